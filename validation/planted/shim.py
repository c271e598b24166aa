"""An engine whose coded passes are off by planted amounts, and a codec that says what it was really given.

Nothing here reads a label that the pipeline made. The codec stands in the block codec's place and marks what it
codes with the ratio that it was built for and with whose calibration its numbers are. The engine's wrapper takes
the marks away again, so that the pass is the clean one, and adds to its logits what is planted where these
facts meet: whose model ran (by its module), in which dtype (of its weights), along which of the two
passes the marks came, and what the marks say. A number under another label is then off by what was planted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvlab.codecs.base import Encoded, Place, Site, StreamCalibration, block_index, checked
from kvlab.codecs.block import BlockStream
from kvlab.codecs.block.codec import BlockCodec
from kvlab.codecs.shared.quantizer import gaussian_table
from kvlab.core.errors import Fault
from kvlab.core.testimony import Proof, Testimony
from kvlab.engines.base import ContextCache, Engine, Part, Storage, Tap
from kvlab.measure.scoring import CANARY_STREAM
from kvlab.witness.testify import CellClaim

HALVINGS = 80
SIGN = 2.0**14  # first number of a mark; exact in bfloat16, as the others are
ORIGINS = {1.0: "hf", 2.0: "vllm"}  # what a planted calibration's numbers are multiplied by -> whose it is
HOMES = {"transformers": "hf", "vllm": "vllm"}  # the package that a running model's class is of -> the engine


class Facts(NamedTuple):
    """Where a coded pass really stands in the factorial."""

    engine: str
    protocol: str
    dtype: str
    variance_ratio: float
    origin: str


# ------------------------------------------------------------------------------------------ the codec


class MarkingCodec:
    """Changes four numbers of a tensor, which say what the codec was built of; the canary's recipe is coded for real.

    The mark is ``[SIGN, 100 * variance_ratio, scale of the table, 0]`` in the first token of the first head. The scale
    is read from the table's numbers and, where K is whitened, has to be that of the whitener's.
    """

    per_token: ClassVar[bool] = True

    def __init__(self, recipe: BlockStream, calibration: StreamCalibration | None = None):
        self.recipe, self._calibration = recipe, calibration
        self._canary = BlockCodec(recipe, calibration) if recipe == CANARY_STREAM else None

    def encode(self, x: Tensor, site: Site) -> Encoded:
        """The marked tensor."""
        if self._canary:
            return self._canary.encode(x, site)
        values = checked(x, site).clone()
        values[0, 0, :4] = torch.tensor([SIGN, round(100 * self.recipe.variance_ratio), self._scale(site), 0.0])
        return Encoded(tuple(x.shape), site.layer, site.stream, shared=(), blocks=((values,),), packed=False)

    def _scale(self, site: Site) -> float:
        """What the calibration that was given is multiplied by."""
        given = self._calibration
        scale = float(given.centroids.double().max() / gaussian_table(self.recipe.bits).max())
        if site.stream == "k" and self.recipe.whiten and site.layer not in self.recipe.whiten_skip_layers:
            whitening = float(given.whiteners[site.layer].chol[0, 0, 0])
            if abs(whitening - scale) > 1e-3:
                raise Fault(f"layer {site.layer}: the table is of {scale:g} and the whitener of {whitening:g}")
        return round(scale, 3)

    def decode(self, encoded: Encoded) -> Tensor:
        """The marked tensor."""
        return self._canary.decode(encoded) if self._canary else encoded.blocks[0][0].clone()

    def decode_block(self, encoded: Encoded, index: int) -> tuple[Place, Tensor]:
        """See `Codec.decode_block`; a marked tensor has one block only."""
        if self._canary:
            return self._canary.decode_block(encoded, index)
        block_index(encoded, index)
        return (slice(None), slice(None)), self.decode(encoded)


def mark_of(x: Tensor) -> tuple[float, str] | None:
    """Variance ratio and origin that a tensor is marked with; None of one without a mark."""
    sign, ratio, scale, end = x[0, 0, :4].double().tolist()
    if sign != SIGN or end != 0:
        return None
    if scale not in ORIGINS:
        raise Fault(f"a codec was given numbers of {scale:g} times the Gaussian table's size; planted: {list(ORIGINS)}")
    return ratio / 100, ORIGINS[scale]


# ----------------------------------------------------------------------------------------- the engine


@dataclass(frozen=True)
class Planted:
    """KL of every scored row by where its pass stands.

    Parameters
    ----------
    windows : dict of tuple of int to int
        Number of a window by its tokens.
    kl : dict of Facts to float64 array [windows, rows]
        Nats, positive.
    """

    windows: dict[tuple[int, ...], int]
    kl: dict[Facts, np.ndarray]


class PlantedShift(Engine):
    """An engine whose coded passes are off by planted amounts.

    A pass with marks comes back with one logit of every row raised so that KL to the clean pass is the planted value;
    any other pass comes back untouched.

    Parameters
    ----------
    inner : Engine
        Whose logits they are.
    planted : Planted
    """

    def __init__(self, inner: Engine, planted: Planted):
        super().__init__(inner.info, inner.dtype)
        self.name, self.attention = inner.name, inner.attention
        self.inner, self._planted = inner, planted
        self._clean: tuple[tuple[int, ...], dict[tuple[int, Part], Tensor]] = ((), {})

    @property
    def device(self) -> str:
        """The inner engine's."""
        return self.inner.device

    @property
    def storage(self) -> Storage:
        """The inner engine's."""
        return self.inner.storage

    @property
    def proof(self) -> Proof:
        """The inner engine's."""
        return self.inner.proof

    def score(self, ids: Sequence[int], first: int, tap: Tap | None = None, placement: str = "pre_rope") -> Tensor:
        """See `Engine.score`; shifted where a tap marks."""
        if tap is None:
            return self.inner.score(ids, first, None, placement)
        watch = Watch(tap)
        logits = self.inner.score(ids, first, watch, placement)
        if not watch.answered:
            self._clean = tuple(ids), watch.seen
        return self._shifted(logits, ids, watch.marks, "in_forward")

    def layer_inputs(self, ids: Sequence[int]) -> list[Tensor] | None:
        """See `Engine.layer_inputs`."""
        return self.inner.layer_inputs(ids)

    def score_from(
        self,
        layer: int,
        inputs: Sequence[Tensor],
        ids: Sequence[int],
        first: int,
        tap: Tap,
        placement: str = "pre_rope",
    ) -> Tensor:
        """See `Engine.score_from`; shifted where the tap marks."""
        watch = Watch(tap)
        return self._shifted(
            self.inner.score_from(layer, inputs, ids, first, watch, placement), ids, watch.marks, "in_forward"
        )

    def score_over(self, ids: Sequence[int], cache: ContextCache, placement: str = "pre_rope") -> Tensor:
        """See `Engine.score_over`; shifted where the cache is marked."""
        marks = {mark for x in cache.values() if (mark := mark_of(x))}
        if marks:
            known, clean = self._clean
            if known != tuple(ids):
                raise Fault("a marked cache is scored of a window whose clean pass was another's")
            cache = {key: clean[key][:, : x.shape[1]] if mark_of(x) else x for key, x in cache.items()}
        return self._shifted(self.inner.score_over(ids, cache, placement), ids, marks, "snapshot")

    def close(self) -> None:
        """Close the inner engine."""
        self.inner.close()

    def _shifted(self, logits: Tensor, ids: Sequence[int], marks: set[tuple[float, str]], protocol: str) -> Tensor:
        """The logits with what is planted where the marks, the pass and the running model stand."""
        if not marks:
            return logits
        if len(marks) > 1:
            raise Fault(f"one pass holds what codecs of several corners made: {sorted(marks)}")
        weights = next(self.inner.model.parameters())
        home = HOMES[type(self.inner.model).__module__.partition(".")[0]]
        facts = Facts(home, protocol, str(weights.dtype).removeprefix("torch."), *next(iter(marks)))
        return shifted(logits, self._planted.kl[facts][self._planted.windows[tuple(ids)]])


