"""From a capture of Q, K and V to Sigma_q and Lloyd-Max codebooks."""
