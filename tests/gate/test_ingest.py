import sqlite3
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.databases import claim, ingest, judgement, published, row, start
from gate.planted_records import read_back
from kvlab.core.errors import NonFinite, StorageError, UnknownName, UserError
from kvlab.gate.cases import Context
from kvlab.gate.catalogue import BY_NAME, COLUMNS, Row, RowError, checked_row
from kvlab.gate.check import check
from kvlab.gate.reasons import Reason
from kvlab.gate.registry import load
from kvlab.gate.store import open_store
from kvlab.gate.store.ingest import Ingested, prepared, stored_rows
from kvlab.gate.store.ingest import ingest as put
from kvlab.gate.store.queries import QUALITY, query
from refusals import refused_in_one_line

NASTY = (
    "'; DROP TABLE rows; --",
    '"; DELETE FROM runs; --',
    "Robert'); INSERT INTO claims VALUES ('a','r1','supported',NULL,0,'[]'); --",
    "' OR '1'='1",
    "x' UNION SELECT sql FROM sqlite_master --",
    "%s ? :run @row $1",
    "𝕌ñí😀",
    "\\",
    "NULL",
    "--",
)
texts = st.one_of(st.sampled_from(NASTY), st.text(max_size=40))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store.db"


@pytest.fixture
def store(path):
    with open_store(path, create=True) as store:
        yield store


def not_put(store, code, data, *arguments, error=UserError, **options):
    """Nothing is changed by what is refused in one line."""
    before = store.connection.total_changes
    with refused_in_one_line(error, code, *data):
        ingest(store, *arguments, **options)
    assert store.connection.total_changes == before


def test_the_same_again_changes_nothing(store):
    rows = [row(i, evidence=[{"n": i}], embedded={"issues": []}) for i in range(5)]
    assert ingest(store, rows, "a", [claim(1)]) == Ingested(added=5, replaced=0, same=0, rejudged=0)
    before = store.connection.total_changes
    assert ingest(store, rows[::-1], "a", [claim(1)]) == Ingested(added=0, replaced=0, same=5, rejudged=0)
    assert ingest(store, rows[:2], "a") == Ingested(added=0, replaced=0, same=2, rejudged=0)
    assert store.connection.total_changes == before
    assert ingest(store, [*rows, row(5), row(5)], "a").added == 1


@pytest.mark.parametrize("other", [{"throughput_tok_s": 7}, {"kl": 0.1}, {"mechanism": None}])
def test_other_content_is_refused_whole(store, other):
    ingest(store, [row(1), row(2)], "a")
    data = ["row 'r2' of run 'a'", "--replace"]
    not_put(store, "user.other-content", data, [row(3), row(2, **other)], "a")
    assert len(query(store)) == 2


@pytest.mark.parametrize("extra", [{"evidence": [{"n": 2}]}, {"embedded": {"issues": []}}])
def test_evidence_and_the_embedded_record_are_content(store, extra):
    ingest(store, [row(1, evidence=[{"n": 1}])], "a")
    not_put(store, "user.other-content", ["'r1'"], [row(1, **extra)], "a")


def test_what_is_replaced_loses_its_claim_and_its_evidence(store):
    ingest(store, [row(1, evidence=[{"n": 1}, {"n": 2}]), row(2)], "a", [claim(1), claim(2)])
    done = ingest(store, [row(1, evidence=[{"n": 3}], kl=0.5), row(2)], "a", replace=True)
    assert done == Ingested(added=0, replaced=1, same=1, rejudged=0)
    assert query(store)["earned_tier"].to_list() == [None, "supported"]
    assert [one.evidence for one in stored_rows(store, "a")] == [({"n": 3},), ()]


def test_a_claim_is_replaced_only_when_that_is_asked_for(store):
    ingest(store, [row(1), row(2)], "a", [claim(1)])
    other = [claim(1, earned="gated", status="failed", loss=None)]
    data = ["'r1' of run 'a'", "earned_tier is 'supported' there and 'gated' here", "--replace"]
    not_put(store, "user.other-judgement", data, [row(1)], "a", other)
    done = ingest(store, [row(1), row(2)], "a", other, replace=True)
    assert done == Ingested(added=0, replaced=0, same=2, rejudged=1)
    quality = query(store).select("earned_tier", "derived_status", "loss").rows()
    assert quality == [("gated", "failed", None), (None, None, None)]


