"""The codecs in use: `kvlab.Cache` (`hf/`), the vLLM plugin (`vllm/`, coded `pages/`), calibrations as `files/`."""
