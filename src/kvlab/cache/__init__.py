"""The codecs in use: `kvlab.Cache` (`hf/`); in vLLM a tap on attention (`vllm/`) or its own `pages/` coded; `files/`."""
