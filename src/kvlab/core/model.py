"""Which model is measured: its folder, its shape, its identity. Reads JSON only; needs no torch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from kvlab.core.decoder import Decoder
from kvlab.core.errors import ModelError
from kvlab.core.hub import GGUF, beside, no_folder, of_gguf, reads_as_id, unpinned
from kvlab.core.limits import MOST_LAYERS, shown
from kvlab.core.params import Model, ModelEntry
from kvlab.core.weights import CONSOLIDATED, WEIGHTS, weight_files

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


@dataclass(frozen=True)
class ModelInfo:
    """A model's slug and folder, its shape as the cache sees it, its hash, and over how many GPUs vLLM splits it.

    The hash is of its config and weights. `windows` says by layer how many last tokens a token sees, itself among them,
    None for all; attention's scores are multiplied by `score_scale`.
    """

    slug: str
    path: Path
    architecture: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    model_hash: str
    tensor_parallel: int
    windows: tuple[int | None, ...]
    score_scale: float

    @property
    def values_per_token(self) -> int:
        """K and V elements that one token adds to the cache, over all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim


def resolve(model: Model, loads: bool = True) -> ModelInfo:
    """Find the model that params.yaml names and read its shape; none of its own code is run.

    Parameters
    ----------
    loads : bool
        Whether kvlab itself is to load its weights. They are then held against what config.json calls for; without it,
        a process that is not ours has them, and only who it is is asked.

    Raises
    ------
    ModelError
        The folder is missing, is no model, has an architecture that the hooks do not know, has another number of
        layers than params.yaml says, or holds weights that engines would not agree on (`kvlab.core.weights`), or that
        are not those of this model (`kvlab.core.tensors`).
    """
    from kvlab.core.records import file_hash
    from kvlab.core.tensors import model_tensors

    path = locate(model)
    config = _configuration(path / "config.json")
    decoder = model_tensors(path, config)[0] if loads else Decoder.read(config, path)
    info = ModelInfo(
        slug=model.slug,
        path=path,
        architecture=decoder.architecture,
        n_layers=decoder.n_layers,
        n_heads=decoder.n_heads,
        n_kv_heads=decoder.n_kv_heads,
        head_dim=decoder.head_dim,
        vocab_size=decoder.vocab_size,
        max_positions=decoder.max_positions,
        model_hash=file_hash(path / "config.json", *weight_files(path)),
        tensor_parallel=model.tensor_parallel,
        windows=tuple(layer.window for layer in decoder.layers),
        score_scale=decoder.score_scale,
    )
    if info.n_layers != model.n_layers:
        raise ModelError(
            f"{model.path} has {info.n_layers} layers, and had {model.n_layers} when this was planned;"
            " plan it again with the model as it is",
            code="model.other-layers",
        )
    return info


def layer_count(model: ModelEntry) -> int:
    """Number of layers, as config.json says; `ModelError` as of `read_config`, or when it says none."""
    found = read_config(model).get("num_hidden_layers")
    if type(found) is not int or found < 1:
        raise ModelError(f"config.json of {model.path!r} names no num_hidden_layers; give a decoder-only text model")
    if found > MOST_LAYERS:
        raise ModelError(
            f"config.json of {model.path!r} names {found} layers; allowed: at most {MOST_LAYERS}",
            code="model.config-misfit",
        )
    return found


def folder_entry(path: Path) -> ModelEntry:
    """A folder that a person names, as a model; `ModelError` where it is not there, which a hub id is not."""
    if not path.exists():
        raise ModelError(no_folder(str(path)))
    named = path if path.name not in ("", "..") else Path(os.path.abspath(path))  # its name names the results
    return ModelEntry(path=str(named))


def model_in(path: Path) -> Model:
    """The model in a folder that a person names, and how many layers it has."""
    entry = folder_entry(path)
    return Model(path=entry.path, n_layers=layer_count(entry))


def resolve_folder(path: Path) -> ModelInfo:
    """`resolve` the model in a folder that a person names."""
    return resolve(model_in(path))


def read_config(model: ModelEntry) -> dict:
    """config.json of the model's directory, or of its copy in the local cache of the hub; nothing is downloaded.

    Raises
    ------
    ModelError
        The directory is missing or no model, or a hub id has not been downloaded.
    """
    folder = local_folder(model)
    return _configuration(folder / "config.json" if folder else _cached_config(model))


