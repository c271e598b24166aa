"""Codecs of other packages: found by entry point, measured as kvlab's own, refused by the package's name."""

import json

import polars as pl
import pytest
import torch
from transformers import AutoModelForCausalLM

from install.plugin import documented, forget, install
from kvlab import Cache, recipe
from kvlab.cache.files.calibration import write_calibration
from kvlab.cache.files.prepared import prepared
from kvlab.cache.files.recipe import read_recipe_file, write_recipe_file
from kvlab.calibration import load as calibration
from kvlab.codecs import plugins
from kvlab.codecs.registry import build
from kvlab.codecs.testing import CHECKS, NotConformant, TestedCodec, conformance
from kvlab.core.errors import KvlabError, ParamsError, PluginError, UnknownName
from kvlab.core.model import resolve
from kvlab.core.recipe import Recipe
from kvlab.core.records import read_job
from kvlab_pipeline.jobs.measure import measure
from kvlab_pipeline.jobs.plan import jobs
from kvlab_pipeline.studies.settings import Settings
from refusals import refused, refused_in_one_line

POINT = {"sign": "kvlab_sign:PLUGIN"}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of packages that Python looks in."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    forget()


@pytest.fixture
def sign(site):
    return install(site, documented(), POINT)


def test_the_page_is_thirty_lines_of_code():
    lines = [line for text in documented().values() for line in text.splitlines() if line.strip()]
    assert len(documented()) == 2 and len(lines) <= 30


@pytest.mark.parametrize(
    "settings", [{"bits": 1}, {"bits": 3, "center": True}, {"bits": 4, "center": True, "whiten": True}], ids=str
)
def test_the_documented_codec_conforms(sign, settings):
    conformance("sign", **settings)


def test_a_recipe_holds_package_version_and_all_settings(sign):
    chosen = recipe("sign+center", bits=2)
    said = chosen.model_dump(mode="json")["k"]
    assert said == {"codec": "sign", "package": "kvlab-sign", "version": "1.0", "reads": [], "bits": 2} | {
        "center": True, "whiten": False, "whiten_skip_layers": [], "block_size": 512,
    }  # fmt: skip
    newer = Recipe.model_validate(json.loads(json.dumps(chosen.model_dump(mode="json")).replace("1.0", "1.1")))
    assert newer.recipe_id != chosen.recipe_id
    with refused(PluginError, "plugin.other-version", "package kvlab-sign 1.1", "installed is kvlab-sign 1.0"):
        build(newer.k)
    assert recipe("sign").k == recipe("sign", bits=1).k


