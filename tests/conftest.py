"""Shared fixtures: the tiny model, its parameters and windows; one vLLM engine for the whole session."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

from tiers import COMPILED, FIRST, FULL, LATER, NEITHER, tier

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of programs that tests start: threads without a core of their own spin
ROOT = Path(__file__).parent.parent
# They share the session's engines: one process runs them all.
ONE_ENGINE = ("engines", "calibration", "measure", "pipeline/studies")
# So do these, each what its tests share; files of other folders fill up the time beside them.
TOGETHER = ("workflow/lab", "gate", "validation/gate", "workflow", "kvstore/vllm")
# What takes longest comes first.
LONG = (*ONE_ENGINE, *TOGETHER, "pipeline", "cache", "codec", "cli", "evals", "text", "kvstore", "validation")
settings.load_profile(FIRST)  # unless --hypothesis-profile names the other


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a test of the tier are not read: to import all of them takes each process half a minute."""
    if collection_path.suffix != ".py" or config.option.markexpr not in (FULL, NEITHER):
        return None
    text = collection_path.read_text()
    return (f"mark.{FULL}" not in text if config.option.markexpr == FULL else bool(LATER.search(text))) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each test has one tier; begin with the folders in `LONG`, in this order."""
    for item in items:
        try:
            tier({mark.name for mark in item.iter_markers()})
        except ValueError as problem:
            raise pytest.UsageError(f"{item.nodeid}: {problem}") from None

    def place(item: pytest.Item) -> int:
        folder = item.path.parent.relative_to(ROOT / "tests").as_posix()
        return next((number for number, name in enumerate(LONG) if folder.startswith(name)), len(LONG))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look at all of it again after every few tests."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """At the end it is freed in order."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Of several processes (`pytest -n 2`), each takes a file at a time, or a folder of which the tests share much.

    All of `ONE_ENGINE` is one: vLLM starts once.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            folder = file.rpartition("/")[0].removeprefix("tests/")
            return "engine" if folder in ONE_ENGINE else folder if folder in TOGETHER else file

    return ByFile(config, log)


@pytest.fixture(autouse=True, scope="session")
def set_threads():
    """Torch's function of that name, called for one thread: small tensors lose by more on a busy machine."""
    import torch

    torch.set_num_threads(1)
    return torch.set_num_threads


@pytest.fixture(autouse=True, scope="module")
def threads_as_before(set_threads):
    """Jobs of the pipeline set torch's threads, for a process of their own; here other files' tests come after them.

    vLLM 0.32's worker on a CPU even puts a function in the place of torch's that does nothing.
    """
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads = set_threads
    set_threads(before)


@pytest.fixture(autouse=True, scope="session")
def torch_alone():
    """Caches read `klt` by torch alone: a process that holds numba cannot start vLLM 0.32 on a CPU after it."""
    from kvlab.cache.hf import codec_tables

    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get(COMPILED):
            patch.setattr(codec_tables, "compiles", lambda: False)
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture
def line(capsys):
    """Exit code, stdout and stderr of a line of `kvlab`, in this process."""
    from kvlab.cli import main

    def answer(*words) -> tuple[int, str, str]:
        code = 0
        try:
            main.main([str(word) for word in words])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return answer


