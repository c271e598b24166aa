"""How many sequences an engine's cache holds: ``python -m validation.serving.capacity MODEL LENGTH REQUESTS CACHE``.

By vLLM's own count of blocks in 1 GiB. CACHE is ``auto``, a dtype of vLLM's, or a recipe file, whose pages take from
that memory what so many requests keep exact.
"""

from __future__ import annotations

import os
import sys

from validation.serving.arm import QUIET, start

MEMORY = 1 << 30


def main(model: str, length: str, requests: str, cache: str) -> None:
    """Start the engine and print the number."""
    os.environ.update(QUIET)
    task = {"model": model, "dtype": "bfloat16", "cache": cache, "bytes": MEMORY, "longest": int(length)}
    llm = start(task | {"most": int(requests), "prefix_caching": False})
    held = llm.llm_engine.vllm_config.cache_config
    print(f"{cache}: {held.num_gpu_blocks * held.block_size / int(length):.2f} sequences of {length} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
