"""The two protocols: what they do, where they differ, and that nothing is coded unnoticed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from kvlab.calibration import load as calibration
from kvlab.codecs.base import Site
from kvlab.codecs.block.studied import studied_recipe
from kvlab.codecs.identity.codec import IdentityCodec
from kvlab.codecs.noise import NoiseStream
from kvlab.codecs.stream.cache_file import CacheHeader, CacheReader, CacheWriter
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.errors import CodecNotActive, Fault
from kvlab.core.recipe import IDENTITY, Cell, Recipe, digest
from kvlab.measure.coding import CleanCapture, Coder, InForward, squares
from kvlab.measure.scoring import CANARY, WindowRun
from kvlab.measure.subjects import probed, probes_of
from kvlab.text import corpus
from kvlab_pipeline.studies.baseline.measure import JitteredCoder
from refusals import refused

CONTEXT = 64


@pytest.fixture(scope="module")
def calibrated(tiny_fitted, hf_engine):
    return calibration.load(tiny_fitted, hf_engine.info.model_hash)


@pytest.fixture(scope="module")
def run(hf_engine, tiny_windows):
    ids = corpus.load(tiny_windows, hf_engine.info.model_hash).test[0].tolist()
    return WindowRun(hf_engine, ids, CONTEXT, 0)


def cell(protocol="in_forward", recipe=IDENTITY, layers=(0, 1, 2), stream="kv", engine="hf") -> Cell:
    shared = {"study": "cells", "label": "test", "engine": engine, "dtype": "float32", "windows": 1, "origin": "hf"}
    return Cell(protocol=protocol, recipe=recipe, layers=layers, stream=stream, **shared)


def noise(sigma: float) -> Recipe:
    return Recipe(k=NoiseStream(sigma=sigma, seed=7), v=NoiseStream(sigma=sigma, seed=7))


def kl(run, cell, coder) -> float:
    return float(run.rows("x", run.logits(cell, coder))["kl"].mean())


@pytest.mark.parametrize("protocol", ["in_forward", "snapshot"])
def test_identity_changes_nothing(run, protocol):
    coder = Coder(cell(protocol), None)
    assert kl(run, coder.cell, coder) < 1e-12
    assert coder.tally.fires == 6


def test_snapshot_is_what_a_real_cache_does(run, calibrated, tiny_params):
    """Clean prefill, coded cache, teacher-forced evaluation: with transformers' own cache as the oracle."""
    recipe = studied_recipe(tiny_params)
    ours = Coder(cell("snapshot", recipe, layers=(1, 2)), calibrated)
    expected = run.logits(ours.cell, ours)

    model, coder = run.engine.model, Coder(cell("snapshot", recipe, layers=(1, 2)), calibrated)
    ids = torch.tensor([run.ids])
    with torch.inference_mode():
        cache = model(ids[:, :CONTEXT], use_cache=True).past_key_values
        cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(CONTEXT)[None])
        for layer in (1, 2):
            k = coder.round_trip(run.clean["pre_rope"].kept[layer, "k"], Site(0, layer, "k"))
            half = k.shape[-1] // 2
            cache.layers[layer].keys = (k * cos + torch.cat([-k[..., half:], k[..., :half]], -1) * sin)[None]
            v = run.clean["pre_rope"].kept[layer, "v"]
            cache.layers[layer].values = coder.round_trip(v, Site(0, layer, "v"))[None]
        logits = model(ids[:, CONTEXT:], past_key_values=cache, use_cache=True).logits[0, :-1]
    torch.testing.assert_close(expected, logits, atol=2e-4, rtol=1e-4)


def test_the_protocols_agree_where_no_damage_can_travel(run):
    """A codec on the last layer alone has no layer above it to disturb."""
    kls = []
    for protocol in ("in_forward", "snapshot"):
        coder = Coder(cell(protocol, noise(0.3), layers=(2,)), None)
        kls.append(run.logits(coder.cell, coder))
    torch.testing.assert_close(kls[0], kls[1], atol=1e-5, rtol=1e-5)


def test_the_protocols_differ_where_damage_travels(run):
    logits = []
    for protocol in ("in_forward", "snapshot"):
        coder = Coder(cell(protocol, noise(0.3), layers=(0,)), None)
        logits.append(run.logits(coder.cell, coder))
    assert (logits[0] - logits[1]).abs().max() > 1e-2


def test_both_protocols_code_the_same_first_layer(run, calibrated, tiny_params):
    """Below the first coded layer nothing differs, so the first coded tensor is the same, bit for bit."""
    taken = {}

    class Spy(Coder):
        def _code(self, x, site):
            coded = super()._code(x, site)
            taken.setdefault((self.cell.protocol, site), coded.tensor)
            return coded

    for protocol in ("in_forward", "snapshot"):
        coder = Spy(cell(protocol, studied_recipe(tiny_params), layers=(1, 2)), calibrated)
        run.logits(coder.cell, coder)
    for stream in "kv":
        first, second = Site(0, 1, stream), Site(0, 2, stream)
        assert torch.equal(taken["in_forward", first], taken["snapshot", first])
        assert not torch.equal(taken["in_forward", second], taken["snapshot", second])


