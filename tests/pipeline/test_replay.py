"""The gate measures rows again: true ones of a tiny model are certified, made-up ones are not, however consistent."""

from __future__ import annotations

import copy
import json
import random

import polars as pl
import pytest

from kvlab.core.code import digest_of
from kvlab.core.errors import Fault
from kvlab.core.recipe import canonical
from kvlab.core.records import read_json, write_json
from kvlab.gate import registry
from kvlab.gate.catalogue.rows import read_rows
from kvlab.gate.catalogue.values import RowError
from kvlab.gate.check import check
from kvlab.gate.evidence import parse
from kvlab.gate.render import to_json, to_markdown
from kvlab.gate.rules import Context
from kvlab.output.markdown import render
from kvlab_pipeline.gate_page.page import TEMPLATE, page
from kvlab_pipeline.gate_page.summary import judged
from kvlab_pipeline.jobs.measure import Lab
from kvlab_pipeline.replay import ReplayPart
from kvlab_pipeline.studies.mechanisms.measure import longest
from kvlab_pipeline.studies.mechanisms.plan import FIDELITY, NEEDLE, modules
from kvlab_pipeline.studies.mechanisms.records import EvalRun, read_mechanisms, write_mechanisms
from pipeline.replayed import SLUG, lenient, workspace

pytestmark = pytest.mark.full
LABEL, SERVED, LOSSY = "klt 2 snapshot", "klt 2 served", "int 2 snapshot"
WINDOWS = 72  # enough to certify a row among those that are tried here


@pytest.fixture(scope="module")
def evals(tmp_path_factory):
    """See `lenient`."""
    return lenient(tmp_path_factory.mktemp("evals") / "evals.yaml")


@pytest.fixture(scope="module")
def origin(tiny_params, evals, tmp_path_factory):
    """The workspace, made once."""
    asked = {"protocols": ("snapshot",), "codecs": ("klt", "int"), "caches": ("klt",)}
    asked |= {"kept": ("attention:percent=25",), "bits": (2,), "greedy": 0}
    return workspace(tmp_path_factory.mktemp("workspace"), tiny_params, ("hf",), WINDOWS, evals, **asked)


@pytest.fixture
def made(origin, tmp_path):
    """A copy of the workspace that a test may damage."""
    import shutil

    shutil.copytree(origin.root, tmp_path / "own")
    return origin._replace(root=tmp_path / "own")


def test_true_rows_are_certified_by_measuring_again_and_by_nothing_else(origin):
    rows = read_rows(origin.rows)
    without, after = origin.claims(rows, replayer=None), origin.claims(rows)
    best = {name for name, claim in without.items() if claim.earned == "supported"}
    assert {origin.of(label) for label in (LABEL, SERVED, "attention:percent=25", "baseline")} <= best
    assert not any(claim.certified for claim in without.values())
    wrong = {name: (claim.replay.lacking, claim.replay.differs) for name, claim in after.items() if claim.replay}
    assert {name for name, claim in after.items() if claim.certified} == best, wrong
    for name in best:
        scores = after[name].replay.scores
        assert all(score.claimed == score.found for score in scores) and after[name].replay.code
        assert {score.quality_eval_id for score in scores} >= {FIDELITY, NEEDLE}
    assert {name: claim.earned for name, claim in after.items()} == {n: c.earned for n, c in without.items()}
    assert without[origin.of(LABEL)].uncertified == "not measured again"


@pytest.fixture(scope="module")
def replayed(origin):
    """The rows judged while they are measured again, and the summary of the gate's page."""
    return judged(read_rows(origin.rows), origin.context, replayer=origin.replayer())


def test_a_page_names_what_is_certified_and_what_was_not_measured_again(origin, replayed):
    before = judged(read_rows(origin.rows), origin.context, replayer=None)
    for (_, summary), word, why in ((before, "not measured again", "not measured again"), (replayed, "certified", "")):
        assert {answer.word for answer in summary.answers} == {word}
        assert {line.why for line in summary.rows if line.earned == "supported"} == {why}


