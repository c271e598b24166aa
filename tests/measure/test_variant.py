"""Variants in the measuring loop: bytes that two ways must agree on, and what no sum over windows may hide."""

from __future__ import annotations

import pytest

from kvlab.attention.named import mechanism
from kvlab.codecs.recipes import named_recipe
from kvlab.core.errors import CalibrationMismatch, CodecNotActive
from kvlab.core.recipe import IDENTITY
from kvlab.measure import quick_run
from kvlab.measure.coding import Coder
from kvlab.measure.mechanism import IN_16_BITS, SparseReading, mechanism_variant
from kvlab.measure.scoring import WindowRun, cell_of_all_layers
from kvlab.measure.variant import ITEMSIZE
from kvlab.text import corpus
from refusals import refused

PATTERN = "block_sparse:block=8,top_k=1,window=8,sinks=0"


@pytest.fixture(scope="module")
def windows(hf_engine, tiny_windows):
    return corpus.load(tiny_windows, hf_engine.info.model_hash)


@pytest.fixture(scope="module")
def run(hf_engine, windows) -> WindowRun:
    return WindowRun(hf_engine, windows.test[0].tolist(), windows.context, 0)


class Uneven(Coder):
    """Its count is one too few on the first window's tensors and one too many on the others'."""

    def snapshot(self, x, site):
        found = super().snapshot(x, site)
        self.tally.fires += 1 if site.window else -1
        return found


def test_a_window_without_the_codec_is_refused_although_the_sum_of_all_is_right(hf_engine, windows, monkeypatch):
    monkeypatch.setattr(quick_run, "coder_of", Uneven)
    codec, layers = quick_run.NamedCodec("int 4", named_recipe("int", 4)), hf_engine.info.n_layers
    with refused(CodecNotActive, "not-active.fires", "'int 4'", f"fired 0 times where {2 * layers} were due"):
        quick_run.score(hf_engine, windows.test[:2], windows.context, [codec])


def test_the_gate_and_the_tradeoffs_count_the_same_reading(hf_engine, run):
    """Over K and V as an engine stores them, and over 16 bits: as many numbers, at the size of each."""
    asked, found = mechanism(PATTERN), []
    for variant in (SparseReading(asked), mechanism_variant(asked, hf_engine, "in_forward")):
        outcome = variant.measure(run)
        found.append((outcome.note, float(run.rows("x", outcome.logits, outcome.reference)["kl"].mean())))
    (own, own_kl), (half, half_kl) = found
    size = hf_engine.storage.itemsize / ITEMSIZE
    assert size == 2 and own["pattern"] == half["pattern"]
    assert own["stored"] == size * half["stored"] and own["read"] == pytest.approx(size * half["read"], rel=1e-12)
    assert own["stored"] == hf_engine.storage.itemsize * hf_engine.info.values_per_token * (1 + 1 / 16)  # of 8 keys one
    assert own_kl == pytest.approx(half_kl, rel=0.05) and own_kl > 1e-6


@pytest.mark.parametrize("protocol", ["snapshot", "in_forward"])
def test_a_pattern_over_a_codec_that_changes_nothing_stores_its_frames(hf_engine, run, protocol):
    """32 bits a number and the frame's head; 16 bits where there is no codec. Inside a forward nothing is witnessed."""
    asked = mechanism(PATTERN)
    cells = [cell_of_all_layers(PATTERN, hf_engine, protocol, recipe) for recipe in (IDENTITY, IN_16_BITS)]
    coded, plain = (SparseReading(asked, cell).measure(run) for cell in cells)
    assert coded.note["stored"] == pytest.approx(
        plain.note["stored"] + (hf_engine.storage.itemsize - ITEMSIZE) * hf_engine.info.values_per_token, rel=0.05
    )
    assert 1.1 * plain.note["read"] < coded.note["read"] < 2 * plain.note["read"]  # tokens since are in 16 bits in both
    assert (coded.read is None) == (protocol == "in_forward")


def test_a_latent_without_the_moments_of_a_layer_is_refused(hf_engine):
    moments = dict.fromkeys(range(hf_engine.info.n_layers - 1))
    with refused(CalibrationMismatch, None, "latent:rank=8", f"all {hf_engine.info.n_layers} layers"):
        mechanism_variant(mechanism("latent:rank=8"), hf_engine, "snapshot", moments)
