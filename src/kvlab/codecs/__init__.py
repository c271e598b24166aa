"""The codecs, a folder or file each, and what they share: recipes to classes, packing, streams of bytes."""
