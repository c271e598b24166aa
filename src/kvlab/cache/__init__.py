"""kvlab's codecs where people use them: a transformers Cache, a vLLM plugin, coded files."""