@dataclass
class Watch:
    """A tap around another: reads the marks that the other makes and gives the pass the tensor as it was."""

    tap: Tap
    marks: set[tuple[float, str]] = field(default_factory=set)
    seen: dict[tuple[int, Part], Tensor] = field(default_factory=dict)
    answered: bool = False

    def __call__(self, layer: int, part: Part, x: Tensor) -> Tensor | None:
        """See `Tap`."""
        answer = self.tap(layer, part, x)
        if answer is None:
            self.seen[layer, part] = x.clone()
            return None
        self.answered = True
        mark = mark_of(answer)
        if mark is None:
            return answer
        self.marks.add(mark)
        if not torch.equal(answer.flatten(1)[:, 4:], x.flatten(1)[:, 4:]):
            raise Fault(f"layer {layer} {part}: more than the mark came back changed", code="fault.more-than-the-mark")
        return None


def unexamined(_model: object, claim: CellClaim, _calibrated: object) -> Testimony:
    """In the place of `witness.testify`, which would object to planted logits: what is claimed, as it is claimed."""
    return Testimony(
        cell_id=claim.cell.cell_id,
        window=claim.number,
        reference_kl=0.0,
        alternative_kl=0.0,
        tensor_error=0.0,
        read_error=0.0,
        effects=0,
        expected_effects=0,
        nbytes=claim.nbytes,
        engine=claim.engine,
        kl=float(claim.rows["kl"].mean()),
    )


# ------------------------------------------------------------------------------------------ the shift


def shifted(logits: Tensor, kl: np.ndarray) -> Tensor:
    """Logits, float64, with one of each row raised so that KL from the row as it was is as given.

    Raising a logit of probability p by s makes KL = log(1 - p + p e^s) - s p, which grows with s. The logit is that
    whose probability is nearest to a half, and s is found by bisection.

    Parameters
    ----------
    logits : Tensor [rows, vocabulary]
    kl : float64 array [rows]
        Positive, nats.
    """
    logits = logits.double()
    p, token = closest_to_half(logits.softmax(-1))
    target = torch.from_numpy(kl).to(p)
    low, high = torch.zeros_like(p), torch.ones_like(p)
    while (kl_of_shift(p, high) < target).any():
        high = 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        short = kl_of_shift(p, middle) < target
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    return logits.scatter_add(1, token[:, None], ((low + high) / 2)[:, None])


def closest_to_half(p: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's probability nearest to a half, and its token."""
    token = (p - 0.5).abs().argmin(-1)
    return p.gather(1, token[:, None])[:, 0], token


def kl_of_shift(p: Tensor, s: Tensor) -> Tensor:
    """KL between a distribution and the same with the logit of probability `p` raised by `s`."""
    return torch.log1p(p * torch.expm1(s)) - s * p
