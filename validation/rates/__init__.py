"""What codecs cost at the bits that they take, on several models and two texts."""
