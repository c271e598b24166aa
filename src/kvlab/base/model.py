"""Which model is measured: its folder, its shape, its identity. Reads JSON only; needs no torch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from kvlab.base.errors import ModelError, nearest, suggestion
from kvlab.base.hub import reads_as_id, unpinned
from kvlab.base.params import Model, ModelEntry
from kvlab.base.plain import MOST_LAYERS, shown
from kvlab.base.weights import CONSOLIDATED, WEIGHTS, weight_files

# Architectures whose projection modules the hooks know (engines/hooks.py). One name, one attention layout.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True)
class ModelInfo:
    """A model's slug and folder, its shape as the cache sees it, its hash, and over how many GPUs vLLM splits it.

    The hash is of its config and weights.
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

    @property
    def values_per_token(self) -> int:
        """K and V elements that one token adds to the cache, over all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim


def resolve(model: Model) -> ModelInfo:
    """Find the model that params.yaml names and read its shape; none of its own code is run.

    Raises
    ------
    ModelError
        The folder is missing, is no model, has an architecture that the hooks do not know, keeps a
        sliding window, has another number of layers than params.yaml says, or holds weights that engines would
        not agree on (`kvlab.base.weights`).
    """
    from kvlab.base.records import file_hash

    path = locate(model)
    config = _configuration(path / "config.json")
    architecture = known_architecture(config, path)
    if slides(config, architecture):
        raise ModelError(
            f"{model.path} uses sliding-window attention, whose cache is not a whole prefix; not supported"
        )
    heads = _whole(config, "num_attention_heads", path)
    info = ModelInfo(
        slug=model.slug,
        path=path,
        architecture=architecture,
        n_layers=_whole(config, "num_hidden_layers", path),
        n_heads=heads,
        n_kv_heads=_whole(config, "num_key_value_heads", path, heads),
        head_dim=_whole(config, "head_dim", path, 0) or _whole(config, "hidden_size", path) // heads,
        vocab_size=_whole(config, "vocab_size", path),
        max_positions=_whole(config, "max_position_embeddings", path),
        model_hash=file_hash(path / "config.json", *weight_files(path)),
        tensor_parallel=model.tensor_parallel,
    )
    if info.n_layers != model.n_layers:
        raise ModelError(
            f"{model.path} has {info.n_layers} layers, and had {model.n_layers} when this was planned;"
            " plan it again with the model as it is"
        )
    return info


def known_architecture(config: dict, path: Path) -> str:
    """The architecture that a config.json names.

    Raises
    ------
    ModelError
        The hooks do not know it, its `model_type` is that of another one (transformers goes by the type, vLLM by the
        architecture), or it would load code of the model's own or weights from another place.
    """
    named = config.get("architectures")
    architecture = str(named[0] if isinstance(named, list) and named else "none")
    if architecture not in ARCHITECTURES:
        near = nearest(architecture, ARCHITECTURES)
        hint = f"; did you mean {near}?" if near else ""
        raise ModelError(f"architecture {architecture!r} is not supported; allowed: {', '.join(ARCHITECTURES)}{hint}")
    kind, expected = config.get("model_type"), architecture.removesuffix("ForCausalLM").lower()
    if kind != expected:
        code = "; code that a model brings (auto_map) is never run" if "auto_map" in config else ""
        raise ModelError(f"model_type of {path} is {kind!r}; allowed for {architecture}: {expected!r}{code}")
    if "transformers_weights" in config:
        raise ModelError(
            f"config.json of {path} has transformers_weights, a file that vLLM would not load; remove the key"
        )
    return architecture


def _whole(config: dict, key: str, path: Path, default: int | None = None) -> int:
    """A count that config.json holds; the default where it is missing or null."""
    found = config.get(key)
    found = default if found is None else found
    if type(found) is not int or found < (default is None):
        raise ModelError(f"{key} in config.json of {path} is {found!r}; allowed: a whole number from 1")
    return found


def slides(config: dict, architecture: str) -> bool:
    """Whether any layer attends to a window only.

    Mistral has no switch: its window counts whenever it is not null, and is 4096 where none is given.
    """
    if "sliding_attention" in (config.get("layer_types") or ()):
        return True
    always_on = architecture == "MistralForCausalLM"
    window = config.get("sliding_window", 4096 if always_on else None)
    return window is not None and config.get("use_sliding_window", always_on)


def layer_count(model: ModelEntry) -> int:
    """Number of layers, as config.json says; `ModelError` as of `read_config`, or when it says none."""
    found = read_config(model).get("num_hidden_layers")
    if type(found) is not int or found < 1:
        raise ModelError(f"config.json of {model.path!r} names no num_hidden_layers; give a decoder-only text model")
    if found > MOST_LAYERS:
        raise ModelError(f"config.json of {model.path!r} names {found} layers; allowed: at most {MOST_LAYERS}")
    return found


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
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):  # the last: brackets without end
        found = None
    if not isinstance(found, dict):
        raise ModelError(f"{path} is no configuration of a model")
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
    except OSError as error:  # a name that is too long
        raise ModelError(f"model directory {shown(model.path)} cannot be read: {error.strerror}") from None
    if found:
        if not (path / "config.json").is_file():
            raise ModelError(f"model directory {model.path!r} has no config.json; give a Hugging Face model directory")
        return path
    if not reads_as_id(model.path):
        siblings = [str(p) for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        raise ModelError(
            f"model directory {model.path!r} does not exist; give a directory or a hub id (owner/name)"
            f"{suggestion(model.path, siblings)}"
        )
    if model.revision is None:
        raise ModelError(unpinned(model.path))
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
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"model {model.path!r} is no directory and could not be had from the hub{offline}: {reason}"
        ) from None


def check_window(info: ModelInfo, length: int) -> None:
    """Refuse windows that the model has no positions for (one more is needed to sample a token)."""
    if length + 1 > info.max_positions:
        raise ModelError(
            f"a window of {length} tokens is longer than the model's {info.max_positions} positions;"
            f" windows.context + windows.eval may be at most {info.max_positions - 1}"
        )


def load_tokenizer(info: ModelInfo):
    """The model's tokenizer (transformers); code that the model brings is not run."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(info.path, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"no tokenizer could be read from {info.path}: {reason}") from None
