"""From windows streaming through an engine to Sigma_q, components of K and V, and Lloyd-Max tables."""
