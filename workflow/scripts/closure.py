"""Which code of this repository a module's results depend on: itself and whatever it imports, found without running it.

    python workflow/scripts/closure.py FOLDER    writes a record for each module and for each file of rules

A record names the files and what they do, each by its digest. Snakemake compares `code` in memory; DVC, which
compares files, compares the records: a comment changes neither.
"""

import argparse
import hashlib
import io
import sys
import tokenize
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from kvlab.core import code

SRC = Path("src")
PACKAGES = dict.fromkeys(code.PACKAGES, SRC) | {"validation": Path(".")}  # where each package of this repository lies
FOLDERS = [root / name for name, root in PACKAGES.items()]
RULES = Path("workflow/rules")
RECORDS = Path("results/code")
CODE = {".py", ".smk"}
LAYOUT = {tokenize.COMMENT, tokenize.NL}


@lru_cache(None)
def module_file(name):
    """The file of a module of this repository, or None when it is somebody else's."""
    parts = name.split(".")
    if parts[0] not in PACKAGES:
        return None
    path = PACKAGES[parts[0]].joinpath(*parts)
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()), None)


@lru_cache(None)
def files(*modules):
    """The files of `modules` and of everything in this repository that they import, sorted.

    What a module loads by name at run time (an engine, a codec) cannot be seen and is to be named too.
    """
    for name in modules:
        if module_file(name) is None:
            raise ValueError(f"a rule names the module {name!r}, which is not in this repository")
    return tuple(sorted(map(str, code.reached(modules, module_file).values())))


class Code(str):
    """Digest of what `modules` do, and everything in this repository that they import, for a rule's `params`.

    Snakemake runs a job again when it is another one: comments, docstrings and layout are no part of it. Of modules of
    the packages alone it is what `kvlab.core.code` says, so that a program that runs can tell whether it is the same.
    """

    modules: tuple[str, ...]

    def __new__(cls, *modules):
        """Digest the syntax trees of the modules' files, each with its path."""
        digest = super().__new__(cls, code.digest_of(*modules) or _sha256(listing(files(*modules))))
        digest.modules = tuple(sorted(set(modules)))
        return digest

    @property
    def files(self):
        """The files that are digested."""
        return files(*self.modules)

    @property
    def records(self):
        """The records that say the same for DVC."""
        return tuple(str(record_of(module)) for module in self.modules)


def listing(paths):
    """What some files do: a line for each."""
    return "".join(f"{meaning(path)}  {path}\n" for path in paths)


@lru_cache(None)
def meaning(path):
    """Digest of a file's syntax tree without docstrings; equal for two files that compute the same.

    Rules are no Python, so theirs is of the words without comments and layout.
    """
    if Path(path).suffix == ".smk":
        return _sha256(repr(words(Path(path).read_text())))
    return code.meaning(str(path))


def words(text):
    """The words of a file of rules, and where its lines and blocks begin and end, however they are laid out."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string.strip() or token.type for token in tokens if token.type not in LAYOUT]


# The records


def record_of(name):
    """Where the record of a module lies, or that of a file of rules."""
    return RECORDS / (f"{Path(name).stem}.rules.txt" if str(name).endswith(".smk") else f"{name}.txt")


def record(path):
    """What the record at a path has to say; None if it is of nothing that is there."""
    name = path.stem
    if module_file(name):  # first: a module may be called `rules`
        return listing(files(name))
    rules = RULES / f"{name.removesuffix('.rules')}.smk"
    return listing([str(rules)]) if name.endswith(".rules") and rules.exists() else None


def records():
    """The text of every record by its path."""
    paths = map(record_of, [*sorted(RULES.glob("*.smk")), *package_modules()])
    return {path: record(path) for path in paths}


def everything():
    """Digest of all that the records are made from; cheap, because it is of the files as they are written."""
    paths = [path for folder in FOLDERS for path in sorted(folder.rglob("*.py"))] + sorted(RULES.glob("*.smk"))
    return _sha256("".join(f"{path} {_sha256(path.read_text())}\n" for path in paths))


def package_modules():
    """Every module of the packages by its dotted name."""
    paths = [path.relative_to(root) for name, root in PACKAGES.items() for path in sorted((root / name).rglob("*.py"))]
    return [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]


def forget():
    """Read every file anew from now on."""
    for cached in (module_file, files, meaning, code.located, code.parsed, code.imports, code.source):
        cached.cache_clear()


def _sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("folder", type=Path)
    folder = arguments.parse_args().folder
    folder.mkdir(parents=True)
    for path, text in records().items():
        (folder / path.name).write_text(text)
    code.keep()


if __name__ == "__main__":
    main()
