"""Scores of planted codecs whose error and bits are known."""

import math
from dataclasses import replace

import pytest
import torch

from kvlab.codecs.base import Site
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.klt import KltStream
from kvlab.core.errors import CapabilityError
from kvlab.core.recipe import IDENTITY, Recipe
from validation.bench import clock, sources, subjects
from validation.bench.rivals import EncodedTensor, Library, LibraryCodec, usable
from validation.bench.score import Scorer, limit_row, whole
from validation.bench.subjects import BenchCodec
from validation.limit import theory as limit

pytestmark = pytest.mark.full

SOURCE = sources.planted(heads=1, tokens=600, head_dim=16)
RIDGE = 1e-6


def first(source, stream):
    return next(sample for sample in source.samples if sample.stream == stream)


def both(stream):
    return Recipe(k=stream, v=stream)


def noisy(bits, nbytes_per_value, variance):
    """A codec that adds noise of a variance and says that it stored so many bytes."""

    def encode(x):
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) * math.sqrt(variance)
        return EncodedTensor(x.float() + noise, x.numel() * nbytes_per_value)

    return BenchCodec(
        "noisy", 4, library=Library("none", "math", lambda b, d: LibraryCodec(encode, lambda stored: stored.held, bits))
    )


@pytest.fixture(scope="module")
def scorers():
    return {sample.stream: Scorer(sample, RIDGE) for sample in SOURCE.samples}


def test_identity_has_no_error_and_sixteen_bits(scorers):
    found = scorers["k"].score(BenchCodec("identity", None, IDENTITY))
    assert found["index_bits"] == 16 and 16 < found["bits"] < 16.5
    assert [found[key] for key in ("nmse_db", "above_db", "excess", *limit.PARTS)] == [None] * 8


def test_known_noise_gives_the_known_distance(scorers):
    scorer, variance = scorers["v"], 1e-4
    found = scorer.score(noisy(4.0, 0.625, variance))
    assert found["bits"] == 5.0 and found["index_bits"] == 4.0
    assert found["excess"] == pytest.approx(5.0 - limit.rate_at(scorer.spectrum, variance).item(), abs=0.02)
    assert found["above_db"] == pytest.approx(
        10 * math.log10(variance / limit.distortion_at(scorer.spectrum, 5.0).item()), abs=0.1
    )
    assert found["metadata"] == 1.0
    assert abs(found["shape"]) < 0.01 and found["mismatch"] == 0
    assert sum(found[part] for part in limit.PARTS) == pytest.approx(found["excess"], abs=1e-12)


def test_errors_of_keys_are_weighed(scorers):
    scorer, variance = scorers["k"], 1e-3
    found = scorer.score(noisy(4.0, 0.5, variance))
    weight = scorer.sample.weight
    expected = variance * weight.diagonal(dim1=-2, dim2=-1).mean() / scorer.spectrum.mean()
    assert found["nmse_db"] == pytest.approx(10 * math.log10(expected), abs=0.3)


def test_rotated_scalar_codec_loses_the_coding_gain(scorers):
    found = scorers["v"].score(BenchCodec("hadamard 4", 4, both(HadamardStream(bits=4))))
    assert found["allocation"] == pytest.approx(limit_row(scorers["v"])["coding_gain"], abs=0.15)
    assert found["granular"] == pytest.approx(0.641, abs=0.15)
    assert abs(found["shape"]) < 0.1
    assert sum(found[part] for part in limit.PARTS) == pytest.approx(found["excess"], abs=1e-12)


def test_klt_allocates_and_pays_for_mismatch(scorers):
    for stream in ("k", "v"):
        found = scorers[stream].score(BenchCodec("klt 3", 3, both(KltStream(bits=3))))
        assert found["bits"] <= 3.1
        assert 0 <= found["allocation"] < 0.2
        assert 0.3 < found["granular"] < 0.65
        assert found["mismatch"] > -0.02
        assert sum(found[part] for part in limit.PARTS) == pytest.approx(found["excess"], abs=1e-12)


def test_a_sample_scored_whole(scorers):
    sample = first(SOURCE, "v")
    found = whole(noisy(4.0, 0.5, 1e-4), replace(sample, whole=sample.scored[0]), RIDGE)
    spectrum = scorers["v"].spectrum
    assert found["nmse_db"] == pytest.approx(10 * math.log10(1e-4 / spectrum.mean()), abs=0.1)
    assert found["bits"] == 4.0


def test_own_coder_goes_through_bytes():
    coder = BenchCodec("identity", None, IDENTITY).coder("k", 16, None)
    x = first(SOURCE, "k").scored[0]
    coded = coder.encode(x, Site(0, 0, "k"))
    assert torch.equal(coder.decode(coder.read(coder.write(coded))), x.float())
    assert coder.nbytes(coded) == len(coder.write(coded))


def test_a_library_that_is_missing_or_broken_is_named():
    def broken(bits, head_dim):
        raise CapabilityError("no such bits")

    assert usable(Library("no-such-package", "no_such_module", broken)) == "not installed"
    assert "no such bits" in usable(Library("torch", "torch", broken))


def test_roster_names_every_rung_once(monkeypatch):
    import embedded

    monkeypatch.setattr(subjects, "LIBRARIES", {"none": Library("no-such-package", "no_such_module", None)})
    found = subjects.roster(embedded.settings())
    labels = [subject.label for subject in found.subjects]
    assert len(labels) == len(set(labels)) and {"identity", "klt 2", "fp8"} <= set(labels)
    assert found.missing == {"none": "no-such-package: not installed"}


def test_every_task_is_timed_in_every_round():
    calls = []
    tasks = {("a",): lambda: calls.append("a"), ("b",): lambda: calls.append("b")}
    found = clock.interleaved(tasks, rounds=4, threads=(1, 2))
    assert {key: len(seconds) for key, seconds in found.items()} == {
        (name, threads): 4 for name in "ab" for threads in (1, 2)
    }
    assert calls.count("a") == calls.count("b") == 4 * 2 + 1
    assert calls[2:4] == ["a", "b"] and calls[-2:] == ["b", "a"]  # the first of a round changes
    assert clock.rate(2_000_000, [1.0, 2.0, 4.0]) == {"value": 1.0, "low": 0.5, "high": 2.0}
