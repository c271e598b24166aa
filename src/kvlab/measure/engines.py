"""The engines of one process, each started when first asked for, and the visit to a window that they score."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import NamedTuple

import torch

from kvlab.calibration.load import Calibrated
from kvlab.core.engines import AUTO
from kvlab.core.errors import Fault
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import ENGINES, Cell, Recipe, digest
from kvlab.core.records import sha256, versions
from kvlab.core.testimony import Proof
from kvlab.engines import registry
from kvlab.engines.base import Engine
from kvlab.measure.scoring import WindowRun
from kvlab.measure.windows import Window

PAGES = "kvlab.measure.paged"
"""The code of one whose pages are coded; loaded by name, as what measures without it does not hang on it."""
DECIDING = ("ATEN", "CUDA", "CUBLAS", "DNNL", "GLIBC_TUNABLES", "GOMP", "KMP", "KVLAB_RECIPE", "LD_", "MKL", "NCCL")
DECIDING += ("NVIDIA", "OMP", "ONEDNN", "OPENBLAS", "PYTORCH", "TORCH", "TRANSFORMERS", "USE_HUB_KERNELS", "VLLM")
"""Beginnings of the names of environment variables that may decide how an engine computes."""


class Which(NamedTuple):
    """An engine, its dtype, its attention and what its own cache holds.

    `coded` names the recipe and the calibration of coded pages (`Engines.coding`); empty where the cache holds values.
    """

    name: str
    dtype: str
    attention: str
    cache_dtype: str = AUTO
    coded: str = ""

    @property
    def modules(self) -> tuple[str, ...]:
        """The code that it is."""
        return (*ENGINES[self.name].code, *([PAGES] if self.coded else []))

    @classmethod
    def of(cls, name: str, dtype: str, attention: str = "default", cache_dtype: str = AUTO) -> Which:
        """With the attention that is meant by ``default``."""
        attention = ENGINES[name].attention if attention == "default" and name in ENGINES else attention
        return cls(name, dtype, attention, cache_dtype)

    @classmethod
    def of_cell(cls, cell: Cell) -> Which:
        """The one that a cell runs on."""
        return cls.of(cell.engine, cell.dtype, cell.attention)


@dataclass
class Engines:
    """Starts engines on demand, each once, and closes all of them together.

    Parameters
    ----------
    info : ModelInfo
    max_tokens : int
        Longest window that any of them scores.
    references : dict or None
        Logits of the clean passes, kept beyond a visit where windows are visited for one engine after the other.
    """

    info: ModelInfo
    max_tokens: int
    running: dict[Which, Engine] = field(default_factory=dict)
    references: dict[tuple[Which, Window], torch.Tensor] | None = None
    _coded: dict[str, tuple[Recipe, Calibrated | None]] = field(default_factory=dict)

    def coding(self, which: Which, recipe: Recipe, calibrated: Calibrated | None) -> Which:
        """The same engine with coded pages: its cache holds what a recipe makes of K and V."""
        fitted = calibrated.calibration_hash if calibrated else None
        name = digest({"recipe": recipe.model_dump(mode="json"), "calibration": fitted})
        self._coded[name] = recipe, calibrated
        return which._replace(coded=name)

    def get(self, which: Which) -> Engine:
        """An engine; see `registry.start` for what is refused."""
        if which not in self.running:
            started = self._started(which)
            self.running[which] = started
            if started.device != device():
                raise Fault(f"{which.name} runs on {started.device}, where {device()} was expected")
            refuse_impostor(which.name, started.proof, {other.name: e.proof for other, e in self.running.items()})
        return self.running[which]

    def _started(self, which: Which) -> Engine:
        if which.coded:
            paged = import_module(PAGES)
            return paged.PagedEngine(self.info, which.dtype, self.max_tokens, *self._coded[which.coded])
        return registry.start(
            which.name,
            self.info,
            which.dtype,
            which.attention,
            max_tokens=self.max_tokens,
            cache_dtype=which.cache_dtype,
        )

    def end(self, which: Which) -> None:
        """Give the memory of one of them back."""
        if engine := self.running.pop(which, None):
            engine.close()

    def visit(self, window: Window) -> Visit:
        """Begin a window."""
        return Visit(self, window)

    def identity(self) -> dict:
        """Everything outside a subject and a window that decides what is measured."""
        return {
            "model_hash": self.info.model_hash,
            "tensor_parallel": self.info.tensor_parallel,
            "max_tokens": self.max_tokens,
            "versions": versions(),
            "device": device(),
            "processor": processor(),
            "threads": torch.get_num_threads(),
            "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(DECIDING)},
        }

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_exception) -> None:
        self.close()

    def close(self) -> None:
        """Give all memory back, of the last one started first."""
        for engine in reversed(self.running.values()):
            engine.close()
        self.running = {}


@dataclass
class Visit:
    """One window on the engines: the clean pass of each is made when first asked for, and once."""

    engines: Engines
    window: Window
    _runs: dict[Which, WindowRun] = field(default_factory=dict)

    def run(self, which: Which) -> WindowRun:
        """The clean pass on an engine."""
        if which not in self._runs:
            engine, window, references = self.engines.get(which), self.window, self.engines.references
            known = references.get((which, window)) if references else None
            self._runs[which] = run = WindowRun(engine, list(window.ids), window.context, window.number, known)
            if references is not None:
                references[which, window] = run.reference
        return self._runs[which]


def refuse_impostor(name: str, proof: Proof, others: Mapping[str, Proof]) -> None:
    """An engine is of its own library, and has what no other engine has.

    Parameters
    ----------
    others : mapping of str to Proof
        Engines that run beside it, by name.

    Raises
    ------
    Fault
        It is another engine under this one's name.
    """
    own = ENGINES.get(name)
    if own and (proof.library != own.library or own.paged != bool(proof.cache_blocks)):
        raise Fault(
            f"what runs as {name} is {proof.model} of {proof.library}, with {proof.cache_blocks or 'no'} blocks of"
            f" cache: another engine under its name",
            code="fault.other-engine",
        )
    same = [other for other, known in others.items() if other != name and known == proof]
    if same:
        raise Fault(
            f"{name} and {same[0]} cannot be told apart: both run {proof.model} of {proof.library}",
            code="fault.same-engine",
        )


def device() -> str:
    """The device that both engines choose, in words, without starting one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def processor() -> str:
    """Digest of what the libraries choose their kernels by: the processor's model and flags, and torch's build."""
    try:
        with open("/proc/cpuinfo") as stream:
            lines = {line for line in stream if line.startswith(("model name", "flags", "Features", "CPU part"))}
    except OSError:
        lines = set()
    chosen = torch.backends.cpu.get_cpu_capability()
    return sha256("".join(sorted(lines)).encode(), chosen.encode(), torch.__config__.show().encode())
