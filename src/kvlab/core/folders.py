"""Folders of a package by the files that they hold: how studies are found without a list of them."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path


@cache
def holding(package: str, *files: str) -> tuple[str, ...]:
    """Names of a package's folders that hold these modules, sorted."""
    (root,) = import_module(package).__path__
    folders = (path for path in Path(root).iterdir() if (path / "__init__.py").exists())
    return tuple(sorted(path.name for path in folders if all((path / f"{name}.py").exists() for name in files)))
