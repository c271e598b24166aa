"""The process of an engine of coded pages: ``python -m kvlab.measure.paged_process DESCRIPTOR``.

Started by `kvlab.measure.paged` with ``KVLAB_PAGES`` set, it is told of a model and of one window after the other
through a pipe, and answers with what vLLM says. It ends when the pipe is closed, and with the process that started it
in any case.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import torch

from kvlab.core import parent_watch
from kvlab.core.codec_settings import Frozen
from kvlab.core.errors import KvlabError
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import PAGES_VARIABLE
from kvlab.core.testimony import Pool, Proof
from kvlab.engines.capability import CODED


class Started(Frozen):
    """The engine that runs, by its own account (`vllm_plugin.Status`) and as found in its live model."""

    storage: dict
    proof: Proof
    pool: Pool
    recipe_id: str
    calibration_hash: str | None
    canary_kl: float


class PagedPass(Frozen):
    """What one window did.

    Parameters
    ----------
    fires, tokens : int
        Codings of a layer's K or V, and tokens that were put into the pages.
    seconds : float
        Of the pass.
    dtype : str
    width : int
        Of the logits that follow, as bytes of their rows.
    """

    fires: int
    tokens: int
    seconds: float
    dtype: str
    width: int


def serve(pipe: Connection) -> None:
    """Load the model with coded pages, and score windows until the pipe is closed."""
    asked = pipe.recv()
    torch.set_num_threads(asked["threads"])
    # its import sets what vLLM's own has to find
    from kvlab.cache import vllm_plugin
    from kvlab.engines.vllm.process import Loaded

    vllm_plugin.activate(os.environ[PAGES_VARIABLE], pages=True)
    info = ModelInfo(**asked["info"] | {"path": Path(asked["info"]["path"])})
    loaded = Loaded(info, asked["dtype"], asked["max_tokens"], CODED)
    status = vllm_plugin.status(loaded.llm)
    started = Started(
        storage=vars(loaded.storage()),
        proof=loaded.proof(),
        pool=loaded.pool().model_copy(
            update={"exact_bytes": status.pages.exact_bytes, "exact_requests": status.pages.requests}
        ),
        recipe_id=status.recipe_id,
        calibration_hash=status.calibration_hash,
        canary_kl=status.pages.canary_kl,
    )
    pipe.send(started.model_dump())
    while True:
        one = pipe.recv()
        began = time.perf_counter()
        logits = loaded.logits(one["ids"], one["first"], None, "pre_rope")
        seconds, before = time.perf_counter() - began, status
        status = vllm_plugin.status(loaded.llm)
        fires = [sum(map(sum, found.fires.values())) for found in (before, status)]
        dtype, width = str(logits.dtype).removeprefix("torch."), logits.shape[-1]
        passed = PagedPass(
            fires=fires[1] - fires[0],
            tokens=status.tokens - before.tokens,
            seconds=seconds,
            dtype=dtype,
            width=width,
        )
        pipe.send(passed.model_dump())
        pipe.send_bytes(logits.contiguous().view(torch.uint8).numpy().tobytes())


def main() -> int:
    """The exit code."""
    parent_watch.follow(psutil.Process().parent(), "the process that measures")
    pipe = Connection(int(sys.argv[1]))
    try:
        serve(pipe)
    except (EOFError, ConnectionError):
        return 0
    except KvlabError as error:
        pipe.send((type(error).__name__, str(error)))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
