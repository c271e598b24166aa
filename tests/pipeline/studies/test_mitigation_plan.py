"""The arms of the mitigations as cells, and the record of a choice."""

from __future__ import annotations

import pytest

from kvlab.codecs.block.studied import coded_layers, studied_recipe
from kvlab.core.errors import MissingResult, StaleResult, StorageError
from kvlab.core.paramfile import overlay
from kvlab.core.recipe import IDENTITY
from kvlab.core.records import Provenance, write_json
from kvlab_pipeline.jobs import plan as plans
from kvlab_pipeline.studies.mitigations import plan
from kvlab_pipeline.studies.mitigations.plan import ChoiceRecord, LayerChoice, Step, current, read_choice, search_id
from kvlab_pipeline.studies.settings import Settings
from refusals import refused

CHOICE = LayerChoice(greedy=(0, 2, 3), extended=(0, 3, 5), hot=(1, 2), klt_boundary=(0,), klt_hot=(4,), moved=(2, 3))


@pytest.fixture(scope="module")
def params(base_params) -> Settings:
    return Settings.complete(base_params)


def arms(params, choice=CHOICE) -> dict:
    return {arm.name: arm for arm in plan.arms(params, choice)}


def test_each_arm_codes_what_it_says(params):
    made = arms(params)
    assert made["moved"].layers == (0, 1, 4, 5)
    assert made["greedy"].layers == (1, 4, 5) and made["extended"].layers == (1, 2, 4)
    assert {made[name].recipe for name in ("moved", "greedy", "extended", "hot")} == {studied_recipe(params)}
    (special,) = made["hot"].exceptions
    assert special.layers == CHOICE.hot
    assert (special.recipe.k.bits, special.recipe.v.bits) == (params.bits + 1, params.v_bits)
    assert made["klt uniform"].layers == tuple(range(6)) and made["klt boundary"].layers == (1, 2, 3, 4, 5)
    (special,) = made["klt hot"].exceptions
    uniform, others = made["klt uniform"].recipe, made["klt hot"].recipe
    assert special.recipe.k.bits == uniform.k.bits + 1 and others.k.bits == pytest.approx(uniform.k.bits - 1 / 5)
    assert special.recipe.v == others.v == uniform.v


def test_the_curve_starts_at_the_studied_recipe_whatever_is_listed(params):
    names = [arm.name for arm in plan.uniform(params)]
    assert names[0] == f"uniform {params.bits}/{params.v_bits}" and len(set(names)) == len(names)
    changes = params.mitigations.model_copy(update={"uniform": ((5, 5), (5, 5))})
    other = plan.uniform(params.model_copy(update={"mitigations": changes}))
    assert [arm.name for arm in other] == [names[0], "uniform 5/5"]
    assert {arm.layers for arm in other} == {coded_layers(params)}


def test_k_and_v_of_klt_stand_apart_as_far_as_there_is_room(params):
    assert plan.klt_bits(params, 4.0) == (4.5, 3.5)
    assert plan.klt_bits(params, 2.0) == (2.25, 1.75)
    wide = params.model_copy(update={"bits": 8, "v_bits": 1})
    assert plan.klt_bits(wide, 2.0) == (3.5, 0.5)
    assert plan.klt_bits(wide, 7.5) == (8.0, 7.0)
    assert plan.klt_bits(params, 0.5) == (0.5, 0.5)


def test_every_engine_judges_every_arm_under_every_protocol(params):
    for engine in params.engines:
        cells = plan.cells(params, engine, CHOICE)
        assert {cell.text for cell in cells} == {"test"} and {cell.engine for cell in cells} == {engine}
        assert {cell.origin for cell in cells} == {params.calibration.origin}
        per_protocol = len(arms(params)) + 1
        assert len(cells) == per_protocol * len(params.mitigations.protocols)
        floors = [cell for cell in cells if cell.recipe == IDENTITY]
        assert [cell.protocol for cell in floors] == list(params.mitigations.protocols)
        assert all(len(cell.layers) == params.model.n_layers for cell in floors)


def test_the_cells_of_a_choice_are_never_those_it_was_made_by(params):
    (arm, *_) = plan.arms(params, CHOICE)
    judged = plan.cell_of(arm, params, "hf", "snapshot", 16)
    chosen_by = plan.cell_of(arm, params, "hf", "snapshot", 16, text="calib")
    assert judged.cell_id != chosen_by.cell_id


def test_searches_that_find_the_same_layers_are_one_cell(params):
    same = CHOICE.model_copy(update={"extended": CHOICE.greedy, "moved": params.codec.boundary_layers})
    ids = {arm.name: plan.cell_of(arm, params, "hf", "snapshot", 32).cell_id for arm in plan.arms(params, same)}
    assert ids["extended"] == ids["greedy"] and ids["moved"] == ids[f"uniform {params.bits}/{params.v_bits}"]
    planned = plans.study_cells(params, "mitigations", "hf", same)
    assert len({cell.cell_id for cell in planned}) == len(planned)
    assert set(ids.values()) == {c.cell_id for c in planned if c.protocol == "snapshot" and c.recipe != IDENTITY}


