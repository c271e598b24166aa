"""What Python code does, as a digest: comments, docstrings and layout are no part of it.

The workflow asks it of a rule's modules, the store of measured cells of the modules that measured them: what other
code has measured is measured again.

To parse every source takes seconds, and each start of Snakemake asks for all. So `keep` writes what was read in them
to a file, by the digest of a source's bytes: no time of a file is trusted.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import kvlab

PACKAGES = ("kvlab", "kvlab_mechanisms", "kvlab_pipeline")
ROOT = Path(kvlab.__file__).resolve().parents[1]  # the folder that the packages lie in
KEPT = "KVLAB_SOURCES"  # the variable that names the file of `keep`
_READ: dict[str, Source] = {}  # what this process has read, by the digest of a source's bytes


class Source(NamedTuple):
    """What one source says: the digest of what it does, and its imports as (level, module, names)."""

    meaning: str
    imported: list[tuple[int, str | None, list[str]]]


def digest_of(*modules: str) -> str | None:
    """Digest of what modules of these packages do, with everything in it that they import.

    None when one of them is no module of these packages: what somebody else's code does is not known here.
    """
    found = sources(*modules)
    return None if found is None else _sha256("".join(f"{meaning(str(p))}  {p.relative_to(ROOT)}\n" for p in found))


def state() -> str | None:
    """Digest of when every file of the packages was last written; None if one was after this process began.

    What runs here may then be other code than lies on the disk, and no digest of it can be had.
    """
    paths = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    files = [(path, path.stat()) for path in paths]
    if any(found.st_mtime > kvlab.BEGAN for _, found in files):
        return None
    return _sha256("".join(f"{path} {found.st_mtime_ns} {found.st_size}\n" for path, found in files))


@lru_cache(None)
def sources(*modules: str) -> tuple[Path, ...] | None:
    """The files of modules and of everything in the packages that they import, sorted; None as in `digest_of`.

    What a module loads by name at run time (an engine, a codec) cannot be seen and is to be named too.
    """
    if any(located(name) is None for name in modules):
        return None
    return tuple(sorted(set(reached(modules, located).values())))


def reached(modules: Iterable[str], locate: Callable[[str], Path | None]) -> dict[str, Path]:
    """The files of modules and of everything that they import, by name, as far as `locate` finds them."""
    todo, seen = set(modules), {}
    while todo:
        name = todo.pop()
        path = locate(name)
        if path is not None:
            seen[name] = path
            todo |= imports(name, path) - seen.keys()
    return seen


@lru_cache(None)
def located(name: str) -> Path | None:
    """The file of a module of these packages; None for all others."""
    if name.partition(".")[0] not in PACKAGES:
        return None
    path = ROOT.joinpath(*name.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


@lru_cache(None)
def imports(name: str, path: Path) -> frozenset[str]:
    """Names that a module imports, at its top or inside its functions, and its parent package."""
    found = {name.rpartition(".")[0]}
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for level, module, names in source(str(path)).imported:
        near = package[: len(package) + 1 - level] if level else []
        base = ".".join([*near, *filter(None, [module])])
        found |= {base} | {f"{base}.{one}" for one in names}
    return frozenset(found - {""})


@lru_cache(None)
def parsed(path: str) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(Path(path).read_text(), path)


def meaning(path: str) -> str:
    """Digest of a file's syntax tree without docstrings; equal for two files that compute the same."""
    return source(path).meaning


@lru_cache(None)
def source(path: str) -> Source:
    """What a file says, from the kept ones if one of the same bytes is among them."""
    data = Path(path).read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return _READ.setdefault(digest, _kept().get(digest) or _said(ast.parse(data, path)))


def keep() -> None:
    """Write what was read in sources to the file that the variable `KEPT` names; nothing if none is named or new.

    A folder that cannot be written is no reason to stop: the sources are then parsed each time.
    """
    place = os.environ.get(KEPT)
    if place is None or _READ.keys() <= _kept().keys():
        return
    with contextlib.suppress(OSError):
        path = Path(place)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(json.dumps({"made_by": _made_by(), "sources": _READ}))
        part.replace(path)


@lru_cache(None)
def _kept() -> dict[str, Source]:
    """What the file of `keep` holds; nothing if other code, or another Python, has written it."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads(Path(os.environ[KEPT]).read_text())
        if found["made_by"] == _made_by():
            return {digest: Source(*said) for digest, said in found["sources"].items()}
    return {}


def _made_by() -> str:
    """What a kept source depends on beside its bytes: this module, and Python, whose syntax trees differ."""
    return f"{sys.version} {_sha256(Path(__file__).read_text())}"


def _said(tree: ast.Module) -> Source:
    """Read a syntax tree, and take the docstrings out of it."""
    imported: list[tuple[int, str | None, list[str]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [(0, alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported.append((node.level, node.module, [alias.name for alias in node.names]))
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and _documented(node):
            node.body = node.body[1:]
    return Source(_sha256(ast.dump(tree)), imported)


def _documented(node: ast.AST) -> bool:
    """Whether a module, class or function begins with a docstring."""
    first = node.body[0] if node.body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
