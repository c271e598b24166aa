"""Parameters: what is refused, and in which words."""

from __future__ import annotations

import copy
import json
import re

import pytest
from dvc.utils.hydra import apply_overrides

import embedded
from kvlab.codecs.block.studied import coded_layers, studied_recipe
from kvlab.codecs.catalogue import CONDITIONABLE, LADDERED
from kvlab.codecs.recipes import named_recipe
from kvlab.core.errors import ParamsError, UnknownName
from kvlab.core.paramfile import assignment, overlay, preset, read_yaml
from kvlab.core.params import Undeclared
from kvlab.core.recipe import STREAMS
from kvlab_pipeline.jobs import plan
from kvlab_pipeline.studies.cells.params import CELLS, RUNGS, reads_components
from kvlab_pipeline.studies.settings import Settings, by_model, judged, left_out, one_of, read_params, resolved
from refusals import refused


def changed(base: dict, **leaves) -> dict:
    """`base` with dotted leaves (``a__b``) set, unknown ones included."""
    data = copy.deepcopy(base)
    for name, value in leaves.items():
        *sections, leaf = name.split("__")
        target = data
        for section in sections:
            target = target[section]
        target[leaf] = value
    return data


@pytest.mark.parametrize(
    ("leaves", "words"),
    [
        ({"bitz": 3}, ["'bitz'", "'bits'"]),
        ({"bits": 9}, ["'bits'", "9", "8"]),
        ({"bits": 0}, ["'bits'", "0", "1"]),
        ({"v_bits": "three"}, ["'v_bits'", "three"]),
        ({"codec__varience_ratio": 1}, ["codec.varience_ratio", "codec.variance_ratio"]),
        ({"codec__layout": "mixed_head"}, ["mixed_head", "'mixed_heads'"]),
        ({"codec__variance_ratio": 1.5}, ["codec.variance_ratio", "1.5"]),
        ({"engines": ["hff"]}, ["hff", "'hf'"]),
        ({"protocols": ["snapshots"]}, ["snapshots", "'snapshot'"]),
        ({"gap__dtype": "float16"}, ["float16", "'bfloat16'"]),
        ({"codec__boundary_layers": [0, 6]}, ["boundary_layers", "6", "0..5"]),
        ({"noise__windows": 33}, ["noise.windows is 33", "at most 32", "windows.test"]),
        ({"windows__other": 8, "tradeoffs__windows": 8}, ["ladder.windows", "windows.other", "8"]),
        ({"corpus__other": None}, ["ladder.texts", "corpus.other"]),
        ({"ladder__codecs": ["klt", "int"], "ladder__conditioned": ["int", "e8"]}, ["ladder.conditioned", "'e8'"]),
        ({"ladder__codecs": ["clt"]}, ["clt", "'klt'"]),
        ({"ladder__conditioned": ["klt"]}, ["klt"]),
        ({"calibration__origin": "vlm"}, ["calibration.origin", "'vlm'", "'vllm'"]),
        ({"windows__context": -1}, ["windows.context", "-1"]),
        ({"windows__calib": 1}, ["windows.calib", "1", "2"]),
        ({"codec__boundary_layers": [0, 1, 2, 3, 4, 5]}, ["codec.boundary_layers", "none is coded", "0..5"]),
        ({"gap__dtypes": ["bfloat16"]}, ["gap.dtypes is bfloat16", "'float32'", "one engine"]),
        ({"mitigations__uniform": [[4, 3], [3, 4]]}, ["mitigations.uniform", "[3, 4] after [4, 3]", "rise"]),
        ({"mitigations__uniform": [[4, 3], [4, 3]]}, ["[4, 3] after [4, 3]", "rise"]),
        ({"mitigations__uniform": [[5, 4], [4, 5]]}, ["[4, 5] after [5, 4]"]),
        ({"cells": {"k-only": 3}}, ["cells.k-only", "3"]),
    ],
)
def test_a_bad_value_is_refused_in_one_line_that_names_it(base_params, leaves, words):
    with pytest.raises(ParamsError) as caught:
        Settings.complete(changed(base_params, **leaves))
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_every_mistake_is_told_at_once_in_a_line_of_its_own(base_params):
    data = changed(base_params, bits=9, noise__windows=33, codec__varience_ratio=1, gap__dtypes=["bfloat16"], zzz=1)
    with pytest.raises(ParamsError) as caught:
        Settings.complete(data | {"cells": {"a": {"against": "k-olny", "attention": "sdpa"}}})
    told = (
        "unknown parameter 'zzz'; allowed: ",
        "parameter 'bits' is 9; allowed: ",
        "unknown parameter 'codec.varience_ratio'; did you mean 'codec.variance_ratio'?",
        "gap.dtypes is bfloat16; engines are compared in 'float32'",
        "noise.windows is 33; allowed: at most 32, which is windows.test",
    )
    lines = caught.value.lines
    assert [line[: len(words)] for line, words in zip(lines, told, strict=True)] == list(told)


