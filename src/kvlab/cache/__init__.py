"""The codecs in use: `kvlab.Cache` (`hf/`), a tap in vLLM (`vllm/`), coded `pages/`, and `files/` of both."""