def test_only_the_context_is_coded(run):
    coder = Coder(cell(recipe=noise(0.5)), None)
    tap = InForward(coder, 0, CONTEXT)
    x = torch.randn(2, 96, 32)
    answer = tap(0, "k", x)
    assert torch.equal(answer[:, CONTEXT:], x[:, CONTEXT:])
    assert not torch.equal(answer[:, :CONTEXT], x[:, :CONTEXT])
    assert tap(0, "q", x) is None


@pytest.mark.parametrize("placement", ["pre_rope", "post_rope"])
def test_a_weighted_error_is_recorded_only_where_its_metric_is_known(run, calibrated, placement):
    """A plain error of K under that name would be compared with weighted ones."""
    planted = cell(recipe=noise(0.1)).model_copy(update={"placement": placement})
    for known in [calibrated, replace(calibrated, rotated={})] if placement == "post_rope" else [calibrated, None]:
        coder = Coder(planted, known)
        run.logits(planted, coder)
        due = "kv" if known is calibrated else "v"
        assert set(coder.coding(run.engine.info, CONTEXT, "float32").whitened_error) == set(due)


@pytest.mark.parametrize("placement", ["pre_rope", "post_rope"])
def test_the_error_of_k_is_weighed_as_k_was_coded_and_that_of_v_is_plain(calibrated, placement):
    coder = Coder(cell(recipe=noise(0.1)).model_copy(update={"placement": placement}), calibrated)
    tap, source = InForward(coder, 0, CONTEXT), torch.Generator().manual_seed(1)
    for stream, weigh in (("k", calibrated.metric(placement)[1].whiten), ("v", None)):
        x = torch.randn(2, 96, 32, generator=source)
        before, after = x[:, :CONTEXT], tap(1, stream, x.clone())[:, :CONTEXT]
        found = coder.tally.error_sq[stream], coder.tally.signal_sq[stream]
        assert found == pytest.approx(squares(before, after, weigh))
        assert weigh is None or found != pytest.approx(squares(before, after, None))


def test_a_record_names_what_was_read_and_nothing_else(calibrated, tiny_params):
    """By layer, stream and recipe; another table under the same recipe has another digest."""
    studied = studied_recipe(tiny_params)
    named = Coder(cell(recipe=studied, layers=(0, 1, 2)), calibrated).fitted()
    tables = {f"table/{which}/pre_rope/{digest(getattr(studied, which))}" for which in "kv"}
    whitened = {0, 1, 2} - set(studied.k.whiten_skip_layers) if studied.k.whiten else set()
    assert tables <= set(named) and {name for name in named if name not in tables} >= {
        f"whitener/k/pre_rope/{layer}" for layer in whitened
    }
    assert Coder(cell(recipe=noise(0.1)), calibrated).fitted() == Coder(cell(), None).fitted() == {}
    one = next(iter(tables))
    key = ("k" if one.startswith("table/k") else "v", "pre_rope", one.rpartition("/")[2])
    moved = replace(calibrated, tables=calibrated.tables | {key: calibrated.tables[key] * 1.01})
    again = Coder(cell(recipe=studied, layers=(0, 1, 2)), moved).fitted()
    assert {name for name in named if named[name] != again[name]} == {one}
    assert all(len(made) == 12 for made in named.values())


def test_uncoded_streams_and_layers_are_left_alone():
    coder = Coder(cell(recipe=noise(0.5), layers=(1,), stream="v"), None)
    assert [coder.codes(layer, part) for layer, part in ((1, "v"), (1, "k"), (0, "v"), (1, "q"))] == [True] + [
        False
    ] * 3


def test_planted_noise_is_recovered(run):
    """KL of small Gaussian noise is quadratic in sigma, and the tally knows the sigma that was planted."""
    measured = []
    for sigma in (0.005, 0.01, 0.02):
        coder = Coder(cell(recipe=noise(sigma)), None)
        measured.append(kl(run, coder.cell, coder))
        tally = coder.tally
        error = {stream: tally.error_sq[stream] / tally.signal_sq[stream] for stream in "kv"}
        for stream in "kv":  # the tally divides by the spread about the mean, sigma is relative to the rms
            clean = [run.clean["pre_rope"].kept[layer, stream] for layer in range(3)]
            power = sum(x.square().mean() * x.numel() for x in clean)
            spread = sum((x - x.mean(1, keepdim=True)).square().sum() for x in clean)
            assert (error[stream] * spread / power) ** 0.5 == pytest.approx(sigma, rel=0.05)
    assert measured[1] / measured[0] == pytest.approx(4, rel=0.25)
    assert measured[2] / measured[1] == pytest.approx(4, rel=0.25)


