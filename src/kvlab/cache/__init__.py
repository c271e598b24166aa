"""The codecs in use: `kvlab.Cache` (`hf/`); in vLLM a tap (`vllm/`) or its own `pages/` coded; `files/`."""
