"""What of the ladder no cell asks for, on the tiny model: files weighed, gains, parts of the calibration, contexts."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.cache.files.calibration import write_calibration
from kvlab.calibration import load as calibration
from kvlab.core.errors import CorpusError, MissingResult, WitnessDisagrees
from kvlab.core.model import load_tokenizer, resolve
from kvlab.core.paramfile import overlay
from kvlab.core.records import write_json
from kvlab.stats.bootstrap import Bootstrap
from kvlab.text import corpus
from kvlab_pipeline.studies.ladder import facts, further
from kvlab_pipeline.studies.ladder.beyond import further_entries, refuse_unwitnessed
from kvlab_pipeline.studies.ladder.record import Further, calibrated_rungs, read_facts, read_further
from kvlab_pipeline.studies.settings import Settings
from pipeline.report.planted_identity import provenance
from pipeline.report.synthetic import small_params, vouched
from refusals import refused

pytestmark = pytest.mark.full

BOOT = Bootstrap(200, 0.95, 0)


@pytest.fixture(scope="module")
def params(tiny_params):
    changes = {"codecs": ["klt", "hadamard", "fp8"], "conditioned": [], "growth": [0.5], "contexts": [128]}
    asked = {"ladder": changes | {"context_windows": 3}}
    return Settings.complete(overlay(tiny_params.model_dump(mode="json"), asked))


def test_every_calibrated_rung_is_weighed_as_its_files(params, tiny_windows, tiny_fitted, tmp_path):
    facts.facts(params, tiny_windows, tiny_fitted, tmp_path / "facts.json")
    found, info = read_facts(tmp_path / "facts.json"), resolve(params.model)
    recipes = {one.recipe_id: one for one in calibrated_rungs(params)}
    assert {one.recipe_id for one in found.artefacts} == set(recipes) and len(recipes) == 2
    calibrated = calibration.load(tiny_fitted, info.model_hash)
    for one in found.artefacts:
        for decoder, size in ((False, one.whole_bytes), (True, one.decoder_bytes)):
            path = write_calibration(tmp_path / "a.kv", recipes[one.recipe_id], calibrated, info, decoder=decoder)
            assert path.stat().st_size == size
        assert one.decoder_bytes < one.whole_bytes / 2
        # both ways in float32, and their tables: more than a decoder's file, and none of what they were made from
        assert one.decoder_bytes < one.resident_bytes < one.whole_bytes
    assert {one.window for one in found.gains} == set(range(params.ladder.windows))
    assert len(found.gains) == params.ladder.windows * 2 * 2 and found.values_per_token == info.values_per_token
    assert all(one.over_even > 0 for one in found.fitted)


@pytest.fixture(scope="module")
def measured(params, tiny_windows, tiny_fitted, tmp_path_factory):
    out = tmp_path_factory.mktemp("further") / "further.json"
    further.further(params, tiny_windows, None, tiny_fitted, out)
    return read_further(out)


def test_parts_of_the_calibration_and_contexts_are_scored_on_every_window(params, measured):
    windows, eval_ = params.windows, params.windows.eval
    growth = [one for one in measured.scores if one.context == windows.context]
    assert {one.calibration_tokens for one in growth} == {3 * windows.context, windows.calib * windows.context}
    assert len(growth) == 2 * params.ladder.fewer and {one.label for one in growth} == {"klt 2"}
    long = [one for one in measured.scores if one.context == 128]
    assert len(long) == 2 * 3 and {one.label for one in long} == {"klt 2", "hadamard 2"}
    assert all(one.tokens == eval_ - 1 and one.kl_sum > 0 for one in measured.scores)


def test_the_whole_calibration_scores_what_its_cell_would(params, measured, hf_engine, tiny_windows, tiny_fitted):
    from kvlab.measure.quick_run import NamedCodec, score
    from kvlab_pipeline.studies.ladder.plan import cheapest

    info = resolve(params.model)
    windows, calibrated = corpus.load(tiny_windows, info.model_hash), calibration.load(tiny_fitted, info.model_hash)
    subjects = [NamedCodec(*cheapest(params, "klt"), calibrated)]
    (due,) = score(hf_engine, windows.test[:1], windows.context, subjects)
    whole = params.windows.calib * params.windows.context
    (found,) = [one for one in measured.scores if (one.calibration_tokens, one.window, one.context) == (whole, 0, 64)]
    assert found.kl_sum == pytest.approx(due.tokens["kl"].sum(), rel=1e-5)


def test_every_calibration_and_context_is_witnessed_and_what_was_not_is_refused(params, measured, tmp_path):
    assert len(measured.witnessed) == 1 + 2  # the part of the calibration; both codecs at the longer context
    assert all(one.effects == one.expected_effects > 0 for one in measured.witnessed)
    refuse_unwitnessed(measured, tmp_path)
    refuse_unwitnessed(measured.model_copy(update={"scores": (), "witnessed": ()}), tmp_path)  # too long for the model
    scores = [one.model_copy(update={"kl_sum": 1.1 * one.kl_sum}) for one in measured.scores]
    for changes, code in (({"witnessed": ()}, "witness.none"), ({"scores": tuple(scores)}, "witness.other-numbers")):
        with refused(WitnessDisagrees, code, tmp_path):
            refuse_unwitnessed(measured.model_copy(update=changes), tmp_path)


def test_long_windows_hold_documents_of_the_test_split_alone(params):
    info = resolve(params.model)
    rows = further.long_windows(params, info, 128, None)
    assert rows.shape == (3, 128 + params.windows.eval)
    assert np.array_equal(rows, further.long_windows(params, info, 128, None))
    tokenizer = load_tokenizer(info)
    documents = corpus.read_documents(params.corpus)
    ids = {
        split: [tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in documents[split]]
        for split in documents
    }
    runs = {split: {one[i : i + 12] for one in found for i in range(len(one) - 11)} for split, found in ids.items()}
    cut = {tuple(row[i : i + 12].tolist()) for row in rows for i in range(rows.shape[1] - 11)}
    assert cut & runs["test"] and not cut & (runs["calib"] - runs["test"])


def test_a_text_that_is_too_short_is_refused_with_what_to_ask_for(params):
    with refused(CorpusError, "corpus.too-short", "ladder.context_windows"):
        further.long_windows(params, resolve(params.model), 10**6, None)


# ------------------------------------------------------------------------------------------------ numbers


def scored(label, context, tokens, kl, windows=6):
    shared = {"label": label, "context": context, "calibration_tokens": tokens, "bits_per_value": 2.0, "agreeing": 9}
    return [
        shared | {"text": ("other", "test")[w % 2], "window": w, "kl_sum": 10 * kl * (1 + 0.1 * w), "tokens": 10}
        for w in range(windows)
    ]


def test_planted_ratios_are_found_on_each_text(tmp_path):
    from types import SimpleNamespace

    shared = {"corpus": {"scored": ["other", "test"]}, "windows": {"calib": 4}}
    params = small_params(ladder={"growth": [0.5, 0.6, 0.9], "contexts": [64, 128]}, **shared)
    rows = scored("klt 2", 64, 128, 0.3) + scored("klt 2", 64, 256, 0.1)  # of 0.6 as many windows as of 0.5
    rows += scored("klt 2", 128, 256, 0.2) + scored("hadamard 2", 128, 256, 0.8)
    seen = tuple(map(vouched, (0.3, 0.2, 0.8)))
    record = Further(provenance=provenance(), origin="hf", eval=11, scores=rows, witnessed=seen)
    write_json(tmp_path / "further.json", record.model_dump(mode="json"))
    results = SimpleNamespace(provenance=provenance(), select=lambda study: [SimpleNamespace(documents=None)])
    found = further_entries(params, tmp_path / "further.json", results, BOOT)
    assert len(found) == 8
    ratios = {(one["what"], one["text"], one["label"], one["calibration_tokens"]): one["times"] for one in found}
    for text in ("other", "test"):
        assert ratios["growth", text, "klt 2", 128]["value"] == pytest.approx(3.0)
        assert ratios["growth", text, "klt 2", 256] is None and ratios["context", text, "klt 2", 256] is None
        assert ratios["context", text, "hadamard 2", 256]["value"] == pytest.approx(4.0)
    few = Further(provenance=provenance(), origin="hf", eval=11, left_out=(256,), scores=rows[-12:], witnessed=seen[1:])
    write_json(tmp_path / "few.json", few.model_dump(mode="json"))
    beyond = small_params(ladder={"contexts": [128, 256]}, **shared)  # which the model has no positions for
    assert len(further_entries(beyond, tmp_path / "few.json", results, BOOT)) == 4
    other = small_params(ladder={"contexts": [256]}, **shared)
    with refused(MissingResult, "missing-result.other-contexts", "`kvlab step ladder_further`"):
        further_entries(other, tmp_path / "further.json", results, BOOT)
    with refused(MissingResult, "missing-result.further", "`kvlab step ladder_further`"):
        further_entries(params, None, results, BOOT)
    assert further_entries(small_params(), None, results, BOOT) == []
