"""vLLM's ExampleConnector, which hands K and V over through files: what it writes, and how long that and reading takes.

    python -m validation.cluster.vllm_connector MODEL TOKENS...

prints a line of JSON. One engine is producer and consumer in turn: the first request of a prompt saves, the second
loads.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from time import perf_counter

ROUNDS = 5
BLOCK = 32  # tokens of a page, the least that vLLM takes on a processor; the connector keeps whole pages alone

SPENT: Counter[str] = Counter()
"""Seconds inside the connector, by what it did."""


def timed(owner: type, name: str, kind: str) -> None:
    """Count the seconds of a method."""
    own = getattr(owner, name)

    def measured(*words, **named):
        began = perf_counter()
        try:
            return own(*words, **named)
        finally:
            SPENT[kind] += perf_counter() - began

    setattr(owner, name, measured)


def main(folder: str, *tokens: str) -> None:
    """Save and load each prompt; the first round warms up and is not told."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    for name, kind in (("save_kv_layer", "save"), ("wait_for_save", "save"), ("start_load_kv", "load")):
        timed(ExampleConnector, name, kind)
    once = SamplingParams(max_tokens=1, temperature=0)
    with tempfile.TemporaryDirectory() as store:
        transfer = KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": store},
        )
        most = max(map(int, tokens)) + 2 * BLOCK
        llm = LLM(
            model=folder, dtype="float32", enforce_eager=True, enable_prefix_caching=False, max_model_len=most,
            block_size=BLOCK, disable_log_stats=True, kv_transfer_config=transfer,
        )  # fmt: skip

        def request(ids: list[int]) -> tuple[list[int], Counter]:
            SPENT.clear()
            answer = llm.generate([{"prompt_token_ids": ids}], once, use_tqdm=False)[0].outputs[0].token_ids
            return list(answer), SPENT.copy()

        rows = [row(request, count, Path(store)) for count in map(int, tokens)]
    print(json.dumps(rows), flush=True)


def row(request, count: int, store: Path) -> dict[str, float]:
    """A prompt of this many tokens."""
    saves, loads, sizes = [], [], []
    for number in range(ROUNDS + 1):
        before = {*store.rglob("*.safetensors")}
        ids = [5 + (7 * number + n) % 900 for n in range(count)]
        first, spent = request(ids)
        again, read = request(ids)
        if first != again:
            raise SystemExit("the answer over what was loaded is another one")
        written = {*store.rglob("*.safetensors")} - before
        if not written or not read["load"]:
            raise SystemExit(f"the connector saved {len(written)} files and loaded for {read['load']:g} s")
        saves.append(spent["save"])
        loads.append(read["load"])
        sizes.append(sum(path.stat().st_size for path in written))
    save_ms, load_ms = (statistics.median(found[1:]) * 1e3 for found in (saves, loads))
    return {"tokens": count, "bytes": sizes[-1], "save_ms": save_ms, "load_ms": load_ms}


if __name__ == "__main__":
    main(*sys.argv[1:])