def test_a_replayed_row_names_the_code_that_measured_and_the_code_that_measured_again(origin, replayed):
    """Two codes of one digest are one; another is said to be another, however equal what it found."""
    (report, summary), now = replayed, code_now(origin.params)
    replayed = [claim.replay for claim in report.claims if claim.replay]
    assert replayed and {(one.measured_by, one.code) for one in replayed} == {("c0de", now)}
    assert {one.codes for one in replayed} == {("c0de", f"another, {now[:12]}")}
    told = {one["row"]["row_id"]: one["replay"] for one in json.loads(to_json(report))["claims"] if one["replay"]}
    assert {(one["measured_by"], one["code"]) for one in told.values()} == {("c0de", now)}
    assert f"| c0de | another, {now[:12]} |" in to_markdown(report)
    assert replayed[0].model_copy(update={"measured_by": now}).codes == (now[:12], "the same")
    assert f"| c0de | another, {now[:12]} |" in render(TEMPLATE, **page(summary), reasons="why.md", disclosures={})


def code_now(params):
    return digest_of(*modules(params))


def test_where_nothing_would_be_certified_nothing_is_measured(origin):
    def refuse(rows):
        raise AssertionError([row.values["row_id"] for row in rows])

    rows = read_rows(origin.rows)
    shipped = check(rows, Context(registry.load()), replayer=refuse)
    assert not any(claim.earned == "supported" and claim.row["mechanism"] != "baseline" for claim in shipped.claims)
    plain = [row for row in rows if row.values["mechanism"] == "baseline"]
    assert not check(plain, origin.context, replayer=refuse).claims[0].certified


# ------------------------------------------------------------------------- a forger of rows and evidence


def seal(piece):
    piece["evidence_id"] = parse(piece).content_id()


def forged(origin, row, observed=None, identity=None, piece=None, label=LABEL):
    """The rows, of which one and all its evidence say something else together, with new ids."""
    rows = json.loads(origin.rows.read_text())
    mine = next(one for one in rows if one["row_id"].endswith("/" + origin.of(label)))
    for one in mine["evidence"]:
        one["observed"].update({k: v(one["observed"]) if callable(v) else v for k, v in (observed or {}).items()})
        for who in ("identity", "baseline_identity"):
            one[who].update(identity or {})
        (piece or (lambda _: None))(one)
        seal(one)
    mine.update({k: v(mine) if callable(v) else v for k, v in row.items()})
    return [{name: value for name, value in one.items() if value is not ...} for one in rows]


def part_of(share):
    return {name: lambda one, name=name: one[name] * share for name in ("bits_per_value", "compression_ratio")} | {
        "kv_bytes": lambda one: int(one["kv_bytes"] * share)
    }


def less(share):
    return {"observed": {"kv_bytes": lambda seen: int(seen["kv_bytes"] * share)}, "row": part_of(share)}


INT = {"mechanism": "kv_quantization", "mechanism_variant": "int", "compression_method": "int", "codec": "int"}
BLOCK = {"mechanism_variant": "block", "compression_method": "block", "codec": "block"}
FORGERIES = {
    "bits": {"row": {"bits": 1}, "observed": {"bits": 1.0}},
    "bytes": less(0.5),
    "a twentieth of the bytes": less(0.95),
    "canary": {"row": {}, "observed": {"canary_kl": 0.005}},
    "calls": {"row": {"fires": 1, "expected_fires": 1}, "observed": {"fires": 1, "expected_fires": 1}},
    "context": {"row": {"context_tokens": 8192, "context_band": "8k"}, "identity": {"context_tokens": 8192}},
    "engine": {"row": {"engine": "vllm"}, "identity": {"engine": "vllm"}},
    "device": {"row": {"device": "cuda"}, "identity": {"device": "cuda"}},
    "protocol": {
        "row": {"protocol": "in_forward", "stored_span": "window"},
        "observed": {"span": "window"},
        "identity": {"protocol": "in_forward"},
    },
    "calibration": {"row": {"calibration": ...}, "identity": {"calibration": None}},
    "codec int": {"row": INT, "observed": {"codec": "int"}},
    "codec block": {"row": BLOCK, "observed": {"codec": "block"}},
    "evals": {"row": {}, "piece": lambda one: one.update(evals=[FIDELITY])},
    "family": {"row": {}, "piece": lambda one: one["family"].update(tested=1)},
}


