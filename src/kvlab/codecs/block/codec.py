"""The published block codec, v1.3: whiten, cut into blocks, PCA, spherical k-means, rotate, quantise, pack.

`metric` is part of the recipe because it was part of the published one, where it decided which norm is written
and whether the decoder applies it. It never changed what a vector is coded as: the nearest value of a table is
the same by the squared error and by Huber's function of it (``linf``). Here the residual's norm is always stored
and always applied, so the three metrics make the same stream. ``emulate_published_decoder`` leaves the norm out
where the original did: under ``inner_product``, which its vLLM harness chose by itself for every K that it did not
whiten. A V of another metric kept its norm there, and keeps it here. The flag is for comparison only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvlab.codecs.base import (
    Encoded,
    Place,
    Site,
    Stats,
    StreamCalibration,
    block_index,
    checked,
    finite,
    fitting,
    stored,
    uncalibrated,
)
from kvlab.codecs.block import BlockStream, outliers
from kvlab.codecs.block.analysis import Analysis, analyse
from kvlab.codecs.block.layout import Grid, TokenRun
from kvlab.codecs.block.outliers import Outliers
from kvlab.codecs.block.skeleton import Frame
from kvlab.codecs.block.stored import PRECISION, BlockArrays, Rounding
from kvlab.codecs.shared import quantizer, rotation, transform
from kvlab.codecs.shared.apart import apart
from kvlab.codecs.shared.quantizer import gaussian_table
from kvlab.codecs.shared.whitening import Whitener
from kvlab.codecs.stream import packing
from kvlab.codecs.stream.packing import LookUp, bits_for
from kvlab.core.errors import CalibrationMismatch, StreamError


class BlockCodec:
    """The codec of one stream.

    Parameters
    ----------
    recipe : BlockStream
        All settings.
    calibration : StreamCalibration or None
        Whiteners, for a recipe that whitens, and centroids, for a ``fitted`` codebook.

    Raises
    ------
    CalibrationMismatch
        When the codebook is missing, or is not 2**bits ascending numbers.
    """

    per_token: ClassVar[bool] = False

    def __init__(self, recipe: BlockStream, calibration: StreamCalibration | None = None):
        self.recipe = recipe
        self.whiteners = calibration.whiteners if calibration else {}
        self.table = codebook(recipe, calibration)

    @apart
    def encode(self, x: Tensor, site: Site) -> Encoded:
        """Code [heads, tokens, head_dim]; the ragged last block is coded like the others."""
        recipe = self.recipe
        batches, shared = self._analysed(x, site)
        table = self.table.to(x.device)
        blocks: dict[int, BlockArrays] = {}
        for numbers, analysis in batches:
            written = write(analysis, table, recipe.bits, recipe.outlier_threshold, recipe.seed)
            blocks |= zip(numbers, written, strict=True)
        ordered = [blocks[number] for number in range(len(blocks))]
        return Encoded(
            shape=tuple(x.shape),
            layer=site.layer,
            stream=site.stream,
            shared=(shared.of(0),) if shared else (),
            blocks=tuple(block.arrays(recipe.share_basis) for block in ordered),
            stats=Stats(
                d_eff=tuple(block.d_eff for block in ordered),
                n_outliers=sum(block.apart.places.numel() for block in ordered if block.apart),
                n_coefficients=sum(block.width * len(block.codes) for block in ordered),
            ),
        )

    @apart
    def decode(self, encoded: Encoded) -> Tensor:
        """Read the stored arrays, float32 [heads, tokens, head_dim]; `StreamError` when they cannot be."""
        grid = self._grid(encoded)
        blocks = [self._read(encoded, grid, number) for number in range(grid.count)]
        rows = torch.empty(encoded.shape, dtype=torch.float32, device=blocks[0].codes.device)
        for group in grouped(blocks):
            weights = self._weights(encoded, [blocks[number] for number in group])
            for number, own in zip(group, weights, strict=True):
                runs = grid.runs(number)
                self._fill(encoded, blocks[number], own, runs, [rows[run.head, run.tokens] for run in runs])
        return rows

    @apart
    def decode_block(self, encoded: Encoded, index: int) -> tuple[Place, Tensor]:
        """See `Codec.decode_block`; heads and tokens are index tensors when a block mixes heads."""
        grid = self._grid(encoded)
        block = self._read(encoded, grid, block_index(encoded, index))
        rows = torch.empty(len(block.codes), encoded.shape[2], dtype=torch.float32, device=block.codes.device)
        runs = grid.runs(index)
        self._fill(encoded, block, self._weights(encoded, [block])[0], runs, [rows[run.rows] for run in runs])
        return grid.place(index), rows if grid.mixed else rows[None]

    @apart
    def residuals(self, x: Tensor, site: Site) -> Tensor:
        """The numbers that the quantiser's table serves, as `encode` would see them, float32 [m].

        Padding of the rotation is included; vectors without a residual and coefficients that are
        stored apart are not.
        """
        threshold = self.recipe.outlier_threshold
        pool = []
        for _, analysis in self._analysed(x, site)[0]:
            for group in groups(analysis):
                z = rotated(analysis, group, self.recipe.seed)
                z = z[group.of(analysis.scalars)[:, 1] > 0].flatten()
                pool.append(z if threshold is None else z[z.abs() <= threshold])
        return torch.cat(pool)

    def _analysed(self, x: Tensor, site: Site) -> tuple[list[tuple[list[int], Analysis]], Frame | None]:
        """Numbers and analysis of each batch of whitened blocks, and the frame that they share."""
        recipe = self.recipe
        rows, whitener = checked(x, site), self._whitener(site.layer)
        if whitener:
            rows = fitting(whitener.whiten(rows), site)
        rounding = Rounding(PRECISION[recipe.skeleton], site, whitened=whitener is not None)
        shared = None
        if recipe.share_basis:
            shared = Frame.store(transform.fit(rows.reshape(1, -1, rows.shape[-1]), recipe), rounding)
        batches = Grid.of(rows.shape, recipe).batches(rows)
        return [(numbers, analyse(blocks, recipe, shared, rounding)) for blocks, numbers in batches], shared

    def _grid(self, encoded: Encoded) -> Grid:
        """The grid of the stored shape; `StreamError` when it does not have as many blocks as are stored."""
        if min(encoded.shape) < 1:
            raise StreamError(f"a coded tensor cannot have the shape {list(encoded.shape)}")
        try:
            whitener = self._whitener(encoded.layer)
            if whitener:
                whitener.fits(encoded.shape)
        except CalibrationMismatch as error:
            raise uncalibrated(encoded, error) from None
        grid = Grid.of(encoded.shape, self.recipe)
        if len(encoded.blocks) != grid.count:
            raise StreamError(
                f"{len(encoded.blocks)} blocks where a tensor of shape {list(encoded.shape)} needs {grid.count}"
            )
        if self.recipe.share_basis:
            (frame,) = stored(encoded.shared, (PRECISION[self.recipe.skeleton], (None, encoded.shape[2])))
            finite(frame, "the frame that the blocks share")
        else:
            stored(encoded.shared)
        return grid

    def _read(self, encoded: Encoded, grid: Grid, number: int) -> BlockArrays:
        """The checked arrays of one block."""
        arrays = encoded.blocks[number]
        _, first, last = grid.span(number)
        return BlockArrays.read(arrays, encoded.shared, (last - first, encoded.shape[2]), self.recipe)

    def _weights(self, encoded: Encoded, blocks: list[BlockArrays]) -> Tensor:
        """See `summed_weights`."""
        look_up = LookUp(self.table.to(blocks[0].codes.device), self.recipe.bits)
        return summed_weights(blocks, look_up, self._applies_norm(encoded))

    def _fill(
        self, encoded: Encoded, block: BlockArrays, weights: Tensor, runs: list[TokenRun], targets: list[Tensor]
    ) -> None:
        """Write the decoded rows of a block, run by run; one product per run, whatever is decoded with it.

        The encoder's whitening is undone on the few vectors that the rows are sums of.
        """
        vectors = summed_vectors(block, self.recipe.seed)
        whitener = self._whitener(encoded.layer)
        for run, target in zip(runs, targets, strict=True):
            own = whitener.unwhiten_head(vectors, run.head) if whitener else vectors
            # Not into the target: where the output of a product lies may decide how it is rounded.
            target.copy_(torch.addmm(own[0], weights[run.rows], own[1:]))

    def _whitener(self, layer: int) -> Whitener | None:
        if not self.recipe.whiten or layer in self.recipe.whiten_skip_layers:
            return None
        if layer not in self.whiteners:
            raise CalibrationMismatch(
                f"the recipe whitens layer {layer} but the calibration has no whitener for it; "
                f"calibrate this model, or add layer {layer} to whiten_skip_layers",
                code="calibration.missing",
            )
        return self.whiteners[layer]

    def _applies_norm(self, encoded: Encoded) -> bool:
        whitened = self.recipe.whiten and encoded.layer not in self.recipe.whiten_skip_layers
        dropped = self.recipe.metric == "inner_product" or (encoded.stream == "k" and not whitened)
        return not (dropped and self.recipe.emulate_published_decoder)


# The Lloyd-Max table that a recipe asks for.


def codebook(recipe: BlockStream, calibration: StreamCalibration | None) -> Tensor:
    """Ascending float32 [2**bits]: the Gaussian table, or the fitted one of the calibration.

    Raises
    ------
    CalibrationMismatch
        When the fitted table is missing, or is not 2**bits ascending finite numbers.
    """
    if recipe.codebook == "gaussian":
        return gaussian_table(recipe.bits).float()
    table = calibration.centroids if calibration else None
    if table is None:
        raise CalibrationMismatch(
            "the recipe asks for a fitted codebook but the calibration holds none; "
            "fit it, or set calibration.codebooks: gaussian"
        )
    table = table.float()
    if table.shape != (2**recipe.bits,):
        raise CalibrationMismatch(
            f"the fitted codebook has shape {list(table.shape)}, {recipe.bits} bits need "
            f"[{2**recipe.bits}]; fit it for this recipe"
        )
    if not (table.diff() >= 0).all() or not table.isfinite().all():
        raise CalibrationMismatch("the fitted codebook is not ascending and finite; fit it again")
    return table


# The vectors of a batch of blocks as they are stored: rotated, quantised, packed, outliers apart.


@dataclass(frozen=True)
class SizeGroup:
    """Blocks whose vectors have the same stored size: padded width and bits of a segment."""

    index: list[int]
    width: int
    segment_bits: int

    def of(self, batch: Tensor) -> Tensor:
        """Their part of a batch; the batch itself when it is all of them."""
        return batch if len(self.index) == len(batch) else batch[self.index]


def groups(analysis: Analysis) -> list[SizeGroup]:
    """The blocks of a batch by (next power of two of d_eff, bits of a segment)."""
    found: dict[tuple[int, int], list[int]] = {}
    for block, (rank, count) in enumerate(zip(analysis.frame.d_eff, analysis.centres.counts, strict=True)):
        found.setdefault((1 << bits_for(rank), bits_for(count)), []).append(block)
    return [SizeGroup(index, *key) for key, index in found.items()]


def rotated(analysis: Analysis, group: SizeGroup, seed: int) -> Tensor:
    """Residuals of a group after the rotation, float32 [b, n, width], of mean square 1 per coordinate."""
    unit = group.of(analysis.unit)
    matrix = rotation.forward(seed, group.width, unit.device)
    kept = min(group.width, unit.shape[-1])
    return unit[..., :kept] @ matrix[:kept]


def write(analysis: Analysis, table: Tensor, bits: int, threshold: float | None, seed: int) -> list[BlockArrays]:
    """Rotate, quantise and pack all blocks of a batch."""
    written: list[BlockArrays | None] = [None] * len(analysis.unit)
    for group in groups(analysis):
        z = rotated(analysis, group, seed)
        codes = packing.pack(quantizer.codes(z, table), bits)
        segments = packing.pack(group.of(analysis.segment), group.segment_bits)
        apart = [None] * len(z) if threshold is None else outliers_of(z, threshold)
        for place, block in enumerate(group.index):
            written[block] = BlockArrays(
                frame=analysis.frame.of(block),
                centres=analysis.centres.of(block, analysis.frame.d_eff[block]),
                segments=segments[place],
                scalars=analysis.scalars[block],
                codes=codes[place],
                apart=apart[place],
            )
    return written


def outliers_of(z: Tensor, threshold: float) -> list[Outliers]:
    """The outliers of each block of z [b, n, width]."""
    found = outliers.take(z.flatten(0, 1), threshold)
    counts = found.counts.view(z.shape[:2])
    sizes = counts.to(torch.int32).sum(-1).tolist()
    return [
        Outliers(*parts) for parts in zip(counts, found.places.split(sizes), found.values.split(sizes), strict=True)
    ]


# From what is stored to rows.


def grouped(blocks: list[BlockArrays]) -> Iterator[list[int]]:
    """Numbers of blocks whose arrays of vectors have the same shapes."""
    found: dict[tuple, list[int]] = {}
    for number, block in enumerate(blocks):
        found.setdefault((block.scalars.shape[1], block.width, len(block.centres)), []).append(number)
    yield from found.values()


def summed_weights(blocks: list[BlockArrays], look_up: LookUp, apply_norm: bool) -> Tensor:
    """Weights of the vectors of `summed_vectors`, float32 [b, n, N + K], of b blocks of the same shapes.

    Raises
    ------
    StreamError
        When a segment is none of the centres, or outliers do not fit the vectors.
    """
    first = blocks[0]
    n_centres, width, count = len(first.centres), first.width, first.scalars.shape[1]
    z = look_up(torch.stack([block.codes for block in blocks]), width)
    if first.apart is not None:
        z = restored(z, blocks)
    segment = packing.unpack(torch.stack([block.segments for block in blocks]), bits_for(n_centres), count)
    if n_centres & (n_centres - 1) and int(segment.max()) >= n_centres:
        raise StreamError(f"a vector has centre {int(segment.max())} of {n_centres}")
    gain, norm = torch.stack([block.scalars for block in blocks]).float()[..., None].unbind(1)
    found = z.new_empty(*z.shape[:2], width + n_centres)
    torch.mul(z, norm if apply_norm else 1.0, out=found[..., :width])
    found[..., width:].zero_().scatter_(-1, segment[..., None], gain)
    return found


def restored(z: Tensor, blocks: list[BlockArrays]) -> Tensor:
    """z [b, n, N] with the outliers of the blocks in their places."""
    parts = ([getattr(block.apart, name) for block in blocks] for name in ("counts", "places", "values"))
    return outliers.restore(z.flatten(0, 1), Outliers(*map(torch.cat, parts))).view_as(z)


def summed_vectors(block: BlockArrays, seed: int) -> Tensor:
    """What the rows of a block are sums of, float32 [1 + N + K, D]: the mean, rotated axes, centres."""
    frame, width = block.frame.float(), block.width
    found = frame.new_empty(1 + width + len(block.centres), frame.shape[1])
    found[0] = frame[0]
    torch.mm(rotation.inverse(seed, width, frame.device)[:, : block.d_eff], frame[1:], out=found[1 : 1 + width])
    torch.mm(block.centres.float(), frame[1:], out=found[1 + width :])
    return found
