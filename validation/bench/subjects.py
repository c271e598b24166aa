"""What is benched: kvlab's codecs and the rivals, with one interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvlab.calibration.needs import reads
from kvlab.codecs.base import Codec, Encoded, Site, StreamCalibration
from kvlab.codecs.block import BlockStream
from kvlab.codecs.klt import KltStream
from kvlab.codecs.registry import build
from kvlab.codecs.shared import components, whitening
from kvlab.codecs.shared.metric import ridged
from kvlab.codecs.stream.bitstream import frame_bytes, read_frame
from kvlab.core.codec_settings import Conditioned, IdentityStream
from kvlab.core.errors import CapabilityError
from kvlab.core.params import Params
from kvlab.core.recipe import IDENTITY, WHOLE, Recipe, StreamRecipe
from kvlab_pipeline.studies.ladder.plan import rungs
from validation.bench.rivals import LIBRARIES, EncodedTensor, Library, LibraryCodec, usable
from validation.bench.sources import StreamSample
from validation.limit import theory as limit


class BenchCoder(Protocol):
    """Something that codes [heads, tokens, head_dim] tensors; `write` and `read` are None without a byte format."""

    decodes: bool
    serialises: bool

    def encode(self, x: Tensor, site: Site) -> object:
        """Code a tensor."""

    def decode(self, coded: object) -> Tensor:
        """Float32 tensor of what `encode` gave."""

    def nbytes(self, coded: object) -> float:
        """Bytes that it takes, all side information included."""

    def index_bits(self, coded: object, values: int) -> float:
        """Bits per value of the quantiser's indices alone."""

    def known_loss(self, coded: object) -> float | None:
        """Bits that the quantiser loses on the source it was made for; None where that must be measured."""


@dataclass(frozen=True)
class BenchCodec:
    """A codec at one setting.

    Parameters
    ----------
    label : str
        As the ladder study calls it.
    bits : int or None
        Nominal bits; None where there is no choice.
    recipe : Recipe or None
        Of kvlab's own.
    library : Library or None
        Of a rival.
    """

    label: str
    bits: int | None
    recipe: Recipe | None = None
    library: Library | None = None

    def of(self, stream: str) -> StreamRecipe | None:
        """The recipe of one stream; None for a rival."""
        return getattr(self.recipe, stream) if self.recipe else None

    def calibrated(self, stream: str) -> bool:
        """Whether anything that was fitted enters."""
        return self.recipe is not None and bool(reads(self.of(stream), stream))

    def coder(self, stream: str, head_dim: int, calibration: StreamCalibration | None) -> BenchCoder:
        """The codec of one stream."""
        recipe = self.of(stream)
        if recipe is None:
            return RivalCoder(self.library.make(self.bits, head_dim))
        return OwnCoder(recipe, build(recipe, calibration if self.calibrated(stream) else None))

    def bare(self) -> BenchCodec:
        """Without mean removal and whitening: as it meets the source that its quantiser was made for."""
        if self.recipe is None:
            return self
        return BenchCodec(self.label, self.bits, Recipe(k=bare(self.recipe.k), v=bare(self.recipe.v)))


def bare(recipe: StreamRecipe) -> StreamRecipe:
    """The recipe without what stands before the codec."""
    changes = {"center": False, "whiten": False} if isinstance(recipe, Conditioned) else {}
    if isinstance(recipe, BlockStream):
        changes = {"whiten": False}
    return recipe.model_copy(update=changes)