def read(tmp_path, rows):
    path = tmp_path / "forged.json"
    path.write_text(json.dumps(rows))
    return read_rows(path)


@pytest.mark.parametrize("what", FORGERIES)
def test_a_row_that_is_forged_with_all_its_evidence_is_not_certified(origin, tmp_path, what):
    rows = read(tmp_path, forged(origin, **FORGERIES[what]))
    claim = origin.claims(rows, only=[LABEL])[origin.of(LABEL)]
    assert not claim.certified
    if claim.replay:  # it looks as good as a true one, and is none
        assert origin.claims(rows, replayer=None, only=[LABEL])[origin.of(LABEL)].earned == "supported"
        assert claim.replay.lacking or (claim.earned, claim.codes) == ("unsupported", {"record_other"})


def test_a_row_with_the_metrics_of_a_better_one_is_not_certified(origin, tmp_path):
    rows = json.loads(origin.rows.read_text())
    lossy, good = (next(r for r in rows if r["row_id"].endswith(origin.of(label))) for label in (LOSSY, LABEL))
    better = {piece["quality_eval_id"]: piece for piece in good["evidence"]}
    for piece in lossy["evidence"]:
        piece |= {name: copy.deepcopy(better[piece["quality_eval_id"]][name]) for name in ("metrics", "paired")}
        seal(piece)
    lossy |= {name: good[name] for name in ("kl", "delta_nll", "top1_agreement")}
    claims = origin.claims(read(tmp_path, rows), only=[LOSSY, LABEL])
    assert "record_other" in claims[origin.of(LOSSY)].codes and not claims[origin.of(LOSSY)].certified
    assert claims[origin.of(LABEL)].certified  # a true row beside it is


# -------------------------------------------------------------------------------- a forger of the record


def damaged(made, change_row=None, change_scores=None):
    """Rows of a record in which something was changed; the record, its table and the rows agree."""
    record, scores = read_mechanisms(made.record)
    rows = tuple(change_row(row) if change_row and row.label == LABEL else row for row in record.rows)
    write_mechanisms(made.record, record.model_copy(update={"rows": rows}), (change_scores or (lambda t: t))(scores))
    return made.written()


MINE = pl.col("label") == LABEL


def one_score(table):
    last = MINE & (pl.col("metric") == "kl") & (pl.col("item") == WINDOWS - 1)
    return table.with_columns(variant=pl.when(last).then(pl.col("variant") * 0.999).otherwise(pl.col("variant")))


def every_score(table):
    return table.with_columns(variant=pl.when(MINE & (pl.col("metric") == "kl")).then(1e-4).otherwise("variant"))


def baselines(table):
    found = pl.col("metric") == "needle_recall"
    return table.with_columns(**{side: pl.when(found).then(1.0).otherwise(side) for side in ("variant", "baseline")})


def told_again(run, lengths):
    """An eval with other lengths; the rest are their sums."""
    return EvalRun.of(lengths, **run.model_dump(include={"quality_eval_id", "version", "context"}))


def runs(change):
    def changed(row):
        evals = tuple(
            told_again(run, tuple(one.model_copy(update=change(one)) for one in run.lengths)) for run in row.evals
        )
        counted = {name: getattr(evals[0], name) for name in ("fires", "expected_fires", "kv_bytes")}
        return row.model_copy(update=counted | {"evals": evals})

    return changed


RECORDS = {
    "one score": (None, one_score, WINDOWS, "kl of the variant"),
    "all scores of a metric": (None, every_score, 1, "kl of the variant"),
    "needles found": (None, baselines, 1, "needle_recall of the variant"),
    "bytes": (runs(lambda run: {"kv_bytes": int(run.kv_bytes * 0.99)}), None, 1, f"kv_bytes of {FIDELITY}"),
    "calls": (runs(lambda run: {"fires": run.items, "expected_fires": run.items}), None, 1, f"fires of {FIDELITY}"),
    "canary": (lambda row: row.model_copy(update={"canary_kl": row.canary_kl * 2}), None, 1, "canary_kl"),
    "class": (lambda row: row.model_copy(update={"cache_class": "StaticCache"}), None, 1, "cache_class"),
    "recipe": (lambda row: row.model_copy(update={"recipe_id": "0123456789ab"}), None, 1, "recipe_id"),
}


