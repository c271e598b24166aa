"""What the chain claims of one cell on one window, computed again and held against it.

A codec is discontinuous, so two computations of one cell that differ in the last bit may end far apart. The witness
therefore goes step by step: the tensors that the codec was given are those of the layer, given the K and V below it;
what it answered is what that codec says of them; attention read just that; and with just that K and V the logits are
the chain's. Each step is exact or of the dtype's own rounding, of which a broken cache makes more (`AMPLIFIED`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, NoReturn

import numpy as np
import polars as pl
import torch
from torch import Tensor

from kvlab.calibration.archive import Archive
from kvlab.calibration.load import Calibrated
from kvlab.calibration.whole import Whole
from kvlab.codecs.base import Codec, Site
from kvlab.codecs.registry import build
from kvlab.codecs.stream.bitstream import frame_bytes, read_frame
from kvlab.core.errors import WitnessDisagrees
from kvlab.core.recipe import ENGINES, WHOLE, Cell, Recipe
from kvlab.core.testimony import Proof, Testimony
from kvlab.engines.base import Reading
from kvlab.witness import reading as corpus
from kvlab.witness.plain import PlainModel, PlainPass
from kvlab.witness.scores import divergence, scored


class Apart(NamedTuple):
    """How far the chain may be from the witness: nats per token of logits, and the relative error of K and V."""

    logits: float
    tensors: float


LOGITS = {"float32": 1e-6, "bfloat16": 1e-2}
"""Nats per token that the chain's logits may be from the witness's, which are of float32."""
TENSORS = {"float32": 1e-4, "bfloat16": 5e-2}
"""Of a head's K or V, the root mean square error that its dtype's rounding may leave, relative to the head's own."""
CODED = {"float32": 1e-4, "bfloat16": 1e-2}
"""The same where attention read what a codec answered: nothing but a rotary embedding was computed of it."""
AMPLIFIED = {"bfloat16": Apart(0.2, 0.3)}
"""So much more of logits and of tensors for each nat by which a codec moves the witness's own predictions.

A cache that predicts something else makes more of rounding. `hadamard` at 2 and 4 bits moved Qwen2.5-Coder-0.5B by .1
to 4 nats (6 windows of 512 coded and 128 scored tokens). Two computations over such a cache were up to .14 of that
apart in bfloat16, and K and V up to .19 over all tokens. Coded tokens are equal, so that the others differ by more.
"""
MOST_APART = Apart(0.5, 0.8)
"""What is further apart is something else, whatever the codec does."""
SAME_KL = 0.2, 4
"""How far a cell's mean KL may be from the witness's: relative, and in units of what rounding costs the clean logits.

In bfloat16 logits may differ by more than a good codec costs. The number that is written has to be right even so.
"""
FORMULA = 1e-8
"""Between two formulas for the same logits: nats, or relative."""
ATTENTIONS = {"eager": "eager_attention_forward", "sdpa": "sdpa_attention_forward"}
"""The function that a transformers model calls, by the name of the implementation."""

Tensors = Mapping[tuple[int, str], Tensor]


@dataclass(frozen=True)
class CellClaim:
    """What the chain did with one cell on one window.

    Parameters
    ----------
    cell : Cell
    ids : list of int
        The window's tokens as the witness read them.
    number, context : int
        The window's number, and the tokens of it that are stored.
    reference, alternative : Tensor
        [tokens, vocabulary]; the untouched model's logits, and those under the cell.
    rows : polars.DataFrame
        What was written of both, as `records.TOKENS`.
    given, answered : mapping of (layer, stream) to Tensor
        What came to the codec's place and what left it, [kv_heads, tokens, head_dim].
    reading : Reading or None
        K and V as the engine's attention used them; None where they could not be looked at.
    nbytes : int
        That the cell's codecs are said to have written.
    engine : Proof
        Of the engine that ran.
    stored : bytes
        The file of a codec of whole caches; empty of others.
    """

    cell: Cell
    ids: list[int]
    number: int
    context: int
    reference: Tensor
    alternative: Tensor
    rows: pl.DataFrame
    given: Tensors
    answered: Tensors
    reading: Reading | None
    nbytes: int
    engine: Proof
    stored: bytes = b""


