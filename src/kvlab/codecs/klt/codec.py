"""The project's own transform codec: calibrated components, bits where they lower the error most, nothing else stored.

x - mean is rotated into the principal components of the weighted error (Karhunen-Loeve transform; Huang and
Schultheiss 1963), each component is quantised by a Lloyd-Max table of its own shape, and the widths of the
tables are what reverse water-filling in whole bits spends of the budget. The heads of a group (`grouping`) are coded
as one vector, and the budget may be that of the whole cache (`KltStream.budget`). Mean, rotation, widths and tables
come from the calibration, so that a block is nothing but packed indices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from kvlab.codecs.base import (
    Encoded,
    Place,
    Site,
    Stats,
    StreamCalibration,
    all_finite,
    block_index,
    checked,
    shaped,
    stored,
    uncalibrated,
)
from kvlab.codecs.klt import KltStream, escapes
from kvlab.codecs.klt.allocation import shared
from kvlab.codecs.klt.choosing import Chooser, Worth
from kvlab.codecs.klt.escapes import Spent, last_spent
from kvlab.codecs.klt.halves import HalfMatrix, scratch
from kvlab.codecs.klt.marginal import MAX_WIDTH, Marginals
from kvlab.codecs.klt.synthesis import Decoding, Synthesis
from kvlab.codecs.shared import covariance
from kvlab.codecs.shared.apart import apart
from kvlab.codecs.shared.components import FLOOR, TINY, Components
from kvlab.codecs.shared.front import needed
from kvlab.codecs.shared.grouping import block_diagonal, centred
from kvlab.codecs.shared.products import FEW
from kvlab.codecs.shared.sketch import gaussian_sketch
from kvlab.core.errors import CalibrationMismatch, CapabilityError, NonFinite, ParamsError, StreamError

OVERHEAD = 48  # bytes of a frame with one block that are not indices, bits lost at the ends of planes included
STRIP = 2048  # tokens that are coded at once: bounds the memory, and stays near the processor


class KltCodec:
    """Codes blocks of `recipe.block_size` tokens of all heads at a fixed number of bits per vector.

    A block is one array, uint8 [bytes], whose length follows from recipe, calibration and number of tokens
    alone. A full block, written as a frame of its own, takes at most `recipe.bits` bits per value, where these are
    divided over several tensors on their average; a shorter one takes as much per vector, and its share of the same
    few bytes of headers is larger.

    Parameters
    ----------
    recipe : KltStream
        Settings.
    calibration : StreamCalibration
        Its `components`, of every layer that is coded, and where the budget is that of several tensors its `stream`
        and the `spectra` of all of them.
    """

    per_token: ClassVar[bool] = True

    def __init__(self, recipe: KltStream, calibration: StreamCalibration | None = None):
        self.recipe, self.calibration = recipe, calibration or StreamCalibration()
        self._plans: dict[tuple[int, torch.device], Synthesis] = {}
        self._shares: dict[tuple[str, int], list[int]] = {}

    @apart
    def encode(self, x: Tensor, site: Site) -> Encoded:
        """See `Codec.encode`."""
        rows, plan = shaped(x, site), self.plan(site.layer, x.shape, x.device)
        if not isinstance(plan, Plan):
            raise CalibrationMismatch(
                f"the calibration holds what decodes layer {site.layer} alone, and a tensor is to be encoded; give the"
                " whole file that `kvlab calibrate` wrote",
                code="calibration.decoder-only",
            )
        size, blocks, escaped = self.recipe.block_size, [], 0
        for start, stop in self._strips(x.shape[1]):
            symbols, count = plan.analyse(rows[:, start:stop], site)
            escaped += count
            whole = (stop - start) // size * size
            for part in (symbols[:, :whole].unflatten(1, (-1, size)), symbols[:, None, whole:]):
                if part.numel():
                    packed = plan.planes.pack(part.transpose(0, 1).contiguous())
                    blocks += [(data,) for data in packed]
        stats = Stats(n_outliers=escaped, n_coefficients=x.numel())
        return Encoded(tuple(x.shape), site.layer, site.stream, shared=(), blocks=tuple(blocks), stats=stats)

    @apart
    def decode(self, encoded: Encoded) -> Tensor:
        """See `Codec.decode`."""
        return self._decoded(encoded, 0, encoded.shape[1])

    @apart
    def decode_block(self, encoded: Encoded, index: int) -> tuple[Place, Tensor]:
        """See `Codec.decode_block`."""
        start = block_index(encoded, index) * self.recipe.block_size
        stop = min(start + self.recipe.block_size, encoded.shape[1])
        return (slice(None), slice(start, stop)), self._decoded(encoded, start, stop)

    def _decoded(self, encoded: Encoded, start: int, stop: int) -> Tensor:
        """Tokens `start` to `stop`, both at the ends of blocks."""
        stored(encoded.shared)
        tokens, size = encoded.shape[1], self.recipe.block_size
        if tokens < 1 or len(encoded.blocks) != -(-tokens // size):
            raise StreamError(f"{len(encoded.blocks)} blocks of {size} tokens cannot hold {tokens} tokens")
        parts = []
        for first, last in self._strips(stop - start):
            first, last = first + start, last + start
            blocks = encoded.blocks[first // size : -(-last // size)]
            device = blocks[0][0].device if blocks[0] else torch.device("cpu")
            try:
                plan = self.plan(encoded.layer, encoded.shape, device)
            except CalibrationMismatch as error:
                raise uncalibrated(encoded, error) from None
            whole = (last - first) // size
            symbols = []
            for group, length in ((blocks[:whole], size), (blocks[whole:], (last - first) % size)):
                if group:
                    data = [stored(arrays, (torch.uint8, (plan.planes.bytes(length),)))[0] for arrays in group]
                    read = plan.planes.unpack(torch.stack(data), length)
                    symbols.append(read.transpose(0, 1).flatten(1))
            parts.append(plan.synthesise(symbols[0] if len(symbols) == 1 else torch.cat(symbols, dim=1)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _strips(self, tokens: int) -> list[tuple[int, int]]:
        size = self.recipe.block_size
        step = max(1, STRIP // size) * size
        return [(start, min(start + step, tokens)) for start in range(0, tokens, step)]

    def plan(self, layer: int, shape: tuple[int, int, int], device: torch.device) -> Synthesis:
        """What the recipe makes of one layer's components (a `Plan`), or what decodes alone where that is all there is.

        Made when the layer is first met, and kept.

        Raises
        ------
        CalibrationMismatch
            The calibration has no components for the layer, or of another shape.
        CapabilityError
            The recipe's bits leave none for some head.
        """
        plan = self._plans.get((layer, device)) or self._made(layer, shape, device)
        if (shape[0], shape[2]) != plan.shape:
            raise _other_shape(layer, plan.shape, shape)
        return plan

    def let_go(self) -> None:
        """Drop the calibration: the layers that were met are coded as before, on other devices too, and no others."""
        self.calibration = StreamCalibration(stream=self.calibration.stream)

    def _made(self, layer: int, shape: tuple[int, int, int], device: torch.device) -> Synthesis:
        """The plan of a layer for a device, which is kept: one that is for another device moved there, or a new one."""
        own = next((plan for (at, _), plan in list(self._plans.items()) if at == layer), None)
        if own is not None:
            made = own.to(device)
        else:
            found = needed(self.calibration.components, layer, "codec: klt", "components")
            if (shape[0], shape[2]) != tuple(found.mean.shape):
                raise _other_shape(layer, tuple(found.mean.shape), shape)
            with one_thread():
                made = self._planned(layer, found, device)
        self._plans[layer, device] = made
        return made

    def _planned(self, layer: int, found: Components | Decoding, device: torch.device) -> Synthesis:
        """The plan of whole components; the decoder of one, if it is for the recipe's bits."""
        if not isinstance(found, Decoding):
            return Plan.made(found, self.recipe, self.totals(layer, found), device)
        if float(found.bits) != self.recipe.bits:
            raise CalibrationMismatch(
                f"the decoder's file is not for klt at {self.recipe.bits:g} bits; give the one that was written for it",
                code="calibration.other-bits",
            )
        return Synthesis(found, device)

    def totals(self, layer: int, components: Components) -> list[int]:
        """Bits of a token in each group of a layer, the same of every token.

        Raises
        ------
        CalibrationMismatch
            The budget is that of several tensors, and the calibration does not say how large they are.
        CapabilityError
            The recipe's bits are fewer than its headers take.
        """
        bits = vector_bits(self.recipe, *components.mean.shape)
        if self.recipe.budget == "tensor":
            return shared(components.variance, bits).tolist()
        if not self._shares:
            self._shares = self._shared(bits, len(components.variance))
        return self._shares[self.calibration.stream, layer]

    def _shared(self, bits: int, groups: int) -> dict[tuple[str, int], list[int]]:
        """What the groups of every tensor get of budgets that several share, each of `bits` times their number."""
        sharing: dict[object, list[tuple[str, int]]] = {}
        for stream, layer in self.calibration.spectra:
            key = {"layer": layer, "stream": stream, "cache": None}[self.recipe.budget]
            sharing.setdefault(key, []).append((stream, layer))
        due = {"k", "v"} if self.recipe.budget != "stream" else {self.calibration.stream}
        if not due <= {stream for stream, _ in self.calibration.spectra}:
            raise CalibrationMismatch(
                f"the recipe divides its bits over a {self.recipe.budget}, and the calibration does not hold the"
                " variances of all of it; calibrate this model with `kvlab calibrate`",
                code="calibration.no-variances",
            )
        found = {}
        for tensors in sharing.values():
            variances = torch.cat([self.calibration.spectra[tensor] for tensor in tensors])
            own = shared(variances, len(tensors) * bits).unflatten(0, (-1, groups))
            found |= dict(zip(tensors, own.tolist(), strict=True))
        return found


