"""AQUA-KV (arXiv 2501.19392): K from the decoded K of the layer below, V from the decoded V below and its own K.

What is left is coded as HIGGS does (arXiv 2411.17525): a vector's norm, its direction spread over all coordinates, and
words of two of these as the nearest point of a Gaussian grid. The first layer has nothing below it, and gets more bits.
All heads of a token are one vector, as one run of 1024 channels is in the paper's models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kvlab.codecs.aquakv import AquaKvStream
from kvlab.codecs.aquakv.grids import grid, nearest
from kvlab.codecs.base import Codec, Encoded, Site, Stats, checked, stored
from kvlab.codecs.shared import fp16, rotation
from kvlab.codecs.shared.apart import apart
from kvlab.codecs.shared.ended_codec import EndedCodec
from kvlab.codecs.shared.exact_tokens import ExactTokens
from kvlab.codecs.stream import packing
from kvlab.codecs.stream.whole_file import STREAMS, Cache, Owner, dtype_of
from kvlab.core.recipe import Recipe

DAMPING = 1e-3  # of the predictors' mean variance, added to each: the published calibration's `percdamp`
SEED = 0xA0A


def sources_of(layer: int, stream: str) -> list[tuple[int, str]]:
    """What a layer's K or V is predicted from; nothing in the first layer."""
    if not layer:
        return []
    return [(layer - 1, "k")] if stream == "k" else [(layer, "k"), (layer - 1, "v")]


def variant(recipe: Recipe) -> str:
    """What predictors are fitted for: the grids that their inputs are decoded from."""
    k, v = recipe.k, recipe.v
    return f"{k.bits:g}-{v.bits:g}-{k.first_bits:g}-{k.dim}"


def grid_of(settings: AquaKvStream, layer: int) -> tuple[int, int]:
    """Numbers of a word of a layer, and bits of its index."""
    if not layer and settings.first_bits > settings.bits:
        return 2, round(2 * settings.first_bits)
    return settings.dim, round(settings.dim * settings.bits)


def fit(rows: Callable[[int, str], Tensor], layers: int, recipe: Recipe) -> dict[str, Tensor]:
    """Predictors by least squares, float32: ``{layer}/{k|v}/weight`` [n, width] and ``{layer}/{k|v}/bias`` [width].

    Layer by layer, from what is decoded of the sample below: noise of a grid is alike in all directions, so that a
    predictor fitted on K and V as they are would lean on directions in which next to nothing is left of them.

    Parameters
    ----------
    rows : callable
        A layer's K or V of a sample, heads joined [tokens, width].
    """
    found: dict[str, Tensor] = {}
    decoded: dict[tuple[int, str], Tensor] = {}
    for layer in range(layers):
        for stream in STREAMS:
            x, sources = rows(layer, stream).float(), sources_of(layer, stream)
            given = torch.cat([decoded[at] for at in sources], dim=1) if sources else x[:, :0]
            weight, bias = _least_squares(given, x) if sources else (x.new_zeros(0, x.shape[1]), 0 * x[0])
            inner = LeftOver(given @ weight + bias, *grid_of(getattr(recipe, stream), layer))
            decoded[layer, stream] = inner.decode(inner.encode(x[None], Site(0, layer, stream)))[0]
            found |= {f"{layer}/{stream}/weight": weight, f"{layer}/{stream}/bias": bias}
        decoded = {at: x for at, x in decoded.items() if at[0] == layer}
    return found