def test_cells_are_looked_at_as_far_as_what_they_change_is_right(base_params):
    data = changed(base_params, bits=9) | {
        "cells": {"a": {"against": "k-olny", "attention": "sdpa"}, "b": {"layers": [9]}}
    }
    with pytest.raises(ParamsError) as caught:
        Settings.complete(data)
    found = "\n".join(caught.value.lines)
    for words in (
        "'bits' is 9",
        "cells.a.attention is 'sdpa'",
        "did you mean 'k-only'?",
        "cells.b.layers names layer 9",
    ):
        assert words in found


def test_what_is_not_said_has_its_default():
    params = Settings.complete({"model": {"path": "a/b", "n_layers": 6}})
    assert (params.bits, params.v_bits, params.codec.boundary_layers, params.noise.seed) == (3, 2, (0, 5), 12345)
    assert params.cells.keys() == CELLS.keys() and params.kvstore.restore.prompts == 20
    with refused(ParamsError, None, "'model' is missing"):
        Settings.complete({})


def test_a_partial_instance_reads_only_what_its_rule_named(base_params):
    partial = read_params(json.dumps({"bits": 4, "windows": base_params["windows"]}))
    assert partial.bits == 4
    assert partial.windows.length == base_params["windows"]["context"] + base_params["windows"]["eval"]
    with refused(Undeclared, None, "'noise'"):
        partial.noise  # noqa: B018


@pytest.mark.parametrize(
    ("text", "word"), [('{"bits": 12}', "12"), ('{"bots": 3}', "'bits'"), ('{"codec": {"pac": 1}}', "codec.pca")]
)
def test_partial_values_are_held_to_the_same_ranges(text, word):
    with refused(ParamsError, None, word):
        read_params(text)


def test_every_preset_is_valid_and_an_unknown_one_names_the_nearest(root):
    data = read_yaml(root / "params.yaml")
    for name in ("quick", "published", "reference"):
        by_model(preset(name, data))
    with refused(ParamsError, None, "'quik'", "'quick'"):
        preset("quik", data)


def test_the_recipe_follows_every_parameter_that_decides_what_the_codec_does(base_params):
    reference = studied_recipe(Settings.complete(base_params)).recipe_id
    decisive = {
        "bits": 4,
        "v_bits": 3,
        "calibration__codebooks": "gaussian",
        "codec__variance_ratio": 0.9,
        "codec__block_size": 64,
        "codec__layout": "mixed_heads",
        "codec__n_centres": 8,
        "codec__outlier_threshold": None,
        "codec__v_outlier_threshold": 2.0,
        "codec__whiten": False,
        "codec__whiten_skip_layers": [],
        "codec__seed": 1,
        "codec__published_decoder": "mse",
    }
    ids = {studied_recipe(Settings.complete(changed(base_params, **{k: v}))).recipe_id for k, v in decisive.items()}
    assert len(ids) == len(decisive)
    assert reference not in ids


def test_words_of_the_report_do_not_touch_the_recipe(base_params):
    words = changed(base_params, report__title="another")
    assert studied_recipe(Settings.complete(words)) == studied_recipe(Settings.complete(base_params))


def test_boundary_layers_are_not_coded(base_params):
    assert coded_layers(Settings.complete(base_params)) == (1, 2, 3, 4)


def test_jobs_hold_every_cell_once(base_params):
    params = Settings.complete(base_params)
    for study in plan.STUDIES:
        if study == plan.CHOSEN:
            continue
        packed = plan.jobs(params, study)
        cells = [cell for job in packed.values() for cell in job]
        wanted = [cell for engine in params.engines for cell in plan.study_cells(params, study, engine)]
        assert sorted(c.cell_id for c in cells) == sorted(c.cell_id for c in wanted)
        assert len({c.cell_id for c in cells}) == len(cells)
        alike = [{(c.engine, c.dtype, c.attention) for c in job} for job in packed.values()]
        assert all(len(one) == 1 for one in alike)
        assert plan.job_names(params, study) == list(packed)


