"""Gaussian noise in the codec's place: how KL grows with the size of an error."""
