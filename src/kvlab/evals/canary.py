"""Proof, before anything is scored, that an answer hangs on what the cache holds. Torch-free.

A score that was taken past the codec looks like a codec without loss. So a codec of one bit, which no model survives,
takes the codec's place first, on K and on V by themselves, and has to move the very kind of answer that will be asked
for. Then the variant itself must change something: an 8-bit codec little, but never nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvlab.codecs.int import IntStream
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.errors import CapabilityError, CodecNotActive
from kvlab.core.recipe import Recipe
from kvlab.core.records import CANARY_MIN
from kvlab.evals.backend import Kind, ScoreRequest, Side, Sides, WriteRequest

ONE_BIT = {
    "k": Recipe(k=IntStream(bits=1), v=IdentityStream()),
    "v": Recipe(k=IdentityStream(), v=IntStream(bits=1)),
}

# A log-probability that moves by d costs about d^2 / 2 nats: what CANARY_MIN asks of a KL, asked of a token
LEAST = math.sqrt(2 * CANARY_MIN)
LONGEST, WRITTEN = 512, 8  # tokens of the canary's context, and tokens that it writes
SHORTEST = 8


@dataclass
class Guard:
    """Holds a variant against the plain engine and against one-bit codecs, once for each kind of request.

    Parameters
    ----------
    sides : Sides
        `one_bit` may be empty where there is no codec to take the place of, in an engine's own cache: the variant's
        own effect is then all that there is.
    """

    sides: Sides
    done: set[Kind] = field(default_factory=set)

    def check(self, kind: Kind, ids: Sequence[int]) -> None:
        """Look at a kind of request, on the text of one that is about to be asked; the first time only.

        Raises
        ------
        CapabilityError
            The text is too short to show anything, or this kind of request never reads the cache.
        CodecNotActive
            An answer does not move.
        """
        if kind in self.done:
            return
        self.sides.variant.refuse_blind(kind)
        if len(ids) < SHORTEST:
            raise CapabilityError(
                f"the longest request has {len(ids)} tokens; to show that the codec is read it takes {SHORTEST}",
                code="capability.short-request",
            )
        ids = list(ids[-LONGEST:])
        reference = answer(self.sides.plain, kind, ids)
        for name, side in self.sides.one_bit.items():
            moved = distance(reference, answer(side, kind, ids))
            if moved < LEAST:
                raise CodecNotActive(
                    f"a one-bit codec on {name.upper()} moves the answers to `{kind}` requests by {moved:.1e} nats a"
                    f" token only, at least {LEAST:.1e} is expected; the cache is not read, nothing was scored",
                    code="not-active.canary",
                )
        if distance(reference, answer(self.sides.variant, kind, ids)) <= 0:
            raise CodecNotActive(
                f"{self.sides.variant.what} leaves every answer to `{kind}` requests as it is without; the cache is not"
                " read, nothing was scored",
                code="not-active.no-change",
            )
        if not self.done:
            self.sides.variant.begin()
        self.done.add(kind)


def answer(side: Side, kind: Kind, ids: list[int]) -> list[float]:
    """Log-probabilities of a text's second half, or of the tokens written after it."""
    if kind == "score":
        half = len(ids) // 2
        return side.score([ScoreRequest(ids[:half], ids[half:])])[0].logprobs
    return side.write([WriteRequest(ids, WRITTEN, [])])[0].logprobs


def distance(first: list[float], second: list[float]) -> float:
    """Mean absolute difference in nats per token; infinite where one is longer, which only another text can be."""
    if len(first) != len(second):
        return math.inf
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / max(1, len(first))
