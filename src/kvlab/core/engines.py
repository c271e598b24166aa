"""What is true of an engine, known without loading it; each says so in its folder of `kvlab.engines`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineInfo:
    """An engine that is measured.

    Parameters
    ----------
    engine : str
        Its class as ``package.module:Class``.
    title : str
        As people write it.
    library : str
        The package that the class of its live model is from.
    attention : str
        What its cells run with where none is named.
    modules : tuple of str
        Further code of it that is loaded by name or in a process of its own: what it measured hangs on that too.
    paged : bool
        Whether its cache lies in blocks, which can hold coded bytes.
    """

    engine: str
    title: str
    library: str
    attention: str
    modules: tuple[str, ...] = ()
    paged: bool = False

    @property
    def code(self) -> tuple[str, ...]:
        """The modules of the engine, for digests of what measured."""
        return (self.engine.partition(":")[0], *self.modules)
