"""Which heads a rank has, and what was fitted for them alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvlab.codecs.base import StreamCalibration
from kvlab.codecs.shared.whitening import Whitener
from kvlab.core.errors import CapabilityError, UserError


@dataclass(frozen=True)
class Share:
    """The heads of one rank, next to one another.

    Attributes
    ----------
    q, kv : slice
        Query heads, and the KV heads that they read. Where there are more ranks than KV heads, several ranks hold the
        same one: a rank's cache grows no smaller then.
    """

    q: slice
    kv: slice

    @property
    def kv_heads(self) -> int:
        """How many KV heads lie here."""
        return self.kv.stop - self.kv.start

    def kv_bytes(self, tokens: int, head_dim: int, itemsize: int) -> int:
        """Bytes of K and V of a layer on this rank."""
        return 2 * self.kv_heads * tokens * head_dim * itemsize


def share(heads: int, kv_heads: int, world: int, rank: int) -> Share:
    """The share of one rank.

    Raises
    ------
    UserError
        The heads cannot be split so that each rank has equally many, and the KV heads that they read.
    """
    if heads % kv_heads or heads % world or (kv_heads % world and world % kv_heads):
        allowed = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        raise UserError(
            f"{heads} query heads over {kv_heads} KV heads cannot be split between {world} ranks; allowed:"
            f" {', '.join(map(str, allowed))}"
        )
    each, kv_each = heads // world, max(kv_heads // world, 1)
    first = rank * kv_heads // world
    return Share(slice(rank * each, (rank + 1) * each), slice(first, first + kv_each))


def cut(calibration: StreamCalibration, heads: slice) -> StreamCalibration:
    """What was fitted for some KV heads, out of what was fitted for all.

    Whiteners and what attention makes of V stand by head, tables of the codec are of all heads; each serves the heads
    as it serves them among the others, so that codes of a part are a part of the codes.

    Raises
    ------
    CapabilityError
        It holds what was fitted over heads together (`klt`'s components, a codec's own fit), which is of no head alone.
    """
    if calibration.components or calibration.own or calibration.spectra:
        raise CapabilityError(
            "this calibration was fitted over the heads of a layer together, so its codec cannot be cut between ranks;"
            " code on one rank, or take a codec of single heads: hadamard, int, kivi, nf4, fp8"
        )
    whiteners = {n: Whitener(one.chol[heads], one.inv_chol[heads]) for n, one in calibration.whiteners.items()}
    outputs = {n: one[heads] for n, one in calibration.outputs.items()}
    return replace(calibration, whiteners=whiteners, outputs=outputs)
