"""The codec bench: speed, bytes and distance to the limit of every codec, beside the libraries a user would pick."""
