"""Prompts of any length out of the test windows, and snapshots of what they begin with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlab.core.errors import ParamsError
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.snapshot.write import Saved


def joined(windows: Sequence[Sequence[int]], first: int, length: int) -> list[int]:
    """Tokens of windows one after the other, from window `first` on; after the last one comes the first again.

    Raises
    ------
    ParamsError
        When all windows together are shorter.
    """
    count, width = len(windows), len(windows[0])
    if length > count * width:
        raise ParamsError(
            f"a prompt of {length} tokens was asked for; the test windows have {count * width}",
            code="params.too-few-tokens",
        )
    needed = -(-length // width)
    return [int(token) for n in range(needed) for token in windows[(first + n) % count]][:length]


def pool_of(chunk_tokens: int, tokens: int, sink_chunks: int = 1, tail_chunks: int = 1) -> PagerConfig:
    """The smallest pool that is possible and holds so many tokens."""
    blocks = max(sink_chunks + tail_chunks + 2, -(-tokens // chunk_tokens))
    return PagerConfig(blocks * chunk_tokens, chunk_tokens, sink_chunks, tail_chunks)


def shared_tokens(length: int, suffix: int, chunk_tokens: int) -> int:
    """How much of a prompt its snapshot holds: whole chunks, at least one, and never the whole prompt.

    Of a prompt that is shorter than two suffixes, a half is new.
    """
    whole = (length - min(suffix, length // 2)) // chunk_tokens * chunk_tokens
    if not 0 < (found := max(whole, chunk_tokens)) < length:
        raise ParamsError(
            f"a prompt of {length} tokens shares no whole chunk of {chunk_tokens} and leaves something",
            code="params.no-shared-chunk",
        )
    return found


@dataclass(frozen=True)
class TimedSnapshot:
    """A snapshot, and milliseconds of writing it."""

    saved: Saved
    save_ms: float

    @property
    def path(self) -> Path:
        """The file."""
        return self.saved.path


def snapshot_of(
    model: PagedModel, tokens: Sequence[int], config: PagerConfig, path: Path, policy: str = "lru"
) -> TimedSnapshot:
    """Prefill tokens, which are whole chunks, in a run of their own, and save them."""
    run = PagedRun(model, config, policy)
    run.extend(tokens)
    return timed_save(run, path)


def timed_save(run: PagedRun, path: Path, **how) -> TimedSnapshot:
    """Save a run, on the clock."""
    begun = time.perf_counter()
    saved = run.save(path, **how)
    return TimedSnapshot(saved, 1e3 * (time.perf_counter() - begun))
