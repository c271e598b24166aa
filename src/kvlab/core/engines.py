"""What is true of an engine, known without loading it; each says so in its folder of `kvlab.engines`."""

from __future__ import annotations

from dataclasses import dataclass

AUTO = "auto"


@dataclass(frozen=True)
class Capability:
    """What an engine computes correctly; all else is refused before it runs (`kvlab.engines.capability`).

    Parameters
    ----------
    attentions : tuple of str
        Implementations of attention.
    dtypes : tuple of str
        What it computes in.
    protocols : tuple of str
        How the tokens that are scored see the cache.
    cache_dtypes : tuple of str
        What its own cache may be told to store K and V in, ``auto`` being the model's dtype.
    cpu_head_dims : tuple of int, optional
        Head sizes of its CPU kernel; any where not given.
    one_window : tuple of str, optional
        Architectures that it runs with a window in all layers or in none.
    splits : bool
        Whether it puts a model whose `tensor_parallel` is above 1 into as many processes; others keep it whole.
    """

    attentions: tuple[str, ...]
    dtypes: tuple[str, ...]
    protocols: tuple[str, ...]
    cache_dtypes: tuple[str, ...] = (AUTO,)
    cpu_head_dims: tuple[int, ...] | None = None
    one_window: tuple[str, ...] = ()
    splits: bool = False


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
    able : Capability
        What it computes correctly.
    modules : tuple of str
        Further code of it that is loaded by name or in a process of its own: what it measured hangs on that too.
    paged : bool
        Whether its cache lies in blocks, which can hold coded bytes.
    """

    engine: str
    title: str
    library: str
    attention: str
    able: Capability
    modules: tuple[str, ...] = ()
    paged: bool = False

    @property
    def code(self) -> tuple[str, ...]:
        """The modules of the engine, for digests of what measured."""
        return (self.engine.partition(":")[0], *self.modules)