def test_the_ladder_runs_on_its_own_engine_and_scores_every_rung_on_every_text(base_params):
    every = {"codecs": list(LADDERED), "conditioned": list(CONDITIONABLE), "ablated": [], "in_forward": []}
    changes = {f"ladder__{name}": value for name, value in every.items()}
    params = Settings.complete(changed(base_params, ladder__engine="vllm", ladder__bits=[2, 4], **changes))
    cells = [cell for job in plan.jobs(params, plan.LADDER).values() for cell in job]
    assert {(cell.engine, cell.dtype, cell.protocol, cell.stream) for cell in cells} == {
        ("vllm", "float32", "snapshot", "kv")
    }
    names = {text: [cell.label for cell in cells if cell.text == text] for text in params.ladder.texts}
    assert names["test"] == names["other"] and len(set(names["test"])) == len(names["test"])
    assert {"klt 2", "kivi+center 4", "hadamard+center+whiten 2", "fp8", "block 4"} <= set(names["test"])
    assert "oscar+center+weigh 4" in names["test"]
    rates = {name: 2 if "bits" in STREAMS[name].model_fields else 1 for name in LADDERED}  # fp8 and nf4 have one rate
    rungs = sum(rates.values()) + sum(3 * rates[name] for name in CONDITIONABLE)
    assert len({cell.cell_id for cell in cells}) == len(cells) == 2 * rungs


def test_rungs_condition_k_and_v_as_they_say(base_params):
    params = Settings.complete(base_params)
    plain, centred, white = (named_recipe(f"kivi{c}", 3, params=params) for c in ("", "+center", "+center+whiten"))
    assert (plain.k.axis, plain.v.axis, plain.k.bits, plain.v.bits) == ("channel", "token", 3, 3)
    assert not (plain.k.center or plain.k.whiten or plain.v.center or plain.v.whiten)
    assert centred.k.center and centred.v.center and not centred.k.whiten
    assert white.k.center and white.k.whiten and white.v == centred.v
    assert named_recipe("fp8", params=params).k.codec == "fp8"


def test_the_block_rung_is_the_studied_recipe_at_other_bits(base_params):
    params = Settings.complete(base_params)
    studied, rung = studied_recipe(params), named_recipe("block", 4, params=params)
    other = {"bits": 4, "codebook": "gaussian"}
    assert rung.k == studied.k.model_copy(update=other) and rung.v == studied.v.model_copy(update=other)
    less = read_params(json.dumps({key: base_params[key] for key in ("codec", "calibration")}))
    assert named_recipe("block", 4, params=less) == rung


@pytest.mark.parametrize(
    ("rung", "error", "code", "data"),
    [
        (("klt+center", 3), ParamsError, "params.not-conditionable", ("'klt'",)),
        (("fp8", 8), ParamsError, "params.no-bits", ("'fp8'",)),
        (("hadamar", 3), UnknownName, None, ("'hadamar'", "'hadamard'")),
        (("int+centre", 3), UnknownName, None, ("'centre'", "'center'")),
    ],
)
def test_a_rung_that_cannot_be_is_refused(base_params, rung, error, code, data):
    with refused(error, code, *data):
        named_recipe(*rung, params=Settings.complete(base_params))


def test_the_default_recipe_is_klt_at_the_bits_of_the_params(base_params):
    recipe = named_recipe("klt", params=Settings.complete(base_params))
    assert (recipe.k.codec, recipe.k.bits, recipe.v.codec, recipe.v.bits) == ("klt", 3.0, "klt", 2.0)


def test_the_text_is_part_of_a_cell_s_identity(base_params):
    cell = next(iter(plan.jobs(Settings.complete(base_params), plan.LADDER).values()))[0]
    assert cell.text == "test" and cell.model_copy(update={"text": "other"}).cell_id != cell.cell_id


def test_the_factorial_is_complete(base_params):
    params = Settings.complete(base_params)
    cells = [c for job in plan.jobs(params, "factors").values() for c in job if c.recipe.k.codec == "block"]
    corners = {(c.engine, c.protocol, c.dtype, c.origin, c.recipe.k.variance_ratio) for c in cells}
    assert len(corners) == len(cells) == 2**5


def entries(base_params: dict, **cells) -> Settings:
    """Parameters with these cells alone."""
    return Settings.complete(base_params | {"cells": dict.fromkeys(CELLS) | cells})


def planned(params: Settings, label: str) -> list:
    return [c for job in plan.jobs(params, "cells").values() for c in job if c.label == label]