@pytest.mark.parametrize("what", RECORDS)
def test_a_record_that_says_something_else_is_found_by_measuring_again(made, what):
    *change, items, field = RECORDS[what]
    rows = damaged(made, *change)
    assert made.claims(rows, replayer=None, only=[LABEL])[made.of(LABEL)].earned == "supported"
    claim = made.claims(rows, items, only=[LABEL])[made.of(LABEL)]
    assert (claim.earned, claim.certified, claim.word) == ("unsupported", False, "fail")
    assert field in [reason.field for reason in claim.replay.differs], claim.replay.differs
    assert claim.codes == {"replay_other"}


def longer(record):
    """Contexts twice as long, at which the same seconds are more tokens per second."""
    more = (2 * record.context + record.eval) / (record.context + record.eval)
    rows = [
        one.model_copy(update={"throughput_tok_s": one.throughput_tok_s and one.throughput_tok_s * more})
        for one in record.rows
    ]
    return {"context": 2 * record.context, "rows": tuple(rows)}


HEADERS = {
    "dtype": lambda record: {"dtype": "bfloat16"},
    "documents": lambda record: {"documents": tuple(range(WINDOWS))},
    "variants": lambda record: {"rows": tuple(one for one in record.rows if one.label in (LABEL, "baseline"))},
}


def lent(one, two):
    """Bytes of the items of one length said to be of those of another, so that sum and mean stay."""
    return [each.model_copy(update={"kv_bytes": each.kv_bytes + add}) for each, add in ((one, -8), (two, 8))]


