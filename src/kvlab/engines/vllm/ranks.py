"""The other processes of a split model, seen from rank 0, which is the process that measures.

vLLM's external launcher expects all of them to be given the same prompts in the same order. Rank 0 starts the others,
which do what `follower` says, and tells them of each pass through a pipe.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from uuid import uuid4

from kvlab.core.model import ModelInfo
from kvlab.core.recipe import Placement
from kvlab.engines.vllm import follower  # by import: so the rules know that the results depend on it

LEAVE = 30.0  # seconds that a follower has to shut down


class Followers:
    """The processes beside rank 0. Where one of them is lost, this one ends too.

    To vLLM's collectives a lost process is no error: they would wait for it forever.
    """

    def __init__(self, info: ModelInfo, dtype: str, max_tokens: int, cache_dtype: str):
        self.meeting = f"{tempfile.gettempdir()}/kvlab-{uuid4().hex}"
        self._closing = False
        ranks = range(1, info.tensor_parallel)
        self._processes = [self._start(rank) for rank in ranks]
        settings = {"dtype": dtype, "max_tokens": max_tokens, "cache_dtype": cache_dtype}
        model = {"info": asdict(info) | {"path": str(info.path)}} | settings
        for rank, process in zip(ranks, self._processes, strict=True):
            _tell(process, model | {"rank": rank, "meeting": self.meeting})

    def _start(self, rank: int) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-m", follower.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        threading.Thread(target=self._watch, args=(process, rank), daemon=True).start()
        return process

    def _watch(self, process: subprocess.Popen, rank: int) -> None:
        code = process.wait()
        if not self._closing:
            print(f"error: process {rank} of the split model has ended with code {code}", file=sys.stderr, flush=True)
            os._exit(code if code > 0 else 1)  # the main thread waits inside a collective and cannot be asked

    def forget_memory(self) -> None:
        """Take the name off the memory that the processes share; they have all found it, and a kill would leave it."""
        for name in Path("/dev/shm").glob(f"{Path(self.meeting).name}*"):
            name.unlink()

    def join(self, ids: Sequence[int], first: int, tapped: bool, placement: Placement) -> None:
        """Tell the others of a pass that rank 0 is about to begin."""
        told = {"ids": [int(token) for token in ids], "first": first, "tapped": tapped, "placement": placement}
        for process in self._processes:
            _tell(process, told)

    def close(self, patience: float = LEAVE) -> None:
        """Let the others end: a closed pipe is their sign. Inside a pass they do not see it, and are killed."""
        self._closing = True
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        Path(self.meeting).unlink(missing_ok=True)


def _tell(process: subprocess.Popen, what: dict) -> None:
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()
