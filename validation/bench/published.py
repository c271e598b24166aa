"""The published Rust codec on the tensors of the `given` source: what was measured of it, and its settings as ours.

kakeyaturbo is the codec of the LLM-KV--Cache-compress study. It was built in release mode and run on one
thread; its bytes are computed from the sizes of its structs (it writes none), its MB/s are those of its own
report. Bits and speeds are means over six layers of which the folder holds two, errors are of those two. Blocks
were per head. Under `inner_product` without whitening its decoder left the residual's norm out.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.codecs.block import BlockStream
from kvlab.core.recipe import Recipe

LAYERS = (5, 13)


@dataclass(frozen=True)
class Published:
    """One line: settings, bits per value, weighted error in dB below the variance (layers 5 and 13), MB/s."""

    stream: str
    settings: dict
    bits: float
    error_db: tuple[float, float]
    encode: float
    decode: float

    @property
    def name(self) -> str:
        """The settings in words."""
        given = self.settings
        words = [given["metric"], given["pca"], f"variance_ratio {given['variance_ratio']:g}"]
        words.insert(0, "whitened" if given["whiten"] else "raw")
        words += [f"T {given['outlier_threshold']:g}"] if given["outlier_threshold"] else []
        words += ["shared basis"] if given["share_basis"] else []
        words += [f"rank at most {given['exact_rank_cap']}"] if given["exact_rank_cap"] else []
        return ", ".join(words)

    @property
    def label(self) -> str:
        """A name that no rung of the ladder has."""
        return f"published {self.stream}: {self.name}"

    @property
    def places(self) -> set[tuple[str, int]]:
        """Stream and layer of the tensors that it was measured on."""
        return {(self.stream, layer) for layer in LAYERS}

    def numbers(self) -> dict[str, float]:
        """What was published: bits, error (mean of the layers), MB/s."""
        error = sum(self.error_db) / len(self.error_db)
        return {"bits": self.bits, "error_db": error, "encode": self.encode, "decode": self.decode}

    def recipe(self) -> Recipe:
        """The same settings for kvlab's block codec: blocks per head, half precision, the Gaussian table at 3 bits."""
        stream = BlockStream(
            bits=3,
            block_size=512,
            layout="per_head",
            n_centres=16,
            kmeans_iterations=32,
            rank_fraction=0.5,
            oversample=8,
            power_iterations=2,
            skeleton="fp16",
            codebook="gaussian",
            seed=3405691582,
            **self.settings,
        )
        return Recipe(k=stream, v=stream.model_copy(update={"whiten": False}))


# A transform codec without tuning on the six layers: mean and covariance from the first half of the tokens,
# scored on the second. Stream -> nominal bits -> bits above the limit of the true covariance.
PROTOTYPE = {"k": {2: 0.59, 3: 0.78, 4: 0.93}, "v": {2: 0.49, 3: 0.65, 4: 0.76}}


def line(stream, bits, five, thirteen, encode, decode, whiten=False, metric="mse", pca="exact", ratio=1.0,
         threshold=None, share=False, cap=None) -> Published:  # fmt: skip
    """One line of the table below."""
    settings = {
        "whiten": whiten,
        "metric": metric,
        "pca": pca,
        "variance_ratio": ratio,
        "outlier_threshold": threshold,
        "share_basis": share,
        "exact_rank_cap": cap,
    }
    return Published(stream, settings, bits, (five, thirteen), encode, decode)


LINES = (
    line("k", 4.30, -10.30, -10.05, 7, 28, whiten=True, pca="randomized", ratio=0.95, threshold=2.0),
    line("k", 8.16, -18.91, -17.88, 3, 10, whiten=True),
    line("k", 4.63, -18.53, -17.55, 3, 10, whiten=True, share=True),
    line("k", 5.71, -12.54, -12.38, 6, 18, whiten=True, ratio=0.95),
    line("k", 4.27, -11.47, -11.68, 6, 20, whiten=True, ratio=0.95, cap=64),
    line("k", 5.20, -10.79, -7.71, 6, 18, ratio=0.95),
    line("k", 5.20, -3.05, -2.19, 6, 19, ratio=0.95, metric="inner_product"),
    line("v", 2.60, -7.95, -7.93, 6, 21, pca="randomized", ratio=0.95, share=True),
    line("v", 3.31, -8.05, -8.03, 6, 21, pca="randomized", ratio=0.95, threshold=2.0, share=True),
    line("v", 4.30, -11.44, -11.43, 6, 20, ratio=0.95),
    line("v", 4.31, -11.68, -11.78, 5, 14, ratio=0.95, share=True),
    line("v", 4.63, -15.76, -15.77, 4, 10, share=True),
)