@pytest.fixture(scope="session")
def base_params() -> dict:
    """The parameters of the embedded model, with every default written out, as a mapping."""
    import embedded
    from kvlab_pipeline.studies.settings import resolved

    with contextlib.chdir(ROOT):
        found = resolved(embedded.document()) | {"model": embedded.settings().model.model_dump(mode="json")}
    del found["models"]
    return found


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """Folder of a random three-layer Qwen2 with a tokenizer."""
    import tiny

    return tiny.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tiny_params(tiny_model, tmp_path_factory, base_params):
    """Parameters that fit the tiny model: windows of 64 + 32 tokens."""
    import tiny
    from kvlab.core.paramfile import overlay
    from kvlab_pipeline.studies.settings import Settings

    folder = tmp_path_factory.mktemp("text")
    text, other = tiny.write_text(folder / "text.txt"), tiny.write_text(folder / "other.txt", seed=1)
    changes = {
        "model": {"path": str(tiny_model), "n_layers": 3},
        "corpus": {"source": str(text), "other": str(other)},
        "windows": {"context": 64, "eval": 32, "test": 4, "calib": 6, "other": 3},
        "calibration": {"engines": ["hf"]},
        "codec": {"block_size": 64, "boundary_layers": [0], "n_centres": 4},
        "gap": {"origins": ["hf"]},
        "cells": {name: None for name in ("other-calibration", "k2v2", "k4v2", "k2v4", "k3v4", "k4v4")},
        "baseline": {"windows": 4},
        "layers": {"windows": 3},
        "split": {"windows": 3},
        "noise": {"windows": 3, "sigmas": [0.03, 0.1, 0.3], "groups": ["all", "boundary"]},
        "mitigations": {"windows": 3, "budget": 14.0, "uniform": [[3, 2], [6, 4]]},
        "ladder": {"windows": 3, "fewer": 3, "bits": [2, 4], "conditioned": ["hadamard"]},
        "mechanisms": {"dtype": "float32", "codecs": ["klt", "int", "fp8", "archive"], "bits": [2], "needles": 4}
        | {"cached_bits": [2]},
        "kvstore": {
            "restore": {"chunk_tokens": 8, "prompts": 2, "decode": 4, "lengths": [48, 96], "suffix": 8, "repeats": 3}
            | {"codecs": ["klt", "fp8"]},
            "policy": {"needles": 4},
            "bitplanes": {"windows": 2, "queries": 4},
            "placement": {"windows": 2, "orders": 4, "decode": 4},
        },
        "tradeoffs": {"windows": 2, "prompts": 2},
        "stats": {"resamples": 500},
        "jobs": {"threads": 1},
    }
    return Settings.complete(overlay(base_params, changes))


@pytest.fixture(scope="session")
def tiny_windows(tiny_params, tmp_path_factory) -> Path:
    """The tiny corpus, cut."""
    from kvlab.text.corpus import build

    out = tmp_path_factory.mktemp("corpus") / "windows.safetensors"
    build(tiny_params, out)
    return out


@pytest.fixture(scope="session")
def hf_engine(tiny_params):
    """The tiny model in transformers, float32, sdpa."""
    from kvlab.core.model import resolve
    from kvlab.engines.registry import start

    return start("hf", resolve(tiny_params.model), "float32", max_tokens=96)


@pytest.fixture(scope="session")
def vllm_engine(tiny_params):
    """The tiny model in vLLM, float32: the one start of the session."""
    from kvlab.core.model import resolve
    from kvlab.engines.registry import start

    engine = start("vllm", resolve(tiny_params.model), "float32", max_tokens=96)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def tiny_calibration(tiny_params, tiny_windows, tmp_path_factory) -> dict[str, Path]:
    """Capture, Sigma_q (also `rotated`), codebooks, components and `archive` of the tiny model, from transformers."""
    from kvlab.calibration.archive_file import write_archive
    from kvlab.calibration.asked import write_asked
    from kvlab.calibration.capture import capture
    from kvlab.calibration.components import fit_components
    from kvlab.calibration.sigma import fit_sigma
    from kvlab_pipeline.jobs.codebooks import fit_codebooks

    folder = tmp_path_factory.mktemp("calib")
    paths = {
        "capture": folder / "capture" / "hf.safetensors",
        "sigma": folder / "sigma" / "hf.safetensors",
        "rotated": folder / "sigma" / "hf-post_rope.safetensors",
        "codebooks": folder / "codebooks" / "hf.json",
        "components": folder / "components" / "hf.safetensors",
        "asked": folder / "asked" / "tiny.json",
        "archive": folder / "archive" / "hf.safetensors",
    }
    write_asked(["archive"], paths["asked"])
    capture(tiny_params, "hf", tiny_windows, paths["capture"], paths["asked"])
    fit_sigma(tiny_params, paths["capture"], paths["sigma"])
    fit_codebooks(tiny_params, paths["capture"], paths["sigma"], paths["rotated"], paths["codebooks"])
    fit_components(tiny_params, paths["capture"], paths["sigma"], paths["components"])
    write_archive(tiny_params, paths["asked"], paths["capture"], paths["sigma"], paths["archive"])
    return paths


@pytest.fixture(scope="session")
def tiny_fitted(tiny_calibration):
    """The same as the codecs take it."""
    from kvlab.calibration.load import FittedFiles

    return FittedFiles(*(tiny_calibration[name] for name in ("sigma", "codebooks", "components", "rotated", "archive")))
