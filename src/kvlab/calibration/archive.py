"""The fitted `archive` codec of a model, and what its encoder asks of the model besides K and V."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kvlab.calibration.across import expected_attention
from kvlab.calibration.capture import WindowStatistics
from kvlab.calibration.components import Fitting
from kvlab.calibration.metrics import Angles, ErrorMetrics
from kvlab.calibration.moments import STREAMS
from kvlab.codecs.archive import ArchiveStream, fit
from kvlab.codecs.archive.codec import ArchiveBody, ArchiveCodec
from kvlab.codecs.archive.counting import LayerSample
from kvlab.codecs.archive.file import ArchiveFile, ArchiveHeader, dump, load, refuse_other
from kvlab.codecs.archive.layer import ENCODES_NOT, StreamModel
from kvlab.codecs.archive.model import ArchiveModel
from kvlab.codecs.archive.tokens import FirstLayer
from kvlab.codecs.stream.seal import Key
from kvlab.core.errors import CalibrationMismatch, CapabilityError
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import Recipe
from kvlab.core.records import sha256

FILED = "archive/"  # before the names of its tensors in a file
TABLES = ("exponents", "counts", "points", "rates", "by_tokens")


@dataclass(frozen=True, eq=False)
class Archive:
    """A fitted `archive` codec with the model that it is for.

    Parameters
    ----------
    fitted : ArchiveModel
    probes : Tensor
        Queries that keys are weighed by, see `across.AcrossTap`; only the encoder reads them.
    info : ModelInfo
        Of its files the first layer's weights are read, and nothing else.
    """

    fitted: ArchiveModel
    probes: Tensor
    info: ModelInfo

    def codec(self, block: int) -> ArchiveCodec:
        """With blocks of so many tokens."""
        return ArchiveCodec(self.fitted, self._first.rows if self._first else None, block)

    @cached_property
    def _first(self) -> FirstLayer | None:
        return FirstLayer(self.info) if bool(self.fitted.by_tokens) else None

    def expected(self, keys: Mapping[int, Tensor]) -> Tensor:
        """Squared attention that a context's tokens may expect, [layers, tokens]; see `across.expected_attention`.

        Parameters
        ----------
        keys : mapping of int to Tensor
            By layer, before the rotary embedding [kv_heads, tokens, head_dim].

        Raises
        ------
        CalibrationMismatch
            The calibration holds what decodes alone.
        """
        if not self.probes.numel():
            raise CalibrationMismatch(ENCODES_NOT, code="calibration.decoder-only")
        angles = ErrorMetrics(self.info, keys[0].shape[1] + 1).angles
        layers = enumerate(self.probes)
        return torch.stack([_expected(self.info, n, probes, keys[n], angles) for n, probes in layers])

    @torch.no_grad()
    def encode(
        self,
        recipe: Recipe,
        cache: Mapping[tuple[int, str], Tensor],
        ids: Sequence[int],
        starts: bool = True,
        key: Key | None = None,
    ) -> bytes:
        """The file of a cache.

        Parameters
        ----------
        recipe : Recipe
            Says the bits, or the quality.
        cache : mapping
            By layer and stream, K before its rotary embedding, float [kv_heads, tokens, head_dim].
        ids : sequence of int
            Its tokens.
        starts : bool
            Whether the first of them is the first of its text.
        key : Key, optional
            Sign with it.

        Raises
        ------
        CapabilityError
            The bits cannot be met.
        CalibrationMismatch
            The calibration holds what decodes alone.
        NonFinite
            A value is NaN or infinite.
        """
        settings, sample, layers = recipe.k, cache[0, "k"], self.fitted.layers
        heads, tokens, head_dim = sample.shape
        beside = ArchiveHeader.overhead(layers, tokens, settings.block_size)
        body = self.body(settings, cache, ids, settings.block_size, beside, starts)
        header = ArchiveHeader(
            layers=layers,
            heads=heads,
            head_dim=head_dim,
            tokens=tokens,
            block=settings.block_size,
            quality=body.quality,
            dtype=str(sample.dtype).removeprefix("torch."),
            starts=starts,
            recipe_id=recipe.recipe_id,
            calibration_hash=self.digest,
            model_hash=self.info.model_hash,
        )
        return dump(body, header, ids, key)

    def body(
        self,
        settings: ArchiveStream,
        cache: Mapping[tuple[int, str], Tensor],
        ids: Sequence[int],
        block: int,
        beside: int,
        starts: bool = True,
    ) -> ArchiveBody:
        """A cache in blocks of so many tokens, at the quality or the bits of a recipe; raises as `encode`.

        Parameters
        ----------
        cache : mapping
            As `encode` takes it. It is asked for one layer's K or V at a time, several times over, so that it need not
            hold them.
        beside : int
            Bytes that will be stored with what the entropy coder wrote; the bits count them.
        """
        codec, layers, sample = self.codec(block), self.fitted.layers, cache[0, "k"]
        expected = self.expected(_Keys(cache, layers))
        if settings.bits is None:
            return codec.encode(cache, ids, expected, settings.quality, starts)
        return codec.encode_to(cache, ids, expected, settings.bits * 2 * layers * sample.numel() / 8, beside, starts)

    def decode(self, recipe: Recipe, data: bytes, ids: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Layer, K and V of a file of these tokens, which says its recipe itself; see `decoded`."""
        yield from self.decoded(load(data), ids)

    def decoded(self, file: ArchiveFile, ids: Sequence[int] | None = None) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Layer, K before its rotary embedding and V, float32 [kv_heads, tokens, head_dim], from the first layer up.

        Raises
        ------
        StreamError
            The file is of another calibration, another model or, where they are given, other tokens.
        """
        refuse_other(file, self.digest, self.info.model_hash, ids)
        yield from self.codec(file.header.block).decode(file.body, file.ids)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of it by name: ``streams/{layer}/{k|v}/{field}``, ``probes`` and `TABLES`."""
        found = {
            f"streams/{layer}/{stream}/{name}": tensor
            for (layer, stream), model in sorted(self.fitted.streams.items())
            for name, tensor in vars(model).items()
        }
        return found | {"probes": self.probes} | {name: getattr(self.fitted, name) for name in TABLES}

    @cached_property
    def digest(self) -> str:
        """What names it in the files that it writes, 16 hexadecimal digits; of all that decodes."""
        decoding = {name: x for name, x in self.tensors.items() if not encodes_alone(name)}
        parts = (part for name, x in decoding.items() for part in (name.encode(), x.contiguous().numpy().tobytes()))
        return sha256(*parts)

    @classmethod
    def read(cls, path: Path | str, tensors: dict[str, Tensor], info: ModelInfo) -> Archive | None:
        """What a file holds of one, see `filed`; `CalibrationMismatch` when it is not all there."""
        mine = {name.removeprefix(FILED): x for name, x in tensors.items() if name.startswith(FILED)}
        try:
            return cls.of(mine, info) if mine else None
        except KeyError as error:
            raise CalibrationMismatch(
                f"{path} has no {FILED}{error.args[0]}; write it again with `kvlab calibrate`"
            ) from None

    @classmethod
    def of(cls, tensors: dict[str, Tensor], info: ModelInfo) -> Archive:
        """What `tensors` gave, or what of it decodes; `KeyError` names what is missing."""
        places = [f"streams/{layer}/{stream}/forward" for layer in range(info.n_layers) for stream in STREAMS]
        tensors = dict.fromkeys([*places, "probes"], torch.empty(0)) | tensors
        streams = {
            (layer, stream): StreamModel(
                **{field.name: tensors[f"streams/{layer}/{stream}/{field.name}"] for field in fields(StreamModel)}
            )
            for layer in range(info.n_layers)
            for stream in STREAMS
        }
        return cls(ArchiveModel(streams, **{name: tensors[name] for name in TABLES}), tensors["probes"], info)


