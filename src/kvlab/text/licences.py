"""A second text that needs no download either: the licences of installed distributions, legal English.

Licences are copied from one another, so a paragraph is kept only where most of its words stand in an
order that none before it had. Nothing depends on which edition of a text is installed: what was read is
described in the windows' record, and the windows' hash is in every result, so that results on different
texts cannot be mixed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvlab.core.errors import CorpusError

# Pinned alike for CPU and CUDA, and with more text of their own than the rest of the environment.
DISTRIBUTIONS = (
    "aiohappyeyeballs",
    "aiohttp",
    "asyncssh",
    "blake3",
    "docutils",
    "dulwich",
    "fonttools",
    "grpcio",
    "matplotlib",
    "numpy",
    "opencv-python-headless",
    "pillow",
    "pyarrow",
    "snakemake",
)
LICENCE = re.compile(r"(LICEN[CS]E|NOTICE|COPYING)", re.IGNORECASE)
TEXT_SUFFIXES = frozenset({"", ".txt", ".md", ".rst", ".apache", ".bsd", ".external"})
MIN_WORDS = 20  # shorter paragraphs are headings, names and addresses
RUN = 5  # words in an order
NEW = 0.7  # of a paragraph's runs that must not have been seen


@dataclass(frozen=True)
class Licence:
    """What one file says that no file before it said."""

    text: str
    distribution: str


def extract(distributions: Sequence[str] = DISTRIBUTIONS) -> list[Licence]:
    """Read the licence files, in order of distribution and path, and keep what is new in each.

    Raises
    ------
    CorpusError
        A distribution is not installed, or a file of its is not readable text.
    """
    seen: set[tuple[str, ...]] = set()
    found = []
    for name in distributions:
        for whole in _files(name):
            text = "\n\n".join(_new_paragraphs(whole, seen))
            if text:
                found.append(Licence(text, name))
    return found


def describe(licences: Iterable[Licence]) -> dict:
    """What was read: hash and size of all, and the version and size of each distribution's part."""
    by_name: dict[str, list[str]] = {}
    for licence in licences:
        by_name.setdefault(licence.distribution, []).append(licence.text)
    everything = "\0".join(text for texts in by_name.values() for text in texts)
    return {
        "sha256": hashlib.sha256(everything.encode()).hexdigest(),
        "distributions": {
            name: {
                "version": importlib.metadata.version(name),
                "documents": len(texts),
                "bytes": sum(len(text.encode()) for text in texts),
            }
            for name, texts in by_name.items()
        },
    }


def _files(name: str) -> Iterator[str]:
    try:
        listed = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        raise CorpusError(
            f"distribution {name} is not installed, whose licence `corpus.other: licences` reads; install the pinned"
            " requirements, or name another text",
            code="corpus.not-installed",
        ) from None
    for path in sorted(listed, key=str):
        if LICENCE.match(path.name) and path.suffix.lower() in TEXT_SUFFIXES:
            try:
                yield path.locate().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CorpusError(f"cannot read {path} of distribution {name}: {error}") from None


def _new_paragraphs(text: str, seen: set[tuple[str, ...]]) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        words = re.findall(r"[a-z]+", paragraph.lower())
        runs = {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}
        if len(words) >= MIN_WORDS and len(runs - seen) >= NEW * len(runs):
            yield paragraph.strip()
        seen |= runs