@pytest.mark.parametrize("protocol", ["in_forward", "snapshot"])
def test_every_measure_of_damage_falls_with_bits(run, protocol):
    """Error and KL, from one bit to eight, with nothing truncated; at eight almost nothing is left."""
    errors, kls, flips = [], [], []
    for bits in (1, 2, 4, 6, 8):
        stream = CANARY.k.model_copy(update={"bits": bits})
        coder = Coder(cell(protocol, Recipe(k=stream, v=stream)), None)
        rows = run.rows("x", run.logits(coder.cell, coder))
        kls.append(float(rows["kl"].mean()))
        flips.append(int((rows["top1_ref"] != rows["top1_alt"]).sum()))
        errors.append({s: coder.tally.error_sq[s] / coder.tally.signal_sq[s] for s in "kv"})
    for falling in ([e["k"] for e in errors], [e["v"] for e in errors], kls):
        assert all(after < before for before, after in pairwise(falling))
    assert kls[-1] < 1e-3 * kls[0] and errors[-1]["k"] < 1e-3 * errors[0]["k"]
    assert flips[-1] <= flips[0]


def test_a_codec_that_fires_too_seldom_is_refused(run):
    coder = Coder(cell(), None)
    coder.tally.fires = 5
    with refused(CodecNotActive, "not-active.fires", "fired 5 times", "6 were due"):
        coder.coding(run.engine.info, CONTEXT, "float32")


def probe(run, cells):
    """The canaries and floors of some cells, on a window that has been begun."""
    visit = SimpleNamespace(run=lambda _which: run)
    return probed((one, one.score(visit)) for one in probes_of(cells, None))


def test_the_canary_moves_the_logits(run):
    found = probe(run, [cell("in_forward"), cell("snapshot")])
    assert len(found) == 2
    assert all(one.canary > 1e-3 and one.floor <= 1e-9 for one in found.values())


def test_a_dead_hook_of_one_stream_is_caught(run, monkeypatch):
    score = type(run.engine).score

    def deaf_to_k(self, ids, first, tap=None, placement="pre_rope"):
        def only_v(layer, part, x):
            return tap(layer, part, x) if part == "v" else None

        return score(self, ids, first, only_v if tap else None)

    monkeypatch.setattr(type(run.engine), "score", deaf_to_k)
    with refused(CodecNotActive, "not-active.canary", "on K "):
        probe(run, [cell()])


def test_a_hook_that_reaches_nothing_is_caught(run, monkeypatch):
    monkeypatch.setattr(type(run.engine), "score", lambda *_: run.reference)
    with refused(CodecNotActive, "not-active.canary"):
        probe(run, [cell()])


def test_an_exchange_on_the_way_to_the_codec_is_caught_by_the_floor(run, monkeypatch):
    code = Coder._code

    def heads_swapped(self, x, site):
        return code(self, x.flip(0), site)

    monkeypatch.setattr(Coder, "_code", heads_swapped)
    with refused(Fault, "fault.floor", "hf in float32"):
        probe(run, [cell("snapshot")])


def test_the_memo_changes_no_count_and_no_logit(run, calibrated, tiny_params):
    recipe, memo = studied_recipe(tiny_params), {}
    plain = Coder(cell("snapshot", recipe), calibrated)
    first, second = (Coder(cell("snapshot", recipe), calibrated, memo) for _ in range(2))
    logits = [run.logits(c.cell, c) for c in (plain, first, second)]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    assert plain.tally == first.tally == second.tally
    assert len(memo) == 6


@pytest.mark.parametrize("layers", [(0, 1), (1, 2), (2,)])
def test_what_a_pass_need_not_do_again_changes_nothing(run, calibrated, tiny_params, layers, monkeypatch):
    """Clean tensors looked up and layers below left out, against a pass that codes and runs all of it."""
    recipe, memo = studied_recipe(tiny_params), {}
    one = cell("in_forward", recipe, layers)
    first, second = (Coder(one, calibrated, memo) for _ in range(2))
    logits = [run.logits(one, coder) for coder in (first, second)]
    assert {key[3].layer for key in memo} == {layers[0]}  # the damage of one layer reaches the next
    bare = Coder(one, calibrated)
    monkeypatch.setattr(run, "_inputs", None)
    monkeypatch.setattr(run, "clean", {})
    whole = run.logits(one, bare)
    assert torch.equal(logits[0], whole) and torch.equal(logits[1], whole)
    assert first.tally == second.tally == bare.tally


