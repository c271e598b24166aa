"""A vLLM whose cache is coded pages: what it says, what it holds, and that no request feels another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cache.pages.pages_user import BLOCKS, PROMPTS, REQUESTS
from kvlab.cache.files.recipe import CalibrationFiles, write_recipe_file
from kvlab.cache.pages.token_bytes import rows_of
from kvlab.calibration.load import FittedFiles, load
from kvlab.codecs.base import Site
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.klt import KltStream
from kvlab.codecs.registry import build
from kvlab.core.recipe import Recipe

CODED = Recipe(k=KltStream(bits=3), v=HadamardStream(bits=3))
pytestmark = [pytest.mark.full, pytest.mark.engine]


@pytest.fixture(scope="session")
def fitted(tiny_calibration, hf_engine):
    files = {name: tiny_calibration[name] for name in ("sigma", "components")}
    return load(FittedFiles(**files, codebooks=None), hf_engine.info.model_hash)


@pytest.fixture(scope="session")
def codecs(fitted):
    return {stream: build(getattr(CODED, stream), fitted.stream(getattr(CODED, stream), stream)) for stream in "kv"}


@pytest.fixture(scope="session")
def user(tiny_model, tiny_calibration, tmp_path_factory) -> SimpleNamespace:
    """The one start of vLLM with coded pages of the session."""
    return served("pages_user.py", tiny_model, CODED, tiny_calibration, tmp_path_factory)


def served(program: str, model: Path, recipe: Recipe, calibration: dict, folders, *more: str) -> SimpleNamespace:
    """What a program beside this file answers about a model and a recipe, and its log."""
    files = CalibrationFiles(sigma=calibration["sigma"], components=calibration["components"])
    file = write_recipe_file(folders.mktemp("pages") / "coded.json", recipe, calibration=files)
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "KVLAB_"))}
    paths = os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(program), model, file, *more],
        capture_output=True,
        text=True,
        timeout=300,
        env=clean | settings | {"PYTHONPATH": paths},
    )
    answers = [line.split(" ", 1)[1] for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(answers) == 1, done.stdout[-4000:] + done.stderr[-4000:]
    return SimpleNamespace(**json.loads(answers[0]), log=done.stdout + done.stderr)


def test_its_pages_are_the_coded_bytes_by_vllms_own_count(user, codecs, hf_engine):
    info, pages = hf_engine.info, user.status["pages"]
    due = [
        sum(rows_of(codecs[s], Site(0, layer, s), info.n_kv_heads, info.head_dim).bytes for s in "kv")
        for layer in range(info.n_layers)
    ]
    assert user.bytes == due and pages["bytes_per_token"] == sum(due)
    assert pages["blocks"] == user.blocks == BLOCKS and pages["block_size"] == 32
    assert pages["plain_bytes_per_token"] == 2 * 4 * info.n_layers * info.n_kv_heads * info.head_dim
    assert "vLLM's pages hold the coded bytes of K (klt) and V (hadamard)" in user.log


def test_it_says_what_transformers_says_with_the_same_codecs_in_its_forward(user, codecs, hf_engine):
    """Prompts are cut into chunks, and the last one finds its beginning in the prefix cache."""

    def every_token(layer, part, x):
        if part in codecs:
            return codecs[part].decode(codecs[part].encode(x, Site(0, layer, part)))

    for ids, found in zip(PROMPTS, user.logprobs, strict=True):
        said, plain = (logprobs(hf_engine, ids, tap) for tap in (every_token, None))
        torch.testing.assert_close(torch.tensor(found), said, atol=1e-3, rtol=1e-3)
        assert (said - plain).abs().max() > 0.02


def logprobs(engine, ids: list[int], tap=None) -> torch.Tensor:
    return engine.score(ids, 0, tap).log_softmax(-1)[range(len(ids) - 1), ids[1:]]


def test_another_backend_or_cache_is_refused_in_the_persons_own_process(user):
    assert [kind for kind, _ in user.refused] == ["CapabilityError", "CapabilityError"]
    backend, dtype = [said for _, said in user.refused]
    assert "attention backend FLEX_ATTENTION was asked for" in backend and "kv_cache_dtype 'fp8_e4m3'" in dtype
    assert "\n" not in backend + dtype


def test_the_backend_stands_in_its_place_only_while_the_variable_is_set(user):
    assert user.placed == [True, False]


def test_zeroed_pages_moved_the_logits(user):
    assert user.status["pages"]["canary_kl"] > 0.01


def test_no_request_feels_another_and_no_block_leaks(user):
    found = user.soak
    assert found["different"] == [] and found["leaked"] == 0
    assert found["equal"] + found["tied"] + found["cancelled"] == REQUESTS and found["tied"] <= 1
    assert found["preemptions"] > 0 and found["shared"] > 0 and found["cancelled"] > 0
