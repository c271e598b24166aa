"""The codecs in use: `kvlab.Cache` (`hf_cache.py`, `hf_*`), the vLLM plugin (`vllm_*`, `pages/`), codec files."""