def _configuration(path: Path) -> dict:
    """The object in a config.json; `ModelError` where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"{path} is no configuration of a model: {error.strerror}", code="model.broken-config"
        ) from None
    except (ValueError, RecursionError) as error:  # the last: brackets without end
        raise ModelError(
            f"{path} is no configuration of a model, but no JSON in UTF-8: {error}", code="model.broken-config"
        ) from None
    if not isinstance(found, dict):
        raise ModelError(
            f"{path} is no configuration of a model, but {shown(found)}; it must be a JSON object",
            code="model.broken-config",
        )
    return found


def _cached_config(model: ModelEntry) -> Path:
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
    except (OSError, ValueError) as error:  # what can be no id, or no revision
        raise ModelError(f"model {model.path!r} is no hub id: {' '.join(str(error).split())}") from None
    if not isinstance(config, str):
        raise ModelError(
            f"model {model.path!r} is not in the local cache of Hugging Face, so its layers cannot be counted;"
            f" get it once with `hf download {model.path} --revision {model.revision}`, or give a directory"
        )
    return Path(config)


def locate(model: Model) -> Path:
    """The model's folder: as named, or downloaded from the hub (HF_HOME and HF_HUB_OFFLINE are honoured)."""
    return local_folder(model) or _download(model)


def local_folder(model: ModelEntry) -> Path | None:
    """The folder that the model names; None for a hub id. `ModelError` when it is neither."""
    path = Path(model.path)
    try:
        found = path.is_dir()
        if not found and path.is_file():
            raise ModelError(no_folder(model.path))
    except OSError as error:  # a name that is too long
        raise ModelError(f"model directory {shown(model.path)} cannot be read: {error.strerror}") from None
    if found:
        if not (path / "config.json").is_file():
            gguf = next((file for file in sorted(path.iterdir()) if file.suffix == GGUF), path)
            raise ModelError(
                f"model directory {model.path!r} has no config.json; give a Hugging Face model directory"
                f"{of_gguf(gguf)}",
                code="model.no-config",
            )
        return path
    if not reads_as_id(model.path):
        raise ModelError(
            f"model directory {model.path!r} does not exist; give a directory or a hub id (owner/name)"
            f"{beside(model.path)}",
            code="model.no-folder",
        )
    if model.revision is None:
        raise ModelError(unpinned(model.path), code="model.unpinned")
    return None


def _download(model: Model) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model.path,
                revision=model.revision,
                allow_patterns=["*.json", "*.txt", "*.model", *WEIGHTS],
                ignore_patterns=[CONSOLIDATED],
            )
        )
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise ModelError(
            f"model {model.path!r} is no directory and could not be had from the hub{offline}: {reason(error)}"
        ) from None


def check_window(info: ModelInfo, length: int) -> None:
    """Refuse windows that the model has no positions for (one more is needed to sample a token)."""
    if length + 1 > info.max_positions:
        raise ModelError(
            f"a window of {length} tokens is longer than the model's {info.max_positions} positions;"
            f" windows.context + windows.eval may be at most {info.max_positions - 1}"
        )


def load_tokenizer(info: ModelInfo):
    """The model's tokenizer (transformers); code that the model brings is not run.

    Raises
    ------
    ModelError
        There is none, it cannot be read, it knows no words, or has tokens that the model has no embedding of.
    """
    from transformers import AutoTokenizer

    if not any((info.path / name).is_file() for name in TOKENIZERS):  # transformers makes one up, of no words
        raise ModelError(
            f"{info.path} has no tokenizer; put its files there: tokenizer.json, or tokenizer.model",
            code="model.no-tokenizer",
        )
    try:
        found = AutoTokenizer.from_pretrained(info.path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizers' own are of no narrower class
        raise ModelError(
            f"no tokenizer could be read from {info.path}: {reason(error)}", code="model.broken-tokenizer"
        ) from None
    known = found.get_vocab()
    if known.keys() <= found.get_added_vocab().keys():
        raise ModelError(
            f"the tokenizer of {info.path} has no tokens but {len(known)} special ones: it reads no text",
            code="model.no-words",
        )
    token, most = max(known.items(), key=lambda item: item[1])
    if most >= info.vocab_size:
        raise ModelError(
            f"the tokenizer of {info.path} has token {most} ({shown(token)}), and the model embeds 0 to"
            f" {info.vocab_size - 1}; take the tokenizer of this model, or resize its embedding",
            code="model.no-embedding",
        )
    return found


def reason(error: Exception) -> str:
    """The first sentence of what another library raised; with the error's name where it says little by itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else ""
    return said if isinstance(error, OSError | ValueError) and said else f"{type(error).__name__} {said}".strip()
