"""What was fitted for a codec of whole caches of other people, and the codec made of it for a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from kvlab.calibration.archive import required
from kvlab.calibration.capture import WindowStatistics
from kvlab.codecs.aquakv import codec as aquakv
from kvlab.codecs.aquakv.codec import AquaKvCodec
from kvlab.codecs.kvtc import codec as kvtc
from kvlab.codecs.kvtc.codec import KvtcCodec
from kvlab.codecs.stream.whole_file import STREAMS, Cache, Owner, WholeCodec
from kvlab.core.errors import CalibrationMismatch, CapabilityError
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import Recipe
from kvlab.core.records import sha256

CODECS = {"kvtc": KvtcCodec, "aquakv": AquaKvCodec}
FILED = "whole/"  # before codec and name of a tensor in a file


@dataclass(frozen=True, eq=False)
class Whole:
    """A fitted codec with the model that it is for.

    Parameters
    ----------
    codec : str
        One of `CODECS`.
    tensors : dict of str to Tensor
        All that was fitted; it decodes too.
    info : ModelInfo
    """

    codec: str
    tensors: dict[str, Tensor]
    info: ModelInfo
    _made: dict[str, WholeCodec] = field(default_factory=dict, init=False, repr=False)

    def read_by(self, recipe: Recipe) -> dict[str, Tensor]:
        """The tensors that a recipe reads: predictors of `aquakv` are for the bits that they were fitted at.

        None for a recipe that it was not fitted for.
        """
        due = f"{aquakv.variant(recipe)}/" if recipe.k.codec == "aquakv" else ""
        return {n: x for n, x in self.tensors.items() if n.startswith(due)} if recipe.k.codec == self.codec else {}

    def digest(self, recipe: Recipe) -> str:
        """What names it in the files of a recipe, 16 hexadecimal digits."""
        read = sorted(self.read_by(recipe).items())
        return sha256(self.codec.encode(), *(part for n, x in read for part in (n.encode(), x.numpy().tobytes())))

    def of(self, recipe: Recipe) -> WholeCodec:
        """The codec of a recipe; those that were made are kept.

        Raises
        ------
        CalibrationMismatch
            It was fitted for other bits.
        """
        if not (read := self.read_by(recipe)):
            raise CalibrationMismatch(
                f"the calibration was fitted for {self.codec} at other bits than recipe {recipe.recipe_id} asks for;"
                " calibrate it for this recipe",
                code="calibration.other-bits",
            )
        if recipe.recipe_id not in self._made:
            info, names = self.info, (recipe.recipe_id, self.digest(recipe), self.info.model_hash)
            owner = Owner(info.n_layers, info.n_kv_heads, info.head_dim, *names)
            self._made[recipe.recipe_id] = CODECS[self.codec](recipe, read, owner)
        return self._made[recipe.recipe_id]

    @torch.no_grad()
    def encode(self, recipe: Recipe, cache: Cache, ids: Sequence[int]) -> bytes:
        """The file of a cache; see `WholeCodec`."""
        return self.of(recipe).encode(cache, ids)

    @torch.no_grad()
    def decode(self, recipe: Recipe, data: bytes, ids: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Layer, K and V of a file; see `WholeCodec`."""
        yield from self.of(recipe).decode(data, ids)


def fit_whole(codec: str, observed: WindowStatistics, info: ModelInfo, recipes: Sequence[Recipe]) -> Whole:
    """A codec fitted to what was observed, for those of the recipes that are of it.

    Raises
    ------
    CapabilityError
        It was observed layer by layer alone.
    """
    seen = {"kvtc": observed.joint, "aquakv": observed.rows}[codec]
    if seen is None:
        raise CapabilityError(
            f"{codec} is fitted on layers together, of which the pipeline's captures hold nothing; use"
            " `kvlab calibrate`",
            code="capability.not-captured",
        )
    if codec == "aquakv":
        asked = {aquakv.variant(one): one for one in recipes if one.k.codec == codec}
        fits = {name: aquakv.fit(seen.rows, info.n_layers, one) for name, one in asked.items()}
        return Whole(codec, {f"{name}/{own}": x for name, fit in fits.items() for own, x in fit.items()}, info)
    found = {}
    for stream in STREAMS:
        sample = _sample(observed, stream, info.n_layers)
        fit = kvtc.Fit.of(seen.mean[stream], seen.covariance(stream), sample, info.head_dim)
        found |= {f"{stream}/{one.name}": getattr(fit, one.name) for one in fields(fit)}
    return Whole(codec, found, info)


def _sample(observed: WindowStatistics, stream: str, layers: int) -> Tensor:
    """K or V of all layers of `kvtc.RANGED` tokens of the sample, float32 [tokens, P]; none of them among the first."""
    joined = []
    for layer in range(layers):
        rows = observed.layer(layer, stream)[:, :, min(kvtc.UNSEEN, observed.context - 1) :]
        rows = rows.transpose(1, 2).flatten(0, 1).flatten(1)
        joined.append(rows[:: max(1, len(rows) // kvtc.RANGED)])
    return torch.cat(joined, dim=1)


def filed_whole(recipe: Recipe, whole: dict[str, Whole], layers: Sequence[int] | None) -> dict[str, Tensor]:
    """The tensors of a recipe's codec as a file names them; nothing where it is none of `CODECS`.

    Raises
    ------
    CalibrationMismatch
        It was not fitted.
    CapabilityError
        Some layers only are to be coded.
    """
    codec = recipe.k.codec
    if codec not in CODECS:
        return {}
    required(recipe, whole.get(codec), layers)
    whole[codec].of(recipe)  # refuses other bits
    return {f"{FILED}{codec}/{name}": tensor for name, tensor in whole[codec].read_by(recipe).items()}


def read_whole(tensors: dict[str, Tensor], info: ModelInfo) -> dict[str, Whole]:
    """What a file holds of them, by codec."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(FILED):
            codec, own = name.removeprefix(FILED).split("/", 1)
            found.setdefault(codec, {})[own] = tensor
    return {codec: Whole(codec, own, info) for codec, own in found.items()}
