"""A process of a split model that does what rank 0 does: `python -m kvlab.engines.vllm.follower`.

Started by `kvlab.engines.vllm.ranks`, which writes a line of JSON for the model and one for each pass. It ends when
the pipe is closed, and with rank 0 in any case.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil

from kvlab.core import parent_watch
from kvlab.core.errors import KvlabError
from kvlab.core.model import ModelInfo
from kvlab.engines.vllm.process import Loaded, WholeTap, executor


def follow() -> None:
    """Load this rank's part of the model, and take part in every pass."""
    model = json.loads(next(sys.stdin))
    info = ModelInfo(**model["info"] | {"path": Path(model["info"]["path"])})
    rank = executor(model["rank"], model["meeting"])
    loaded = Loaded(info, model["dtype"], model["max_tokens"], model["cache_dtype"], rank)
    for line in sys.stdin:
        one = json.loads(line)
        loaded.logits(one["ids"], one["first"], WholeTap(None) if one["tapped"] else None, one["placement"])
    loaded.close()


def main() -> int:
    """The exit code."""
    parent_watch.follow(psutil.Process().parent(), "rank 0 of the split model")
    try:
        follow()
    except KvlabError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
