"""Codecs of whole caches in the bench: measured on a model's cache, and told apart from the others."""

from __future__ import annotations

import pytest

from kvlab.core.errors import MixedIdentity, UserError
from kvlab.core.model import resolve
from kvlab.text import corpus
from refusals import refused
from validation.bench import caches, contest, page, run

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def found(tiny_params, tiny_windows, tiny_calibration):
    info = resolve(tiny_params.model)
    tokens = corpus.load(tiny_windows, info.model_hash)
    archive = caches.opened(tiny_calibration["archive"], info, tokens.corpus_hash)
    return caches.measured(tiny_params, info, archive, tokens, rounds=2, threads=(1,))


def test_every_whole_rung_is_timed_both_ways_and_its_bytes_are_real(found, tiny_params):
    assert [(one["label"], one["bits"]) for one in found] == [("archive 2", 2)]
    (one,) = found
    assert one["tokens"] == tiny_params.windows.context and one["stored"] == pytest.approx(2, rel=0.011)
    assert all(one["speed"][task]["1"]["value"] > 0 for task in ("write", "read"))


def test_it_has_a_table_of_its_own_and_is_in_no_contest(found):
    kl = {"test": {"bits": 2.0, "windows": [0.001, 0.002]}}
    dear = {"test": {"bits": 2.0, "windows": [0.1, 0.2]}}
    data = {
        "whole": found,
        "whole_unmeasured": [],
        "kl": {"archive 2": kl, "klt 2": dear},
        "machine": {"threads": [1]},
        "bootstrap": {"resamples": 100, "confidence": 0.95, "seed": 0},
    }
    assert set(contest.divergences(data, "test")) == {"klt 2"}
    table = page.whole_table(data)
    assert "archive 2" in table and "0.0015" in table and page.whole_tokens(data) == str(found[0]["tokens"])
    none = data | {"whole": [], "whole_unmeasured": ["archive 2"]}
    assert page.whole_table(none) is None and set(contest.divergences(none, "test")) == {"klt 2"}


def test_a_codec_beside_other_windows_is_refused(tiny_params, tiny_calibration, tmp_path):
    with pytest.raises(MixedIdentity):
        caches.opened(tiny_calibration["archive"], resolve(tiny_params.model), "0" * 16)
    with refused(UserError, "user.no-windows", "--archive", "--windows"):
        run.opened(tiny_params, tmp_path, run.Inputs(archive=tiny_calibration["archive"]), run.Effort(windows=2))
