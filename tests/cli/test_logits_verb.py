"""`kvlab logits` on files written by llama.cpp's rules, of this model, of another, and broken ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import tiny
from kvlab.core.errors import StorageError
from kvlab.core.model import load_tokenizer, resolve_folder
from kvlab.engines.registry import start
from kvlab.measure.base_logits import CUT, LEAST, NO_FILE, BaseLogits, divergence
from kvlab.stats.divergences import token_record
from kvlab.text.corpus import bos
from refusals import refused, refused_line

CONTEXT, CHUNKS = 32, 3


def row_of(logits: np.ndarray) -> bytes:
    """A row as perplexity.cpp has it: step and least log-probability in float32, then 16 bits a token."""
    logits = logits.astype(np.float32)
    top = logits.max()
    low = max(logits.min(), top - np.float32(16))
    total = np.log(np.exp((logits - top).astype(np.float64)).sum())
    step = np.float32((top - low) / np.float32(65535))
    codes = np.zeros(2 * ((logits.size + 1) // 2), "<u2")
    if step:
        codes[: logits.size] = np.where(logits > low, np.rint((logits - low) / step), 0)
    return np.array([step, low - top - total], "<f4").tobytes() + codes.tobytes()


def write(path, tokens: np.ndarray, logits: list[np.ndarray], vocabulary: int):
    """A file of chunks of tokens [chunks, tokens] and of logits [rows, vocabulary] of each."""
    header = np.array([tokens.shape[1], vocabulary, len(tokens)], "<i4")
    rows = b"".join(row_of(row) for chunk in logits for row in chunk)
    path.write_bytes(b"_logits_" + header.tobytes() + tokens.astype("<i4").tobytes() + rows)
    return path


@pytest.fixture(scope="module")
def scored(tiny_model, tmp_path_factory):
    """Tokens, and by model (this one and one of other weights) the logits that llama.cpp would have computed."""
    other = tiny.write_model(tmp_path_factory.mktemp("other") / "model", seed=5)
    info = resolve_folder(tiny_model)
    tokens = np.random.default_rng(0).integers(3, info.vocab_size, (CHUNKS, CONTEXT))
    prefix, found = bos(load_tokenizer(info)), {}
    for name, folder in (("same", tiny_model), ("other", other)):
        engine = start("hf", resolve_folder(folder), "float32", max_tokens=CONTEXT)
        chunks = [[*prefix, *row[len(prefix) :]] for row in tokens.tolist()]
        found[name] = [engine.score(ids, CONTEXT // 2).numpy() for ids in chunks]
        engine.close()
    return tokens, found, info.vocab_size


@given(arrays(np.float64, 37, elements=st.floats(-40, 40)))
def test_a_row_comes_back_to_half_a_step(tmp_path_factory, logits):
    path = tmp_path_factory.mktemp("row") / "one.kld"
    write(path, np.zeros((1, 4), int), [logits[None]], 37)
    (found,) = BaseLogits.read(path).log_probabilities(0)
    due = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    known = np.isfinite(found)
    assert np.abs(found - due)[known].max() <= 16 / 65535 / 2 + 1e-5
    assert due[~known].max(initial=-np.inf) <= LEAST + 1e-3 and known.any()


def test_a_model_against_its_own_logits_is_equal(tiny_model, scored, line, tmp_path):
    tokens, found, vocabulary = scored
    base, out = write(tmp_path / "same.kld", tokens, found["same"], vocabulary), tmp_path / "out.json"
    code, said, err = line("logits", tiny_model, "--base", base, "--json", out)
    data = json.loads(out.read_text())
    assert code == 0 and said.startswith("KL "), err
    assert abs(data["kl"]["value"]) < 1e-5 and data["top1"]["value"] > 0.95
    assert data["perplexity"][0] == pytest.approx(data["perplexity"][1], rel=1e-4)


def test_another_model_costs_what_the_whole_vocabulary_says(tiny_model, scored, line, tmp_path):
    import torch

    tokens, found, vocabulary = scored
    base, out = write(tmp_path / "other.kld", tokens, found["other"], vocabulary), tmp_path / "out.json"
    code, _, err = line("logits", tiny_model, "--base", base, "--json", out)
    data, labels = json.loads(out.read_text()), torch.tensor(tokens[:, CONTEXT // 2 + 1 :].copy())
    records = [
        token_record(torch.tensor(theirs), torch.tensor(ours), row)
        for theirs, ours, row in zip(found["other"], found["same"], labels, strict=True)
    ]
    assert code == 0, err
    due = {name: torch.cat([one[name] for one in records]) for name in records[0]}
    assert data["kl"]["value"] == pytest.approx(due["kl"].mean().item(), rel=1e-3) and data["kl"]["value"] > 0.01
    nll = [due[name].mean().exp().item() for name in ("nll_ref", "nll_alt")]
    assert data["perplexity"] == pytest.approx(nll, rel=1e-3)
    assert data["top1"]["value"] == pytest.approx((due["top1_ref"] == due["top1_alt"]).double().mean().item(), abs=0.03)


def test_tokens_below_the_least_are_no_part_of_the_sum():
    base = np.log(np.array([[0.5, 0.5, 1e-9]]))
    base[base <= LEAST] = -np.inf
    assert divergence(base, np.log(np.array([[0.25, 0.5, 0.25]]))) == pytest.approx(0.5 * np.log(2))


@pytest.mark.parametrize("fault", ["magic", "cut", "longer", "empty", "token", "row"])
def test_a_broken_file_is_refused(fault, scored, tmp_path):
    tokens, found, vocabulary = scored
    whole = bytearray(write(tmp_path / "base.kld", tokens, found["same"], vocabulary).read_bytes())
    if fault == "magic":
        whole[:2] = b"xx"
    elif fault == "token":
        whole[20:24] = np.array([vocabulary], "<i4").tobytes()
    elif fault == "row":
        at = 20 + 4 * CHUNKS * CONTEXT
        whole[at : at + 4] = np.array([np.nan], "<f4").tobytes()
    changed = {"cut": whole[:-2], "longer": whole + b"xx", "empty": b""}.get(fault, whole)
    (tmp_path / "base.kld").write_bytes(changed)
    with refused(StorageError, NO_FILE if fault in ("magic", "empty") else CUT, "base.kld"):
        read = BaseLogits.read(tmp_path / "base.kld")
        assert read.tokens.size and read.log_probabilities(0).size


def test_logits_of_another_vocabulary_are_one_line(tiny_model, line, tmp_path):
    base = write(tmp_path / "base.kld", np.zeros((2, 4), int), [np.zeros((1, 9))] * 2, 9)
    refused_line(line("logits", tiny_model, "--base", base), "vocabulary of 9")