def test_a_cell_is_one_entry(base_params):
    params = entries(base_params, mine={"bits": 4, "origin": "vllm", "codec": {"whiten": False}})
    found = planned(params, "mine")
    assert {(c.engine, c.protocol) for c in found} == {(e, p) for e in params.engines for p in params.protocols}
    assert all(c.origin == "vllm" and c.recipe.k.bits == 4 and not c.recipe.k.whiten for c in found)
    assert all(c.dtype == params.gap.dtype and c.layers == coded_layers(params) for c in found)
    table = ("k", "pre_rope", found[0].recipe.k)
    assert table in plan.fittings(params, "vllm") and table not in plan.fittings(params, "hf")


def test_an_entry_that_computes_otherwise_brings_its_own_floor(base_params):
    params = entries(base_params, turned={"placement": "post_rope"}, sdpa={"attention": "sdpa", "engines": ["hf"]})
    floors = planned(params, "identity")
    assert {(c.engine, c.attention, c.placement) for c in floors} == {
        ("hf", "default", "post_rope"),
        ("vllm", "default", "post_rope"),
        ("hf", "sdpa", "pre_rope"),
    }


@pytest.mark.parametrize(
    ("entry", "data"),
    [
        ({"codec": {"whitn": False}}, ("'cells.a.codec.whitn'", "'cells.a.codec.whiten'")),
        ({"codec": {"variance_ratio": 2}}, ("variance_ratio",)),
        ({"span": "window"}, ("cells.a.span", "'window'", "protocols: [in_forward]")),
        ({"attention": "sdpa"}, ("cells.a.attention", "'sdpa'", "engines: [hf]")),
        ({"layers": [6]}, ("cells.a.layers", "layer 6", "0..5")),
        ({"rung": "klt", "codebooks": "gaussian"}, ("a rung", "codec", "codebooks")),
        ({"bits": 9}, ("'cells.a.bits'", "9")),
        ({"bitz": 3}, ("'cells.a.bitz'", "'cells.a.bits'")),
        ({"rung": "hadamar"}, ("'hadamar'", "no rung", "'hadamard'")),
        ({"rung": "kivi+centre"}, ("'kivi+centre'", "no rung", "'kivi+center'")),
        ({"rung": "klt+center"}, ("'klt+center'", "no rung")),
        ({"rung": "studied"}, ("'studied'", "no rung")),
        ({"rung": "block"}, ("Gaussian table", "bits, v_bits, codebooks or codec")),
        ({"rung": "klt", "placement": "post_rope"}, ("'klt'", "post_rope", "d4, e8, fp8, hadamard,")),
        ({"rung": "oscar", "placement": "post_rope"}, ("'oscar'", "post_rope", "components")),
        ({"rung": "int+center", "placement": "post_rope"}, ("'int+center'", "post_rope", "components")),
        ({"codec": {"boundary_layers": [6]}}, ("codec.boundary_layers", "layer 6", "0..5")),
        ({"codec": {"whiten_skip_layers": [-7]}}, ("codec.whiten_skip_layers", "layer -7", "0..5, or -6..-1")),
        ({"codec": {"boundary_layers": list(range(6))}}, ("codec.boundary_layers", "every layer", "0..5")),
        ({"layers": []}, ("cells.a.layers", "empty", "`coded`, `all`")),
        ({"against": "a"}, ("'a'", "itself", "allowed: other, or null")),
        ({"against": "othr"}, ("'othr'", "no entry", "allowed: other, ", "'other'")),
        ({"against": "other"}, ("'other'", "'vllm'", "engines")),
        ({"against": "other", "engines": ["hf"]}, ("'other'", "'in_forward'", "protocols")),
        (
            {"against": "other", "engines": ["hf"], "protocols": ["snapshot"], "dtype": "float32"},
            ("'other'", "in 'bfloat16'", "in 'float32'"),
        ),
    ],
)
def test_an_entry_that_cannot_be_is_refused_by_name(base_params, entry, data):
    with refused(ParamsError, None, *data) as caught:
        entries(base_params, a=entry, other={"engines": ["hf"], "protocols": ["snapshot"], "stream": "k"})
    assert all("cells.a" in line and "\n" not in line for line in caught.value.lines)


def test_an_entry_may_be_held_against_one_that_is_measured_wherever_it_is(base_params):
    narrow = {"engines": ["hf"], "protocols": ["snapshot"], "stream": "k"}
    params = entries(base_params, a=narrow | {"bits": 4, "against": "other"}, other=narrow)
    assert params.cells["a"].against == "other"
    whole = Settings.complete(base_params).cells
    named = {name: entry.against for name, entry in whole.items() if entry.against}
    assert named == {"published-decoder": "unwhitened", "post-rope-unwhitened": "unwhitened", "klt": "all-layers"}


