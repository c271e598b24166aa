"""The codec to keep a cache with: each layer is predicted from the one below, and the rest is entropy coded."""
