"""The transformers cache: K and V held as codes (`rows`, `coder`), what attention reads of them, what codecs keep."""
