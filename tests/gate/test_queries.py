import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.databases import claim, dump, ingest, published, row
from kvlab.core.errors import CapabilityError, StorageError, UnknownName, UserError
from kvlab.gate.catalogue import BY_NAME, groupable
from kvlab.gate.catalogue.values import RowError
from kvlab.gate.store import open_store
from kvlab.gate.store.queries import (
    BEST,
    QUALITY,
    QUALITY_KEYS,
    QUALITY_WORDS,
    SCHEMA,
    SUMMARIES,
    UNJUDGED,
    diff,
    export,
    query,
    runs,
)
from refusals import refused, refused_in_one_line

NASTY = (
    "'; DROP TABLE rows; --",
    'model"; DROP TABLE rows; --',
    "model, (SELECT digest FROM rows)",
    "1 OR 1=1",
    "' OR '1'='1",
    "rowid",
    "digest",
    "e.model",
    "MODEL",
    "model --",
    "",
)
names = st.one_of(st.sampled_from([*NASTY, *BY_NAME, *QUALITY_WORDS]), st.text(max_size=30))
values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(NASTY), st.text(max_size=30), st.binary()
)
TABLES = [
    # i, throughput, tier that was earned
    (0, 900.0, "unsupported"),
    (1, 100.0, "supported"),
    (2, 100.0, "supported"),
    (3, 700.0, "gated"),
    (4, 300.0, "supported"),
    (5, None, "supported"),
    (6, 800.0, None),  # never judged
]


def rows_of(table):
    return [
        row(i, throughput_tok_s=speed, top1_agreement=speed and speed / 1000, context_tokens=1024 * (1 + i), kl=i / 8)
        for i, speed, _ in table
    ]


@pytest.fixture
def store(tmp_path):
    rows = rows_of(TABLES)
    claims = [claim(i, earned=tier, loss=i / 4) for i, _, tier in TABLES if tier]
    with open_store(tmp_path / "store.db", create=True) as store:
        ingest(store, rows, "a", claims)
        yield store


def ids(table):
    return table["row_id"].to_list()


def test_everything_comes_in_order_with_its_quality(store):
    table = query(store)
    assert table.schema == SCHEMA and list(SCHEMA) == [*BY_NAME, *QUALITY]
    assert ids(table) == [f"r{i}" for i in range(7)]
    assert table["earned_tier"].to_list() == [tier for _, _, tier in TABLES]
    assert table["loss_share"].to_list() == [0, 0.25, 0.5, 0.75, 1.0, 1.25, None]


def test_the_best_among_certified_rows(store):
    best = query(store, best="top1_agreement", certified_only=True)
    assert ids(best) == ["r4"] and best.columns == [name for name in SCHEMA if name not in UNJUDGED]
    assert best.select("top1_agreement", "earned_tier", "derived_status", "loss").rows() == [
        (0.3, "supported", "completed", 1)
    ]
    assert ids(query(store, best="top1_agreement")) == ["r0"]
    assert ids(query(store, {"context_tokens": 2048}, best="top1_agreement", certified_only=True)) == ["r1"]


@pytest.mark.parametrize("name", UNJUDGED)
def test_what_nothing_vouches_for_is_neither_certified_nor_best(store, name):
    """A speed that is typed beside good evidence was answered as the fastest certified row."""
    with pytest.raises(CapabilityError):
        query(store, best=name)
    assert name in query(store).columns and name not in query(store, certified_only=True).columns
    assert not any(column == name for _, column in SUMMARIES.values()) and name not in BEST


def test_the_best_of_each_group_and_the_first_of_equals(store):
    best = query(store, group_by=["model"], best="top1_agreement", certified_only=True)
    assert best.select("model", "row_id").rows() == [
        ("model-1", "r4"),
        ("model-2", "r2"),
    ]  # of model-0 none is certified
    assert ids(query(store, {"row_id": ["r1", "r2"]}, ["mechanism"], best="top1_agreement")) == ["r1"]
    assert ids(query(store, group_by=["model"], best="kl")) == ["r0", "r1", "r2"]  # lower is better


def test_who_does_not_say_it_is_not_best(store):
    assert query(store, best="kv_bytes").is_empty()
    assert query(store, {"row_id": "r5"}, best="top1_agreement").is_empty()
    ingest(store, [row(1, kv_bytes=9), row(2)], "b")
    assert query(store, best="kv_bytes").select("run", "row_id").rows() == [("b", "r1")]


def test_a_group_never_mixes_what_is_certified_with_what_is_not(store):
    table = query(store, group_by=["mechanism"])
    assert table.columns == ["mechanism", *QUALITY_KEYS, "rows", *SUMMARIES]
    shown = table.select("earned_tier", "rows", "max_loss_share").rows()
    assert shown == [(None, 1, None), ("gated", 1, 0.75), ("supported", 4, 1.25), ("unsupported", 1, 0)]
    certified = query(store, group_by=["mechanism", "mechanism"], certified_only=True)
    assert certified["rows"].to_list() == [4]
    assert query(store, group_by=["quality_eval_id"]).columns[:3] == ["quality_eval_id", *QUALITY_KEYS[:2]]


