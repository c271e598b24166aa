"""vLLM whose own cache holds coded bytes, as an engine beside the plain one: it runs as users run it, in a process.

What it stores and what ran is asked of the running engine: its pages by vLLM's own count, the backend that computes
its attention, the recipe and the calibration that it says it was given, and how far zeroed pages move its logits.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from kvlab.cache.files.calibration import read_header, write_calibration
from kvlab.cache.files.recipe import write_recipe_file
from kvlab.calibration.load import Calibrated
from kvlab.core.errors import CapabilityError, CodecNotActive, ModelError
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import PAGES_VARIABLE, RECIPE_VARIABLE, Placement, Recipe, digest
from kvlab.core.testimony import Pool, Proof, Served
from kvlab.engines.base import Engine, Storage, Tap
from kvlab.measure import paged_process
from kvlab.measure.paged_process import PagedPass, Started

LEAVE = 30.0  # seconds that the process has to shut down


class PagedEngine(Engine):
    """A recipe in the pages of vLLM's cache; it scores whole windows and takes no tap, as its cache codes by itself.

    Parameters
    ----------
    recipe : Recipe
    calibrated : Calibrated or None
        What the recipe reads; None where it reads nothing.

    Raises
    ------
    CapabilityError
        Pages cannot hold the recipe here, or vLLM does not start with them.
    CodecNotActive
        The engine that started is another one, codes by another recipe or calibration, or has ended since.
    """

    name = "vllm"
    attention = "default"

    def __init__(self, info: ModelInfo, dtype: str, max_tokens: int, recipe: Recipe, calibrated: Calibrated | None):
        super().__init__(info, dtype)
        if info.tensor_parallel != 1:
            raise CapabilityError(f"coded pages are of one process; tensor_parallel is {info.tensor_parallel}")
        if torch.cuda.is_available():
            raise CapabilityError("coded pages are served by a CPU backend, and this vLLM would run on a GPU")
        self._folder = tempfile.TemporaryDirectory(prefix="kvlab-pages-")
        self._process, self._started = None, None
        try:
            file, self._due = written(Path(self._folder.name), recipe, calibrated, info)
            self._process, self._pipe = begun(file)
            told = {"info": asdict(info) | {"path": str(info.path)}, "dtype": dtype, "max_tokens": max_tokens}
            self._started = Started(**self._asked(told | {"threads": torch.get_num_threads()}))
            refuse_other(self._started, self._due, file)
        except BaseException:
            self.close()
            raise

    @property
    def device(self) -> str:
        """The device in words."""
        return "cpu"

    @property
    def storage(self) -> Storage:
        """What the pages' tensors are."""
        return Storage(**self._started.storage)

    @property
    def proof(self) -> Proof:
        """See `Engine.proof`: its attention is the backend of coded pages."""
        return self._started.proof

    @property
    def pool(self) -> Pool:
        """See `Engine.pool`."""
        return self._started.pool

    @property
    def served(self) -> Served:
        """What it says that it codes by."""
        return self._due

    @property
    def canary_kl(self) -> float:
        """Nats that zeroed pages moved its logits by when it started."""
        return self._started.canary_kl

    def score(
        self, ids: Sequence[int], first: int, tap: Tap | None = None, placement: Placement = "pre_rope"
    ) -> torch.Tensor:
        """See `Engine.score`; `CapabilityError` for a tap."""
        if tap is not None:
            raise CapabilityError("an engine of coded pages takes no tap: K and V would be coded twice")
        self.passed = PagedPass(**self._asked({"ids": [int(token) for token in ids], "first": first}))
        data = self._over_the_pipe(self._pipe.recv_bytes)
        logits = torch.frombuffer(bytearray(data), dtype=getattr(torch, self.passed.dtype))
        return logits.view(-1, self.passed.width)[:, : self.info.vocab_size]

    def _asked(self, question: dict) -> dict:
        """What the process says to a question; what it refused is raised here."""
        self._over_the_pipe(self._pipe.send, question)
        found = self._over_the_pipe(self._pipe.recv)
        if isinstance(found, tuple):
            kind, said = found
            raise {"CodecNotActive": CodecNotActive, "ModelError": ModelError}.get(kind, CapabilityError)(said)
        return found

    def _over_the_pipe(self, act: Callable, *what: object) -> object:
        """Send or receive; a process that has ended did not start (`CapabilityError`), or broke off."""
        try:
            return act(*what)
        except (EOFError, OSError):
            said = f"vLLM with coded pages has ended with code {self._process.wait()}; what it said stands above"
            if self._started:
                raise CodecNotActive(said, code="not-active.process-ended") from None
            raise CapabilityError(said, code="capability.process-ended") from None

    def close(self) -> None:
        """End the process: a closed pipe is its sign."""
        if self._process is not None:
            self._pipe.close()
            try:
                self._process.wait(LEAVE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self._folder.cleanup()


def written(folder: Path, recipe: Recipe, calibrated: Calibrated | None, info: ModelInfo) -> tuple[Path, Served]:
    """The file that the engine is given, and what it has to say of itself for it."""
    if calibrated is None:
        return write_recipe_file(folder / "coded.json", recipe), Served(recipe_id=recipe.recipe_id, calibration=None)
    file = write_calibration(folder / "coded.kv", recipe, calibrated, info)
    fitted = digest({calibrated.origin: calibrated.sigma_hash})  # as a row names it
    return file, Served(recipe_id=recipe.recipe_id, calibration=fitted)


def begun(file: Path) -> tuple[subprocess.Popen, Connection]:
    """The process, and the pipe to it."""
    own, other = Pipe()
    environment = {name: value for name, value in os.environ.items() if name != RECIPE_VARIABLE}
    process = subprocess.Popen(
        [sys.executable, "-m", paged_process.__name__, str(other.fileno())],
        pass_fds=[other.fileno()],
        stdout=subprocess.DEVNULL,
        env=environment | {PAGES_VARIABLE: str(file)},
    )
    other.close()
    return process, own


def refuse_other(started: Started, due: Served, file: Path) -> None:
    """`CodecNotActive` unless the engine says that it codes by this recipe and the calibration that it reads."""
    own = read_header(file) if file.suffix == ".kv" else None
    calibration = own.calibration_hash if own and own.tensors else None
    found = (started.recipe_id, started.calibration_hash)
    if found != (due.recipe_id, calibration):
        raise CodecNotActive(
            f"vLLM says that it codes by recipe {found[0]} and calibration {found[1]}; it was given {due.recipe_id} and"
            f" {calibration}",
            code="not-active.other-recipe",
        )