class OwnCoder:
    """One of kvlab's codecs; bytes are the frame that the bitstream writes."""

    decodes = serialises = True

    def __init__(self, recipe: StreamRecipe, codec: Codec):
        self.recipe, self.codec = recipe, codec

    def encode(self, x: Tensor, site: Site) -> Encoded:
        """See `BenchCoder.encode`."""
        return self.codec.encode(x, site)

    def decode(self, coded: Encoded) -> Tensor:
        """See `BenchCoder.decode`."""
        return self.codec.decode(coded)

    def write(self, coded: Encoded) -> bytes:
        """The frame."""
        return frame_bytes(coded)

    def read(self, data: bytes) -> Encoded:
        """From the frame."""
        return read_frame(data)

    def nbytes(self, coded: Encoded) -> int:
        """Length of the frame."""
        return len(frame_bytes(coded))

    def index_bits(self, coded: Encoded, values: int) -> float:
        """Quantised coefficients times the bits of each; fp8 and identity keep 8 and 16 for every value."""
        if isinstance(self.recipe, IdentityStream):
            return 8.0 * coded.blocks[0][0].element_size()
        if isinstance(self.recipe, KltStream):
            return self.widths(coded).double().mean().item()
        return coded.stats.n_coefficients * getattr(self.recipe, "bits", 8) / values

    def known_loss(self, coded: Encoded) -> float | None:
        """For `klt`, made for Gaussian components, the mean over its components of what their whole bits lose."""
        return limit.lloyd_max_loss(self.widths(coded)).mean().item() if isinstance(self.recipe, KltStream) else None

    def widths(self, coded: Encoded) -> Tensor:
        """Bits of each component of a layer, [groups, width] (klt only)."""
        return self.codec.plan(coded.layer, coded.shape, torch.device("cpu")).widths


class RivalCoder:
    """A library's quantiser; it has no byte format, its bytes are those of the tensors that it keeps."""

    serialises = False

    def __init__(self, rival: LibraryCodec):
        self.rival, self.decodes = rival, rival.separate

    def encode(self, x: Tensor, site: Site) -> EncodedTensor:
        """See `BenchCoder.encode`."""
        return self.rival.encode(x)

    def decode(self, coded: EncodedTensor) -> Tensor:
        """See `BenchCoder.decode`."""
        return self.rival.decode(coded)

    def nbytes(self, coded: EncodedTensor) -> float:
        """See `BenchCoder.nbytes`."""
        return coded.nbytes

    def index_bits(self, coded: EncodedTensor, values: int) -> float:
        """See `BenchCoder.index_bits`."""
        return self.rival.index_bits

    def known_loss(self, coded: EncodedTensor) -> None:
        """See `BenchCoder.known_loss`."""


# --------------------------------------------------------------------------------------- which ones


@dataclass(frozen=True)
class Roster:
    """Who takes part, and who could not: label -> reason."""

    subjects: tuple[BenchCodec, ...]
    missing: dict[str, str]


def roster(params: Params) -> Roster:
    """Identity, every rung of the ladder that codes one tensor at a time, and every rival that runs here."""
    subjects = [BenchCodec("identity", None, IDENTITY)]
    own = [(label, recipe) for label, recipe in rungs(params) if recipe.k.codec not in WHOLE]
    subjects += [BenchCodec(label, nominal(recipe), alone(recipe)) for label, recipe in own]
    missing = {}
    for name, library in LIBRARIES.items():
        reason = usable(library)
        if reason:
            missing[name] = f"{library.distribution}: {reason}"
            continue
        for bits in params.ladder.bits:
            try:
                library.make(bits, 64)
            except CapabilityError:
                continue
            subjects.append(BenchCodec(f"{name} {bits}", bits, library=library))
    return Roster(tuple(subjects), missing)


def alone(recipe: Recipe) -> Recipe:
    """The recipe for one tensor, which shares its bits with no other."""
    streams = {"k": recipe.k, "v": recipe.v}
    own = {"budget": "tensor"}
    found = {name: one.model_copy(update=own) for name, one in streams.items() if isinstance(one, KltStream)}
    return Recipe(**(streams | found), rotary=recipe.rotary)


def nominal(recipe: Recipe) -> int | None:
    """The bits that the recipe names."""
    bits = getattr(recipe.k, "bits", None)
    return bits if bits is None else int(bits)


# ------------------------------------------------------------------------------------ calibrations


def calibrate(rows: Tensor, sample: StreamSample, weight: Tensor | None, ridge: float) -> StreamCalibration:
    """Everything that can be fitted, from rows [windows, heads, tokens, head_dim] and the metric of their errors.

    K is whitened by the sample's Sigma_q, or by the metric where it has none; V never is.
    """
    by = weight if sample.sigma is None else sample.sigma
    whiteners = {sample.layer: whitening.fit(by, ridge)} if by is not None and sample.stream == "k" else {}
    metric = None if weight is None else ridged(weight.double(), ridge)
    fitted = components.fit(rows.float().transpose(0, 1).contiguous(), metric)
    return StreamCalibration(whiteners=whiteners, components={sample.layer: fitted})
