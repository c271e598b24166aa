"""The one measuring loop: windows x subjects -> what was found, window by window.

A subject is anything that can be scored on a window: a cell, a comparison of two engines, a mechanism, a way to store
the cache. The loop visits the windows one after the other, so that what a window needs (its clean pass, the tensors
coded so far) is made once for all subjects and is gone before the next window. What a store holds already is not
measured again, and an engine that nothing asks for is not started.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from tqdm import tqdm

W = TypeVar("W")


class Subject(Protocol):
    """Something that is scored on windows."""

    def due(self, window: Any) -> bool:
        """Whether it is to be scored on this window."""

    def score(self, visit: Any) -> Any:
        """What is found of it on the window of this visit."""


class FindingStore(Protocol):
    """Where findings are kept: see `measure.store.ResultStore`."""

    def key(self, subject: Any) -> Hashable:
        """By what a subject's findings are known; equal for two that must find the same."""

    def get(self, key: Hashable, window: Any) -> Any:
        """A finding that is kept, or None."""

    def put(self, window: Any, fresh: dict) -> None:
        """Keep what was found on a window, by key."""


def walk(
    windows: Iterable[W],
    subjects: Sequence[Subject],
    visit: Callable[[W], Any],
    kept: FindingStore | None = None,
    title: str = "",
) -> Iterator[tuple[W, list[tuple[Subject, Any]]]]:
    """Score subjects on windows.

    Parameters
    ----------
    windows : iterable
        In the order in which they are visited.
    subjects : sequence of Subject
        In the order in which they are scored on each.
    visit : callable
        Begins a window; called only where something is to be measured.
    kept : FindingStore, optional
        Findings of earlier runs; new ones are added window by window, so that a job that is killed goes on here.
        Subjects of equal keys are scored once.
    title : str
        Of the progress bar.

    Yields
    ------
    window, list of (subject, finding)
        For each window the subjects that are due on it, in their order.
    """
    keyed = [(subject, kept.key(subject) if kept else id(subject)) for subject in subjects]
    windows = list(windows)
    with tqdm(desc=title, total=len(windows) * len(keyed), unit="score", disable=not title) as bar:
        for number, window in enumerate(windows):
            due = [(subject, key) for subject, key in keyed if subject.due(window)]
            found = {key: kept.get(key, window) for _, key in due} if kept else {}
            missing = {key: subject for subject, key in reversed(due) if found.get(key) is None}  # the first of equals
            if missing:
                here, fresh = visit(window), {}
                for key in dict.fromkeys(key for _, key in due if key in missing):
                    fresh[key] = missing[key].score(here)
                    bar.update()
                if kept:
                    kept.put(window, fresh)
                found |= fresh
                del here
            bar.update((number + 1) * len(keyed) - bar.n)  # what was kept, or is not due here
            yield window, [(subject, found[key]) for subject, key in due]
