"""Rounding to the stored precision, and the arrays of one block, written and read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.codecs.base import Arrays, Site, finite, stored
from kvlab.codecs.block import BlockStream, outliers
from kvlab.codecs.block.outliers import Outliers
from kvlab.codecs.stream import packing
from kvlab.codecs.stream.packing import bits_for
from kvlab.core.errors import NonFinite, StreamError

PRECISION = {"fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Rounding:
    """Rounds side information to the stored dtype, and never to infinity in silence."""

    dtype: torch.dtype
    site: Site
    whitened: bool

    def __call__(self, values: Tensor, what: str) -> Tensor:
        """`values` in the stored dtype; `NonFinite` says how to mend an overflow of `what`."""
        rounded = values.to(self.dtype)
        if not torch.isfinite(rounded).all():
            other = f", or add layer {self.site.layer} to whiten_skip_layers" if self.whitened else ""
            raise NonFinite(
                f"layer {self.site.layer} {self.site.stream}: {what} of {values.abs().max().item():.4g} "
                f"does not fit the stored precision; use skeleton: fp32{other}",
                code="non-finite.too-large",
            )
        return rounded


@dataclass(frozen=True)
class BlockArrays:
    """What is stored of a block of n vectors of D numbers, of which d coefficients are kept.

    Parameters
    ----------
    frame : Tensor
        [1 + d, D] in the stored precision: the mean and the axes. Not among the block's own arrays when
        all blocks share one.
    centres : Tensor
        [K, d], stored precision.
    segments : Tensor
        Packed number of each vector's centre, uint8.
    scalars : Tensor
        [2, n], stored precision: gains and residual norms.
    codes : Tensor
        Packed residuals of N = 2**ceil(log2 d) numbers, uint8 [n, ceil(N * bits / 8)].
    apart : Outliers or None
        With an outlier threshold.
    """

    frame: Tensor
    centres: Tensor
    segments: Tensor
    scalars: Tensor
    codes: Tensor
    apart: Outliers | None

    @property
    def d_eff(self) -> int:
        """d, the components that are kept."""
        return len(self.frame) - 1

    @property
    def width(self) -> int:
        """N."""
        return 1 << bits_for(self.d_eff)

    def arrays(self, share_basis: bool) -> Arrays:
        """In the order in which they are stored."""
        frame = () if share_basis else (self.frame,)
        apart = (self.apart.counts, self.apart.places, self.apart.values) if self.apart else ()
        return (*frame, self.centres, self.segments, self.scalars, self.codes, *apart)

    @classmethod
    def read(cls, arrays: Arrays, shared: Arrays, shape: tuple[int, int], recipe: BlockStream) -> BlockArrays:
        """The inverse of `arrays` for a block of `shape` [n, D].

        Raises
        ------
        StreamError
            When number, dtype or shape of an array is not what recipe and shape allow, or a float is NaN or
            infinite. Numbers inside the packed arrays are checked when they are unpacked.
        """
        count, dim = shape
        precision = PRECISION[recipe.skeleton]
        if not recipe.share_basis:
            shared, arrays = arrays[:1], arrays[1:]
        (frame,) = stored(shared, (precision, (None, dim)))
        d_eff = len(frame) - 1
        if not 1 <= d_eff <= dim:
            raise StreamError(f"a block keeps {d_eff} components of {dim}")
        width = 1 << bits_for(d_eff)
        n_centres = len(arrays[0]) if arrays and arrays[0].dim() else 0
        if not 1 <= n_centres <= recipe.n_centres:
            raise StreamError(f"a block has {n_centres} centres where the recipe allows 1 to {recipe.n_centres}")
        expected = [
            (precision, (n_centres, d_eff)),
            (torch.uint8, (packing.packed_size(count, bits_for(n_centres)),)),
            (precision, (2, count)),
            (torch.uint8, (count, packing.packed_size(width, recipe.bits))),
        ]
        if recipe.outlier_threshold is not None:
            of_counts, of_places = outliers.dtypes(width)
            listed = len(arrays[-1]) if arrays[-1].dim() else 0
            expected += [(of_counts, (count,)), (of_places, (listed,)), (torch.float16, (listed,))]
        arrays = stored(arrays, *expected)
        block = cls(frame, *arrays[:4], apart=Outliers(*arrays[4:]) if arrays[4:] else None)
        own = () if recipe.share_basis else (frame,)  # a shared one is checked with the grid
        floats = (*own, block.centres, block.scalars, *((block.apart.values,) if block.apart else ()))
        finite(torch.cat([array.flatten() for array in floats]), "the side information of a block")
        return block