def test_engines_that_do_not_run_are_not_missed(base_params):
    one = {"engines": ["hf"], "cells": {"a": {"against": "b"}, "b": {"engines": ["hf"], "stream": "k"}}}
    assert Settings.complete(base_params | one).cells["a"].against == "b"


def test_an_entry_whose_counterpart_was_taken_out_is_refused(base_params):
    without = overlay(base_params, {"cells": {"unwhitened": None}})
    with refused(ParamsError, None, "cells.published-decoder.against", "'unwhitened'", "no entry"):
        Settings.complete(without)


@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_is_planned_after_the_rotary_embedding_unless_it_reads_components(base_params, rung):
    assert planned(entries(base_params, a={"rung": rung}), "a")
    turned = {"rung": rung, "placement": "post_rope"}
    if reads_components(rung):
        with refused(ParamsError, None, "cells.a.rung", repr(rung), "post_rope"):
            entries(base_params, a=turned)
    else:
        cell = planned(entries(base_params, a=turned), "a")[0]
        streams = (cell.recipe.k, cell.recipe.v)
        assert not any(getattr(stream, "center", False) or stream.codec in ("klt", "oscar") for stream in streams)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"stream": "k"}, {"stream": "k"}),
        ({"stream": "k"}, {"stream": "k", "engines": ["hf"]}),
        ({"layers": "all"}, {"codec": {"boundary_layers": []}}),
        ({"rung": "fp8"}, {"rung": "fp8", "bits": 4}),
        ({}, {"against": "one"}),
    ],
)
def test_two_entries_that_are_one_cell_are_refused_by_both_names(base_params, one, other):
    params = entries(base_params, one=one, other=other)
    with refused(ParamsError, "params.same-cell", "cells.one", "cells.other") as caught:
        plan.check(params)
    assert "\n" not in str(caught.value)


def test_an_entry_may_be_the_studied_cell_or_share_a_floor(base_params):
    turned = {"placement": "post_rope"}
    plan.check(entries(base_params, studied={}, turned=turned, other=turned | {"bits": 4}))


def test_one_engine_may_do_without_float32(base_params):
    alone = changed(base_params, engines=["hf"], gap__dtypes=["bfloat16"])
    assert Settings.complete(alone).gap.dtypes == ("bfloat16",)


@pytest.mark.parametrize("bits", [(2, 2), (3, 2), (4, 2), (3, 3), (4, 3), (8, 8)])
def test_the_curve_takes_a_studied_recipe_that_has_a_place_between_its_points(base_params, bits):
    assert Settings.complete(changed(base_params, bits=bits[0], v_bits=bits[1])).bits == bits[0]


@pytest.mark.parametrize(("dtype", "casts"), [("float32", True), ("bfloat16", False)])
def test_only_an_engine_that_has_something_to_round_is_cast(base_params, dtype, casts):
    params = Settings.complete(changed(base_params, noise__dtype=dtype))
    labels = {cell.label for job in plan.jobs(params, "noise").values() for cell in job}
    assert ("cast" in labels) == casts and {"identity", "codec", "isotropic"} <= labels


def test_an_overlay_adds_changes_and_takes_out_entries(base_params):
    changes = {"cells": {"k-only": None, "v-only": {"bits": 4}, "new": {"stream": "k"}}}
    cells = overlay(base_params, changes)["cells"]
    deeper = overlay(base_params, {"cells": {"published-decoder": {"codec": {"seed": 1, "whiten": None}, "bits": 4}}})
    before = base_params["cells"]["published-decoder"]
    merged = before | {"bits": 4, "codec": before["codec"] | {"seed": 1, "whiten": None}}
    assert deeper["cells"]["published-decoder"] == merged and base_params["cells"]["published-decoder"] == before
    assert cells["v-only"] == base_params["cells"]["v-only"] | {"bits": 4}
    assert cells["k-only"] is None and cells["new"] == {"stream": "k"}


@pytest.mark.parametrize("value", [3, "k", [1], True])
def test_an_overlay_with_an_entry_that_is_no_mapping_is_refused(base_params, value):
    with refused(ParamsError, None, f"cells.k-only is {value!r}", "a mapping", "null"):
        Settings.complete(overlay(base_params, {"cells": {"k-only": value}}))


