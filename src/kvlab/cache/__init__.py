"""The codecs where people use them: the transformers Cache, the vLLM plugin and its coded pages, coded files."""
