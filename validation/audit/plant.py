"""What a planted fault is, and how it is put into the running code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

HF, VLLM = "factors/hf-float32-0", "factors/vllm-float32-0"
Apply = Callable[["Changes"], None]


class Changes(ExitStack):
    """Attributes that are replaced until the process ends."""

    def put(self, target: Any, name: str, new: Any) -> None:
        """Replace one attribute."""
        self.enter_context(patch.object(target, name, new))

    def around(self, target: Any, name: str, made: Callable[[Callable], Callable]) -> None:
        """Replace a function by what `made` makes of it."""
        self.put(target, name, made(getattr(target, name)))


@dataclass(frozen=True)
class Plant:
    """One fault.

    Parameters
    ----------
    name : str
        Readable and unique.
    apply : callable
        Puts it into the running code.
    job : str
        ``<study>/<job>`` that runs with it.
    beyond : str
        Why nothing can catch it; empty for a fault that has to be caught.
    """

    name: str
    apply: Apply
    job: str = HF
    beyond: str = ""


class Plants(dict):
    """All faults of a file, by name."""

    def fault(self, name: str, job: str = HF, beyond: str = "") -> Callable[[Apply], Apply]:
        """Register what plants a fault."""

        def registered(apply: Apply) -> Apply:
            if name in self:
                raise ValueError(f"two faults are named {name!r}")
            self[name] = Plant(name, apply, job, beyond)
            return apply

        return registered

    def on_both(self, name: str) -> Callable[[Apply], Apply]:
        """The same fault on each engine."""

        def registered(apply: Apply) -> Apply:
            for engine, job in (("transformers", HF), ("vLLM", VLLM)):
                self.fault(f"{name}, on {engine}", job)(apply)
            return apply

        return registered
