"""The codecs that any system must beat, one file each, behind the interface of all codecs."""
