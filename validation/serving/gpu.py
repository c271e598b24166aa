"""Coded rows on a GPU beside plain ones: attention of one layer, and steps of a model with the transformers cache.

    python -m validation.serving.gpu MODEL FILE.kv...

FILE is what `kvlab calibrate --rotary after` wrote for the model. Attention is timed as a graph of its kernels, so that
what launches them does not count, over pages of random bytes, each of which is some row; beside it torch's attention
over bfloat16, and the time in which the GPU copies as many bytes. Steps are timed as transformers runs them, caches in
turn, and what launches kernels counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, DynamicCache
from triton.testing import do_bench_cudagraph

from kvlab.cache.transformers_cache import Cache
from kvlab.codecs.klt.served_triton import CodedSpans

SHAPES = ((1, 512), (1, 8192), (8, 8192), (32, 512), (32, 2048), (32, 8192))  # requests, tokens of each
STEPS = ((1, 1024), (8, 1024), (8, 8192), (32, 8192))
PAGE, WARM, COUNTED = 16, 2, 8
GIB = 2**30


def microseconds(call: Callable[[], object]) -> float:
    """Of the GPU, the median of replays of a graph."""
    return 1e3 * do_bench_cudagraph(call, rep=20, return_mode="median")


def plain(config, requests: int, tokens: int) -> tuple[float, float]:
    """Microseconds of torch's attention over bfloat16, and of copying half as many bytes, which reads and writes."""
    q = torch.randn(requests, config.num_attention_heads, 1, head_dim(config), device="cuda", dtype=torch.bfloat16)
    shape = requests, config.num_key_value_heads, tokens, head_dim(config)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    took = microseconds(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    return took, microseconds(lambda: v.copy_(k))


def coded(cache: Cache, config, requests: int, tokens: int) -> float:
    """Microseconds of attention over coded rows, the mean of the first, the middle and the last layer."""
    times = []
    q = torch.randn(requests, config.num_attention_heads, head_dim(config), device="cuda") * head_dim(config) ** -0.5
    turns = torch.randn(tokens, head_dim(config), device="cuda")
    for layer in (cache.layers[0], cache.layers[len(cache.layers) // 2], cache.layers[-1]):
        size = requests * tokens, layer.pages.bytes
        rows = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda")
        blocks = torch.randperm(size[0] // PAGE).view(requests, -1)
        span = CodedSpans.of(blocks, [0] * requests, [tokens] * requests, rows.device)
        times.append(microseconds(partial(layer.pages.served.attend, rows, PAGE, span, q, turns)))
    return statistics.mean(times)


def head_dim(config) -> int:
    """Of a model's attention."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@torch.inference_mode()
def steps(model, caches: dict[str, object], requests: int, tokens: int) -> dict[str, list[float]]:
    """Milliseconds of the steps of each cache, in turn, after a prompt of random tokens."""
    ids = torch.randint(0, model.config.vocab_size, (requests, tokens + WARM + COUNTED), device="cuda")
    for cache in caches.values():
        model(ids[:, :tokens], past_key_values=cache, logits_to_keep=1)
    times: dict[str, list[float]] = {name: [] for name in caches}
    for step in range(tokens, tokens + WARM + COUNTED):
        for name, cache in caches.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            model(ids[:, step : step + 1], past_key_values=cache)
            torch.cuda.synchronize()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: own[WARM:] for name, own in times.items()}


def held(cache: Cache | DynamicCache) -> float:
    """GiB that a cache stores."""
    if isinstance(cache, Cache):
        return cache.nbytes / GIB
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / GIB


def lines(model, files: list[str]) -> Iterator[str]:
    """Both tables."""
    made = {file: Cache(model, file) for file in files}
    yield f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    yield f"| requests x tokens | bf16, us | a copy of its bytes | {' | '.join(made)} |"
    for requests, tokens in SHAPES:
        found = (
            *plain(model.config, requests, tokens),
            *(coded(cache, model.config, requests, tokens) for cache in made.values()),
        )
        yield f"| {requests} x {tokens:,} | {' | '.join(f'{one:.0f}' for one in found)} |"
    del made
    yield f"| requests x tokens | DynamicCache, ms a step | GiB | {' | '.join(f'{file} | GiB' for file in files)} |"
    for requests, tokens in STEPS:
        caches = {"DynamicCache": DynamicCache()} | {file: Cache(model, file) for file in files}
        times = steps(model, caches, requests, tokens)
        cells = [f"{statistics.median(times[name]):.1f} | {held(cache):.2f}" for name, cache in caches.items()]
        yield f"| {requests} x {tokens:,} | {' | '.join(cells)} |"
        del caches
        torch.cuda.empty_cache()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("files", nargs="+", help="what `kvlab calibrate --rotary after` wrote")
    given = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16).eval().to("cuda")
    for line in lines(model, given.files):
        print(line, flush=True)


if __name__ == "__main__":
    main()
