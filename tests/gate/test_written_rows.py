"""Rows whose evidence was written over a stored context: lost answers keep a row from support, chance tells nothing."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest

from gate.planted_records import BASE, CONTEXT, GOOD, VALUES, plant, read_back, record, run_of, table
from kvlab.core.errors import NonFinite, StorageError
from kvlab.gate import registry
from kvlab.gate.cases import Context
from kvlab.gate.catalogue.rows import read_rows
from kvlab.gate.check import check
from kvlab.gate.evidence import measured, paired, parse
from kvlab.gate.evidence.measures import change_bounds, rate_bounds
from kvlab.gate.inputs import read_current
from kvlab_pipeline.gate_page.measured_rows import rows_of, write
from kvlab_pipeline.gate_page.page import page
from kvlab_pipeline.gate_page.summary import judged
from kvlab_pipeline.gate_page.written_table import written_table
from kvlab_pipeline.studies.mechanisms.plan import GREEDY
from kvlab_pipeline.studies.mechanisms.records import SCORES, write_mechanisms
from refusals import refused

REGISTRY = registry.load()
ITEMS, LONGEST, WINDOWS = 60, 2048, 64
TASK, METRIC = "ruler_niah_multikey", "niah_multikey"


def with_written(row):
    """A row that was asked a task and greedy decoding too."""
    runs = []
    for name, items, own in ((TASK, ITEMS, LONGEST), (GREEDY, WINDOWS, None)):
        tokens, fires = own or CONTEXT, row.fires * items
        values = VALUES // CONTEXT * tokens * items
        held = {"kv_values": values, "kv_bytes": row.kv_bytes * values // row.kv_values}
        runs.append(run_of(name, own, tokens=tokens, items=items, fires=fires, expected_fires=fires, **held))
    return row.model_copy(update={"evals": (*row.evals, *runs)})


def written_scores(label, found, lost, same):
    plain = np.zeros(ITEMS)
    plain[:found] = 1
    coded = plain.copy()
    coded[:lost] = 0
    parts = {(TASK, METRIC): (coded, plain)}
    shares = same + 0.001 * np.sin(np.arange(WINDOWS))
    parts |= {(GREEDY, name): (np.minimum(shares, 1), np.ones(WINDOWS)) for name in ("greedy_prefix", "greedy_same")}
    return pl.concat(
        pl.DataFrame(
            {"label": label, "quality_eval_id": name, "metric": metric, "item": np.arange(len(variant))}
            | {"variant": variant, "baseline": baseline},
            schema=SCORES,
        )
        for (name, metric), (variant, baseline) in parts.items()
    )


ROWS = (with_written(BASE), with_written(GOOD))


def scores(found=ITEMS, lost=0, same=0.99):
    own = [written_scores("baseline", found, 0, 1.0), written_scores("klt 4", found, lost, same)]
    return pl.concat([table(BASE, GOOD), *own])


def claim(tmp_path, **asked):
    read = read_back(tmp_path, rows_of(record(rows=ROWS), scores(**asked), "supported"))
    (found,) = (one for one in check(read, Context(REGISTRY)).claims if one.row["row_id"].endswith("klt-4"))
    _, summary = judged(read, Context(REGISTRY))
    return found, {judgement.key: judgement for judgement in found.judgements}, summary


def test_evidence_of_a_task_names_its_own_length_and_is_judged_with_the_row(tmp_path):
    found, words, _ = claim(tmp_path)
    lengths = {parse(piece).quality_eval_id: parse(piece).identity.context_tokens for piece in evidence(tmp_path)}
    assert lengths[TASK] == LONGEST and lengths[GREEDY] == lengths["needle"] == 512
    assert {words[key].word for key in (METRIC, "greedy_prefix", "greedy_same")} == {"within"}
    assert found.earned == "supported"


def evidence(tmp_path):
    rows = json.loads((tmp_path / "rows.json").read_text())
    return next(row for row in rows if row["row_id"].endswith("klt-4"))["evidence"]


def test_lost_answers_and_other_tokens_keep_a_row_from_support(tmp_path):
    found, words, _ = claim(tmp_path, lost=40)
    assert words[METRIC].word == "beyond" and found.earned != "supported"
    found, words, _ = claim(tmp_path, same=0.8)
    assert words["greedy_same"].word == "beyond" and found.earned != "supported"


@pytest.mark.parametrize("lost", [0, 3])
def test_a_baseline_at_chance_cannot_tell_and_is_not_passed(tmp_path, lost):
    found, words, summary = claim(tmp_path, found=15, lost=lost)
    assert (words[METRIC].word, words[METRIC].untold, words[METRIC].needed_n) == ("open", True, None)
    assert found.earned != "supported"
    (line,) = (line for line in summary.rows if line.row_id.endswith("klt-4"))
    assert line.untold == (METRIC,)
    (reason,) = (r for f in found.findings for r in f.reasons if r.field == f"metrics.{METRIC}")
    assert "cannot tell" in reason.said and "settle" not in reason.said
    shown = written_table([one for one in summary.rows if one.engine == "hf"])
    assert any("(cannot tell)" in cell for row in shown["lines"] for cell in row["cells"])


def test_a_loss_that_is_shown_is_one_whatever_the_baselines_floor(tmp_path):
    _, words, _ = claim(tmp_path, found=30, lost=30)
    assert words[METRIC].word == "beyond" and not words[METRIC].untold


def test_the_page_has_a_table_of_what_is_written_and_says_where_there_is_none(tmp_path):
    _, _, summary = claim(tmp_path, lost=6)
    (place,) = page(summary)["places"]
    columns = place["written"]["columns"]
    assert columns[0] == f"one of four needles, % of {ITEMS}" and len(columns) == 3
    cells = {line["label"]: line["cells"] for line in place["written"]["lines"]}
    assert cells["klt 4"][0].startswith("90.0; -10.0 [")
    plain = rows_of(record(rows=(BASE, GOOD)), table(BASE, GOOD), "supported")
    (tmp_path / "plain.json").write_text(json.dumps(plain))
    _, summary = judged(read_rows(tmp_path / "plain.json"), Context(REGISTRY))
    assert page(summary)["places"][0]["written"] is None


def test_every_row_of_an_engine_that_writes_has_to_have_been_asked(tmp_path):
    files = plant(tmp_path)
    out = {"out": tmp_path / "rows.json", "current": tmp_path / "now.json"}
    told = {"model_hash": "5eed", "items_hash": "7ex7", "tasks": {METRIC: ITEMS}, "greedy": WINDOWS}
    files["ruler"].write_text(json.dumps(told))
    given = ([files["hf"], files["vllm"]], files["windows"], files["needles"], "c0de", "supported")
    with refused(StorageError, "storage.other-items", METRIC, "kvlab step mechanisms"):
        write(*given, **out)
    write_mechanisms(files["hf"], record(rows=ROWS), scores())
    assert len(write(*given, **out)) == 6  # vLLM's rows are asked none of it
    assert read_current(out["current"])
    files["ruler"].unlink()
    with refused(StorageError, None, files["ruler"]):
        write(*given, **out)


# --------------------------------------------------------------------------- answers that are found in part


def test_parts_of_answers_have_the_interval_of_a_rate_of_the_same_mean():
    parts, whole = [0.5] * 10, [1] * 5 + [0] * 5
    assert measured(parts, True) == measured(whole, True)
    low, high = rate_bounds(0.5, 10)
    assert rate_bounds(0, 10)[0] <= low < 0.05 < high < rate_bounds(1, 10)[1]
    with refused(NonFinite, "non-finite.rate"):
        measured([0.5, 1.5], True)


def test_a_change_in_parts_is_that_of_as_many_whole_answers():
    found = paired([0.5, 0.5, 1, 1], [1, 1, 1, 0.5], True)
    low, high = change_bounds(0.5, 1.0, 4)
    assert (found.value, found.low, found.high) == (-0.125, float(low), float(high))
    same = paired([0.5] * 30, [0.5] * 30, True)
    assert same.value == 0 and same.high == pytest.approx(-same.low) and same.high > 0.1
