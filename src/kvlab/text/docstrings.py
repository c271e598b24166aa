"""A pinned text corpus that needs no download: the docstrings of installed packages.

Source files are read with `ast`, nothing is imported. Only ``.py`` files count, and whatever a build
writes into a wheel is left out (``version.py``, ``__config__.py``, torch's private and GPU folders), so
that the CPU and the CUDA wheel of torch give the same text. That last point follows from what is left
out; only the recorded hash, checked by `load_checked`, proves it on a given machine.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from kvlab.core.errors import CorpusError

PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "polars",
    "sympy",
    "networkx",
    "pandas",
    "sqlalchemy",
    "huggingface_hub",
    "datasets",
    "pydantic",
)

MIN_CHARS = 200
SPLITS = ("train", "calib", "test")
CALIB_PERCENT = TEST_PERCENT = 5
KEY_CHARS = 80

# Tests hold inputs, not prose; a vendored copy changes with its own version, not with the package's.
SKIPPED_FOLDERS = frozenset({"__pycache__", "tests", "test", "testing", "_vendor", "externals", "vendored"})
# Written while a wheel is built, so they may differ between two builds of one version.
SKIPPED_FILES = frozenset({"version.py", "_version.py", "_version_meson.py", "__config__.py"})
# transformers generates its modeling files from these, docstrings included.
SKIPPED_PREFIX = "modular_"
# In torch the private folders hold generated kernels and templates, and these hold device-specific code.
TORCH_SKIPPED = frozenset({"cuda", "backends", "xpu", "mtia", "mps", "bin", "lib", "include", "share", "csrc"})
# torch documents its compiled functions with calls such as add_docstr(torch.abs, r"...").
TORCH_DOC_FILE = re.compile(r"^_\w+_docs\.py$")

Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LONG_STRING = re.compile(r'"""(?:(?!""").){150,}?"""' + r"|'''(?:(?!''').){150,}?'''", re.DOTALL)
NOT_PROSE = re.compile(r"`[^`]*`|\S*[\d_.\[\]()<>]\S*|[a-z]*[A-Z]+\S*[A-Z]\S*|\b[A-Z][a-z]+[A-Z]\S*")


@dataclass(frozen=True)
class Document:
    """One docstring, the package it came from and the sha256 of its text."""

    text: str
    package: str
    sha256: str


def extract(packages: Sequence[str] = PACKAGES) -> list[Document]:
    """Read every docstring of over 200 characters, once each.

    Parameters
    ----------
    packages : sequence of str
        Import names of installed packages.

    Returns
    -------
    list of Document
        In order of package, then of path, then of place in the file; a text that occurs twice is kept
        where it occurs first.

    Raises
    ------
    CorpusError
        If a package is not installed.
    """
    files = [(package, path) for package in packages for path in _source_files(package)]
    documents: dict[str, Document] = {}
    # Parsing is all the work; processes share it, `map` keeps the order. Trees hold no cycles for a collector to find.
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=gc.disable) as pool:
        found = pool.map(_docstrings, [path for _, path in files], chunksize=64)
        for (package, _), texts in zip(files, found, strict=True):
            for text in texts:
                digest = _sha256(text)
                documents.setdefault(digest, Document(text, package, digest))
    return list(documents.values())


def split(documents: Iterable[Document]) -> dict[str, list[Document]]:
    """Divide documents into train, calib and test at about 90, 5 and 5 percent.

    The side is chosen by a hash of the first 80 characters of prose, lower-cased and without names, code
    and numbers: the many docstrings that differ only in a class name therefore stay on one side. Within
    a side the order is that of the text hash, so neighbours do not come from one module.

    Parameters
    ----------
    documents : iterable of Document
        The documents, in any order.

    Returns
    -------
    dict of str to list of Document
        The keys are ``train``, ``calib`` and ``test``.
    """
    sides: dict[str, list[Document]] = {name: [] for name in SPLITS}
    for document in sorted(documents, key=lambda document: document.sha256):
        sides[_side(document.text)].append(document)
    return sides


def corpus_hash(documents: Iterable[Document]) -> str:
    """The sha256 over the texts in the order given; one changed character changes it."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.text.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def describe(documents: Sequence[Document], packages: Sequence[str] = PACKAGES) -> dict:
    """What `load_checked` expects to find in the recorded file.

    Parameters
    ----------
    documents : sequence of Document
        The result of `extract`.
    packages : sequence of str
        The packages they were extracted from.

    Returns
    -------
    dict
        The hash over everything, and per package its version, document count, bytes and hash.
    """
    by_package: dict[str, list[Document]] = {package: [] for package in packages}
    for document in documents:
        by_package[document.package].append(document)
    return {
        "sha256": corpus_hash(documents),
        "documents": len(documents),
        "bytes": _bytes(documents),
        "splits": {
            name: {"documents": len(side), "bytes": _bytes(side), "sha256": corpus_hash(side)}
            for name, side in split(documents).items()
        },
        "packages": {
            package: {
                "version": installed_version(package),
                "documents": len(found),
                "bytes": _bytes(found),
                "sha256": corpus_hash(found),
            }
            for package, found in by_package.items()
        },
    }


def load_checked(expected_path: Path) -> dict[str, list[Document]]:
    """Extract and split the corpus, and refuse it unless it is the recorded one.

    Parameters
    ----------
    expected_path : Path
        The ``corpus.json`` written beside the model that was trained on this corpus.

    Returns
    -------
    dict of str to list of Document
        The result of `split`.

    Raises
    ------
    CorpusError
        If the record is unreadable, a package is missing, or the text differs; the message names the
        packages whose version or text differs.
    """
    expected = _read_expected(expected_path)
    packages = list(expected["packages"])
    documents = extract(packages)
    if corpus_hash(documents) != expected["sha256"]:
        raise CorpusError(_difference(expected["packages"], describe(documents, packages)["packages"]))
    return split(documents)


def installed_version(package: str) -> str:
    """The public version of the distribution that provides `package`, without a tag such as ``+cpu``.

    Raises
    ------
    CorpusError
        If no installed distribution provides it.
    """
    try:
        return importlib.metadata.version(package).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        raise CorpusError(f"package {package} is not installed; install the pinned requirements") from None


def _source_files(package: str) -> Iterator[Path]:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise CorpusError(f"package {package} is not installed; install the pinned requirements")
    root = Path(next(iter(spec.submodule_search_locations)))
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    for name in sorted(paths):
        if _is_wanted(package, name.split("/")):
            yield paths[name]


def _is_wanted(package: str, parts: list[str]) -> bool:
    folders, name = parts[:-1], parts[-1]
    if name in SKIPPED_FILES or name.startswith(SKIPPED_PREFIX) or not SKIPPED_FOLDERS.isdisjoint(folders):
        return False
    if package == "torch" and folders:
        return not (folders[0] in TORCH_SKIPPED or any(folder.startswith("_") for folder in folders))
    return True


def _docstrings(path: Path) -> list[str]:
    try:
        source = path.read_bytes().decode("utf-8")
        if not LONG_STRING.search(source):  # parsing is the slow part, and many files have nothing to offer
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError) as error:
        raise CorpusError(f"cannot read docstrings from {path.parent.name}/{path.name}: {error}") from error
    texts = _called(tree) if TORCH_DOC_FILE.match(path.name) else _written(tree)
    return [text for text in texts if len(text) > MIN_CHARS]


def _written(node: ast.AST) -> Iterator[str]:
    """Docstrings in the order of the source; only statements are visited, for speed."""
    if isinstance(node, Documented):
        yield ast.get_docstring(node, clean=True) or ""
    for block in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(node, block, ()):
            yield from _written(child)


def _called(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) > 1:
            yield inspect.cleandoc(_literal(node.args[1]) or "")


def _literal(node: ast.expr) -> str | None:
    """The text of a string, also where it is built as ``"...".format(**common_args)`` or with ``+``."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _literal(node.func.value)
    if isinstance(node, ast.BinOp):
        parts = [_literal(node.left), _literal(node.right)]
        return "".join(part for part in parts if part)
    return None


def _side(text: str) -> str:
    prose = " ".join(NOT_PROSE.sub(" ", text).lower().split())[:KEY_CHARS]
    place = int(_sha256(prose)[:8], 16) % 100
    if place < TEST_PERCENT:
        return "test"
    return "calib" if place < TEST_PERCENT + CALIB_PERCENT else "train"


def _read_expected(path: Path) -> dict:
    try:
        expected = json.loads(path.read_text())
        expected["sha256"], expected["packages"].items()
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorpusError(f"cannot read the recorded corpus {path}: {error}") from error
    return expected


def _difference(pinned: dict, found: dict) -> str:
    parts = []
    for package, want in pinned.items():
        have = found[package]
        if want["version"] != have["version"]:
            parts.append(f"{package} {have['version']} is installed, {want['version']} is pinned")
        elif want["sha256"] != have["sha256"]:
            parts.append(f"{package} {have['version']} has other text than recorded")
    listed = "; ".join(parts) or "the recorded hash fits no package"
    return f"this is not the recorded docstring corpus: {listed}; install the pinned requirements"


def _bytes(documents: Iterable[Document]) -> int:
    return sum(len(document.text.encode()) for document in documents)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
