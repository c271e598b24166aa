"""Tensor parallelism: a model over two processes measures what it measures in one."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvlab.core.errors import CapabilityError
from kvlab.core.model import resolve
from kvlab.engines.capability import check
from refusals import refused

USER = Path(__file__).with_name("split_user.py")


@pytest.fixture(scope="module")
def split(tiny_model, tmp_path_factory, root):
    """What the split engine answered, how it ended when one of the two was killed, and what memory that left."""
    before = set(Path("/dev/shm").iterdir())
    out = tmp_path_factory.mktemp("split") / "answers.safetensors"
    command, environment = [sys.executable, USER, tiny_model, out], os.environ | {"PYTHONPATH": str(root / "src")}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert out.exists(), ended.stderr
    return load_file(out), ended, {path.name for path in set(Path("/dev/shm").iterdir()) - before}


@pytest.fixture(scope="module")
def whole(vllm_engine):
    """The same questions to the session's engine, which is in one process."""
    spec = importlib.util.spec_from_file_location(USER.stem, USER)
    user = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(user)
    return user.answers(vllm_engine)


@pytest.mark.nightly
def test_logits_are_those_of_one_process(split, whole):
    for name in ("plain", "pre_rope", "post_rope", "again"):
        torch.testing.assert_close(split[0][name], whole[name], atol=2e-5, rtol=0)
    assert (whole["pre_rope"] - whole["plain"]).abs().max() > 0.1  # the tap has an effect to be missed


@pytest.mark.nightly
def test_the_tap_sees_all_heads_in_their_order(split, whole):
    assert split[0].keys() == whole.keys()
    assert split[0]["k0"].shape == (2, 96, 32) and split[0]["q0"].shape == (4, 96, 32)
    for part in "qkv":
        assert torch.equal(split[0][f"{part}0"], whole[f"{part}0"])  # nothing was summed over processes yet
        torch.testing.assert_close(split[0][f"{part}2"], whole[f"{part}2"], atol=2e-5, rtol=0)


@pytest.mark.nightly
def test_a_lost_process_ends_the_other_with_one_line(split):
    assert split[1].returncode == 1
    errors = [line for line in split[1].stderr.splitlines() if line.startswith("error: ")]
    assert errors == ["error: process 1 of the split model has ended with code -9"]
    assert not [name for name in split[2] if "kvlab" in name or "cpushm" in name]


@pytest.mark.parametrize("parts", [3, 4])
def test_parts_that_would_share_heads_are_refused_by_vllm_alone(parts, tiny_params):
    info = dataclasses.replace(resolve(tiny_params.model), tensor_parallel=parts)
    with refused(CapabilityError, "capability.split", f"is {parts}", "2 KV heads", "allowed: 1, 2"):
        check("vllm", "float32", "default", info)
    check("hf", "float32", "eager", info)


def test_fewer_gpus_than_parts_are_refused_before_anything_is_loaded(tiny_params, monkeypatch):
    from kvlab.engines.vllm.engine import VLLMEngine

    info = dataclasses.replace(resolve(tiny_params.model), tensor_parallel=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with refused(CapabilityError, "capability.split", "is 2", "1 GPU ", "1 at most"):
        VLLMEngine(info, "float32", "default", 96)