def _least_squares(given: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and what is added, float32, damped; computed in float64."""
    given, target = given.double(), target.double()
    means = given.mean(0), target.mean(0)
    centred = given - means[0]
    system = centred.mT @ centred
    system.diagonal().add_(DAMPING * system.diagonal().mean().clamp(min=1e-30))
    weight = torch.cholesky_solve(centred.mT @ (target - means[1]), torch.linalg.cholesky(system))
    return weight.float(), (means[1] - means[0] @ weight).float()


class AquaKvCodec:
    """Goes up the layers; encoder and decoder predict from what is decoded of the layer below.

    Parameters
    ----------
    recipe : Recipe
        Of `AquaKvStream`.
    fitted : mapping of str to Tensor
        What `fit` gave, each name after the recipe's `variant`.
    owner : Owner
    """

    def __init__(self, recipe: Recipe, fitted: Mapping[str, Tensor], owner: Owner):
        self.recipe, self.fitted, self.owner = recipe, fitted, owner
        self.kept = ExactTokens.of(recipe.k)

    def encode(self, cache: Cache, ids: Sequence[int]) -> bytes:
        """See `WholeCodec`."""
        self.owner.refuse_other_shape(cache, ids)
        return self.owner.written(self._frames(cache, len(ids)), dtype_of(cache[0, "k"]), len(ids))

    def _frames(self, cache: Cache, tokens: int) -> Iterator[Encoded]:
        walk = _PredictedStreams(self, tokens)
        for layer in range(self.owner.layers):
            for stream in STREAMS:
                codec = walk.codec(layer, stream)
                encoded = codec.encode(cache[layer, stream].cpu(), Site(0, layer, stream))
                walk.decoded(layer, stream, codec.decode(encoded))
                yield encoded

    def decode(self, data: bytes, ids: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """See `WholeCodec`."""
        reader = self.owner.read(data, ids)
        walk = _PredictedStreams(self, len(ids))
        for layer in range(self.owner.layers):
            k, v = (
                walk.decoded(layer, stream, walk.codec(layer, stream).decode(reader.frame(layer, stream)))
                for stream in STREAMS
            )
            yield layer, k, v


class _PredictedStreams:
    """Holds what is decoded of two layers, and makes the codec of each stream from it."""

    def __init__(self, codec: AquaKvCodec, tokens: int):
        self.whole = codec
        first, coded, _ = codec.kept.split(tokens)
        self._coded = slice(first, first + coded)
        self._rows: dict[tuple[int, str], Tensor] = {}

    def codec(self, layer: int, stream: str) -> Codec:
        """What codes a stream: the tokens at the ends as they are, of the others what is not predicted."""
        whole, name = self.whole, f"{variant(self.whole.recipe)}/{layer}/{stream}"
        settings = getattr(whole.recipe, stream)
        weight, bias = whole.fitted[f"{name}/weight"], whole.fitted[f"{name}/bias"]
        rows = [self._rows[at] for at in sources_of(layer, stream)]
        coded = self._coded.stop - self._coded.start
        predicted = torch.cat(rows, dim=1) @ weight if rows else bias.new_zeros(coded, len(bias))
        inner = LeftOver(predicted + bias, *grid_of(settings, layer))
        return EndedCodec(inner, whole.kept) if whole.kept else inner

    def decoded(self, layer: int, stream: str, x: Tensor) -> Tensor:
        """Keep what the next layer is predicted from; `x` itself."""
        self._rows = {at: rows for at, rows in self._rows.items() if at[0] >= layer - 1}
        self._rows[layer, stream] = x[:, self._coded].transpose(0, 1).flatten(1)
        return x


class LeftOver:
    """Codes what a prediction leaves of rows, all heads of a token together.

    Parameters
    ----------
    predicted : Tensor
        float32 [tokens, heads * head_dim].
    dim : int
        Numbers of a word.
    bits : int
        Of a word's index.
    """

    per_token = True

    def __init__(self, predicted: Tensor, dim: int, bits: int):
        self.predicted, self.dim, self.bits = predicted, dim, bits
        self._grid = grid(dim, bits)

    def encode(self, x: Tensor, site: Site) -> Encoded:
        """See `Codec.encode`."""
        left = checked(x, site).transpose(0, 1).flatten(1) - self.predicted
        norm = fp16.nearest(left.norm(dim=-1), "norm", site.layer)
        turn = spreading(left.shape[1])
        unit = left / torch.where(norm > 0, norm, 1).float()[:, None]
        turned = unit @ turn * left.shape[1] ** 0.5
        words = torch.nn.functional.pad(turned, (0, -turned.shape[1] % self.dim))
        codes = nearest(words.reshape(-1, self.dim), self._grid)
        block = (packing.pack(codes, self.bits), norm)
        return Encoded(tuple(x.shape), site.layer, site.stream, (), (block,), Stats(n_coefficients=left.numel()))

    def decode(self, encoded: Encoded) -> Tensor:
        """See `Codec.decode`."""
        heads, tokens, head_dim = encoded.shape
        width = heads * head_dim
        count = tokens * -(-width // self.dim)
        (block,) = encoded.blocks
        codes, norm = stored(block, (torch.uint8, (packing.packed_size(count, self.bits),)), (torch.float16, (tokens,)))
        words = self._grid[packing.unpack(codes, self.bits, count).long()].view(tokens, -1)[:, :width]
        left = words @ spreading(width).mT * (fp16.read(norm)[:, None] / width**0.5)
        return (self.predicted + left).unflatten(1, (heads, head_dim)).transpose(0, 1)


@lru_cache(maxsize=4)
@apart
def spreading(width: int) -> Tensor:
    """An orthonormal matrix that spreads a vector evenly, float32 [width, width]: Walsh-Hadamard after random signs.

    A width that is no power of two is one times an odd number, over which cosines spread instead (the DCT, type II).
    """
    power = width & -width
    odd = width // power
    place = torch.arange(odd, dtype=torch.float64)
    cosines = torch.cos(torch.pi * (place[:, None] + 0.5) * place[None] / odd) * (2 / odd) ** 0.5
    cosines[:, 0] /= 2**0.5
    both = torch.kron(cosines.float(), rotation.sylvester(power, torch.device("cpu")) / power**0.5)
    return both * rotation.signs(SEED, width)[:, None]