def testify(model: PlainModel, claim: CellClaim, calibrated: Calibrated | None) -> Testimony:
    """Compute a cell's window again.

    Parameters
    ----------
    calibrated : Calibrated or None
        What was fitted for the cell's codecs.

    Raises
    ------
    WitnessDisagrees
        Says what differs, and by how much.
    """
    return Witness(model, claim, calibrated).testimony()


@dataclass
class Witness:
    """One claim under examination."""

    model: PlainModel
    claim: CellClaim
    calibrated: Calibrated | None

    def testimony(self) -> Testimony:
        """All questions in the order in which an answer means something."""
        claim, cell = self.claim, self.claim.cell
        self._labels()
        self._running()
        self._formulas()
        reference = self._logits("without the codec", self._p, self._clean, LOGITS[cell.dtype])
        tensors = self._given()
        self._answers()
        alternative = self._logits("under the codec", self._q, self._coded, self._allowed.logits)
        kl = self._mean_kl(reference)
        effects, read = self._read()
        return Testimony(
            cell_id=cell.cell_id,
            window=claim.number,
            reference_kl=reference,
            alternative_kl=alternative,
            tensor_error=tensors,
            read_error=read,
            effects=effects,
            expected_effects=len(self._places) if claim.reading else 0,
            nbytes=claim.nbytes,
            engine=claim.engine,
            kl=kl,
        )

    @property
    def _places(self) -> list[tuple[int, str]]:
        cell = self.claim.cell
        return [(layer, part) for layer in cell.layers for part in ("k", "v") if part in cell.stream]

    @cached_property
    def _p(self) -> np.ndarray:
        return array(self.claim.reference)

    @cached_property
    def _q(self) -> np.ndarray:
        return array(self.claim.alternative)

    @cached_property
    def _clean(self) -> PlainPass:
        return self.model.clean(self.claim.ids, self.claim.context)

    @cached_property
    def _coded(self) -> PlainPass:
        claim, cell = self.claim, self.claim.cell
        rotated, held = cell.placement == "post_rope", {place: claim.answered[place] for place in self._places}
        if cell.protocol == "in_forward":
            return self.model.forward(claim.ids, claim.context, held, rotated=rotated)
        whole = self._clean.read if rotated else self._clean.own
        held = {place: x[:, : claim.context] for place, x in whole.items()} | held
        return self.model.forward(claim.ids, claim.context, held, begin=claim.context, rotated=rotated)

    @cached_property
    def _moved(self) -> float:
        """How far the codec moves the witness's own predictions, nats per token."""
        return float(divergence(array(self._clean.logits), array(self._coded.logits)).mean())

    @cached_property
    def _allowed(self) -> Apart:
        """Of what is computed over coded K and V."""
        own = Apart(LOGITS[self.claim.cell.dtype], TENSORS[self.claim.cell.dtype])
        amplified = AMPLIFIED.get(self.claim.cell.dtype)
        if amplified is None:
            return own
        ends = zip(own, amplified, MOST_APART, strict=True)
        return Apart(*(min(least + more * self._moved, most) for least, more, most in ends))

    def _labels(self) -> None:
        """The tokens that were scored are those of the corpus at these positions."""
        rows, claim = self.claim.rows, self.claim
        expected = list(range(claim.context + 1, len(claim.ids)))
        if rows["position"].to_list() != expected:
            self._object(
                "witness.other-windows",
                f"scored positions {_ends(rows['position'].to_list())}, and {_ends(expected)} are due",
            )
        wrong = rows["label"].to_numpy() != corpus.labels(claim.ids, expected)
        if wrong.any():
            place = expected[int(wrong.argmax())]
            self._object(
                "witness.other-windows",
                f"scored token {rows['label'][int(wrong.argmax())]} at position {place}, where the windows' file has"
                f" {claim.ids[place]}",
            )

    def _running(self) -> None:
        """The model computes in the dtype, and with the attention, that the label says."""
        cell, seen = self.claim.cell, self.claim.reading
        if seen is None:
            return
        if seen.dtype != cell.dtype:
            self._object(
                "witness.other-label", f"it is labelled {cell.dtype}, and attention read K and V of {seen.dtype}"
            )
        wanted = ENGINES[cell.engine].attention if cell.attention == "default" else cell.attention
        if ATTENTIONS.get(wanted, seen.attention) != seen.attention:
            self._object(
                "witness.other-label", f"it is labelled {wanted} attention, and the model called {seen.attention}"
            )

    def _formulas(self) -> None:
        """Every column is what its definition makes of the chain's own logits."""
        rows = self.claim.rows
        due = scored(self._p, self._q, rows["label"].to_numpy())
        for name, expected in due.items():
            found = rows[name].to_numpy()
            wrong = np.abs(found - expected) > FORMULA * (1 + np.abs(expected))
            if wrong.any():
                row = int(wrong.argmax())
                self._object(
                    "witness.other-formula",
                    f"column {name} at position {rows['position'][row]} is {found[row]:.9g}, and its logits make"
                    f" {expected[row]:.9g}",
                )

    def _logits(self, when: str, theirs: np.ndarray, own: PlainPass, allowed: float) -> float:
        """The chain's probabilities are the witness's."""
        kl = float(divergence(array(own.logits), theirs).mean())
        if not kl <= allowed:
            self._object(
                "witness.other-logits",
                f"it predicts {when} KL {kl:.2e} nats per token from a plain forward; {self.claim.cell.dtype} allows"
                f" {allowed:.0e}",
            )
        return kl

    def _mean_kl(self, reference: float) -> float:
        """The mean KL that is written is what the witness comes to; `reference` is the KL of the clean logits."""
        kl, (share, times) = float(np.mean(self.claim.rows["kl"].to_numpy())), SAME_KL
        if not abs(kl - self._moved) <= share * self._moved + times * reference:
            self._object(
                "witness.other-kl",
                f"the codec costs KL {kl:.3g} nats per token, and {self._moved:.3g} by a plain forward",
            )
        return kl

    def _given(self) -> float:
        """What came to the codec is the K and V of its layer, head by head; the largest relative error."""
        cell, worst = self.claim.cell, 0.0
        own = self._coded if cell.protocol == "in_forward" else self._clean
        for layer, part in self._places:
            found = self._at(self.claim.given, (layer, part), "came to the codec")
            rotated = part == "k" and cell.placement == "post_rope"
            expected = own.own[layer, part][:, : found.shape[1]]
            expected = self.model.rotated(layer, expected) if rotated else expected
            what = f"K and V that came to the codec: layer {layer} {part}"
            over_coded = cell.protocol == "in_forward" and layer > min(cell.layers)
            allowed = self._allowed.tensors if over_coded else TENSORS[cell.dtype]
            worst = max(worst, self._same(found, expected, what, allowed))
            coded = self.claim.context if cell.span == "context" else len(self.claim.ids)
            if found.shape[1] != coded:
                line = f"it codes {found.shape[1]} tokens of layer {layer} {part}, and {coded} are due"
                self._object("witness.other-shape", line)
        return worst

    def _answers(self) -> None:
        """What left the codec is what the codec says, and as many bytes."""
        claim = self.claim
        own, nbytes = self._said_by_codecs()
        for layer, part in self._places:
            found = self._at(claim.answered, (layer, part), "left the codec")
            if not torch.equal(found, own[layer, part]):
                error = relative(found, own[layer, part])
                if not (found.is_cuda and error <= TENSORS["float32"]):
                    line = f"layer {layer} {part}: what left the codec is {error:.1e} from what the codec says"
                    self._object("witness.other-codec", line)
        if nbytes != claim.nbytes:
            line = f"it counts {claim.nbytes} coded bytes, and the files of its codecs hold {nbytes}"
            self._object("witness.other-bytes", line)

    def _said_by_codecs(self) -> tuple[Tensors, int]:
        """What codecs make of what they were given, and their bytes; of a file of a whole cache, what is in it."""
        claim, cell = self.claim, self.claim.cell
        if cell.recipe.k.codec in WHOLE:
            decoded = unarchived(
                self.calibrated.whole_of(cell.recipe), cell.recipe, claim.stored, claim.ids[: claim.context]
            )
            return {place: x.to(claim.given[place]) for place, x in decoded.items()}, len(claim.stored)
        codecs = {}
        for layer, part in self._places:
            recipe = cell.stream_recipe(part, layer)
            fitted = self.calibrated.stream(recipe, part, cell.placement) if self.calibrated else None
            codecs[layer, part] = build(recipe, fitted)
        return answers(codecs, claim.given, claim.number)

    def _read(self) -> tuple[int, float]:
        """Attention used what the codec answered, in every layer: how many places, and the largest relative error."""
        worst, effects, seen = 0.0, 0, self.claim.reading
        for layer, part in self._places if seen else ():
            found = self._at(seen.tensors, (layer, part), "was read by attention")
            expected = self._coded.read[layer, part]
            if found.shape != expected.shape:
                line = f"layer {layer} {part}: attention read {list(found.shape)}, and {list(expected.shape)} are due"
                self._object("witness.other-shape", line)
            coded = self.claim.answered[layer, part].shape[1]
            parts = [(slice(coded), "coded tokens", CODED[self.claim.cell.dtype])]
            if coded < found.shape[1]:
                parts.append((slice(coded, None), "the tokens after them", self._allowed.tensors))
            for tokens, whose, allowed in parts:
                what = f"K and V that attention read: layer {layer} {part}, {whose}"
                worst = max(worst, self._same(found[:, tokens], expected[:, tokens], what, allowed))
            effects += 1
        return effects, worst

    def _at(self, tensors: Tensors, place: tuple[int, str], what: str) -> Tensor:
        if place not in tensors:
            self._object("witness.nothing-read", f"layer {place[0]} {place[1]}: nothing {what}")
        return tensors[place]

    def _same(self, found: Tensor, expected: Tensor, what: str, allowed: float) -> float:
        error = relative(found, expected)
        if not error <= allowed:
            line = f"{what} are {error:.1e} (relative) from a plain forward's; allowed: {allowed:.0e}"
            self._object("witness.other-tensors", line)
        return error

    def _object(self, code: str, what: str) -> NoReturn:
        cell = self.claim.cell
        raise WitnessDisagrees(
            f"the witness disagrees on cell {cell.label!r} ({cell.engine}, {cell.dtype}, {cell.protocol},"
            f" {cell.placement}), window {self.claim.number}: {what}",
            code=code,
        )


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest error of a head, root mean square, relative to what is due there."""
    found, expected = found.float().cpu(), expected.float().cpu()
    size = expected.square().mean(dim=(1, 2)).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((found - expected).square().mean(dim=(1, 2)) / size).sqrt().max())


def array(logits: Tensor) -> np.ndarray:
    """Logits in numpy, which has no bfloat16."""
    return logits.detach().to("cpu", torch.float32).numpy()


def _ends(places: list[int]) -> str:
    return f"{places[0]} to {places[-1]}" if places else "none"


# A codec asked again, with what it writes put down in a file and read back from there.

Places = Iterable[tuple[int, str]]


def answers(codecs: Mapping[tuple[int, str], Codec], given: Mapping, window: int) -> tuple[dict, int]:
    """What each place's codec makes of the tensor that it was given, and the bytes of all files that it wrote.

    Parameters
    ----------
    codecs : mapping
        (layer, ``"k"`` or ``"v"``) -> the codec of that place.
    given : mapping
        By the same places, the tensors [kv_heads, tokens, head_dim].
    """
    found: dict[tuple[int, str], Tensor] = {}
    nbytes = 0
    with TemporaryDirectory() as folder:
        for (layer, part), codec in codecs.items():
            x = given[layer, part]
            encoded = codec.encode(x, Site(window, layer, part))
            if encoded.packed:
                path = Path(folder, f"{layer}{part}")
                path.write_bytes(frame_bytes(encoded))
                nbytes += path.stat().st_size
                encoded = read_frame(path.read_bytes()).to(x.device)
            found[layer, part] = codec.decode(encoded).to(x.dtype)
    return found, nbytes


def unarchived(codec: Archive | Whole, recipe: Recipe, stored: bytes, ids: list[int]) -> dict[tuple[int, str], Tensor]:
    """What the file of a whole cache of these tokens holds, by layer and stream."""
    decoded = codec.decode(recipe, stored, ids)
    return {(layer, part): x for layer, k, v in decoded for part, x in (("k", k), ("v", v))}