def test_a_group_never_mixes_what_different_registries_allow(tmp_path):
    with open_store(tmp_path / "rows.db", create=True) as opened:
        for number, registry in enumerate(("r1", "r1", "r2")):
            ingest(opened, [row(number)], "a", [claim(number)], registry=registry)
        table = query(opened, group_by=["mechanism"])
    assert table.select("registry_digest", "rows").rows() == [("r1", 2), ("r2", 1)]


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ({"context_tokens": 1024}, ["r0"]),
        ({"context_tokens": "1024"}, ["r0"]),
        ({"context_tokens": ["1024", 2048]}, ["r0", "r1"]),
        ({"throughput_tok_s": 100}, ["r1", "r2"]),
        ({"throughput_tok_s": "1e2", "model": "model-2"}, ["r2"]),
        ({"throughput_tok_s": None}, ["r5"]),
        ({"throughput_tok_s": ""}, ["r5"]),
        ({"throughput_tok_s": [None, 900]}, ["r0", "r5"]),
        ({"throughput_tok_s": []}, []),
        ({"earned_tier": "gated"}, ["r3"]),
        ({"earned_tier": None}, ["r6"]),
        ({"derived_status": "completed", "model": "model-0"}, ["r0", "r3"]),
        ({"model": "nobody's"}, []),
        ({"run": "a", "row_id": "r6"}, ["r6"]),
    ],
)
def test_where(store, where, found):
    assert ids(query(store, where)) == found


@pytest.mark.parametrize(
    ("given", "error", "data"),
    [
        ({"where": {"modle": "x"}}, UnknownName, ["modle", "'model'"]),
        ({"where": {"modle": []}}, UnknownName, ["modle", "'model'"]),
        ({"where": {"digest": "x"}}, UnknownName, ["column to ask for 'digest'"]),
        ({"where": {"earned_tier": "suported"}}, UnknownName, ["earned_tier 'suported'", "'supported'"]),
        ({"where": {"context_tokens": "many"}}, RowError, ["context_tokens is 'many'"]),
        ({"where": {"context_tokens": 2**63}}, RowError, ["context_tokens is 9223372036854775808"]),
        ({"where": {"kl": float("nan")}}, RowError, ["kl is nan"]),
        ({"where": {"model": "\ud800"}}, RowError, [r"model is '\ud800'"]),
        ({"group_by": ["kl"]}, UnknownName, ["column to group by 'kl'"]),
        ({"group_by": ["modle"]}, UnknownName, ["column to group by 'modle'", "'model'"]),
        ({"best": "model"}, UnknownName, ["measure that can be best 'model'"]),
        ({"best": "top1_agreemnt"}, UnknownName, ["top1_agreemnt", "'top1_agreement'"]),
    ],
)
def test_what_cannot_be_queried_is_said_in_one_line(store, given, error, data):
    with refused_in_one_line(error, None, *data):
        query(store, **given)


def test_what_can_be_best_and_what_is_summed_up_are_columns():
    assert set(BEST) <= set(BY_NAME)
    assert {name for _, name in SUMMARIES.values()} <= set(SCHEMA)


@pytest.fixture(scope="module")
def long_open(tmp_path_factory):
    with open_store(tmp_path_factory.mktemp("asked") / "store.db", create=True) as store:
        ingest(store, [row(i, model=NASTY[i % 3], context_tokens=1 + i) for i in range(9)], "a", [claim(1)])
        yield store


@given(
    where=st.dictionaries(names, st.one_of(values, st.lists(values, max_size=3)), max_size=3),
    group_by=st.lists(names, max_size=2),
    best=st.one_of(st.none(), names),
    certified=st.booleans(),
)
def test_a_question_changes_nothing_and_answers_no_other(long_open, where, group_by, best, certified):
    content = "SELECT count(*), sum(length(digest)) FROM rows"
    before = long_open.select(content), long_open.connection.total_changes
    try:
        found = query(long_open, where, group_by, best, certified)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert set(where) <= {*BY_NAME, *QUALITY_WORDS} and set(group_by) <= set(groupable())
        assert set(found.columns) <= {*SCHEMA, "rows", *SUMMARIES}
        assert len(found) <= 11
    assert (long_open.select(content), long_open.connection.total_changes) == before


@given(text=st.one_of(st.sampled_from(NASTY), st.text(min_size=1, max_size=30)))
def test_a_text_finds_only_itself(long_open, text):
    try:
        ingest(long_open, [row(1), row(2, model=text)], "b", replace=True)
        found = query(long_open, {"model": text, "run": "b"})
    except UserError:
        return
    assert ids(found) == ["r2"]  # an empty text is none, and is found as none


