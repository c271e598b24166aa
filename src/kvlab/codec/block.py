"""The block codec: whiten, cut into blocks, PCA, spherical k-means, rotate, quantise, pack.

The residual's norm is always stored and always applied. The published decoder left it out wherever
K was not whitened; ``emulate_published_decoder`` reproduces that, for comparison only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.codec import layout, transform
from kvlab.codec.analysis import Analysis, analyse
from kvlab.codec.base import Encoded, Site, Stats, StreamCalibration, checked, spread_sq, sum_sq
from kvlab.codec.codebook import codebook
from kvlab.codec.skeleton import Centres, Skeleton
from kvlab.codec.stored import Rounding
from kvlab.codec.synthesis import Synthesis
from kvlab.codec.vector_code import VectorCode, write
from kvlab.codec.whitening import Whitener
from kvlab.errors import CalibrationMismatch
from kvlab.recipe import BlockStream

PRECISION = {"fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Batch:
    """Blocks of equal length as stored; `skeleton` is None when the call shares one."""

    skeleton: Skeleton | None
    centres: Centres
    parts: tuple[VectorCode, ...]


@dataclass(frozen=True)
class BlockEncoded(Encoded):
    """One call as stored; the header holds heads, tokens, head_dim, layer as int32 [4] on the CPU."""

    header: Tensor
    skeleton: Skeleton | None
    batches: tuple[Batch, ...]


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

    def __init__(self, recipe: BlockStream, calibration: StreamCalibration | None = None):
        self.recipe = recipe
        self.whiteners = calibration.whiteners if calibration else {}
        self.table = codebook(recipe, calibration)

    @torch.no_grad()
    def encode(self, x: Tensor, site: Site) -> BlockEncoded:
        """Code [heads, tokens, head_dim]; the ragged last block is coded like the others."""
        header = torch.tensor([*x.shape, site.layer], dtype=torch.int32)
        batches, shared = self._analysed(x, site)
        stored, stats = zip(*(self._stored(*batch, shared) for batch in batches), strict=True)
        return BlockEncoded(stats=sum(stats, Stats()), header=header, skeleton=shared, batches=stored)

    @torch.no_grad()
    def decode(self, encoded: BlockEncoded) -> Tensor:
        """Read the stored tensors, float32 [heads, tokens, head_dim]."""
        heads, _, _, layer = encoded.header.tolist()
        whitener = self._whitener(layer)
        batches = []
        for batch in encoded.batches:
            skeleton = batch.skeleton or encoded.skeleton
            synthesis = Synthesis.read(skeleton, batch.centres, self.recipe.seed, self._applies_norm(layer))
            table = self.table.to(skeleton.mean.device)
            parts = [
                synthesis.rows(group, part.read(group, table, self.recipe.bits))
                for group, part in zip(synthesis.groups(), batch.parts, strict=True)
            ]
            batches.append(synthesis.assemble(parts))
        rows = layout.join(batches, self.recipe.layout, heads)
        return whitener.unwhiten(rows) if whitener else rows

    @torch.no_grad()
    def residuals(self, x: Tensor, site: Site) -> Tensor:
        """The numbers that the quantiser's table serves, as `encode` would see them, float32 [m].

        Padding of the rotation is included; vectors without a residual and coefficients that are
        stored apart are not.
        """
        threshold = self.recipe.outlier_threshold
        pool = []
        for _, analysis in self._analysed(x, site)[0]:
            for group in analysis.synthesis.groups():
                vectors = analysis.vectors(group)
                z = vectors.z[vectors.norm > 0].flatten()
                pool.append(z if threshold is None else z[z.abs() <= threshold])
        return torch.cat(pool)

    def _analysed(self, x: Tensor, site: Site) -> tuple[list[tuple[Tensor, Analysis]], Skeleton | None]:
        """Batches of whitened blocks, each with its analysis, and the skeleton they share."""
        recipe = self.recipe
        rows, whitener = checked(x, site), self._whitener(site.layer)
        if whitener:
            rows = whitener.whiten(rows)
        rounding = Rounding(PRECISION[recipe.skeleton], site, whitened=whitener is not None)
        shared = None
        if recipe.share_basis:
            shared = Skeleton.store(transform.fit(rows.reshape(1, -1, rows.shape[-1]), recipe), rounding)
        batches = [
            (blocks, analyse(blocks, recipe, shared, rounding, self._applies_norm(site.layer)))
            for blocks in layout.split(rows, recipe.layout, recipe.block_size)
        ]
        return batches, shared

    def _stored(self, blocks: Tensor, analysis: Analysis, shared: Skeleton | None) -> tuple[Batch, Stats]:
        """Quantise and pack one batch, and count what that did."""
        recipe, synthesis, table = self.recipe, analysis.synthesis, self.table.to(blocks.device)
        stats = Stats(d_eff=tuple(synthesis.frame.d_eff.tolist()), signal_sq=spread_sq(blocks))
        parts = []
        for group in synthesis.groups():
            vectors = analysis.vectors(group)
            part, seen = write(vectors, group, table, recipe.bits, recipe.outlier_threshold)
            parts.append(part)
            stats += Stats(
                n_outliers=part.outliers.places.numel() if part.outliers else 0,
                n_coefficients=vectors.z.numel(),
                error_sq=sum_sq(synthesis.rows(group, seen) - blocks[group.index]),
            )
        return Batch(None if shared else analysis.skeleton, analysis.centres, tuple(parts)), stats

    def _whitener(self, layer: int) -> Whitener | None:
        if not self.recipe.whiten or layer in self.recipe.whiten_skip_layers:
            return None
        if layer not in self.whiteners:
            raise CalibrationMismatch(
                f"the recipe whitens layer {layer} but the calibration has no whitener for it; "
                f"calibrate this model, or add layer {layer} to whiten_skip_layers"
            )
        return self.whiteners[layer]

    def _applies_norm(self, layer: int) -> bool:
        whitened = self.recipe.whiten and layer not in self.recipe.whiten_skip_layers
        return whitened or not self.recipe.emulate_published_decoder