def test_a_row_that_was_not_judged_may_be_later(store):
    ingest(store, [row(1)], "a")
    assert ingest(store, [row(1)], "a", [claim(1)]) == Ingested(added=0, replaced=0, same=1, rejudged=1)
    assert ingest(store, [row(1)], "a") == Ingested(added=0, replaced=0, same=1, rejudged=0)
    assert query(store)["earned_tier"].to_list() == ["supported"]


@pytest.mark.parametrize(
    ("basis", "differs"),
    [
        ({"registry": "r2", "current": "c1"}, "registry_digest is 'r1' there and 'r2' here;"),
        ({"registry": "r1", "current": "c2"}, "current_digest is 'c1' there and 'c2' here;"),
        ({"registry": "r1", "current": None}, "current_digest is 'c1' there and None here;"),
        ({"registry": "r2", "current": None}, "registry_digest is 'r1' there and 'r2' here, current_digest is 'c1'"),
    ],
)
def test_what_was_judged_against_something_else_is_no_silent_upgrade(store, basis, differs):
    ingest(store, [row(1), row(2)], "a", [claim(1), claim(2)], registry="r1", current="c1")
    code = "user.other-judgement"
    not_put(store, code, ["'r1' of run 'a'", differs], [row(3), row(1)], "a", [claim(3), claim(1)], **basis)
    not_put(store, code, ["1 more"], [row(1), row(2)], "a", [claim(1), claim(2)], **basis)
    assert ingest(store, [row(1), row(2)], "a", [claim(1)], replace=True, **basis).rejudged == 1
    kept = query(store).select("registry_digest", "current_digest").rows()
    assert kept == [(basis["registry"], basis["current"]), ("r1", "c1")]


@pytest.mark.parametrize(
    ("claims", "error", "code", "data"),
    [
        ([claim(9)], UserError, "user.claim-of-no-row", ["row 'r9' of run None"]),
        ([claim(1, run="a")], UserError, "user.claim-of-no-row", ["row 'r1' of run 'a'"]),
        ([claim(1), claim(1, earned="gated")], UserError, "user.claim-twice", ["row 'r1' of run None"]),
        ([claim(1, earned="suported")], UnknownName, None, ["suported", "'supported'"]),
        ([claim(1, loss=float("nan"))], NonFinite, "non-finite.loss", ["kl of row 'r1' is nan"]),
        ([claim(1, loss=float("inf"))], NonFinite, "non-finite.loss", ["kl of row 'r1' is inf"]),
    ],
)
def test_a_claim_that_is_none_stops_the_rows_too(store, claims, error, code, data):
    not_put(store, code, data, [row(1), row(2)], "a", claims, error=error)


def test_a_claim_is_of_the_row_that_the_gate_saw(store):
    rows = [row(1, run="a"), row(1, run="b")]
    ingest(store, rows, None, [claim(1, run="b", earned="gated")])
    assert query(store).select("run", "earned_tier").rows() == [("a", None), ("b", "gated")]
    ingest(store, [row(1, run="own")], "c", [claim(1, run="own")])
    assert query(store, {"run": "c"})["earned_tier"].to_list() == ["supported"]


def test_the_metric_nearest_to_its_margin_is_kept(store):
    judged = (judgement("kl", 0.1, 0.2, 1.0), judgement("top1_agreement", 0.01, 0.02, 0.04), judgement("ppl", -1, 0, 0))
    reasons = [Reason(code="tier_missing", field="support_status", said="is not given")]
    said = claim(1, reasons=reasons).model_copy(update={"judgements": judged})
    ingest(store, [row(1)], "a", [said])
    kept = query(store).select("loss_metric", "loss", "loss_share", "reasons").rows()
    assert kept == [("top1_agreement", 0.01, 0.5, '["tier_missing: support_status is not given"]')]


def test_what_the_gate_did_not_judge_is_no_claim_to_anything(store):
    ingest(store, [row(1)], "a", [claim(1, earned=None, status=None, loss=None, replay=None)])
    quality = query(store).select(*QUALITY)
    assert quality.rows() == [("r1", None, None, None, None, None, None, "[]", 0, None)]


def test_what_the_gate_says_of_a_file_is_kept_with_its_rows(store, tmp_path):
    lossless = {"mechanism": "baseline", "mechanism_variant": "none", "kv_cache_dtype": "bfloat16", "dtype": "bfloat16"}
    lossy = lossless | {"mechanism": "kv_quantization", "mechanism_variant": "invented"}
    made = [one | {"model": "m", "support_status": "supported"} for one in (lossless, lossy)]
    rows, context = read_back(tmp_path, made), Context(load(), current={})
    report = check(rows, context)
    put(store, prepared(rows, report, "a"))
    kept = dict(query(store).select("mechanism", "earned_tier").rows())
    assert kept == {claim.row["mechanism"]: claim.earned for claim in report.claims}
    assert kept["kv_quantization"] != "supported" and "variant_unregistered" in "".join(query(store)["reasons"])
    assert set(query(store).select("registry_digest", "current_digest").rows()) == {(report.registry, report.current)}
    again = prepared(stored_rows(store, "a"), check(stored_rows(store, "a"), context), "a")
    assert put(store, again) == Ingested(0, 0, same=2, rejudged=0)


