"""`kvlab measure --mechanism`: rows beside the codecs', and what ends the command when a mechanism is not at work."""

from __future__ import annotations

import json

import pytest

from kvlab.attention import hf
from kvlab.attention.patterns import Full
from kvlab.measure.latent import LatentCoder

SPARSE, LATENT = "block_sparse:block=8,top_k=1,window=8", "latent:rank=32"


@pytest.fixture
def run(tiny_model, texts, line):
    """Exit code, stdout, and the last line of stderr."""

    def verb(*words) -> tuple[int, str, str]:
        small = ("--codec", "int", "--context", 64, "--eval", 32, "--windows", 2, "--calib-text", texts[1])
        code, out, err = line("measure", tiny_model, "--text", texts[0], *small, *words)
        return code, out, (err.splitlines() or [""])[-1]

    return verb


def test_mechanisms_stand_beside_codecs(run, tmp_path):
    out = tmp_path / "found.json"
    code, said, err = run("--mechanism", SPARSE, LATENT, "latent:rank=1", "--dtype", "float32", "--json", out)
    assert code == 0, err
    found = json.loads(out.read_text())
    rounding, coded, sparse, latent, least = found["rows"]
    values = 2 * 3 * 2 * 32
    assert rounding["stored"] == 2 * values and rounding["read"] == 2 * values * (64 + 33 / 2)
    assert coded["read"] == pytest.approx(coded["stored"] * 64 + 2 * values * 33 / 2)
    assert sparse["stored"] == 2 * values * (1 + 1 / 16) and 0 < sparse["read"] < rounding["read"]
    assert latent["stored"] == pytest.approx(2 * (60 * 32 * 3 + 4 * values) / 64)
    assert rounding["kl"]["value"] < latent["kl"]["value"] < least["kl"]["value"]
    assert all(0 <= kl < 1e-5 for kl in found["mechanisms_witnessed"].values()) and len(found["witnessed"]) == 1
    assert "stored B/token" in said and "agrees" in said and "latents calibrated on" in said


def test_a_latent_of_everything_costs_its_rounding(run, tmp_path):
    out = tmp_path / "found.json"
    assert run("--mechanism", "latent:rank=128", "--json", out)[0] == 0
    rounding, _, latent = json.loads(out.read_text())["rows"]
    assert latent["kl"]["value"] < 20 * rounding["kl"]["value"]


def test_sparse_reading_inside_the_forward_is_said_to_be_unwitnessed(run, tmp_path):
    out = tmp_path / "found.json"
    code, said, err = run("--mechanism", SPARSE, LATENT, "--protocol", "in_forward", "--json", out)
    assert code == 0 and "not computed a second time" in said, err
    assert f"{LATENT}: not_run" in said and list(json.loads(out.read_text())["not_run"]) == [LATENT]


def test_without_a_mechanism_nothing_is_said_of_reading(run):
    code, said, _ = run()
    assert code == 0 and "stored B/token" not in said


def test_what_leaves_nothing_out_ends_the_command(run):
    code, said, err = run("--mechanism", "window:window=500")
    assert (code, said) == (1, "") and "leaves out nothing of so few tokens" in err


def test_a_plan_that_is_not_followed_ends_the_command(run, monkeypatch):
    honest = hf.run
    monkeypatch.setattr(hf, "run", lambda _pattern, *given: honest(Full(), *given))
    code, said, err = run("--mechanism", SPARSE)
    assert (code, said) == (1, "") and "does not reach the attention" in err


def test_counts_that_lie_are_caught_by_the_witness(run, monkeypatch):
    honest = hf.allowed
    monkeypatch.setattr(hf, "allowed", lambda q, k, pattern: honest(q.flip(2), k, pattern))
    code, said, err = run("--mechanism", SPARSE)
    assert (code, said) == (1, "") and "a plain forward's logits are KL" in err


def test_latents_that_are_not_made_end_the_command(run, monkeypatch):
    monkeypatch.setattr(LatentCoder, "snapshot", lambda self, x, site: x)
    code, said, err = run("--mechanism", LATENT)
    assert (code, said) == (1, "") and "its codec fired 0 times where 6 were due" in err


def test_latents_that_are_not_read_end_the_command(run, monkeypatch):
    honest = LatentCoder.snapshot
    monkeypatch.setattr(LatentCoder, "snapshot", lambda self, x, site: (honest(self, x, site), x)[1])
    code, said, err = run("--mechanism", LATENT)
    assert (code, said) == (1, "") and "does not reach the attention" in err


def test_a_mistake_is_told_before_anything_is_loaded(run):
    code, said, err = run("--mechanism", "block_sprase")
    assert (code, said) == (2, "") and "did you mean 'block_sparse'" in err