@pytest.fixture
def folders(tmp_path):
    """Makes folders that say how many layers a model has, and gives their paths."""

    def make(*layers: int) -> list[dict]:
        made = []
        for number, n in enumerate(layers):
            folder = tmp_path / f"model{number}"
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps({"num_hidden_layers": n}))
            made.append({"path": str(folder)})
        return made

    return make


def test_each_model_gets_the_same_parameters_and_its_own_layers(folders):
    first, second = folders(6, 24)
    found = by_model({"models": [first | {"slug": "small"}, second | {"revision": "main"}]})
    assert list(found) == ["small", "model1"]
    small, large = found.values()
    assert small.windows == large.windows and large.model.revision == "main"
    assert (small.model.n_layers, large.model.n_layers) == (6, 24)
    assert (small.codec.boundary_layers, large.codec.boundary_layers) == ((0, 5), (0, 23))


def test_a_further_model_may_bring_fewer_studies_and_no_rows_for_the_gate(folders):
    first, second, third = folders(6, 6, 6)
    listed = [first, second | {"studies": []}, third | {"studies": ["ladder"]}]
    data = {"models": listed, "studies": ["ladder", "noise"]}
    asked = {slug: plan.studies(params) for slug, params in by_model(data).items()}
    assert list(asked.values()) == [("factors", "ladder", "noise"), ("factors",), ("factors", "ladder")]
    assert judged(data) == list(asked)[:1] and judged({"models": folders(6, 6)}) == ["model0", "model1"]
    assert [entry["studies"] for entry in resolved(data)["models"]] == [None, [], ["ladder"]]
    with refused(ParamsError, None, "models.0.studies", "first model"):
        by_model({"models": [first | {"studies": []}]})
    with refused(ParamsError, None, "models.1.studies", "'layers'", "allowed: ladder, noise,"):
        by_model(data | {"models": [first, second | {"studies": ["layers"]}]})


@pytest.mark.parametrize(("layers", "boundary"), [(1, ()), (2, (0,)), (3, (0, 2))])
def test_a_small_model_keeps_a_layer_to_code(folders, layers, boundary):
    (params,) = by_model({"models": folders(layers)}).values()
    assert params.codec.boundary_layers == boundary and coded_layers(params)
    plan.check(params)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "no config.json"),
        ("{", "JSON"),
        ("[]", "but []"),
        ("{}", "no num_hidden_layers"),
    ],
)
def test_a_model_whose_layers_cannot_be_counted_is_refused(tmp_path, config, words):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with refused(ParamsError, None, tmp_path, words):
        by_model({"models": [{"path": str(tmp_path)}]})


def test_a_hub_id_is_counted_in_the_local_cache_or_named_with_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    entry = {"path": "an/other", "revision": "v1"}
    with refused(ParamsError, None, "'an/other'", "`hf download an/other --revision v1`"):
        by_model({"models": [entry]})
    with refused(ParamsError, None, "'an/other'", "`revision`"):
        by_model({"models": [{"path": "an/other"}]})
    repository = tmp_path / "models--an--other"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "v1").write_text("c0ffee")
    (repository / "snapshots" / "c0ffee").mkdir(parents=True)
    (repository / "snapshots" / "c0ffee" / "config.json").write_text('{"num_hidden_layers": 24}')
    assert by_model({"models": [entry]})["other"].model.n_layers == 24


def test_layers_are_counted_from_the_end_wherever_they_are_named(base_params):
    cells = {"last": {"layers": [-1, 2], "codec": {"boundary_layers": [], "whiten_skip_layers": [-6, -2]}}}
    params = Settings.complete(base_params | {"cells": cells})
    entry = params.cells["last"]
    assert entry.layers == (5, 2)
    assert entry.codec == {"boundary_layers": [], "whiten_skip_layers": [0, 4]}


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ([{"pth": "x"}], ("'models.0.pth'", "'models.0.path'")),
        ([{}, {"tensor_parallel": 0}], ("'models.1.tensor_parallel' is 0", "equal to 1")),
        ([{"n_layers": 6}], ("'models.0.n_layers'", "models.0.path, ")),
        ([{}, {"path": "model0"}], ("models.1.slug", "'model0'")),
        ([{"path": ".."}], ("path '..'", "set slug")),
        ([{"slug": "../up"}], ("models.0.slug",)),
        ([{}, {"slug": "b"}], ("boundary_layers", "model 'b'")),
    ],
)
def test_a_model_that_cannot_be_is_refused_by_its_place(folders, models, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = {
        "models": [a | b for a, b in zip(folders(6, 2), models, strict=False)],
        "codec": {"boundary_layers": [0, 5]},
    }
    with refused(ParamsError, None, *words) as caught:
        by_model(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models": []}, ("'models' is []", "a list of models")),
        ({"models": "models/reference"}, ("'models' is 'models/reference'", "a list")),
        ({"model": {"path": "x"}}, ("'model'", "'models'")),
    ],
)
def test_models_are_a_list(folders, changes, words):
    with refused(ParamsError, None, *words):
        by_model({"models": folders(6)} | changes)


