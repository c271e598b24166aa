"""What was measured is used again under the same identity, and under no other."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.calibration import load as calibration
from kvlab.codecs.block.studied import studied_recipe
from kvlab.codecs.noise import NoiseStream
from kvlab.core import code
from kvlab.core.errors import CodecNotActive, NonFinite
from kvlab.core.recipe import IDENTITY, Cell, LayerRecipe, Recipe
from kvlab.engines import registry
from kvlab.measure.coding import Coder
from kvlab.measure.engines import Engines
from kvlab.measure.loop import walk
from kvlab.measure.store import ROWS, Found, ResultStore, address
from kvlab.measure.subjects import UNDECIDING, CellSubject
from kvlab.measure.windows import Window
from kvlab_pipeline.jobs import measure as measuring
from kvlab_pipeline.jobs.plan import jobs
from refusals import refused

WINDOW = Window("test", 3, (5, 6, 7, 8), 2)


class Named:
    """A subject that is what its identity says, and counts how often it is scored."""

    def __init__(self, identity, note=None):
        self._identity, self.note, self.scored = identity, note or {"value": 1.5}, 0

    def identity(self):
        return self._identity

    def due(self, _window):
        return True

    def score(self, _visit):
        self.scored += 1
        return Found(dict(self.note), rows(2.0))


def rows(kl: float) -> pl.DataFrame:
    return pl.DataFrame({name: [1] for name in ROWS}).cast(dict(ROWS)).with_columns(kl=pl.lit(kl))


def score(folder, subject, shared=None, window=WINDOW, current=None):
    """The finding of one subject through a store that is opened for it."""
    store = ResultStore(folder, shared or {"model_hash": "m"}, current)
    ((_, [(_, found)]),) = walk([window], [subject], lambda _: None, store)
    return found


# --------------------------------------------------------------------------------------- the same is used again


def test_what_was_measured_is_read_again_to_the_last_bit(tmp_path):
    first = score(tmp_path, Named({"cell": 1}, {"value": 0.1 + 0.2, "counts": {"7": 3}}))
    again = Named({"cell": 1})
    found = score(tmp_path, again)
    assert again.scored == 0 and found.note == first.note == {"value": 0.1 + 0.2, "counts": {"7": 3}}
    assert found.rows.equals(first.rows) and found.rows.schema == ROWS


def test_two_of_one_identity_are_scored_once_and_one_without_is_always(tmp_path):
    twins = [Named({"cell": 1}), Named({"cell": 1}), Named(None), Named(None)]
    for _ in range(2):
        list(walk([WINDOW], twins, lambda _: None, ResultStore(tmp_path, {})))
    assert [one.scored for one in twins] == [1, 0, 2, 2]


def test_nothing_is_begun_where_nothing_is_missing(tmp_path):
    score(tmp_path, Named({"cell": 1}))
    began = []
    list(walk([WINDOW], [Named({"cell": 1})], began.append, ResultStore(tmp_path, {"model_hash": "m"})))
    assert began == []


def test_a_killed_walk_goes_on_where_it_was(tmp_path):
    windows = [replace(WINDOW, number=n) for n in range(4)]
    first, second = Named({"cell": 1}), Named({"cell": 1})
    walked = walk(windows, [first], lambda _: None, ResultStore(tmp_path, {}))
    next(walked), next(walked)
    walked.close()
    list(walk(windows, [second], lambda _: None, ResultStore(tmp_path, {})))
    assert (first.scored, second.scored) == (2, 2)


# ------------------------------------------------------------------------------------ anything else is measured


LEAVES = st.one_of(st.integers(-9, 9), st.floats(-9, 9), st.text(max_size=3), st.none(), st.booleans())
IDENTITIES = st.dictionaries(st.text(min_size=1, max_size=3), LEAVES | st.lists(LEAVES, max_size=2), max_size=4)


@given(IDENTITIES, IDENTITIES)
def test_two_identities_have_one_address_only_if_they_are_equal(one, other):
    assert (address(one) == address(other)) == (json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True))


def test_no_field_of_what_is_shared_may_differ(tmp_path, hf_engine):
    shared = Engines(hf_engine.info, 96).identity()
    assert {"model_hash", "versions", "device", "processor", "threads", "environment", "max_tokens"} <= shared.keys()
    score(tmp_path, Named({"cell": 1}), shared)
    for name in shared:
        other = Named({"cell": 1})
        score(tmp_path, other, shared | {name: "another"})
        assert other.scored == 1, name
    same = Named({"cell": 1})
    score(tmp_path, same, dict(reversed(shared.items())))
    assert same.scored == 0


@pytest.mark.parametrize(
    "changed", [{"number": 4}, {"ids": (5, 6, 7, 9)}, {"ids": (5, 6, 78)}, {"context": 3}, {"first": 1}]
)
def test_no_part_of_the_window_may_differ(tmp_path, changed):
    score(tmp_path, Named({"cell": 1}))
    other = Named({"cell": 1})
    score(tmp_path, other, window=replace(WINDOW, **changed))
    assert other.scored == 1


def cell(params, **changes) -> Cell:
    settings = {"study": "cells", "label": "x", "engine": "hf", "dtype": "float32", "attention": "sdpa"}
    settings |= {"protocol": "snapshot", "placement": "pre_rope", "span": "context", "origin": "hf", "stream": "kv"}
    return Cell(**settings | {"layers": (1, 2), "windows": 2, "recipe": studied_recipe(params)} | changes)


CHANGES = {
    "engine": "vllm",
    "dtype": "bfloat16",
    "attention": "eager",
    "protocol": "in_forward",
    "placement": "post_rope",
    "span": "window",
    "origin": "vllm",
    "stream": "k",
    "layers": (1,),
    "recipe": IDENTITY,
    "exceptions": (LayerRecipe(layers=(1,), recipe=IDENTITY),),
}


def subject(one: Cell, calibrated) -> CellSubject:
    return CellSubject(one, None, calibrated)


@pytest.fixture(scope="module")
def calibrated(tiny_fitted, hf_engine):
    return calibration.load(tiny_fitted, hf_engine.info.model_hash)


def test_every_field_of_a_cell_is_decided_upon():
    assert set(Cell.model_fields) == CHANGES.keys() | UNDECIDING


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_no_deciding_field_of_a_cell_may_differ(tiny_params, name):
    plain = subject(cell(tiny_params), None).identity()
    assert subject(cell(tiny_params, **{name: CHANGES[name]}), None).identity() != plain


@pytest.mark.parametrize(("name", "value"), [("study", "noise"), ("label", "y"), ("windows", 9), ("text", "other")])
def test_who_asks_for_a_cell_does_not_matter(tiny_params, calibrated, name, value):
    other = subject(cell(tiny_params, **{name: value}), calibrated).identity()
    assert other == subject(cell(tiny_params), calibrated).identity()


def test_no_setting_of_a_codec_may_differ(tiny_params, calibrated):
    recipes = (Recipe(k=NoiseStream(sigma=s, seed=1), v=NoiseStream(sigma=0.1, seed=1)) for s in (0.1, 0.2))
    one, other = (cell(tiny_params, recipe=recipe) for recipe in recipes)
    assert subject(one, calibrated).identity() != subject(other, calibrated).identity()


def test_no_number_that_was_fitted_may_differ(tiny_params, calibrated):
    """The metric by which errors are weighed counts even where no codec reads it."""
    for recipe in (studied_recipe(tiny_params), IDENTITY):
        plain = subject(cell(tiny_params, recipe=recipe), calibrated).identity()
        layer = calibrated.whiteners[1]
        moved = replace(layer, chol=layer.chol * (1 + 2**-20))
        other = replace(calibrated, whiteners=calibrated.whiteners | {1: moved})
        assert subject(cell(tiny_params, recipe=recipe), other).identity() != plain
    tables = {key: table + 2**-20 for key, table in calibrated.tables.items()}
    plain, other = (subject(cell(tiny_params), c).identity() for c in (calibrated, replace(calibrated, tables=tables)))
    assert plain != other


@pytest.mark.parametrize(
    ("module", "recipe", "matters"),
    [
        ("kvlab/codecs/block/codec.py", "studied", True),
        ("kvlab/codecs/block/codec.py", "noise", False),
        ("kvlab/engines/hf/engine.py", "noise", True),
        ("kvlab/engines/vllm/engine.py", "studied", False),
        ("kvlab/measure/scoring.py", "noise", True),
        ("kvlab/measure/coding.py", "studied", True),
        ("kvlab/stats/divergences.py", "noise", True),
        ("kvlab_pipeline/report/page.py", "studied", False),
    ],
)
def test_code_that_measures_a_cell_is_part_of_what_it_is(tiny_params, monkeypatch, module, recipe, matters):
    noise = Recipe(k=NoiseStream(sigma=0.1, seed=1), v=NoiseStream(sigma=0.1, seed=1))
    one = cell(tiny_params, recipe=studied_recipe(tiny_params) if recipe == "studied" else noise)
    plain, meaning = subject(one, None).identity(), code.meaning
    edited = str(code.ROOT / module)
    monkeypatch.setattr(code, "meaning", lambda path: "edited" if path == edited else meaning(path))
    assert (subject(one, None).identity() != plain) == matters


def test_a_codec_of_somebody_else_is_never_taken_from_the_store(tiny_params, monkeypatch):
    monkeypatch.setattr("kvlab.measure.subjects.foreign_codecs", lambda _: ["sign (kvlab-sign 1.0)"])
    assert subject(cell(tiny_params), None).identity() is None


def test_code_that_is_edited_while_it_runs_is_not_kept(tmp_path):
    states = iter(["as it was", "as it was", "edited"])
    windows = [replace(WINDOW, number=n) for n in range(2)]
    store = ResultStore(tmp_path, {}, lambda: next(states))
    list(walk(windows, [Named({"cell": 1})], lambda _: None, store))
    assert len(list(tmp_path.rglob("*.json"))) == 1
    score(tmp_path / "unknown", Named({"cell": 1}), current=lambda: None)
    assert not list((tmp_path / "unknown").rglob("*.json"))


# --------------------------------------------------------------------------------------------- damaged and wrong


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_pack_is_measured_again(tmp_path, suffix, damage):
    score(tmp_path, Named({"cell": 1}))
    (path,) = tmp_path.rglob(f"*{suffix}")
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif suffix == ".json":
        path.write_text(path.read_text().replace("1.5", "2.5"))
    else:
        rows(9.0).with_columns(key=pl.lit(address({"cell": 1}))).write_parquet(path)
    again = Named({"cell": 1})
    assert score(tmp_path, again).note == {"value": 1.5} and again.scored == 1


def test_a_pack_that_was_put_in_another_folder_is_not_believed(tmp_path):
    score(tmp_path, Named({"cell": 1}), {"model_hash": "m"})
    (own,) = tmp_path.iterdir()
    own.rename(tmp_path / address({"version": 1, "shared": {"model_hash": "other"}})[:32])
    other = Named({"cell": 1})
    score(tmp_path, other, {"model_hash": "other"})
    assert other.scored == 1


def test_what_is_not_finite_is_not_kept(tmp_path):
    class Broken(Named):
        def score(self, _visit):
            return Found({}, rows(float("nan")))

    with pytest.raises(NonFinite):
        score(tmp_path, Broken({"cell": 1}))
    assert not list(tmp_path.rglob("*.json"))


def test_a_codec_that_stays_idle_is_not_kept(tiny_params, tmp_path):
    """Also where other windows would make up for it."""
    one = cell(tiny_params, recipe=IDENTITY)
    coder = Coder(one, None)

    class Run:
        def measured(self, _cell, coder):
            coder.tally.fires = 3
            return rows(1.0)

    visit = SimpleNamespace(run=lambda _which: Run())
    with refused(CodecNotActive, "not-active.fires", 3, 4):
        list(walk([WINDOW], [replace_due(CellSubject(one, coder, None))], lambda _: visit, ResultStore(tmp_path, {})))
    assert not list(tmp_path.rglob("*.json"))


def replace_due(subject):
    subject.due = lambda _window: True
    return subject


# ------------------------------------------------------------------------------------------------ a whole job


@pytest.mark.full
def test_a_job_again_is_the_same_bytes_without_an_engine(
    tiny_params, tiny_windows, tiny_fitted, hf_engine, tmp_path, monkeypatch
):
    (job,) = [name for name in jobs(tiny_params, "noise") if name.startswith("hf")]
    given = (tiny_params, "noise", job, tiny_windows, {"hf": tiny_fitted})
    monkeypatch.setattr(registry, "start", lambda *_, **__: hf_engine)
    monkeypatch.setattr(hf_engine, "close", lambda: None)
    measuring.measure(*given, tmp_path / "plain.parquet")
    measuring.measure(*given, tmp_path / "first.parquet", folder=tmp_path / "store")

    def refuse(*_args, **_named):
        raise AssertionError("an engine was started")

    monkeypatch.setattr(registry, "start", refuse)
    measuring.measure(*given, tmp_path / "again.parquet", folder=tmp_path / "store")
    for suffix in (".parquet", ".json"):
        made = [(tmp_path / f"{name}{suffix}").read_bytes() for name in ("plain", "first", "again")]
        assert made[0] == made[1] == made[2]


@pytest.mark.full
def test_another_sigma_measures_the_new_cells_alone(
    tiny_params, tiny_windows, tiny_fitted, hf_engine, tmp_path, monkeypatch
):
    monkeypatch.setattr(registry, "start", lambda *_, **__: hf_engine)
    monkeypatch.setattr(hf_engine, "close", lambda: None)
    scored = []
    score_cell = CellSubject.score
    monkeypatch.setattr(CellSubject, "score", lambda self, visit: scored.append(self.cell) or score_cell(self, visit))
    noise = tiny_params.noise
    for sigmas in (noise.sigmas, (*noise.sigmas, 0.5)):
        scored.clear()
        params = tiny_params.model_copy(update={"noise": noise.model_copy(update={"sigmas": sigmas})})
        (job,) = [name for name in jobs(params, "noise") if name.startswith("hf")]
        out = tmp_path / "x.parquet"
        measuring.measure(params, "noise", job, tiny_windows, {"hf": tiny_fitted}, out, folder=tmp_path / "store")
    assert scored and {one.recipe.k.sigma for one in scored} == {0.5}


def test_tensors_of_two_engines_do_not_share_a_memo(tiny_params, tiny_windows):
    with measuring.Lab.open(tiny_params, tiny_windows, {}) as lab:
        made = [lab.subject(cell(tiny_params, recipe=IDENTITY, attention=a)) for a in ("sdpa", "eager", "default")]
    memos = [one.coder._memo for one in made]
    assert memos[0] is memos[2] is not memos[1]


def test_a_memo_forgets_the_oldest_beyond_its_room(monkeypatch):
    from kvlab.measure import subjects

    monkeypatch.setattr(subjects, "MEMO_BYTES", 100)
    memo = subjects.Memo()
    for name in "abc":
        memo[name] = SimpleNamespace(held=40)
    assert list(memo) == ["b", "c"]
    memo.clear()
    memo["d"] = SimpleNamespace(held=400)
    assert list(memo) == ["d"]