def test_the_drop_ins_take_it(sign, tiny_model, tiny_params, tiny_fitted, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    info = resolve(tiny_params.model)
    plain = write_recipe_file(tmp_path / "r.json", recipe("sign", bits=2, block_size=16))
    calibrated = calibration.load(tiny_fitted, info.model_hash)
    centred = write_calibration(tmp_path / "sign.kv", recipe("sign+center", bits=2, block_size=16), calibrated, info)
    for path in (plain, centred):
        cache = Cache(model, path, semantics="in_forward")
        with torch.inference_mode():
            model(torch.arange(1, 41)[None], past_key_values=cache)
        assert all(entry.fires for entry in cache.check())
        assert prepared(read_recipe_file(path), info).recipe == cache.recipe


def test_it_is_measured_on_the_ladder(sign, tiny_params, tiny_windows, tmp_path):
    """Named in params.yaml, measured by the loop that measures kvlab's own codecs; more bits lose less."""
    data = tiny_params.model_dump(mode="json")
    data["ladder"] |= {"codecs": ["sign"], "bits": [1, 4], "conditioned": [], "windows": 2, "fewer": 2}
    params = Settings.complete(data)
    (job,) = [name for name, cells in jobs(params, "ladder").items() if any("sign" in cell.label for cell in cells)]
    measure(params, "ladder", job, tiny_windows, {}, tmp_path / "ladder.json")
    record, tokens = read_job(tmp_path / "ladder.json")
    kl = dict(tokens.group_by("cell_id").agg(pl.col("kl").mean()).iter_rows())
    few, many = (next(cell for cell in record.cells if cell.cell.label == f"sign {bits}") for bits in (1, 4))
    assert 0 < kl[many.cell_id] < kl[few.cell_id] / 2
    assert few.recipe_id != many.recipe_id and few.cell.recipe.k.package == "kvlab-sign"


def test_params_refuse_a_codec_that_is_nowhere(sign, tiny_params):
    data = tiny_params.model_dump(mode="json")
    data["ladder"] |= {"codecs": ["sing"], "conditioned": []}
    with refused(ParamsError, None, "'sing'", "did you mean 'sign'"):
        Settings.complete(data)


# ------------------------------------------------------------------------------------- what is refused

SETTINGS = documented()["kvlab_sign/__init__.py"]
BROKEN = {
    "no_module": ({}, POINT, "plugin.not-loaded", ("'sign'", "kvlab_sign:PLUGIN: ModuleNotFoundError")),
    "raises": ({"kvlab_sign/__init__.py": "1 / 0"}, POINT, "plugin.not-loaded", ("ZeroDivisionError",)),
    "no_plugin": ({"kvlab_sign/__init__.py": "PLUGIN = 3"}, POINT, "plugin.other-class", ("kvlab-sign: ", "a int")),
    "no_class": (
        {"kvlab_sign/__init__.py": SETTINGS},
        POINT,
        "plugin.not-loaded",
        ("kvlab-sign 1.0", "kvlab_sign.codec:SignCodec: ModuleNotFoundError"),
    ),
    "no_codec": (
        documented() | {"kvlab_sign/codec.py": "class SignCodec: per_token = True"},
        POINT,
        None,
        ("kvlab-sign 1.0: kvlab_sign.codec:SignCodec", "'encode'"),
    ),
    "computed_reads": (
        {"kvlab_sign/__init__.py": SETTINGS + "\nPLUGIN = Plugin(PLUGIN.settings, PLUGIN.codec, lambda *_: ())\n"},
        POINT,
        "plugin.computed-reads",
        ("kvlab-sign: ",),
    ),
    "taken_setting": (
        {"kvlab_sign/__init__.py": SETTINGS.replace("    bits:", "    version: int = 1\n    bits:")},
        POINT,
        "plugin.setting-taken",
        ("'version'",),
    ),
    "our_name": (documented(), {"klt": "kvlab_sign:PLUGIN"}, "plugin.name-taken", ("'klt'",)),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_package_is_refused_by_its_name(site, kind):
    files, points, code, data = BROKEN[kind]
    install(site, files, points)
    with refused_in_one_line(PluginError, code, "package kvlab-sign", *data):
        build(recipe(next(iter(points)), bits=2).k)


def test_two_packages_of_one_name_are_refused(sign):
    install(sign, {}, POINT, name="other-sign")
    with refused(PluginError, "plugin.name-twice", "kvlab-sign", "other-sign", "'sign'"):
        recipe("hadamard", bits=2)


def test_what_is_not_installed_is_said(sign, monkeypatch):
    stored = recipe("sign", bits=2).k
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path != str(sign)])
    with refused(PluginError, "plugin.not-installed", "package kvlab-sign 1.0"):
        build(stored)
    with refused(UnknownName, None, "codec 'sign'", "allowed: "):
        recipe("sign", bits=2)
    with pytest.raises(UnknownName):
        plugins.find("sign")


def test_an_unknown_setting_is_refused(sign):
    with refused(ParamsError, None, "codec 'sign' of package kvlab-sign 1.0: bitts: Extra", "its settings: "):
        recipe("sign", bitts=2)
    with refused(ParamsError, None, "bits: ", "less than or equal to 4"):
        recipe("sign", bits=9)
    bare = recipe("sign").k.model_copy(update={})
    bare.__pydantic_extra__.pop("bits")
    with refused(PluginError, "plugin.incomplete-recipe", "package kvlab-sign 1.0"):
        build(bare)


# ------------------------------------------------------------------------------- the checks themselves

STORED = "stored(arrays, (torch.uint8, stages), (torch.float16, (*stages[:-1], 1)))"
MISTAKES = {
    "codes_any_shape_and_dtype": [(".half()", ".double()"), ("torch.float16", "torch.float64")],
    "is_better_than_nothing": [("torch.where(signs > 0, sizes, -sizes)", "torch.where(signs > 0, -sizes, sizes)")],
    "codes_the_same_every_time": [("left >= 0", "left >= torch.randn(1)")],
    "refuses_forged_arrays": [(STORED, "arrays")],
    "tells_whether_tokens_depend_on_each_other": [
        ("mean(-1, keepdim=True)", "mean((1, 2), keepdim=True).expand(*left.shape[:2], 1)")
    ],
}


@pytest.mark.parametrize("check", MISTAKES)
def test_each_check_finds_its_mistake(site, check):
    text = documented()["kvlab_sign/codec.py"]
    for old, new in MISTAKES[check]:
        assert old in text
        text = text.replace(old, new)
    install(site, documented() | {"kvlab_sign/codec.py": text}, POINT)
    with refused(NotConformant, None, check):
        conformance("sign", bits=2)


@pytest.mark.full
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ["klt", "fp8", "identity"])  # the others: tests/codec/test_conformance.py
def test_our_own_codecs_pass_the_same_checks(name, check):
    settings = {} if name in ("fp8", "identity") else {"bits": 4}
    settings |= {} if name == "identity" else {"block_size": 32}
    check(TestedCodec(recipe(name, **settings).k))


def test_every_refusal_is_one_of_kvlabs():
    assert issubclass(PluginError, KvlabError) and PluginError.exit_code == 2