def test_a_leaf_of_a_listed_model_is_set_by_its_number(folders):
    data = {"models": folders(6, 9)}
    changed = overlay(data, assignment("models.1.tensor_parallel=2"))
    assert [model.get("tensor_parallel") for model in changed["models"]] == [None, 2]
    assert by_model(overlay(data, assignment("models.0.slug=first"))).keys() == {"first", "model1"}
    with refused(ParamsError, None, "'models.2'", "models.0, models.1"):
        overlay(data, assignment("models.2.path=x"))


def test_dvc_changes_the_line_it_is_told_to_and_no_other(root, tmp_path):
    path = tmp_path / "params.yaml"
    path.write_bytes((root / "params.yaml").read_bytes())
    apply_overrides(path, ["bits=4"])
    before, after = ((root / "params.yaml").read_text().splitlines(), path.read_text().splitlines())
    (line,) = [new for old, new in zip(before, after, strict=True) if old != new]
    assert line.startswith("bits: 4 ")


def said(data: dict, path: tuple = ()):
    """The dotted name and the value of each leaf."""
    for key, value in data.items():
        if isinstance(value, dict) and value and path[:1] != ("cells",):
            yield from said(value, (*path, key))
        else:
            yield ".".join((*path, key)), value


@pytest.mark.parametrize("form", ["++{}={}", "{}={}"])
def test_dvc_sets_every_leaf_that_the_table_names(root, tmp_path, monkeypatch, form):
    """`++` sets what params.yaml says and adds what it does not; without it, what params.yaml says."""
    monkeypatch.chdir(root)
    path, document = tmp_path / "params.yaml", read_yaml(root / "params.yaml")
    path.write_bytes((root / "params.yaml").read_bytes())
    whole, here = dict(said(resolved(document))), dict(said(document))
    table = set(re.findall(r"^\| `([^`]+)` \|", (root / "config/PARAMS.md").read_text(), re.M))
    whole = {name: value for name, value in whole.items() if not name.startswith(("models", "cells"))}
    models = {f"models.0.{key}": value for key, value in resolved(document)["models"][0].items()}
    assert {name for name in table if not name.startswith(("models", "cells"))} == whole.keys()
    assert {name for name in table if name.startswith("models")} == {name.replace("0", "N") for name in models}
    wanted = {name: value for name, value in (whole | models).items() if form[0] == "+" or here.get(name)}
    apply_overrides(path, [form.format(name, json.dumps(value)) for name, value in wanted.items()])
    assert by_model(read_yaml(path)) == by_model(document)
    assert len(wanted) > (100 if form[0] == "+" else 10)


def test_an_entry_is_added_and_taken_out_as_the_table_says(root, tmp_path, monkeypatch):
    monkeypatch.chdir(root)
    path = tmp_path / "params.yaml"
    path.write_bytes((root / "params.yaml").read_bytes())
    overrides = [
        "++cells.mine.bits=4",
        "++cells.mine.codec.block_size=64",
        "++cells.k-only=null",
        "++cells.eager.dtype=float32",
    ]
    apply_overrides(path, overrides)
    params = next(iter(by_model(read_yaml(path)).values()))
    assert params.cells["mine"].bits == 4 and params.cells["mine"].codec == {"block_size": 64}
    assert "k-only" not in params.cells and params.cells["eager"].attention == "eager"
    assert params.cells["eager"].dtype == "float32"


def test_one_of_several_models_is_named_or_refused(folders):
    first, second = folders(6, 6)
    found = by_model({"models": [first | {"slug": "reference"}, second | {"slug": "second"}]})
    assert one_of(found, "second").model.slug == "second"
    with refused(ParamsError, None, "2 models", "--model: reference, second"):
        one_of(found, None)
    with refused(ParamsError, None, "'secnd'", "reference, second", "'second'"):
        one_of(found, "secnd")