# --------------------------------------------------------------------------------- export, diff


def test_export_is_what_a_query_finds(store, tmp_path):
    path = tmp_path / "all.parquet"
    written = export(store, path)
    assert pl.read_parquet(path).equals(query(store)) and written.equals(query(store))
    export(store, path, {"model": "model-1"})
    assert ids(pl.read_parquet(path)) == ["r1", "r4"]


def test_export_of_nothing_has_its_columns(tmp_path):
    with open_store(tmp_path / "empty.db", create=True) as store:
        export(store, tmp_path / "none.parquet")
    assert pl.read_parquet(tmp_path / "none.parquet").schema == SCHEMA


def test_a_store_is_not_exported_over_itself(store, tmp_path):
    before = dump(store.path)
    (tmp_path / "link.db").symlink_to(store.path)
    for path in (store.path, tmp_path / "link.db", tmp_path / "x" / ".." / "store.db"):
        with refused(StorageError, "storage.own-file", path):
            export(store, path)
    assert dump(store.path) == before


@pytest.mark.parametrize("ending", ["-wal", "-shm", "-journal"])
def test_nor_over_what_sqlite_keeps_beside_it(store, tmp_path, ending):
    before = dump(store.path)
    (tmp_path / "link.db").symlink_to(store.path)
    with open_store(tmp_path / "link.db") as linked:
        for opened in (store, linked):
            with refused(StorageError, "storage.own-file", f"{store.path}{ending}"):
                export(opened, f"{store.path}{ending}")
    assert dump(store.path) == before
    export(store, f"{store.path}-walrus")


def test_diff_says_what_came_what_went_and_what_changed(store):
    rows = rows_of(TABLES[2:])
    rows[0] = row(2, throughput_tok_s=50, top1_agreement=0.1, context_tokens=3072, kl=2 / 8, cache_class="Café")
    same = [claim(i, earned=tier, loss=i / 4) for i, _, tier in TABLES[3:] if tier]
    ingest(store, [*rows, row(8)], "b", [claim(2, earned="gated", loss=0.5), *same])
    lines = diff(store, "a", "b").select("row_id", "change", "column", "before", "after").rows()
    assert lines == [
        ("r0", "gone", None, None, None),
        ("r1", "gone", None, None, None),
        ("r2", "changed", "throughput_tok_s", "100.0", "50.0"),
        ("r2", "changed", "cache_class", None, '"Caf\\u00e9"'),
        ("r2", "changed", "earned_tier", '"supported"', '"gated"'),
        ("r2", "changed", "certified", "1", "0"),
        ("r8", "added", None, None, None),
    ]
    ingest(store, [row(8)], "c", [claim(8)], registry="r2", current="c2")
    ingest(store, [row(8)], "d", [claim(8)])
    judged = diff(store, "d", "c").select("row_id", "column", "before", "after").rows()
    assert judged == [("r8", "registry_digest", '"r1"', '"r2"'), ("r8", "current_digest", None, '"c2"')]
    back = diff(store, "b", "a")
    assert back["change"].to_list() == ["added", "added", *["changed"] * 4, "gone"]
    assert back.schema == diff(store, "a", "a").schema and diff(store, "a", "a").is_empty()


def test_a_run_that_is_not_there_is_said_with_the_nearest(store):
    ingest(store, [row(1)], "nightly")
    for pair in (("a", "nightli"), ("nightli", "a")):
        with refused(UnknownName, None, "nightli", "'nightly'"):
            diff(store, *pair)
    assert runs(store) == ["a", "nightly"]


def test_the_published_table_is_a_run_that_is_never_certified(tmp_path):
    path = published(tmp_path / "old.db", 50, mechanism_columns=16)
    with open_store(path) as store:
        ingest(store, [row(i) for i in range(3)], "a", [claim(2)])
        assert runs(store) == ["a", "benchmark_runs"]
        groups = query(store, group_by=["mechanism"])
        assert groups.filter(pl.col("earned_tier").is_null())["rows"].sum() == 52
        assert groups.filter(pl.col("earned_tier") == "supported")["rows"].to_list() == [1]
        speeds = query(store).filter(pl.col("run") == "benchmark_runs").sort("throughput_tok_s", nulls_last=True)
        assert "benchmark_runs:49" in ids(speeds.drop_nulls("throughput_tok_s"))  # the 50th failed
        assert "benchmark_runs:50" not in ids(speeds.drop_nulls("throughput_tok_s"))
        assert ids(query(store, certified_only=True)) == ["r2"]
        assert set(diff(store, "benchmark_runs", "a")["change"]) == {"gone", "added"}
        assert len(export(store, tmp_path / "x.parquet")) == 53
