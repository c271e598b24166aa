"""`kvlab speculate` on the tiny model: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json

import pytest

import tiny
from kvlab.core.errors import Fault
from kvlab_mechanisms.decoding.acceptance import refuse_other
from refusals import refused

pytestmark = pytest.mark.full


@pytest.fixture
def run(tiny_model, tmp_path, line):
    """Exit code, stdout and stderr of `kvlab speculate MODEL` on small prompts."""
    text = tiny.write_text(tmp_path / "text.txt")

    def verb(*words) -> tuple[int, str, str]:
        small = ("--context", 32, "--tokens", 8, "--draft", 3, "--windows", 2)
        return line("speculate", tiny_model, "--text", text, *small, *words)

    return verb


@pytest.mark.parametrize("temperature", [0, 1])
def test_each_codec_is_a_row(run, tmp_path, temperature):
    out = tmp_path / "found.json"
    words = ("--codec", "hadamard", "int", "--bits", 2, 6, "--temperature", temperature, "--json", out)
    code, said, err = run(*words)
    assert code == 0, err
    found = json.loads(out.read_text())
    rows = {row["codec"]: row for row in found["rows"]}
    assert list(rows) == ["hadamard 2", "hadamard 6", "int 2", "int 6"]
    assert all(0 <= row["alpha"] <= 1 and 1 <= row["tokens_per_call"] <= 4 for row in rows.values())
    if temperature:  # the greedy token of a random model withstands any codec
        assert rows["hadamard 6"]["alpha"] > rows["hadamard 2"]["alpha"]
    assert all(len(row["by_position"]) == 3 for row in rows.values())
    assert found["prompts"] == 2 and "tokens per call" in said
    assert found["plain_seconds"] > 0 and "without a drafter" in said
    assert ("plain greedy" in said) == (temperature == 0)


def test_a_codec_without_its_calibration_is_refused_in_one_line(run):
    code, said, err = run("--codec", "klt")
    assert code == 2 and said == "" and "calibration" in err.splitlines()[-1]
    code, _, err = run("--temperature", -1)
    assert code == 2 and "--temperature -1" in err.splitlines()[-1]


def test_more_prompts_than_there_are_are_refused(run):
    code, said, err = run("--codec", "fp8", "--windows", 9999)
    assert (code, said) == (2, "") and "--windows 9999: " in err and "give --windows " in err


def test_a_text_that_is_not_the_greedy_one_is_a_fault(tiny_model):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    logits = model(torch.tensor([[1, 2, 3]])).logits[0, -1]
    best, other = logits.topk(2).indices.tolist()
    refuse_other(model, [1, 2, 3], [best], [best])
    with refused(Fault, None, f"token 0 is {other}", best):
        refuse_other(model, [1, 2, 3], [other], [best])