def renumbered(one, two):
    """An item said to be of another length, and all that it counts with it."""

    def of(part, items):
        whole = {name: getattr(part, name) // part.items * items for name in ("kv_bytes", "kv_values")}
        calls = {name: getattr(part, name) // part.items * items for name in ("fires", "expected_fires")}
        return part.model_copy(update={"items": items} | whole | calls)

    return [of(part, items) for part, items in ((one, one.items - 1), (two, two.items + 1)) if items]


@pytest.mark.parametrize(("change", "field"), [(lent, "kv_bytes"), (renumbered, "lengths")])
def test_items_of_unlike_length_are_held_to_their_own_length_and_not_to_their_mean(made, change, field):
    record, scores = read_mechanisms(made.record)
    row = next(one for one in record.rows if one.label == SERVED)
    needle = next(run for run in row.evals if run.quality_eval_id == NEEDLE)
    one, two, *others = sorted(needle.lengths, key=lambda part: -part.items)
    spoilt = told_again(needle, (*change(one, two), *others))
    forged = row.model_copy(update={"evals": tuple(spoilt if run is needle else run for run in row.evals)})
    rows = tuple(forged if one is row else one for one in record.rows)
    write_mechanisms(made.record, record.model_copy(update={"rows": rows}), scores)
    claim = made.claims(made.written(), items=needle.items, only=[SERVED])[made.of(SERVED)]
    assert {reason.field for reason in claim.replay.differs} >= {f"{field} of {NEEDLE}"} and not claim.certified


@pytest.mark.parametrize("what", HEADERS)
def test_what_a_record_says_of_the_whole_run_is_held_against_the_workspace(made, what):
    """What no item tells: the dtype, which windows are of one text, what else was tried."""
    record, scores = read_mechanisms(made.record)
    forged = record.model_copy(update=HEADERS[what](record))
    labels = [one.label for one in forged.rows]
    write_mechanisms(made.record, forged, scores.filter(pl.col("label").is_in(labels)))
    claim = made.claims(made.written(), only=[LABEL])[made.of(LABEL)]
    assert not claim.certified and what in str(claim.replay.differs), claim.replay


def test_contexts_longer_than_the_items_are_refused_when_the_record_is_read(made):
    record, scores = read_mechanisms(made.record)
    write_mechanisms(made.record, record.model_copy(update=longer(record)), scores)
    with pytest.raises(Fault) as refused:
        made.written()
    assert refused.value.code == "fault.span"


def test_a_calibration_that_was_changed_since_certifies_nothing(made):
    from safetensors.numpy import load_file, save_file

    path = made.root / "calib/components" / SLUG / "hf.safetensors"
    held = load_file(path)
    save_file({name: one * 1.01 if one.dtype.kind == "f" else one for name, one in held.items()}, path)
    sidecar = read_json(path.with_suffix(".json"))
    write_json(path.with_suffix(".json"), sidecar)
    claims = made.claims(read_rows(made.rows), only=[LABEL, SERVED])
    assert not claims[made.of(LABEL)].certified and not claims[made.of(SERVED)].certified


def test_another_machine_speaks_neither_for_a_row_nor_against_it(made):
    record, scores = read_mechanisms(made.record)
    other = record.provenance.model_copy(update={"versions": dict(record.provenance.versions, torch="9")})
    write_mechanisms(made.record, record.model_copy(update={"provenance": other}), scores)
    claim = made.claims(made.written(), only=[LABEL])[made.of(LABEL)]
    assert (claim.earned, claim.certified) == ("supported", False)
    assert "here versions is" in claim.uncertified and claim.uncertified.startswith("not measured again: ")


def test_a_row_that_the_workspace_has_no_record_of_is_told_so(origin, tmp_path):
    rows = json.loads(origin.rows.read_text())
    for row in rows:
        row["row_id"] = f"elsewhere/{row['row_id']}"
    claims = check(read(tmp_path, rows), origin.context, replayer=origin.replayer()).claims
    best = [claim for claim in claims if claim.earned == "supported"]
    assert best and {claim.certified for claim in best} == {False}
    assert {"the workspace has no record of" in claim.uncertified for claim in best} == {True}


# ------------------------------------------------------------------------------------ what is drawn


def test_no_seed_decides_which_items_are_drawn(origin):
    replayer = origin.replayer()
    windows, found = replayer._texts(SLUG)
    drawn = set()
    with Lab.open(
        origin.params, windows, replayer._fitted(origin.params), longest=longest(origin.params, found)
    ) as lab:
        for _ in range(8):
            random.seed(0)
            part = ReplayPart(lab, "hf", found, "c0de", origin.root, labels=[LABEL])
            assert part.scored[FIDELITY][0].number == 0 and len(part.scored[NEEDLE]) == 1
            drawn.add(tuple(window.number for window in part.scored[FIDELITY]))
    assert len(drawn) > 1


# ------------------------------------------------------------------------------------ as it is typed


def test_only_the_verb_that_measures_puts_certified_rows_into_a_store(origin, evals, tmp_path, monkeypatch, line):
    monkeypatch.chdir(origin.root)
    db, given = str(tmp_path / "rows.db"), ("--evals", str(evals))
    query = ("gate", "query", db, "--certified", "--format", "json")
    assert line("gate", "ingest", db, "rows.json", *given)[0] == 0
    assert json.loads(line(*query)[1]) == []
    again = ("gate", "replay", "rows.json", *given, "--params", canonical(origin.params.model_dump(mode="json")))
    code, _, err = line(*again, "--store", db)
    assert code == 2 and "certified is 0 there and 1 here" in err  # in silence no row becomes better
    code, out, err = line(*again, "--store", db, "--replace", "--format", "json")
    claims = {claim["row"]["row_id"] for claim in json.loads(out)["claims"] if claim["certified"]}
    assert f"tiny/hf/{origin.of(LABEL)}: certified\n" in err and code == 0
    stored = json.loads(line(*query)[1])
    assert {row["row_id"] for row in stored} == claims and json.loads(stored[0]["replay"])["scores"]


@pytest.mark.parametrize("field", ["replay", "certified", "replayed"])
def test_a_row_that_says_itself_that_it_was_measured_again_is_refused(origin, tmp_path, field):
    rows = json.loads(origin.rows.read_text())
    rows[1][field] = True
    with pytest.raises(RowError) as refusal:
        read(tmp_path, rows)
    assert [reason.code for reason in refusal.value.reasons] == ["field_unknown"]