# ------------------------------------------------------------------------------------------ runs


def test_rows_are_kept_under_the_run_that_is_given_and_remember_their_own(store):
    ingest(store, [row(1, run="own"), row(2)], "a")
    assert query(store)["run"].to_list() == ["a", "a"]
    assert [one.values["run"] for one in stored_rows(store, "a")] == ["own", "a"]
    ingest(store, [row(1, run="own")])
    assert query(store)["run"].to_list() == ["a", "a", "own"]


def test_a_row_without_a_run_is_refused(store):
    not_put(store, "user.no-run", ["row 2", "--run"], [row(1, run="a"), row(2)])
    not_put(store, "user.no-run", ["row 2"], [row(2)], "")
    not_put(store, None, ["run is 'a\\nb'"], [row(2)], "a\nb", error=RowError)
    not_put(store, "user.published-run", ["benchmark_runs"], [row(2)], "benchmark_runs")


def test_two_rows_in_one_place_are_refused_even_to_replace(store):
    not_put(store, "user.row-twice", ["row 'r1' of run 'a'"], [row(1), row(1, kl=1)], "a", replace=True)


def test_a_row_that_is_none_stops_all(store):
    not_put(store, None, ["throughput_tok_s is -1"], [row(1), Row({"throughput_tok_s": -1})], "a", error=RowError)
    not_put(store, None, ["troughput"], [row(1), Row({"troughput": 1})], "a", error=RowError)
    evidence = [{"x": float("nan")}]
    not_put(store, "non-finite.json", ["evidence of row 1"], [row(1, evidence=evidence)], "a", error=NonFinite)


# ----------------------------------------------------------------------------------------- files


def test_a_published_file_and_one_of_this_project_come_back_as_they_were_read(store, tmp_path):
    published_style = {
        "hw": "h100",
        "framework": "vllm",
        "infmax_model_prefix": "dsr1",
        "result_filename": "agg.json",
        "mechanism": "kv_quantization",
        "mechanism_variant": "fp8_e4m3",
        "support_status": "supported",
        "quality_eval_status": "completed",
        "mechanism_eval_validation": {"mechanism_eval_registered": True, "issues": []},
    }
    own = {"model": "m", "engine": "hf", "run": "mine", "fires": 3, "evidence": [{"quality_eval_id": "kv_fidelity"}]}
    rows = read_back(tmp_path, [published_style, own])
    assert ingest(store, rows).added == 2
    back = stored_rows(store, "agg.json") + stored_rows(store, "mine")
    assert [replace(one, source="") for one in back] == [replace(one, source="") for one in rows]
    assert "mechanism" not in back[1].values


def test_every_field_of_the_catalogue_arrives(store):
    kinds = {str: "text", int: 3, float: 0.5, bool: True}
    values = {column.name: column.choices[0] if column.choices else kinds[column.kind] for column in COLUMNS}
    ingest(store, [Row(checked_row(values))])
    assert [one.values for one in stored_rows(store, "text")] == [values]
    assert {name: query(store)[name][0] for name in values} == values


def test_evidence_keeps_its_order(store):
    evidence = tuple({"n": n} for n in (3, 1, 2, *range(20, 4, -1)))
    ingest(store, [row(1, evidence=evidence)], "a")
    assert stored_rows(store, "a")[0].evidence == evidence


def test_a_field_that_rows_gain_later_makes_them_no_others(store, monkeypatch):
    ingest(store, [row(1)], "a")
    monkeypatch.setattr(
        "kvlab.gate.store.ingest.checked_row", lambda values: checked_row(values) | {"of_the_future": None}
    )
    assert ingest(store, [row(1)], "a").same == 1


def test_nothing_is_stored_under_a_run_that_is_not_there(store):
    assert stored_rows(store, "a") == []


@pytest.fixture(scope="module")
def long_open(tmp_path_factory):
    with open_store(tmp_path_factory.mktemp("injected") / "store.db", create=True) as store:
        ingest(store, [row(1)], "untouched", [claim(1, earned="gated")])
        yield store


