"""The published block codec, v1.3: whiten, cut into blocks, PCA, spherical k-means, rotate, quantise, pack.

`metric` is part of the recipe because it was part of the published one, where it decided which norm is written
and whether the decoder applies it. It never changed what a vector is coded as: the nearest value of a table is
the same by the squared error and by Huber's function of it (``linf``). Here the residual's norm is always stored
and always applied, so the three metrics make the same stream. ``emulate_published_decoder`` leaves the norm out
where the original did: under ``inner_product``, which its vLLM harness chose by itself for every K that it did not
whiten. A V of another metric kept its norm there, and keeps it here. The flag is for comparison only.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvlab.base.errors import CalibrationMismatch, StreamError
from kvlab.base.recipe import BlockStream
from kvlab.codec import transform
from kvlab.codec.apart import apart
from kvlab.codec.base import (
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
from kvlab.codec.block import synthesis, vector_code
from kvlab.codec.block.analysis import Analysis, analyse
from kvlab.codec.block.codebook import codebook
from kvlab.codec.block.layout import Grid, Run
from kvlab.codec.block.skeleton import Frame
from kvlab.codec.block.stored import PRECISION, BlockArrays, Rounding
from kvlab.codec.stream.packing import LookUp
from kvlab.codec.whitening import Whitener


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
            written = vector_code.write(analysis, table, recipe.bits, recipe.outlier_threshold, recipe.seed)
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
        for group in synthesis.grouped(blocks):
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
            for group in vector_code.groups(analysis):
                z = vector_code.rotated(analysis, group, self.recipe.seed)
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
        """See `synthesis.weights`."""
        look_up = LookUp(self.table.to(blocks[0].codes.device), self.recipe.bits)
        return synthesis.weights(blocks, look_up, self._applies_norm(encoded))

    def _fill(
        self, encoded: Encoded, block: BlockArrays, weights: Tensor, runs: list[Run], targets: list[Tensor]
    ) -> None:
        """Write the decoded rows of a block, run by run; one product per run, whatever is decoded with it.

        The encoder's whitening is undone on the few vectors that the rows are sums of.
        """
        vectors = synthesis.vectors(block, self.recipe.seed)
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
                f"calibrate this model, or add layer {layer} to whiten_skip_layers"
            )
        return self.whiteners[layer]

    def _applies_norm(self, encoded: Encoded) -> bool:
        whitened = self.recipe.whiten and encoded.layer not in self.recipe.whiten_skip_layers
        dropped = self.recipe.metric == "inner_product" or (encoded.stream == "k" and not whitened)
        return not (dropped and self.recipe.emulate_published_decoder)
