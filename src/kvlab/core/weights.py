"""Which files hold a model's weights: the ones that every engine opens, and no others. Reads JSON only.

transformers opens ``model.safetensors``, or else the shards that ``model.safetensors.index.json`` names. vLLM opens
every ``*.safetensors`` of the folder that the index does not leave out, and ``consolidated*.safetensors`` before all
others; both take pickles where there are no safetensors. A hash says what was measured only where all of them open
the same files, so a folder in which they would not is refused.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvlab.core.errors import ModelError
from kvlab.core.origin import read_origin

WEIGHTS = ("*.safetensors",)
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONSOLIDATED = "consolidated*"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
ADAPTER = "adapter_config.json"


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model folder that an engine opens, sorted.

    Raises
    ------
    ModelError
        There are none, or the engines would open other files than these: pickles, an adapter's, a consolidated copy,
        or safetensors that the index does not name.
    """
    there = sorted(file for pattern in WEIGHTS for file in path.glob(pattern) if file.is_file())
    if not there:
        raise ModelError(_without_weights(path), code="model.no-weights")
    if (path / ADAPTER).exists():
        raise ModelError(
            f"{path} holds {ADAPTER}, by which an adapter is loaded over the weights; merge it, or remove it",
            code="model.adapter",
        )
    copies = [file.name for file in there if file.match(CONSOLIDATED)]
    if copies:
        raise ModelError(
            f"{path} holds {copies[0]}, which vLLM opens and transformers does not; remove it",
            code="model.other-weights",
        )
    return _indexed(path, there) if (path / INDEX).exists() else _single(path, there)


def _without_weights(path: Path) -> str:
    """Why a folder without safetensors is refused."""
    origin = read_origin(path)
    if origin and origin.gguf:
        return f"{path} has no weights yet; make them with `kvlab weights {path}`"
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
    if pickles:
        return f"{path} holds no *.safetensors weights, and {pickles[0]} is a pickle, which may run code; convert it"
    return f"{path} holds no *.safetensors weights"


def _single(path: Path, there: list[Path]) -> list[Path]:
    """The one file of a folder without an index."""
    others = [file.name for file in there if file.name != WHOLE]
    if len(others) == len(there):
        raise ModelError(
            f"{path} holds {others[0]}, but neither {WHOLE} nor {INDEX}, which say what is loaded",
            code="model.no-index",
        )
    if others:
        raise ModelError(
            f"{path} holds {others[0]} beside {WHOLE} and no {INDEX}, so vLLM would load both; remove one",
            code="model.other-weights",
        )
    return there


def _indexed(path: Path, there: list[Path]) -> list[Path]:
    """The shards that the index names."""
    names = sorted(set(weight_map(path / INDEX).values()))
    wrong = [name for name in names if not name.endswith(".safetensors")]
    if wrong:
        raise ModelError(f"{path / INDEX} names {wrong[0]!r}; allowed: *.safetensors", code="model.file-kind")
    for name in names:
        _refuse_elsewhere(path, name)
    if path / WHOLE in there and names != [WHOLE]:
        raise ModelError(
            f"{path} holds {WHOLE}, which transformers loads, beside {INDEX}, which names other files; remove one",
            code="model.other-weights",
        )
    return [path / name for name in names]


def weight_map(index: Path) -> dict[str, str]:
    """Which file holds a tensor, as an index has it; `ModelError` where it is no index."""
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = list(found.values())
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        files = []
    if not files or not all(isinstance(name, str) for name in files):
        raise ModelError(
            f"{index} is no index of weights; allowed: a JSON object with `weight_map`, from name to file",
            code="model.broken-index",
        )
    return found


def _refuse_elsewhere(path: Path, name: str) -> None:
    """`ModelError` for a shard that is not a file of this folder itself."""
    file = path / name
    if file.name != name or "\\" in name or "\0" in name:
        raise ModelError(
            f"{path / INDEX} names {name!r}; allowed: files that lie in this folder itself", code="model.file-elsewhere"
        )
    if not file.is_file():
        raise ModelError(f"{path / INDEX} names {name!r}, which is not there", code="model.file-missing")
    if not any(file.resolve().is_relative_to(root) for root in _roots(path)):
        raise ModelError(
            f"{path / INDEX} names {name!r}, a link that leaves the folder; put the file itself there",
            code="model.file-linked",
        )


def _roots(path: Path) -> list[Path]:
    """Where the files of a model may lie: in its folder; the cache of the hub links to its blobs from a snapshot."""
    folder = path.resolve()
    blobs = [folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else []
    return [folder, *blobs]
