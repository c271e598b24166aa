"""A simulator of an LLM service: what compressing the KV cache buys when many ask at once."""