def filed(recipe: Recipe, archive: Archive | None, layers: Sequence[int] | None) -> dict[str, Tensor]:
    """The tensors of a codec of whole caches as a file names them; nothing where the recipe names none.

    Raises
    ------
    CalibrationMismatch
        It was not fitted.
    CapabilityError
        Some layers only are to be coded.
    """
    if recipe.k.codec != "archive":
        return {}
    required(recipe, archive, layers)
    return {f"{FILED}{name}": tensor for name, tensor in archive.tensors.items()}


def required(recipe: Recipe, fitted: object | None, layers: Sequence[int] | None) -> None:
    """Refuse to file what was not fitted, and a codec of whole caches for some layers; raises as `filed`."""
    codec = recipe.k.codec
    if fitted is None:
        raise CalibrationMismatch(
            f"the calibration was not fitted for {codec}; calibrate it for this recipe", code="calibration.not-fitted"
        )
    if layers is not None:
        raise CapabilityError(
            f"codec {codec!r} codes K and V of all layers, not some of them", code="capability.all-layers"
        )


class _Keys(Mapping[int, Tensor]):
    """K of a cache by layer, each asked for when it is needed."""

    def __init__(self, cache: Mapping[tuple[int, str], Tensor], layers: int):
        self._cache, self._layers = cache, layers

    def __getitem__(self, layer: int) -> Tensor:
        return self._cache[layer, "k"]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._layers))

    def __len__(self) -> int:
        return self._layers


def encodes_alone(name: str) -> bool:
    """Whether a tensor of `Archive.tensors` is of no use to a decoder."""
    return name.endswith(("/forward", "probes"))


def fit_archive(observed: WindowStatistics, fitting: Fitting, info: ModelInfo) -> Archive:
    """The codec of what was observed `across` layers.

    Raises
    ------
    CapabilityError
        It was observed layer by layer alone.
    """
    if observed.across is None:
        raise CapabilityError(
            "archive is fitted on layers together, of which this capture holds nothing: it was not asked for when the"
            " calibration was captured",
            code="capability.not-captured",
        )
    across, angles = observed.across, ErrorMetrics(info, observed.context + 1).angles

    @lru_cache(maxsize=1)  # asked for several times in a row
    def sample(layer: int) -> LayerSample:
        k, v = (observed.layer(layer, stream) for stream in STREAMS)
        expected = torch.stack([_expected(info, layer, across.probes[layer], window, angles) for window in k])
        return LayerSample(tuple(x.transpose(1, 2).flatten(2) for x in (k, v)), expected)

    found = fit.fit(across, fitting.metric, observed.first, sample, _known(info, across.ids))
    return Archive(found, across.probes, info)


def _expected(info: ModelInfo, layer: int, probes: Tensor, k: Tensor, angles: Sequence[Angles]) -> Tensor:
    """`expected_attention` in a layer of a model."""
    return expected_attention(probes, k, angles[layer], info.score_scale, info.windows[layer])


def _known(info: ModelInfo, windows: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]] | None:
    """K and V of the first layer of windows by their tokens; None of a model that does not let it be known."""
    try:
        first = FirstLayer(info)
    except CapabilityError:
        return None
    return [first.rows(ids) for ids in windows]
