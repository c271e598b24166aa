"""A second computation of what the measuring chain claims, by code that shares nothing with it but the codec."""
