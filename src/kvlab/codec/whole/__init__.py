"""Codecs of other people that see all layers of a cache at once, and what such codecs have in common."""
