"""One self-contained file of a calibration, such as ``klt4.kv``: a recipe, what it reads, and whose it is.

    file   := safetensors, whose header entry ``kvlab`` is `Header` as JSON
    tensor := "{k|v}/whitener/{layer}/{field of Whitener}" | "{k|v}/components/{layer}/{field of Components}"
            | "{k|v}/decoding/{layer}/{field of Decoding}" | "{k|v}/own/{layer}/{field of the codec's Fit}"
            | "{k|v}/bias/{layer}" | "{k|v}/spectra/{layer}" | "{k|v}/table" | "v/outputs/{layer}"
            | "archive/{name in `Archive.tensors`}" | "whole/{codec}/{name in `Whole.tensors`}"

A file may hold what decodes alone (`form`): of `klt` the tables of its own bits in place of the sketches that tables
of any bits are made from, of other codecs the tensors that their decoder reads. It decodes what was coded with the
whole one, to the same bits; `klt` refuses to encode with it.

Only what the recipe reads is in it. The header holds a digest of itself and one of every tensor, so that a file
that is not the one that was written is refused whole, before anything of it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvlab.cache.files.decoder_form import STREAMS, completed, decoding_tensors, spectra_of
from kvlab.calibration import whole
from kvlab.calibration.archive import Archive, filed
from kvlab.calibration.load import Calibrated
from kvlab.calibration.needs import by_position, coded_by, reads
from kvlab.codecs.base import StreamCalibration
from kvlab.codecs.klt.synthesis import Decoding
from kvlab.codecs.registry import fit_class
from kvlab.codecs.shared.components import Components
from kvlab.codecs.shared.turning import RUN
from kvlab.codecs.shared.whitening import Whitener
from kvlab.core.codec_settings import Frozen
from kvlab.core.errors import CalibrationMismatch, StorageError
from kvlab.core.filekind import refuse_caches
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import Recipe, StreamRecipe, canonical, digest
from kvlab.core.records import atomic, fingerprint, from_header, sha256, to_header, versions

FORMAT, VERSION = "kvlab-calibration", 3
AGAIN = "write it again with `kvlab calibrate`"


class ModelShape(Frozen):
    """The model that a calibration is for: hash of config and weights, and the shape of its cache."""

    model_hash: str
    n_layers: int
    n_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, info: ModelInfo) -> ModelShape:
        """That of a resolved model."""
        return cls(**{name: getattr(info, name) for name in cls.model_fields})


class Header(Frozen):
    """What the file says of itself.

    Parameters
    ----------
    recipe, layers
        As in a `RecipeFile`; `layers` None means every layer.
    model : ModelShape
        Whose calibration it is.
    corpus_hash, origin, sigma_hash : str
        Of the windows, the engine that was captured, and of the Sigma_q that everything was fitted with.
    n_tokens : int or None
        How many calibration tokens were seen, where that is known.
    versions : dict of str to str
        Of the packages that wrote it; for people, nothing is decided by them.
    tensors : dict of str to str
        `fingerprint` of each tensor.
    calibration_hash : str
        Of the model, the windows and all tensors: one calibration at several bits has one, and so has the decoder's
        file of it.
    form : {"whole", "decoder"}
        Whether all that the recipe reads is there, or what decodes alone.
    run : int or None
        `turning.RUN`, where K is coded after its rotary embedding by runs; None else, and in files of before.
    """

    recipe: Recipe
    layers: tuple[int, ...] | None
    model: ModelShape
    corpus_hash: str
    origin: str
    sigma_hash: str
    n_tokens: int | None
    versions: dict[str, str]
    tensors: dict[str, str]
    calibration_hash: str
    form: Literal["whole", "decoder"] = "whole"
    run: int | None = None

    @property
    def identity(self) -> str:
        """Digest of all that it says: files of one identity hold the same, wherever they lie."""
        return digest(self.model_dump(mode="json"))


class CalibrationFile(NamedTuple):
    """A whole file, checked against itself and against no model yet."""

    header: Header
    tensors: dict[str, Tensor]


def write_calibration(
    path: Path | str,
    recipe: Recipe,
    calibrated: Calibrated,
    info: ModelInfo,
    layers: Iterable[int] | None = None,
    n_tokens: int | None = None,
    decoder: bool = False,
) -> Path:
    """Write what a recipe reads of a calibration, atomically, and give the file's absolute path.

    Parameters
    ----------
    recipe : Recipe
        What is done to K and to V.
    calibrated : Calibrated
        Where it is taken from; what the recipe does not read is left out.
    info : ModelInfo
        The model that was calibrated.
    layers : iterable of int, optional
        The coded layers; every layer when left out.
    n_tokens : int, optional
        How many calibration tokens were seen.
    decoder : bool
        Leave out what only an encoder reads.

    Raises
    ------
    CalibrationMismatch
        The calibration lacks something that the recipe reads at one of the layers.
    """
    coded = None if layers is None else tuple(layers)
    tensors: dict[str, Tensor] = {}
    for stream in STREAMS:
        chosen = getattr(recipe, stream)
        own = calibrated.stream(chosen, stream, recipe.placement, by_position=True)
        if own is not None:
            tensors |= _named(chosen, stream, own, range(info.n_layers) if coded is None else coded)
    tensors |= filed(recipe, calibrated.archive, coded) | whole.filed_whole(recipe, calibrated.whole, coded)
    model = ModelShape.of(info)
    whose = {"model": model.model_dump(), "corpus": calibrated.corpus_hash, "engine": calibrated.origin}
    tensors, marks = marked(tensors)
    calibration_hash = sha256(canonical(whose | {"tensors": marks}).encode())
    if decoder:
        tensors, marks = marked(decoding_tensors(recipe, tensors))
    header = Header(
        recipe=recipe,
        layers=coded,
        model=model,
        corpus_hash=calibrated.corpus_hash,
        origin=calibrated.origin,
        sigma_hash=calibrated.sigma_hash,
        n_tokens=n_tokens,
        versions=versions(),
        tensors=marks,
        calibration_hash=calibration_hash,
        form="decoder" if decoder else "whole",
        run=RUN if by_position(recipe) else None,
    )
    usual = {name for name in ("form", "run") if getattr(header, name) == Header.model_fields[name].default}
    said = header.model_dump(mode="json", exclude=usual)
    path = Path(path).absolute()
    with atomic(path) as temporary:
        save_file(tensors, temporary, to_header({"format": FORMAT, "version": VERSION, "digest": digest(said)} | said))
    return path


def marked(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors as a file holds them, and the digest of each."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return held, {name: fingerprint(tensor.numpy()) for name, tensor in held.items()}


def read_header(path: Path | str) -> Header:
    """The header alone: recipe, layers, whose calibration it is; no tensor is looked at.

    Raises
    ------
    StorageError
        The file is missing, or damaged.
    CalibrationMismatch
        It is another file, or of another version of the format.
    """
    with _opened(path) as file:
        return _header(path, file.metadata())


def described(path: Path | str) -> Iterator[str]:
    """What a file is, line by line; every tensor is checked. Raises as `read_header`."""
    header, tensors = read_file(path)
    recipe, model = header.recipe, header.model
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    able = "encodes and decodes" if header.form == "whole" else "decodes alone"
    yield f"{path}: a codec's file of `kvlab calibrate`, which {able}; {nbytes} bytes of tensors, all as written"
    k, v = map(_named_with_bits, (recipe.k, recipe.v))
    yield f"K: {k}, {recipe.rotary} its rotary embedding; V: {v}; recipe {recipe.recipe_id}"
    for name, stream in (("K", recipe.k), ("V", recipe.v)):
        sink, recent = (getattr(stream, end, 0) for end in ("sink", "recent"))
        if sink or recent:
            yield f"exact in {name}: the first {sink} and the newest {recent} tokens of a sequence"
    if header.layers is not None:
        yield f"coded layers: {', '.join(map(str, header.layers))}"
    shape = f"{model.n_layers} layers, {model.n_kv_heads} KV heads of {model.head_dim} dimensions"
    yield f"model {model.model_hash}: {shape}"
    if not tensors:
        yield "not calibrated: the codec reads nothing that is fitted"
        return
    seen = "" if header.n_tokens is None else f"{header.n_tokens} tokens of "
    yield f"calibrated on {seen}corpus {header.corpus_hash}, on {header.origin}; calibration {header.calibration_hash}"


def _named_with_bits(stream: StreamRecipe) -> str:
    bits = getattr(stream, "bits", None)
    return stream.codec if bits is None else f"{stream.codec} at {bits:g} bits"


def read_file(path: Path | str) -> CalibrationFile:
    """The whole file, every tensor held against its digest; raises as `read_header`."""
    with _opened(path) as file:
        header, names = _header(path, file.metadata()), set(file.keys())
        if strange := sorted(names ^ header.tensors.keys()):
            raise StorageError(
                f"{path} is damaged: its header and its tensors differ in {strange[0]}; {AGAIN}", code="storage.damaged"
            )
        # copies: what comes out of the file is mapped, all of it as long as a part is held, and would change with it
        tensors = {name: file.get_tensor(name).clone() for name in header.tensors}
    for name, tensor in tensors.items():
        if fingerprint(tensor.numpy()) != header.tensors[name]:
            raise StorageError(
                f"{path} is damaged: tensor {name} is not the one that was written; {AGAIN}", code="storage.damaged"
            )
    return CalibrationFile(header, tensors)


def load_calibration(path: Path | str, info: ModelInfo, identity: str | None = None) -> Calibrated | None:
    """What was fitted, as the codecs take it; None where the recipe reads nothing that was fitted.

    Parameters
    ----------
    path : Path or str
        The file.
    info : ModelInfo
        The model that it has to be of.
    identity : str, optional
        That of the header that was read before.

    Raises
    ------
    StorageError
        The file is missing, or damaged, or is no longer the one that was looked at before.
    CalibrationMismatch
        It is another file, another version's, or another model's; or it lacks what its recipe reads.
    """
    header, tensors = read_file(path)
    if identity not in (None, header.identity):
        raise StorageError(f"{path} was replaced while it was read; read it again", code="storage.replaced")
    if header.model != (own := ModelShape.of(info)):
        raise CalibrationMismatch(
            f"{path} was calibrated for model {_said(header.model)}; this is model {_said(own)}; calibrate this model",
            code="calibration.other-model",
        )
    if by_position(header.recipe) and header.run != RUN:
        raise CalibrationMismatch(
            f"{path} has K turned by {header.run or 'all'} positions, this kvlab turns it by runs of {RUN}; {AGAIN}",
            code="calibration.other-run",
        )
    if not tensors:
        return None
    tables = {
        (stream, "pre_rope", digest(getattr(header.recipe, stream))): tensors[f"{stream}/table"]
        for stream in STREAMS
        if f"{stream}/table" in tensors
    }
    if header.form == "decoder":
        tensors = completed(tensors)
    whiteners = _by_layer(path, tensors, "k", "whitener", Whitener)
    after = header.recipe.rotary == "after"
    components = {
        stream: _by_layer(path, tensors, stream, "components", Components)
        | _by_layer(path, tensors, stream, "decoding", Decoding)
        for stream in STREAMS
    }
    return Calibrated(
        whiteners={} if after else whiteners,
        rotated=whiteners if after else {},
        own=_own(path, tensors, header.recipe),
        tables=tables,
        origin=header.origin,
        corpus_hash=header.corpus_hash,
        sigma_hash=header.sigma_hash,
        calibration_hash=header.calibration_hash,
        turned=components.pop("k") if after else {},
        components=components,
        spectra=spectra_of(tensors),
        archive=Archive.read(path, tensors, info),
        whole=whole.read_whole(tensors, info),
        biases={
            (stream, header.recipe.placement if stream == "k" else "pre_rope"): {
                int(name.rpartition("/")[2]): x for name, x in tensors.items() if name.startswith(f"{stream}/bias/")
            }
            for stream in STREAMS
        },
        outputs={int(name.rpartition("/")[2]): x for name, x in tensors.items() if name.startswith("v/outputs/")},
    )


def _named(recipe: StreamRecipe, stream: str, own: StreamCalibration, layers: Iterable[int]) -> dict[str, Tensor]:
    """The tensors that a stream's recipe reads, under their names; of the layers that are coded."""
    found, due = {}, reads(recipe, stream)
    for kind, by_layer in (("whitener", own.whiteners), ("components", own.components), ("own", own.own)):
        for layer in layers if kind in due else ():
            if layer not in by_layer:
                raise CalibrationMismatch(
                    f"the calibration has no {kind} of {stream.upper()} for layer {layer}", code="calibration.missing"
                )
            for name, tensor in vars(by_layer[layer]).items():
                found[f"{stream}/{kind}/{layer}/{name}"] = tensor
    for layer in layers if "bias" in due else ():
        if layer not in own.biases:
            raise CalibrationMismatch(
                f"the calibration has no bias of {stream.upper()} for layer {layer}", code="calibration.missing"
            )
        found[f"{stream}/bias/{layer}"] = own.biases[layer]
    for layer in layers if "outputs" in due else ():
        if layer not in own.outputs:
            raise CalibrationMismatch(
                f"the calibration has no second moment of outputs for layer {layer}", code="calibration.missing"
            )
        found[f"{stream}/outputs/{layer}"] = own.outputs[layer]
    found |= {f"{of}/spectra/{layer}": variance.clone() for (of, layer), variance in own.spectra.items()}
    if own.centroids is not None:
        found[f"{stream}/table"] = own.centroids
    return found


