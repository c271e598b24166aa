"""The block codec of the published study: PCA, spherical k-means, rotation, Lloyd-Max."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvlab.core.codec_settings import Bits, BlockSettings, Kind, Plugin, Tensor


class BlockStream(BlockSettings):
    """One stream of the block codec.

    `whiten` is for K only, `codebook` says whether the Lloyd-Max table is the Gaussian one or fitted on the
    calibration split. `metric` is what the published encoder was told; it decides something in the emulated
    published decoder alone.
    """

    codec: Literal["block"] = "block"
    bits: Bits
    outlier_threshold: float | None = Field(default=None, gt=0)
    share_basis: bool
    whiten: bool
    whiten_skip_layers: tuple[int, ...] = ()
    codebook: Literal["gaussian", "fitted"]
    metric: Literal["mse", "inner_product", "linf"] = "mse"
    emulate_published_decoder: bool = False


def _reads(stream: BlockStream, which: Tensor) -> tuple[Kind, ...]:
    return ("table",) if stream.codebook == "fitted" else ()


CODEC = Plugin(BlockStream, "kvlab.codecs.block.codec:BlockCodec", _reads)