def test_the_tables_of_every_possible_choice_are_fitted(params):
    wanted = {stream for _, _, stream in plans.fittings(params, params.calibration.origin)}
    for arm in plan.arms(params, CHOICE):
        for recipe in (arm.recipe, *(special.recipe for special in arm.exceptions)):
            assert {s for s in (recipe.k, recipe.v) if s.codec == "block"} <= wanted


@pytest.mark.parametrize(
    "changes, code, data",
    [
        ({"hot": (6,)}, "stale.no-layer", ("6 of 6",)),
        ({"klt_boundary": (0, 1)}, "stale.too-many-bytes", ()),
        ({"klt_hot": (0, 1, 2, 3, 4)}, "stale.too-many-bytes", ()),
    ],
)
def test_a_choice_of_other_parameters_is_refused(params, changes, code, data):
    with refused(StaleResult, code, *data):
        plan.arms(params, CHOICE.model_copy(update=changes))


def record_of(params, **changes) -> ChoiceRecord:
    values = {
        "provenance": Provenance(
            model="m", model_hash="a", corpus_hash="b", calibration={"hf": "c"}, versions={}, device="cpu"
        ),
        "engine": params.calibration.origin,
        "dtype": params.gap.dtype,
        "protocol": "snapshot",
        "windows": params.windows.calib,
        "budget": params.mitigations.budget,
        "search_id": search_id(params),
        "choice": CHOICE,
        "searches": {"greedy": (Step(layers=(), kl=0.2, bits_per_value=3.0),)},
    }
    return ChoiceRecord(**values | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"bits": 4},
        {"v_bits": 3},
        {"codec": {"variance_ratio": 0.5}},
        {"codec": {"boundary_layers": [0]}},
        {"calibration": {"codebooks": "gaussian"}},
        {"mitigations": {"klt_bits": 5.0}},
        {"mitigations": {"uniform": [[3, 2], [5, 5]]}},
        {"mitigations": {"budget": 9.0}},
        {"windows": {"calib": 3}},
        {"gap": {"dtype": "float32"}},
    ],
    ids=str,
)
def test_a_choice_made_under_what_decides_a_search_otherwise_is_refused(base_params, params, changes):
    """All of these leave its layers possible ones."""
    now = Settings.complete(overlay(base_params, changes))
    choice = CHOICE.model_copy(update={"klt_boundary": ()})  # in float32 no layer could be left uncoded
    with refused(StaleResult, "stale.other-choice", "`kvlab step choose`"):
        current(now, record_of(params, choice=choice))
    assert current(now, record_of(now, choice=choice)) == choice


def test_how_a_choice_is_judged_does_not_make_it_stale(base_params, params):
    changes = {"mitigations": {"windows": 4, "protocols": ["snapshot"]}, "stats": {"seed": 7}, "windows": {"test": 64}}
    now = Settings.complete(overlay(base_params, changes))
    assert now.mitigations != params.mitigations and current(now, record_of(params)) == CHOICE


def test_a_choice_that_none_can_be_is_refused_with_its_record(params):
    with refused(StaleResult, "stale.no-layer", "6 of 6"):
        current(params, record_of(params, choice=CHOICE.model_copy(update={"hot": (6,)})))


def test_k_of_eight_bits_gets_no_ninth(params):
    full = params.model_copy(update={"bits": 8})
    assert plan.hot(full, (1, 2)).exceptions == () and plan.hot(params, (1, 2)).exceptions


def test_there_are_no_cells_without_a_choice(params):
    with refused(MissingResult, None, "`kvlab step choose`"):
        plans.study_cells(params, "mitigations", "hf")


def test_favoured_layers_by_the_name_of_the_arm(params):
    fields = set(LayerChoice.model_fields)
    for name in arms(params):
        found = plan.favoured(CHOICE, name)
        assert bool(found) == (name.replace(" ", "_") in fields)
    assert plan.favoured(CHOICE, "klt hot") == CHOICE.klt_hot


def test_a_record_survives_its_file_and_nothing_else_is_read(params, tmp_path):
    record = record_of(params)
    write_json(tmp_path / "choice.json", record.model_dump(mode="json"))
    assert read_choice(tmp_path / "choice.json") == record
    write_json(tmp_path / "other.json", record.model_dump(mode="json") | {"choice": {"gready": [1]}})
    with refused(StorageError, "storage.no-record", "`kvlab step choose`"):
        read_choice(tmp_path / "other.json")
    before = {key: value for key, value in record.model_dump(mode="json").items() if key != "search_id"}
    write_json(tmp_path / "old.json", before)
    with refused(StorageError, "storage.no-record", "`kvlab step choose`"):
        read_choice(tmp_path / "old.json")


def test_the_curve_leaves_out_points_that_spend_otherwise_than_the_studied_recipe(base_params):
    """K3 V4 and K4 V3 may take the same bytes, and a curve has one value at one place."""
    params = Settings.complete(base_params | {"v_bits": 4})
    names = [arm.name for arm in plan.uniform(params)]
    assert names[0] == "uniform 3/4" and "uniform 4/3" not in names and "uniform 6/4" in names