def _other_shape(layer: int, have: tuple[int, int], shape: tuple[int, int, int]) -> CalibrationMismatch:
    return CalibrationMismatch(
        f"the components of layer {layer} are for {have[0]} KV heads of {have[1]} dimensions, the tensor has"
        f" {shape[0]} of {shape[2]}; calibrate this model",
        code="calibration.other-shape",
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch in one thread: a plan is made in thousands of small steps, over each of which threads wait for another.

    On two busy cores, two threads took eight times as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Plan(Synthesis):
    """What the recipe makes of the components of one layer: widths, tables, and the way there beside the way back.

    Parameters
    ----------
    decoding : Decoding
        The way back.
    forward : Tensor
        Tokens without their mean to standardised components, float32 [groups, width, width].
    worth : Worth or None
        What bits are worth, which escapes are chosen by; None without escapes.
    device : torch.device
        Where tokens and symbols will be.
    """

    def __init__(self, decoding: Decoding, forward: Tensor, worth: Worth | None, device: torch.device):
        super().__init__(decoding, device)
        self.forward, self.worth = HalfMatrix.of(forward, device), worth
        if worth is not None:
            self.choose = Chooser(worth, self.tails, self.forward, self.shift)

    @property
    def ahead(self) -> Tensor:
        """`forward` as float32 [groups, width, width], in memory that the next call in this thread is given too."""
        shape = self.forward.values.shape
        return self.forward.full(scratch("forward", *shape, device=self.shift.device))

    def to(self, device: torch.device) -> Plan:
        """See `Synthesis.to`."""
        return Plan(self.decoding, self.forward.full().cpu(), self.worth, device)

    @classmethod
    def made(cls, components: Components, recipe: KltStream, totals: list[int], device: torch.device) -> Plan:
        """That of components, where a vector of each group has so many bits (`totals`)."""
        components = asked(components, recipe)
        groups, width = components.variance.shape
        deviation = components.variance.double().sqrt().cpu()
        escaping = recipe.escape and all(escapes.fits(total - 1) for total in totals)
        most = [min(total - escaping, MAX_WIDTH * width) for total in totals]
        marginals = Marginals(components.sketch.flatten(0, 1))
        orders, widths, table, mass = marginals.spend(deviation.square(), most, recipe.allocation == "even")
        wide = 1 << int(widths.max())
        table, mass = (x[:, :wide].unflatten(0, (groups, -1)) for x in (table, mass))
        spent = [Spent(*group) for group in zip(orders, table, mass, deviation, widths, strict=True)]
        tails = last_spent(spent) if escaping else None
        inverse = (components.inverse.double().cpu() * deviation[..., None]).float().contiguous()
        forward = (components.forward.double().cpu() / deviation[:, None]).mT.float().contiguous()
        decoding = Decoding.of(recipe.bits, (components.mean, components.sink), inverse, spent, tails)
        return cls(decoding, forward, Worth.of(spent, tails) if escaping else None, device)

    def analyse(self, x: Tensor, site: Site, found: Tensor | None = None) -> tuple[Tensor, int]:
        """Symbols uint8 [rows, n] of x float32 [heads, n, head_dim], and how many components were escaped.

        `found` are what the tables alone make of x, uint8 [groups * width, n], where that is known.

        Raises
        ------
        NonFinite
            When a value is NaN or infinite, or a component does not fit float32; names layer, stream and window.
        """
        tokens = x.shape[1]
        own = centred(x, self.mean)
        z = self._components(own)
        if not all_finite(z):
            checked(x, site)
            raise NonFinite(
                f"layer {site.layer} {site.stream}: a value in window {site.window} is so large that its components"
                f" do not fit float32",
                code="non-finite.too-large",
            )
        found = self._symbols(z) if found is None else found
        if not self.escaping:
            return found, 0
        symbols = torch.cat((found, z.new_zeros(self.groups, tokens, dtype=torch.uint8)))
        vectors = self.vectors(symbols)
        chosen = self.choose(own, z, vectors)
        if len(chosen.group):
            written = self.tails.write(chosen.group, chosen.symbols, chosen.said, chosen.coefficients)
            vectors[chosen.group, :, chosen.token] = written
            symbols[self.rows + chosen.group, chosen.token] = 1
        return symbols, chosen.components

    def _symbols(self, z: Tensor) -> Tensor:
        """Places in the tables of components [groups, width, n], uint8 [groups * width, n]."""
        found = [self.trees.nearest(number, own) for number, own in enumerate(z)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _components(self, vectors: Tensor) -> Tensor:
        """Standardised components [groups, width, n] of vectors without their mean [groups, n, width]."""
        tokens = vectors.shape[1]
        if tokens < FEW:
            vectors = torch.nn.functional.pad(vectors, (0, 0, 0, FEW - tokens))
        return torch.bmm(self.ahead, vectors.mT)[..., :tokens]


def vector_bits(recipe: KltStream, heads: int, head_dim: int) -> int:
    """Bits of one token of all heads, so that a full block with its headers keeps to the recipe's `bits`.

    Raises
    ------
    CapabilityError
        When the headers leave less than a bit for each head.
    """
    block = recipe.bits * heads * head_dim * recipe.block_size
    budget = int((block - 8 * OVERHEAD) // recipe.block_size)
    if budget < heads:
        raise CapabilityError(
            f"klt: {recipe.bits:g} bits per value are {block / 8:.0f} bytes for a block of {recipe.block_size} tokens"
            f" of {heads} KV heads of {head_dim} dimensions; {OVERHEAD} bytes of headers leave less than a bit per"
            f" vector; raise `bits` or `block_size`",
            code="capability.too-few-bits",
        )
    return min(budget, MAX_WIDTH * heads * head_dim)


# `klt` with a part taken out: the components that its recipe asks for, made of those that were calibrated.


def asked(components: Components, recipe: KltStream) -> Components:
    """The components that a recipe codes by; the calibrated ones themselves where it takes nothing out of them.

    Raises
    ------
    ParamsError
        It asks for other axes and for tables fitted to them, which no calibration holds.
    """
    if recipe.transform != "klt" and recipe.tables != "gaussian":
        raise ParamsError(
            f"klt with transform {recipe.transform!r} has no fitted tables; set tables to 'gaussian'",
            code="params.no-tables",
        )
    made = WAYS[recipe.transform](components)
    if recipe.tables == "fitted":
        return made
    groups, width, _ = made.sketch.shape
    return replace(made, sketch=gaussian_sketch(groups * width).unflatten(0, (groups, width)).to(made.sketch))


def _same(components: Components) -> Components:
    return components


def per_head(components: Components) -> Components:
    """The KLT of each head without the others, in the same metric."""
    metric = components.head_metric
    chol = torch.linalg.cholesky(metric)
    variance, axes = covariance.principal(chol.mT @ components.head_covariance.double() @ chol)
    identity = torch.eye(metric.shape[-1], dtype=metric.dtype).expand_as(metric)
    back = axes.mT @ torch.linalg.solve_triangular(chol, identity, upper=False)
    groups = len(components.variance)
    return _with(
        components,
        block_diagonal(chol @ axes, groups),
        block_diagonal(back, groups),
        variance.reshape(groups, -1),
    )


def unweighted(components: Components) -> Components:
    """The KLT without the metric: principal components of the plain covariance, all errors weighed alike."""
    variance, axes = covariance.principal(components.covariance.double())
    return _with(components, axes, axes.mT, variance)


def untransformed(components: Components) -> Components:
    """The channels as they are, each weighed by the metric's diagonal.

    The metric is F F^T with F the way to the calibrated components, whose axes are orthonormal in its frame.
    """
    forward = components.forward.double()
    root = forward.square().sum(-1).clamp(min=TINY).sqrt()
    variance = components.covariance.double().diagonal(dim1=-2, dim2=-1) * root.square()
    return _with(components, torch.diag_embed(root), torch.diag_embed(1 / root), variance)


def _with(components: Components, forward, inverse, variance) -> Components:
    """Other axes, no component smaller than a calibrated one may be."""
    floor = FLOOR * variance.mean(-1, keepdim=True) + TINY
    found = {"forward": forward, "inverse": inverse, "variance": torch.maximum(variance, floor)}
    return replace(components, **{name: value.float().contiguous() for name, value in found.items()})


WAYS = {"klt": _same, "per_head": per_head, "unweighted": unweighted, "none": untransformed}