@pytest.mark.parametrize("layers", [(0, 1), (1, 2), (2,)])
def test_a_snapshot_scored_from_its_first_coded_layer_is_the_whole_pass(run, calibrated, tiny_params, layers):
    one = cell("snapshot", studied_recipe(tiny_params), layers)
    whole = run.engine.score_over(run.ids, run.snapshot(one, Coder(one, calibrated)))
    assert torch.equal(run.logits(one, Coder(one, calibrated)), whole)
    assert not torch.equal(whole, run.over_clean)


@pytest.mark.parametrize("protocol", ["in_forward", "snapshot"])
def test_what_is_shared_is_not_scored_again(run, calibrated, tiny_params, protocol, monkeypatch):
    monkeypatch.setattr(run, "_shared", {})
    one, other = (cell(protocol, studied_recipe(tiny_params), layers) for layers in ((0, 1), (1, 2)))
    asked, theirs, bare = (Coder(one, calibrated) for _ in range(3))
    expected = run.logits(one, bare)
    kept = run.shared(one, asked)
    renamed = one.model_copy(update={"study": "cells", "label": "the same"})
    assert run.logits(renamed, theirs) is kept and torch.equal(kept, expected)
    assert theirs.tally == bare.tally and theirs.tally is not asked.tally
    for different in (Coder(other, calibrated), JitteredCoder(one, calibrated)):
        assert not torch.equal(run.logits(different.cell, different), kept)


def test_bytes_are_those_of_the_whole_cache_as_a_file(run, calibrated, tiny_params, tmp_path):
    """K of one layer coded, everything else left alone: the record's bytes are the file's."""
    recipe, info = studied_recipe(tiny_params), run.engine.info
    coder = Coder(cell("snapshot", recipe, layers=(1,), stream="k"), calibrated)
    run.logits(coder.cell, coder)
    coding = coder.coding(info, CONTEXT, "float32")
    header = CacheHeader(
        info.n_layers, info.n_kv_heads, info.head_dim, CONTEXT, "float32", recipe.recipe_id, None, info.model_hash
    )
    codec = coder._codecs["k", coder.cell.recipe.k]
    with open(tmp_path / "cache.kvls", "wb") as file:
        writer = CacheWriter(file, header)
        for layer, stream in header.frames:
            own = codec if (layer, stream) == (1, "k") else IdentityCodec(IdentityStream())
            writer.add(own.encode(run.clean["pre_rope"].kept[layer, stream], Site(0, layer, stream)))
        writer.close()
    assert coding.coded_bytes + coding.raw_bytes == writer.nbytes
    assert coding.values == header.values == CONTEXT * info.values_per_token
    assert coding.bits_per_value == CacheReader(tmp_path / "cache.kvls").bits_per_value


@pytest.mark.engine
@pytest.mark.parametrize("protocol", ["in_forward", "snapshot"])
def test_the_engines_agree_under_the_same_recipe(run, vllm_engine, calibrated, tiny_params, protocol):
    """float32: KL below 1e-6 for identity, and the codec's own KL within 2 % on both engines."""
    theirs = WindowRun(vllm_engine, run.ids, CONTEXT, 0)
    identity = [Coder(cell(protocol, engine=e), None) for e in ("hf", "vllm")]
    a, b = run.logits(identity[0].cell, identity[0]), theirs.logits(identity[1].cell, identity[1])
    assert float(run.rows("x", b, a)["kl"].mean()) < 1e-6
    coders = [Coder(cell(protocol, studied_recipe(tiny_params), (1, 2), engine=e), calibrated) for e in ("hf", "vllm")]
    kls = [kl(r, c.cell, c) for r, c in zip((run, theirs), coders, strict=True)]
    assert kls[1] == pytest.approx(kls[0], rel=0.02)


def test_the_same_tensor_decodes_to_the_same_bits_for_both_engines(calibrated, tiny_params):
    x = torch.randn(2, CONTEXT, 32, generator=torch.Generator().manual_seed(0))
    coders = [Coder(cell(recipe=studied_recipe(tiny_params), engine=e), calibrated) for e in ("hf", "vllm")]
    for stream in "kv":
        a, b = (c.round_trip(x, Site(0, 1, stream)) for c in coders)
        assert torch.equal(a, b)


def test_clean_capture_changes_nothing(run):
    clean = CleanCapture(CONTEXT)
    assert torch.equal(run.engine.score(run.ids, CONTEXT, clean), run.reference)
    assert set(clean.kept) == {(layer, part) for layer in range(3) for part in "kv"}


def test_a_known_reference_is_not_computed_again(run):
    again = WindowRun(run.engine, run.ids, CONTEXT, 0, known=run.reference)
    assert again.reference is run.reference and "_clean_pass" not in vars(again)
    first, second = (one.clean["pre_rope"].kept for one in (run, again))
    assert first.keys() == second.keys() and all(torch.equal(first[at], second[at]) for at in first)
