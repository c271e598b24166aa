"""Which family a file belongs to, decided by its fields; a file of none is named with its nearest family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvlab.core.errors import StorageError, UserError
from kvlab.core.records import read_json
from validation.published.readers import cells, channels, others, phases
from validation.published.reading import FileRefused, has
from validation.published.rows import Contents

READ, REFUSED, UNKNOWN, NOT_READ = "read", "refused", "not recognised", "not read"


@dataclass(frozen=True)
class FileFamily:
    """A kind of file: the fields that decide, those that rule it out, and its reader."""

    name: str
    fields: tuple[str, ...]
    read: Callable[[dict, str], Contents]
    without: tuple[str, ...] = ()

    def missing(self, data: dict) -> list[str]:
        """Deciding fields that the data lack."""
        return [path for path in self.fields if not has(data, path)]


FAMILIES = (
    FileFamily(
        "engines without a codec (phase 1)",
        ("per_passage[].ppl_hf", "per_passage[].ppl_vllm"),
        phases.engines,
    ),
    FileFamily(
        "noise (phase 2)",
        ("per_sigma[].sigma", "per_sigma[].per_passage[].ppl_ref", "per_sigma[].per_passage[].ppl_alt"),
        phases.noise,
    ),
    FileFamily(
        "single layers (phase 3)", ("per_layer[].layer", "per_layer[].mean_ppl_delta_rel"), phases.single_layers
    ),
    FileFamily(
        "codec error by layer (phase 4)",
        ("per_layer[].layer", "per_layer[].K_mse_ratio", "per_layer[].V_mse_ratio"),
        phases.codec_error,
    ),
    FileFamily(
        "vLLM ablation",
        ("cells{}.per_passage[].metrics.ppl_ref", "cells{}.per_passage[].metrics.ppl_alt"),
        cells.ablation,
    ),
    FileFamily(
        "vLLM cell",
        ("engine", "per_passage[].metrics.ppl_ref", "per_passage[].metrics.ppl_alt"),
        cells.vllm_cell,
    ),
    FileFamily(
        "HF two-pass cell",
        ("per_passage[].metrics.mean_kl", "per_passage[].metrics.ppl_ref", "per_passage[].metrics.ppl_alt"),
        cells.hf_two_pass,
        without=("engine",),
    ),
    FileFamily(
        "channels (rigorous evaluation)",
        ("per_passage[].channel", "per_passage[].passage", "per_passage[].ppl_ref", "per_passage[].ppl_alt"),
        channels.channels,
    ),
    FileFamily(
        "vLLM snapshot, later harness",
        ("engine", "per_passage[].ppl_ref", "per_passage[].ppl_alt", "per_passage[].delta_ppl"),
        cells.snapshot_qwen3,
        without=("per_passage[].channel",),
    ),
    FileFamily("grid of means", ("rows[].variance_ratio", "rows[].ppl_delta"), others.grid),
    FileFamily(
        "Sigma_q sidecar",
        ("diagnostics[].eig_min", "diagnostics[].eig_max", "diagnostics[].condition"),
        others.sigma,
    ),
)


@dataclass(frozen=True)
class SourceFile:
    """One file of the folder: what it is, what became of it, and why where it was not read."""

    file: str
    status: str
    family: str | None
    why: str
    contents: Contents


def recognise(data: object) -> FileFamily | None:
    """The first family all of whose deciding fields are there."""
    if not isinstance(data, dict):
        return None
    return next(
        (one for one in FAMILIES if not one.missing(data) and not any(has(data, path) for path in one.without)), None
    )


def nearest(data: object) -> str:
    """The family that lacks the smallest share of its fields, and which they are."""
    if not isinstance(data, dict):
        return f"its top level is a {type(data).__name__}, every family has an object"
    best = min(FAMILIES, key=lambda one: len(one.missing(data)) / len(one.fields))
    missing = best.missing(data)
    if len(missing) == len(best.fields):
        shown = ", ".join(sorted(map(str, data))[:6]) or "nothing"
        return f"it shares no deciding field with any family; it has {shown}"
    return f"nearest is {best.name}, which also has {', '.join(missing) or 'fewer fields'}"


def read_file(path: Path, name: str) -> SourceFile:
    """One JSON file.

    Raises
    ------
    StorageError
        When the file is no JSON: a damaged file may hide a result.
    """
    data = json_of(path, name)
    family = recognise(data)
    if family is None:
        return SourceFile(name, UNKNOWN, None, nearest(data), Contents())
    try:
        return SourceFile(name, READ, family.name, "", family.read(data, name))
    except FileRefused as error:
        return SourceFile(name, REFUSED, family.name, str(error), Contents())
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:  # pydantic's is a ValueError
        why = f"not laid out as {family.name} ({type(error).__name__}: {str(error).splitlines()[0]})"
        return SourceFile(name, REFUSED, family.name, why, Contents())


def json_of(path: Path, name: str) -> object:
    """The parsed file; the error names it relative to the folder."""
    try:
        return read_json(path)
    except StorageError as error:
        raise StorageError(str(error).replace(str(path), name), code=error.code) from None


def read_folder(folder: Path, without: Path | None = None) -> list[SourceFile]:
    """Every file under a folder, in the order of their relative names; `without` is a folder to leave out.

    Raises
    ------
    UserError
        When the folder is missing, is no folder, or holds no JSON file.
    StorageError
        When a JSON file is damaged.
    """
    if not folder.is_dir():
        reason = "is not a folder" if folder.exists() else "does not exist"
        raise UserError(
            f"{folder} {reason}; give the folder that holds the published JSON files", code="user.no-published-files"
        )
    written = None if without is None else without.resolve()
    paths = sorted(
        (
            path
            for path in folder.rglob("*")
            if path.is_file() and not path.name.startswith(".") and written not in path.resolve().parents
        ),
        key=lambda path: path.relative_to(folder).as_posix(),
    )
    if not any(path.suffix.lower() == ".json" for path in paths):
        raise UserError(
            f"{folder} holds no .json file; give the folder that holds the published JSON files",
            code="user.no-published-files",
        )
    found = []
    for path in paths:
        name = path.relative_to(folder).as_posix()
        is_json = path.suffix.lower() == ".json"
        found.append(read_file(path, name) if is_json else SourceFile(name, NOT_READ, None, "no JSON", Contents()))
    return found


def refuse_foreign(folder: Path, sources: list[SourceFile]) -> None:
    """`UserError` when no file of a folder is one of the published study's."""
    if not any(source.status in (READ, REFUSED) for source in sources):
        first = next(source for source in sources if source.status == UNKNOWN)
        raise UserError(
            f"{folder} holds no result file of the published study; {first.file} is none: {first.why}. Give the folder "
            "that holds the published JSON files",
            code="user.no-result-file",
        )