def _own(path: Path | str, tensors: dict[str, Tensor], recipe: Recipe) -> dict[tuple[str, str], dict[int, Any]]:
    """What the recipe's codecs fitted by themselves, by stream and codec."""
    chosen = {stream: coded_by(getattr(recipe, stream)) for stream in STREAMS}
    return {
        (stream, one.codec): _by_layer(path, tensors, stream, "own", fit_class(one.codec))
        for stream, one in chosen.items()
        if "own" in reads(one, stream)
    }


def _by_layer(path: Path | str, tensors: dict[str, Tensor], stream: str, kind: str, cls: type) -> dict[int, Any]:
    """Layer -> `cls` of the tensors of one kind."""
    start = f"{stream}/{kind}/"
    layers = sorted({int(name.split("/")[2]) for name in tensors if name.startswith(start)})
    try:
        return {
            layer: cls(**{field.name: tensors[f"{start}{layer}/{field.name}"] for field in fields(cls)})
            for layer in layers
        }
    except KeyError as error:
        raise CalibrationMismatch(f"{path} has no {error.args[0]}; {AGAIN}", code="calibration.missing") from None


@contextmanager
def _opened(path: Path | str) -> Iterator[Any]:
    """A safetensors file, its errors in one line."""
    refuse_caches(path)
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{path} is damaged, or no calibration file: {error}", code="storage.damaged") from None


def _header(path: Path | str, metadata: dict[str, str] | None) -> Header:
    try:
        said = from_header(metadata)
    except ValueError:
        raise StorageError(f"{path} is damaged: its header is no JSON; {AGAIN}", code="storage.damaged") from None
    if not isinstance(said, dict) or said.pop("format", None) != FORMAT:
        raise CalibrationMismatch(
            f"{path} is not what `kvlab calibrate` writes; give such a file, or a recipe file",
            code="calibration.other-file",
        )
    if (version := said.pop("version", None)) != VERSION:
        raise CalibrationMismatch(
            f"{path} is of format version {version}, this kvlab reads {VERSION}; {AGAIN}",
            code="calibration.other-version",
        )
    if said.pop("digest", None) != digest(said):
        raise StorageError(
            f"{path} is damaged: its header is not the one that was written; {AGAIN}", code="storage.damaged"
        )
    try:
        return Header.model_validate(said)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise CalibrationMismatch(f"{path}: {where}: {problem['msg']}; {AGAIN}", code="calibration.header") from None


def _said(model: ModelShape) -> str:
    """A model in words."""
    return f"{model.model_hash} ({model.n_layers} layers, {model.n_kv_heads} KV heads of {model.head_dim} dimensions)"
