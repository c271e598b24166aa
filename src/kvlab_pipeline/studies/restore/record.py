"""What the study of restoring is asked for, and what it leaves. Torch-free."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from kvlab.codecs.catalogue import LADDERED
from kvlab.core.codec_settings import Frozen
from kvlab.core.params import Params
from kvlab.core.recipe import Recipe
from kvlab.stats.bootstrap import Estimate
from kvlab_pipeline.studies.kvstore_params import Counted, Storable
from kvlab_pipeline.studies.record import StudyRecord

SHORTER = (64, 128, 256)
CODED_WINDOWS, CODED_CHUNK = 8, 64
Times = Annotated[tuple[float, ...], Field(min_length=1)]
"""Milliseconds, one a round."""


class RestoreSettings(Frozen):
    """What is measured.

    Parameters
    ----------
    prompts, prompt_tokens, decode : int
        Prompts whose cold and warm answers are compared, their length, and tokens of an answer.
    chunk_tokens : int
        Of the snapshots of the prompts and of the timings.
    suffix : int
        Tokens of a prompt that its snapshot does not hold, which is cut down to whole chunks; see `shared_tokens`.
    lengths : tuple of int
        Prompts whose times are reported.
    shorter : tuple of int
        Further ones, to find where restoring begins to pay.
    rounds : int
        Of each timing.
    policies : tuple of str
        That run in a pool smaller than the context.
    pool : float
        That pool, as a share of the context.
    evicted_prompts : int
        Prompts for each of them.
    codecs : tuple of str
        Ways to store K and V beside as they are, by their names on the ladder.
    bits : tuple of int
        Of K and of V, for codecs that have any.
    windows, codec_chunk_tokens : int
        Test windows that are restored from coded payloads, and tokens of a chunk there: a chunk is coded by itself.
    repeats : int
        Of each arm of the harness.
    """

    prompts: int = Field(default=20, ge=1)
    prompt_tokens: int = Field(default=512, ge=2)
    decode: int = Field(default=64, ge=1)
    chunk_tokens: int = Field(default=32, ge=1)
    suffix: int = Field(default=96, ge=1)
    lengths: tuple[Counted, ...] = Field(default=(512, 1024, 2048), min_length=1)
    shorter: tuple[Counted, ...] = SHORTER
    rounds: int = Field(default=7, ge=1)
    policies: tuple[str, ...] = ("lru", "qk", "oracle", "random", "sign_bit")
    pool: float = Field(default=0.5, gt=0, le=1)
    evicted_prompts: int = Field(default=4, ge=1)
    codecs: tuple[Storable, ...] = LADDERED
    bits: tuple[Annotated[int, Field(ge=1, le=8)], ...] = Field(default=(2, 4), min_length=1)
    windows: int = Field(default=CODED_WINDOWS, ge=2)
    codec_chunk_tokens: int = Field(default=CODED_CHUNK, ge=1)
    repeats: int = Field(default=3, ge=3)

    @classmethod
    def of(cls, params: Params) -> RestoreSettings:
        """What `params.kvstore.restore` asks for; prompts whose answers are compared are as long as a context."""
        asked, windows = params.kvstore.restore, params.windows
        common = asked.model_dump(include={"prompts", "decode", "chunk_tokens", "suffix", "lengths", "codecs", "bits"})
        return cls(
            **common,
            prompt_tokens=windows.context,
            shorter=tuple(length for length in SHORTER if 2 * asked.chunk_tokens <= length < min(asked.lengths)),
            rounds=asked.repeats,
            repeats=asked.repeats,
            windows=min(CODED_WINDOWS, windows.test),
            codec_chunk_tokens=min(CODED_CHUNK, windows.context),
        )


class RunAgreement(Frozen):
    """How many of so many prompts gave the same, cold and warm; in this process or in a new one."""

    process: Literal["this", "new"]
    dtype: str
    prompts: int
    decode: int
    prefix_len: int
    tokens_equal: int
    logits_equal: int


class Evicted(Frozen):
    """The same in a pool that cannot hold the context; `page_outs` is the least of any run. No difference of
    logits without a restore.
    """

    policy: str
    pool_tokens: int
    prompts: int
    restored: int
    prefix_len: int
    page_outs: int
    tokens_equal: int
    residency_equal: int
    max_abs_dlogit: float | None


class Speed(Frozen):
    """Times of one prompt; `whole` is one forward over all of it, with transformers' own cache."""

    length: int
    prefix_len: int
    cold_ms: Times
    warm_ms: Times
    load_ms: Times
    whole_ms: Times
    save_ms: float
    bytes_read: int
    file_bytes: int

    @property
    def reuse(self) -> float:
        """Share of the prompt that came from the snapshot."""
        return self.prefix_len / self.length

    @property
    def ideal(self) -> float:
        """The ratio, were every token as dear as every other: 1 / (1 - reuse)."""
        return self.length / (self.length - self.prefix_len)

    @property
    def ratio(self) -> float:
        """Median cold prefill over median warm prefill; loading is not part of either."""
        return statistics.median(self.cold_ms) / statistics.median(self.warm_ms)

    @property
    def by_round(self) -> tuple[float, ...]:
        """The same ratio of each round."""
        return tuple(cold / warm for cold, warm in zip(self.cold_ms, self.warm_ms, strict=True))

    @property
    def restore_ms(self) -> float:
        """Median of loading and prefilling the rest."""
        return statistics.median(load + warm for load, warm in zip(self.load_ms, self.warm_ms, strict=True))

    def pays(self, rival: Literal["cold", "whole"]) -> bool:
        """Whether restoring, loading included, took less than computing all of it."""
        return self.restore_ms < statistics.median(self.cold_ms if rival == "cold" else self.whole_ms)


def break_even(speeds: Iterable[Speed], rival: Literal["cold", "whole"]) -> int | None:
    """The shortest length from which on restoring pays at every measured length; None when there is none."""
    found = None
    for speed in sorted(speeds, key=lambda speed: speed.length, reverse=True):
        if not speed.pays(rival):
            break
        found = speed.length
    return found


class StorageResult(Frozen):
    """One way to store K and V: its size, its times, and what a restore from it does to the next tokens.

    `kl` (nats per token) and `top1_agreement` are against the restore from K and V as they are, teacher-forced.
    `greedy` is the mean number of greedily decoded tokens before the first other one, of `decode`.
    """

    label: str
    recipe: Recipe | None
    lossless: bool
    payload_bytes: int
    tokens: int
    values: int
    save_ms: Times
    load_ms: Times
    kl: Estimate
    top1_agreement: Estimate
    greedy: float
    decode: int

    @property
    def bytes_per_token(self) -> float:
        """Of the payload."""
        return self.payload_bytes / self.tokens

    @property
    def bits_per_value(self) -> float:
        """Every byte of the payload counted."""
        return 8 * self.payload_bytes / self.values


class Unstored(Frozen):
    """A codec that could not be measured here, and why."""

    label: str
    reason: str


class Harness(Frozen):
    """The harness's verdict on one prompt."""

    length: int
    prefix_len: int
    repeats: int
    outcome: Literal["pass", "fail", "inconclusive"]
    reasons: tuple[str, ...]
    speedup: float | None


class RestoreRecord(StudyRecord):
    """The JSON of the study."""

    machine: dict[str, str | int]
    threads: int
    attention: str
    settings: RestoreSettings
    agreements: tuple[RunAgreement, ...]
    evicted: tuple[Evicted, ...]
    speeds: tuple[Speed, ...]
    stored: tuple[StorageResult, ...]
    unstored: tuple[Unstored, ...]
    harness: Harness


RECORD = RestoreRecord
