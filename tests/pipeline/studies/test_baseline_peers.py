"""The baseline run of another engine is also held against transformers in its own dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvlab.core.model import resolve
from kvlab.core.params import Params
from kvlab.core.records import BaselineCell, read_baseline
from kvlab.engines import registry
from kvlab.engines.hf.engine import HFEngine
from kvlab.measure import engines as lab_engines
from kvlab.stats.divergences import token_record
from kvlab.text import corpus
from kvlab_pipeline.jobs.plan import baseline_runs
from kvlab_pipeline.studies.baseline.measure import baseline
from kvlab_pipeline.studies.baseline.numbers import relative_mean
from kvlab_pipeline.studies.baseline.truth import own_jitter, peer_of

pytestmark = pytest.mark.full

RUN, PEER = "vllm-bfloat16-default", "hf-bfloat16-sdpa"


def changed(params, engines=("hf", "vllm"), **baseline) -> Params:
    """The parameters with another engine baseline."""
    given = params.baseline.model_copy(update=baseline)
    return params.model_copy(update={"engines": engines, "baseline": given})


class Engines:
    """What `start` gives when vLLM is played by transformers with its other attention; remembers all of it."""

    def __init__(self):
        self.open, self.closed = {}, []

    def start(self, name, info, dtype, attention=None, *, max_tokens, cache_dtype="auto"):
        engine = HFEngine(info, dtype, "eager" if name == "vllm" else attention, max_tokens)
        engine.close = lambda: self.closed.append(engine)
        self.open[f"{name}-{dtype}-{attention}"] = engine
        return engine


@pytest.fixture
def engines(monkeypatch):
    made = Engines()
    monkeypatch.setattr(registry, "start", made.start)
    monkeypatch.setattr(lab_engines, "refuse_impostor", lambda *_: None)
    return made


@pytest.mark.parametrize("run", ["hf-float32-sdpa", "hf-bfloat16-sdpa", "hf-bfloat16-eager", "vllm-float32-default"])
def test_runs_that_the_truth_says_enough_about(tiny_params, run):
    assert peer_of(baseline_runs(changed(tiny_params)), run) is None


def test_another_engine_below_float32_has_the_same_dtype_of_hf_as_its_peer(tiny_params):
    assert peer_of(baseline_runs(changed(tiny_params)), RUN) == PEER


@pytest.mark.parametrize("changes", [{"engines": ("vllm",)}, {"hf_attention": ("eager",)}])
def test_without_hf_in_sdpa_attention_there_is_no_peer(tiny_params, changes):
    assert peer_of(baseline_runs(changed(tiny_params, **changes)), RUN) is None


def test_the_run_holds_both_comparisons(tiny_params, tiny_windows, engines, tmp_path):
    """Row by row what the two engines' logits give, transformers first in KL."""
    baseline(changed(tiny_params), RUN, tiny_windows, None, tmp_path / "x.parquet")
    assert set(engines.open) == {RUN, PEER, "hf-float32-sdpa"}
    assert {id(engine) for engine in engines.closed} == {id(engine) for engine in engines.open.values()}

    record, tokens = read_baseline(tmp_path / "x.parquet")
    made = (RUN, "vllm", "bfloat16", "default")
    plain, peer = BaselineCell.of(*made, "plain", None), BaselineCell.of(*made, "peer", None, PEER)
    assert record.cells == (plain, peer)

    windows = corpus.load(tiny_windows, resolve(tiny_params.model).model_hash)
    for cell, against in ((plain, "hf-float32-sdpa"), (peer, PEER)):
        rows = tokens.filter(cell_id=cell.cell_id).sort("window", "position")
        assert len(rows) == windows.test.shape[0] * (windows.eval - 1)
        for number, ids in enumerate(windows.test.tolist()):
            ours, theirs = (engines.open[name].score(ids, windows.context) for name in (RUN, against))
            expected = token_record(theirs, ours, torch.tensor(ids[windows.context + 1 :]))
            found = rows.filter(window=number)
            for name in ("kl", "nll_ref", "nll_alt", "top1_ref", "top1_alt", "label"):
                np.testing.assert_allclose(found[name].to_numpy(), expected[name].numpy(), rtol=0, atol=1e-12)
    assert (tokens.filter(cell_id=peer.cell_id)["kl"] > 0).any()


def test_a_peer_not_measured_is_not_loaded(tiny_params, tiny_windows, engines, tmp_path):
    baseline(changed(tiny_params, hf_attention=("eager",)), RUN, tiny_windows, None, tmp_path / "x.parquet")
    assert set(engines.open) == {RUN, "hf-float32-sdpa"} and len(engines.closed) == 2
    assert [cell.what for cell in read_baseline(tmp_path / "x.parquet")[0].cells] == ["plain"]


def test_the_id_says_against_which_run():
    made = (RUN, "vllm", "bfloat16", "default", "peer", None)
    ids = {BaselineCell.of(*made, name).cell_id for name in (PEER, "hf-bfloat16-eager", "truth")}
    assert len(ids) == 3 and BaselineCell.of(*made) == BaselineCell.of(*made, "truth")


def test_further_rounding_errors_are_of_each_engine_against_itself(
    tiny_params, tiny_windows, tiny_fitted, engines, tmp_path
):
    """vLLM is played by transformers' other attention: it rounds otherwise, so each error ends elsewhere on it."""
    params, run = changed(tiny_params, windows=2, jitters=2), "vllm-float32-default"
    out = tmp_path / f"{run}.parquet"
    baseline(params, run, tiny_windows, tiny_fitted, out)
    record, tokens = read_baseline(out)
    means = {
        (cell.what, cell.protocol): tokens.filter(cell_id=cell.cell_id)["kl"].to_numpy().mean() for cell in record.cells
    }
    for protocol in params.protocols:
        own = [means[own_jitter(engine, n), protocol] for engine in ("hf", "vllm") for n in (1, 2)]
        apart = means["kv", protocol], means["jitter", protocol]
        assert max(apart) < min(own) and max(own) < 2 * min(own)  # what the codec costs, not what rounding does
        assert len(set(own)) == 4
    assert ("identity", "snapshot") in means and len(means) == 1 + 2 * (1 + 2 + 4)


def test_an_engines_cost_is_a_mean_over_its_rounding_errors():
    means = np.array([[1.0, 3.0, 2.0, 2.2, 1.0, 3.0], [2.0, 2.0, 2.0, 3.0, 3.0, 3.0]])
    assert relative_mean(means, 3) == pytest.approx([6.2 / 6 - 1, 0.5])
    assert relative_mean(means[:, [0, 3]], 1) == pytest.approx([1.2, 0.5])  # without further errors: the two alone
