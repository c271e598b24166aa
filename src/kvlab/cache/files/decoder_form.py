"""What of a calibration's file its codecs read: to decode alone, and to code at all."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

import torch
from torch import Tensor

from kvlab.calibration import whole
from kvlab.calibration.archive import FILED, encodes_alone
from kvlab.codecs.base import StreamCalibration
from kvlab.codecs.klt import KltStream
from kvlab.codecs.klt.codec import KltCodec
from kvlab.codecs.oscar import OscarStream
from kvlab.codecs.shared.components import Components
from kvlab.codecs.wush import WushStream
from kvlab.core.recipe import Recipe, StreamRecipe

STREAMS = ("k", "v")
# What of `Whitener` and of `Components` a decoder reads, and a table: of `oscar`, of `wush`, and after a front.
TURNED, BALANCED = {"chol", "covariance", "mean"}, {"covariance", "forward", "mean"}
CONDITIONED = {"inv_chol", "mean", "table"}


def decoding_tensors(recipe: Recipe, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What of a whole file's tensors decodes; for `klt` made of its components at the recipe's bits."""
    found = {n: x for n, x in tensors.items() if n.startswith((FILED, whole.FILED)) and not encodes_alone(n)}
    for stream in STREAMS:
        own, chosen = f"{stream}/components/", getattr(recipe, stream)
        mine = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{stream}/")}
        if not isinstance(chosen, KltStream):
            kept = read_of(chosen)
            fitted = tuple(f"{stream}/{what}/" for what in ("own", "bias", "outputs"))  # these for both ways
            found |= {n: x for n, x in mine.items() if n.startswith(fitted) or n.rpartition("/")[2] in kept}
            continue
        found |= {name: tensor for name, tensor in mine.items() if not name.startswith((own, f"{stream}/spectra/"))}
        layers = sorted({int(name.split("/")[2]) for name in mine if name.startswith(own)})
        every = {
            layer: Components(**{field.name: mine[f"{own}{layer}/{field.name}"] for field in fields(Components)})
            for layer in layers
        }
        codec = KltCodec(chosen, StreamCalibration(components=every, stream=stream, spectra=spectra_of(tensors)))
        for layer, components in every.items():
            heads, head_dim = components.mean.shape
            decoding = codec.plan(layer, (heads, 1, head_dim), torch.device("cpu")).decoding
            found |= {f"{stream}/decoding/{layer}/{name}": tensor for name, tensor in vars(decoding).items()}
    return found


def read_of(chosen: StreamRecipe) -> set[str]:
    """The fields of `Whitener` and of `Components` that a codec other than `klt` reads to decode, and a table.

    Of components it reads no others to encode.
    """
    if isinstance(chosen, WushStream):
        return BALANCED
    kept = TURNED if isinstance(chosen, OscarStream) else CONDITIONED
    return kept | ({"forward"} if getattr(chosen, "weigh", False) else set())


def completed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A decoder's tensors with what its codecs do not read: of a whitener the other triangle, of components nothing."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        place, _, own = name.rpartition("/")
        if "/whitener/" in name:
            other = {"chol": "inv_chol", "inv_chol": "chol"}[own]
            found[f"{place}/{other}"] = inverted(tensor)
        if "/components/" in name:
            found |= {
                f"{place}/{f.name}": torch.empty(0) for f in fields(Components) if f"{place}/{f.name}" not in found
            }
    return found


def inverted(triangle: Tensor) -> Tensor:
    """Inverses of lower triangles [heads, head_dim, head_dim], computed in float64."""
    identity = torch.eye(triangle.shape[-1], dtype=torch.float64).expand(triangle.shape)
    return torch.linalg.solve_triangular(triangle.double(), identity, upper=False).to(triangle.dtype)


def spectra_of(tensors: dict[str, Tensor]) -> dict[tuple[Literal["k", "v"], int], Tensor]:
    """By stream and layer, as `StreamCalibration.spectra`; of K first, from the first layer on."""
    names = [name.split("/") for name in tensors if "/spectra/" in name]
    return {(of, layer): tensors[f"{of}/spectra/{layer}"] for of, layer in sorted((of, int(n)) for of, _, n in names)}
