"""Prompts, and runs that have seen them."""

from __future__ import annotations

import random

from torch import Tensor

from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.paging.geometry import same_bits

VOCABULARY = 320  # of the tiny model
POLICIES = ("lru", "qk", "oracle", "random", "sign_bit")


def prompt(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY) for _ in range(length)]


def run_after(tokens: list[int], *args, **settings) -> PagedRun:
    """A run that has prefilled these."""
    run = PagedRun(*args, **settings)
    run.extend(tokens)
    return run


def payloads(run: PagedRun) -> list[Tensor]:
    return [run.pager.payload(chunk) for chunk in range(run.pager.sealed)]


def same_chunks(one: PagedRun, other: PagedRun) -> bool:
    """Whether all sealed chunks hold the same bits."""
    ours, theirs = payloads(one), payloads(other)
    return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))
