"""Tasks of lm-evaluation-harness: found, loaded, asked of one side after the other. What goes wrong is one line."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.core.errors import CapabilityError, KvlabError, UnknownName, UserError, suggestion
from kvlab.gate.registry import Eval, Registry

if TYPE_CHECKING:
    from kvlab.evals.lm import CachedLM

HARNESS = "lm-evaluation-harness"
SEED = 1234  # the harness's own, of examples and of texts that a task makes up
SCORING = ("multiple_choice", "loglikelihood")
ALLOWED = ("generate_until", *SCORING)
CODE_VARIABLE = "HF_ALLOW_CODE_EVAL"  # without it the metric of such tasks refuses
NOT_THERE = ("couldn't reach", "not cached", "doesn't exist on the hugging face hub", "offline", "connection")


class TaskError(UserError):
    """A task cannot be loaded, or not be run here."""

    code = "task"


def harness_eval(registry: Registry, quality_eval_id: str) -> Eval:
    """A registered eval of lm-evaluation-harness; `UnknownName` for any other."""
    entry = registry.eval(quality_eval_id)
    known = [name for name, one in registry.evals.items() if one.harness == HARNESS and one.task]
    if entry is None or quality_eval_id not in known:
        raise UnknownName(f"eval of {HARNESS}", quality_eval_id, known)
    return entry


@dataclass
class Tasks:
    """The tasks that make up an eval.

    Parameters
    ----------
    entry : Eval
        Of the gate's registry.
    loaded : dict
        What the harness loaded: ``tasks`` and ``groups`` by name.
    """

    entry: Eval
    loaded: dict[str, Any]

    @classmethod
    def load(cls, entry: Eval, folder: Path | None, metadata: dict[str, Any], unsafe: bool) -> Tasks:
        """Find and load an eval's task, with its data set.

        Parameters
        ----------
        entry : Eval
        folder : Path, optional
            Of tasks in YAML beside the harness's own; a name in it comes first.
        metadata : dict
            For tasks that make up their texts: `tokenizer` and `max_seq_lengths`.
        unsafe : bool
            Whether a task may run what the model wrote.

        Raises
        ------
        TaskError
            No task has the name, its data set is not on disk and cannot be fetched, a package is missing, or it needs
            leave to run code.
        CapabilityError
            Its answers would not show what is done to a cache, or are not what the registry says they are.
        """
        random.seed(SEED)
        if unsafe:
            os.environ.setdefault(CODE_VARIABLE, "1")
        with _one_line(entry.task):
            found = _manager(entry.task, folder, metadata).load([entry.task])
        tasks = cls(entry, found)
        tasks._refuse_others(unsafe)
        return tasks

    def _refuse_others(self, unsafe: bool) -> None:
        for name, task in self.loaded["tasks"].items():
            kind = task.OUTPUT_TYPE
            if kind not in ALLOWED:
                raise CapabilityError(
                    f"task {name!r} is of the kind {kind!r}, which scores whole texts in one pass and reads nothing of"
                    f" what is done to a cache; allowed: {', '.join(ALLOWED)}",
                    code="capability.reads-nothing",
                )
            if (kind not in SCORING) != self.entry.generates:
                said = "generated" if self.entry.generates else "scored"
                raise CapabilityError(
                    f"task {name!r} is of the kind {kind!r}, and the registry says of {self.entry.quality_eval_id!r}"
                    f" that its answers are {said}; correct `generates` there"
                )
            if getattr(task, "UNSAFE_CODE", False) and not unsafe:
                raise TaskError(_unsafe(name))

    def ask(self, lm: CachedLM, limit: int | None, chat: bool) -> dict[str, Any]:
        """Every item's answer and score from one side, as the harness writes them.

        What a task raises is one line; what the model raises stays as it is.
        """
        from lm_eval.evaluator import evaluate

        for task in self.loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(SEED)  # anew for each side: both see the same examples
        try:
            with _one_line(self.entry.task):
                return evaluate(
                    lm,
                    self.loaded,
                    limit=limit,
                    bootstrap_iters=0,
                    log_samples=True,
                    apply_chat_template=chat,
                    fewshot_as_multiturn=chat,
                    confirm_run_unsafe_code=True,  # asked for before
                )
        except TaskError:
            if lm.failure is not None:
                raise lm.failure from None
            raise


def _manager(name: str, folder: Path | None, metadata: dict[str, Any]):
    """The harness's index of tasks; that of a folder alone where it holds the task, which is much faster.

    Groups are looked up in the whole, for they may be made of the harness's own tasks.
    """
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import Kind

    if folder is not None:
        if not folder.is_dir():
            raise TaskError(f"--include-path {folder} is no folder; name one with tasks in YAML")
        local = TaskManager(include_path=str(folder), include_defaults=False, metadata=metadata)
        if name in local.task_index and local.task_index[name].kind is not Kind.GROUP:  # a group may name others
            return local
    manager = TaskManager(include_path=None if folder is None else str(folder), metadata=metadata)
    if name not in manager.task_index:
        hint = suggestion(name, manager.task_index)
        raise TaskError(f"lm-evaluation-harness has no task {name!r}; one of your own lies in --include-path{hint}")
    return manager


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Turn what a task raises, which may be anything, into one line."""
    try:
        with redirect_stdout(sys.stderr):  # tasks talk; what the verb prints is its answer
            yield
    except KvlabError:
        raise
    except ImportError as error:
        raise TaskError(
            f"task {name!r} needs a package that is not installed ({_first_line(error)}); what tasks need beyond the"
            " pins stands in requirements/evals.txt"
        ) from None
    except Exception as error:
        raise TaskError(_explained(name, error)) from error


def _explained(name: str, error: Exception) -> str:
    said = _first_line(error)
    if CODE_VARIABLE in str(error):
        return _unsafe(name)
    folder = _folder_of_data(str(error))
    if folder is not None:
        return (
            f"the data of task {name!r} is not on disk and cannot be fetched ({said}); run the same command once where"
            f" there is a network, and bring the folder {folder} here"
        )
    return f"task {name!r} cannot be run: {type(error).__name__}: {said}"


def _folder_of_data(said: str) -> Path | None:
    """Where data lies that an error misses; None when it is about something else."""
    if "NLTK Downloader" in said:
        return Path.home() / "nltk_data"
    if any(mark in said.lower() for mark in NOT_THERE):
        from huggingface_hub.constants import HF_HOME

        return Path(HF_HOME)
    return None


def _unsafe(name: str) -> str:
    return f"task {name!r} runs code that the model wrote; allow it with --confirm-run-unsafe-code"


def _first_line(error: Exception) -> str:
    """The first line that says something."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if any(map(str.isalpha, line))), type(error).__name__)