@pytest.mark.parametrize("layers", [(6, 9), (6, 2), (1,)])
@pytest.mark.parametrize(
    "said", [{}, {"windows": {"test": 8}}, {"engines": ["hf"], "cells": {"k-only": None, "a": {"bits": 5}}}]
)
def test_a_resolved_document_means_the_same_and_keeps_what_fits_every_model(folders, layers, said):
    data = {"models": folders(*layers)} | said
    again = resolved(data)
    assert by_model(again) == by_model(data)
    assert again["models"][0]["tensor_parallel"] == 1
    if min(layers) > 2:
        assert again["codec"]["boundary_layers"] == [0, -1]


SMALLER = {
    "windows.test": [2, 3, 8],
    "windows.other": [2, 8],
    "windows.calib": [2],
    "windows.context": [8, 128],
    "mechanisms.needles": [2, 8],
    "engines": [["hf"], ["vllm"]],
    "calibration.engines": [["hf"], ["vllm"]],
    "protocols": [["snapshot"], ["in_forward"]],
    "gap.dtypes": [["float32"]],
    "ladder.codecs": [["klt"], ["int", "e8"]],
    "corpus.other": [None],
    "codec.whiten": [False],
    "codec.boundary_layers": [[]],
    "cells": [{"unwhitened": None}, {"all-layers": None}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SMALLER.items() for value in values])
def test_a_smaller_study_is_one_edit(root, monkeypatch, name, value):
    monkeypatch.chdir(root)
    data = overlay(read_yaml(root / "params.yaml"), assignment(f"{name}={json.dumps(value)}"))
    params = next(iter(by_model(data).values()))
    plan.check(params)
    test, needles = params.windows.test, params.mechanisms.needles
    taken = [
        params.layers,
        params.noise,
        params.mitigations,
        params.ladder,
        *(getattr(params.kvstore, n) for n in ("bitplanes", "placement")),
    ]
    assert max(part.windows for part in taken) <= test and params.kvstore.restore.prompts <= test
    assert params.kvstore.policy.needles <= needles
    assert {params.calibration.origin, *params.gap.origins} <= set(params.calibration.engines)
    assert {params.ladder.engine} <= set(params.engines) and {*params.layers.protocols} <= set(params.protocols)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            {"windows": {"test": 8}, "noise": {"windows": 9}},
            ("noise.windows is 9", "at most 8", "windows.test"),
        ),
        (
            {"windows": {"test": 8}, "kvstore": {"restore": {"prompts": 9}}},
            ("kvstore.restore.prompts is 9", "at most 8"),
        ),
        (
            {"windows": {"other": 8}, "ladder": {"windows": 9}},
            ("ladder.windows is 9", "at most 8", "windows.other"),
        ),
        (
            {"mechanisms": {"needles": 8}, "kvstore": {"policy": {"needles": 9}}},
            ("at most 8", "mechanisms.needles"),
        ),
        ({"engines": ["hf"], "gap": {"origins": ["vllm"]}}, ("gap.origins.0 is 'vllm'", "allowed: hf,")),
        (
            {"engines": ["hf"], "cells": {"other-calibration": {}}},
            ("cells.other-calibration.origin is 'vllm'", "allowed: hf"),
        ),
        (
            {"corpus": {"other": None}, "ladder": {"texts": ["other"]}},
            ("ladder.texts", "'other'", "corpus.other is null"),
        ),
        ({"codec": {"whiten": False}, "cells": {"post-rope-unwhitened": {}}}, None),
    ],
)
def test_what_is_asked_for_by_name_is_refused_where_it_is_not_there(root, monkeypatch, said, words):
    monkeypatch.chdir(root)
    data = overlay(embedded.document(), said)
    if words is None:  # the entry that was named stays, and the default one that is the same cell goes
        (params,) = by_model(data).values()
        plan.check(params)
        assert "post-rope-unwhitened" in params.cells and left_out(params, data) == ["post-rope"]
    else:
        with refused(ParamsError, None, *words):
            by_model(data)


def test_a_default_cell_that_cannot_be_is_left_out_and_named(root, monkeypatch):
    monkeypatch.chdir(root)
    data = overlay(embedded.document(), {"engines": ["hf"]})
    (params,) = by_model(data).values()
    assert left_out(params, data) == ["other-calibration"] and "other-calibration" not in params.cells


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            {"studies": ["layer"]},
            ("'layer'", "cells, factors, ", "'layers'"),
        ),
        ({"cells": {"k-onl": None}}, ("cells.k-onl is null", "'k-only'")),
    ],
)
def test_a_study_or_a_cell_that_there_is_not_is_refused_by_name(root, said, words):
    data = overlay(read_yaml(root / "params.yaml"), said)
    with refused(ParamsError, None, *words):
        by_model(data)