@given(values=st.fixed_dictionaries({}, optional={c.name: texts for c in COLUMNS if c.kind is str}), run=texts)
def test_text_is_text(long_open, values, run):
    tables = long_open.select("SELECT sql FROM sqlite_master")
    try:
        wanted = checked_row(values | {"run": run})
        ingest(long_open, [Row(wanted, ({"text": run},))], replace=True)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        kept = {name: value for name, value in wanted.items() if name != "mechanism" or value is not None}
        found = [replace(one, source="") for one in stored_rows(long_open, wanted["run"])]
        assert Row(kept, ({"text": run},)) in found
    assert long_open.select("SELECT sql FROM sqlite_master") == tables
    assert long_open.select("SELECT run, row_id, earned_tier FROM claims") == [("untouched", "r1", "gated")]
    assert long_open.select("SELECT count(*) FROM rows WHERE run = 'untouched'") == [(1,)]


# --------------------------------------------------------------------------- beside other processes

TEN_PROCESSES = """
import os, sys, traceback
from gate.databases import claim, ingest, row
from kvlab.gate.store import open_store
def work(number):
    with open_store(sys.argv[1], create=True) as store:
        for part in range(5):
            own = [row(1000 * number + 100 * part + i) for i in range(20, 40)]
            ingest(store, own + [row(i) for i in range(20)], "shared", [claim(1000 * number + 100 * part + 20)])
def child(number):
    try:
        work(number)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
for number in range(10):
    os.fork() or child(number)
sys.exit(max(os.wait()[1] for _ in range(10)))
"""


@pytest.mark.full
@pytest.mark.parametrize("old", [False, True], ids=["new file", "old database"])
def test_ten_processes_at_once_lose_nothing(path, old):
    if old:
        published(path, 50)
    with start(TEN_PROCESSES, path) as others:
        complaint = others.communicate()[1]
    assert others.returncode == 0, complaint
    with open_store(path) as store:
        assert len(query(store)) == 10 * 5 * 20 + 20 + 50 * old
        assert len(query(store, certified_only=True)) == 50
        assert store.select("PRAGMA integrity_check") == [("ok",)]


KILLED_INGEST = """
import os, signal, sys
from gate.databases import ingest, row
from kvlab.gate.store import ingest as module
from kvlab.gate.store import open_store
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "claims":
    module._put_claims = kill  # the last step before the commit
with open_store(sys.argv[1]) as store:
    store.connection.execute("PRAGMA cache_size = 10")  # most of it is in the log by then
    ingest(store, [row(i, mechanism_notes="x" * 999) for i in range(1000)], "b")
kill()
"""


@pytest.mark.parametrize(("at", "kept"), [("claims", 2), ("after", 1002)])
def test_a_killed_ingest_is_all_or_nothing(path, at, kept):
    with open_store(path, create=True) as store:
        ingest(store, [row(1), row(2)], "a")
    with start(KILLED_INGEST, path, at) as other:
        assert other.wait() == -9, other.stderr.read()
    with open_store(path) as store:
        assert len(query(store)) == kept
        assert store.select("PRAGMA integrity_check") == [("ok",)]
        assert ingest(store, [row(3)], "a").added == 1


def test_a_disk_that_is_full_anywhere_in_an_ingest_changes_nothing(path):
    with open_store(path, create=True) as store:
        ingest(store, [row(1)], "a", [claim(1)])
        pages = store.select("PRAGMA page_count")[0][0]
        wide = [row(i, evidence=[{"x": "y" * 2000}], mechanism_notes="z" * 2000) for i in range(9)]
        failed = 0
        while True:
            store.connection.execute(f"PRAGMA max_page_count = {pages + failed}")
            try:
                ingest(store, wide, "b", [claim(i) for i in range(9)])
                break
            except StorageError as error:
                assert error.code == "storage.disk-full" and str(path) in str(error)
                assert not store.connection.in_transaction
                assert query(store).select("run", "row_id", "earned_tier").rows() == [("a", "r1", "supported")]
                failed += 1
        assert failed > 5 and len(query(store)) == 10
        assert store.select("PRAGMA integrity_check") == [("ok",)]


def test_the_catalogue_makes_the_columns(store):
    found = store.select("SELECT name FROM pragma_table_info('rows')")
    assert {name for (name,) in found} == {*BY_NAME, "named_run", "embedded", "digest"}
    with pytest.raises(sqlite3.IntegrityError), store.transaction() as connection:
        connection.execute("INSERT INTO rows (run, row_id, digest) VALUES ('nowhere', 'x', '')")
