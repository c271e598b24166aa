"""The vLLM plugin: silent without its variable, and with it either active or an exception."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tiny
from cache.vllm_user import CHUNK, PROMPTS
from kvlab.cache import vllm_plugin
from kvlab.cache.files.recipe import CalibrationFiles, RecipeFile, read_recipe_file, write_recipe_file
from kvlab.cache.vllm import settings as vllm_settings
from kvlab.cache.vllm import worker as vllm_worker
from kvlab.calibration.load import FittedFiles, load
from kvlab.codecs.base import Site
from kvlab.codecs.cast import CastStream
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.int import IntStream
from kvlab.codecs.isotropic import IsotropicStream
from kvlab.codecs.kivi import KiviStream
from kvlab.codecs.klt import KltStream
from kvlab.codecs.noise import NoiseStream
from kvlab.codecs.registry import build
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.errors import CalibrationMismatch, CapabilityError, CodecNotActive, ParamsError, StorageError
from kvlab.core.recipe import IDENTITY, PAGES_VARIABLE, RECIPE_VARIABLE, Recipe
from kvlab.engines.registry import start
from refusals import refused

LOSSY = Recipe(k=HadamardStream(bits=4), v=HadamardStream(bits=3))
CALIBRATED = Recipe(k=KltStream(bits=3), v=HadamardStream(bits=3))
HEADS, HEAD_DIM, LAYERS = 2, 8, 3


# -- beside numba


def test_vllm_starts_where_numba_was_loaded_before():
    """vLLM looks at the `__dict__` of all that modules hold; llvmlite's library gives a function of that name."""
    script = """
import numba
from llvmlite.binding import ffi
from kvlab.cache import vllm_plugin
before = hasattr(ffi.lib, "__dict__")
vllm_plugin.register()
vllm_plugin.register()
print(before, hasattr(ffi.lib, "__dict__"), numba.njit(lambda x: x + 1)(1))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["True", "False", "2"]


# -- the recipe file


def test_a_recipe_file_is_read_as_it_was_written(tmp_path):
    path = write_recipe_file(tmp_path / "r.json", LOSSY, layers=range(1, 3))
    assert read_recipe_file(path) == RecipeFile(recipe=LOSSY, layers=(1, 2))


def test_paths_in_it_move_with_the_folder(tmp_path):
    files = CalibrationFiles(sigma=tmp_path / "calib" / "s.safetensors", components=tmp_path / "a" / "c.safetensors")
    (tmp_path / "a").mkdir()
    write_recipe_file(tmp_path / "a" / "r.json", LOSSY, calibration=files)
    (tmp_path / "a").rename(tmp_path / "b")
    found = read_recipe_file(tmp_path / "b" / "r.json").calibration
    assert found.sigma.resolve() == files.sigma
    assert found.codebooks is None
    assert found.components.resolve() == tmp_path / "b" / "c.safetensors"


@pytest.mark.parametrize(
    ("content", "code", "data"),
    [
        ("[]", "params.no-recipe", "`recipe`"),
        ("{}", "params.no-recipe", "`recipe`"),
        (
            '{"recipe": {"k": {"codec": "identity"}, "v": {"codec": "int", "bits": 9}}}',
            "params.recipe",
            "recipe.v.int.bits is 9",
        ),
        (
            '{"recipe": {"k": {"codec": "identity"}, "v": {"codec": "identity"}}, "layer": 1}',
            "params.recipe",
            "layer is 1",
        ),
        (
            '{"recipe": {"k": {"codec": "identity"}, "v": {"codec": "identity"}}, "layers": []}',
            "params.layers",
            "layers is []",
        ),
        (
            '{"recipe": {"k": {"codec": "identity"}, "v": {"codec": "identity"}}, "layers": [1, 1]}',
            "params.layers",
            "layers is [1, 1]",
        ),
    ],
)
def test_what_is_no_recipe_is_refused_in_one_line(tmp_path, content, code, data):
    path = tmp_path / "r.json"
    path.write_text(content)
    with refused(ParamsError, code, path, data) as caught:
        read_recipe_file(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with refused(StorageError, None, tmp_path / "gone.json"):
        read_recipe_file(tmp_path / "gone.json")


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(k=KiviStream(bits=2, axis="channel"), v=IdentityStream()),
        Recipe(k=IdentityStream(), v=NoiseStream(sigma=0.1, seed=0)),
        Recipe(k=CastStream(), v=IdentityStream()),
        Recipe(k=IdentityStream(), v=IsotropicStream(of=KltStream(bits=2), seed=0)),
    ],
    ids=lambda recipe: f"{recipe.k.codec}-{recipe.v.codec}",
)
def test_codecs_that_code_tokens_together_and_controls_are_refused(tmp_path, monkeypatch, recipe):
    monkeypatch.setenv(RECIPE_VARIABLE, str(write_recipe_file(tmp_path / "r.json", recipe)))
    mixing = {"kivi", "noise", "cast", "isotropic"}
    stream = "k" if recipe.k.codec in mixing else "v"
    where = f"codec {getattr(recipe, stream).codec!r} of stream {stream}"
    with pytest.raises(CapabilityError) as caught:
        vllm_worker.read_recipe()
    assert caught.value.code in ("capability.tokens-together", "capability.no-codes") and where in str(caught.value)
    allowed = str(caught.value).partition("allowed: ")[2].split(", ")
    assert "hadamard" in allowed and not {"noise", "cast", "isotropic"} & set(allowed)


@pytest.mark.parametrize("variable", [RECIPE_VARIABLE, PAGES_VARIABLE])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1, 2, 3]", "is no recipe file, it has no `recipe`"),
        (b"null", "is no recipe file"),
        (b'{"recipes": {}}', "is no recipe file"),
        (b'{"recipe": {"k": {"codec": "hadamard", "bits": "x"}, "v": {"codec": "identity"}}}', "bits is 'x'"),
    ],
)
def test_what_a_variable_names_and_is_no_recipe_is_one_line_with_its_name(
    tmp_path, monkeypatch, variable, content, words
):
    file = tmp_path / "it's a recipe.json"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv(variable, str(file))
    with pytest.raises((StorageError, ParamsError)) as caught:
        vllm_worker.read_recipe(variable)
    assert [w for w in (variable, "it's a recipe.json", words) if w not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def tiny_files(tiny_calibration) -> CalibrationFiles:
    """The tiny model's calibration, as a recipe file names it."""
    return CalibrationFiles(sigma=tiny_calibration["sigma"], components=tiny_calibration["components"])


# -- settings


def config(**changes) -> SimpleNamespace:
    """What the plugin reads of a `VllmConfig`, by its path; `changes` name leaves."""
    leaves = {
        "enforce_eager": True,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "cache_dtype": "auto",
        "speculative_config": None,
        "lora_config": None,
        "kv_transfer_config": None,
        "kv_offloading_size": None,
    } | changes
    leaf = SimpleNamespace(dtype=torch.bfloat16, **leaves)
    return SimpleNamespace(
        model_config=leaf,
        parallel_config=leaf,
        cache_config=leaf,
        speculative_config=leaf.speculative_config,
        lora_config=leaf.lora_config,
        kv_transfer_config=leaf.kv_transfer_config,
    )


@pytest.mark.parametrize(
    ("changes", "data"),
    [
        ({"enforce_eager": False}, "--enforce-eager"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"data_parallel_size": 2}, "data_parallel_size"),
        ({"speculative_config": object()}, "speculation"),
        ({"lora_config": object()}, "LoRA"),
        ({"kv_transfer_config": object()}, "kv_transfer_config"),
        ({"kv_offloading_size": 4.0}, "kv_offloading_size"),
        ({"cache_dtype": "fp8"}, "kv_cache_dtype 'fp8'"),
    ],
)
def test_settings_that_would_make_the_recipe_a_lie_are_refused(changes, data):
    with refused(CapabilityError, "capability.vllm-setting", RECIPE_VARIABLE, data):
        check(**changes)


@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16"])
def test_plain_settings_pass(cache_dtype):
    check(cache_dtype=cache_dtype)


def check(**changes) -> None:
    made = config(**changes)
    vllm_settings.refuse_settings([*vllm_settings.compiled(made), *vllm_settings.common(made)], RECIPE_VARIABLE)


def config_of(model: Path) -> SimpleNamespace:
    """The settings of a plain `LLM(model)` on a CPU."""
    plain = config()
    plain.model_config.model, plain.model_config.revision = str(model), None
    plain.model_config.hf_config = plain.model_config.hf_text_config = SimpleNamespace(num_hidden_layers=3)
    plain.device_config = SimpleNamespace(device_type="cpu")
    return plain


def test_a_recipe_is_made_ready_for_the_served_model(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv(RECIPE_VARIABLE, str(write_recipe_file(tmp_path / "r.json", LOSSY)))
    served = vllm_worker.prepare(config_of(tiny_model))
    assert (served.recipe, served.layers, served.calibration_hash) == (LOSSY, (0, 1, 2), None)
    assert served.info.path == tiny_model


def test_a_layer_that_the_model_has_not_is_refused(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv(RECIPE_VARIABLE, str(write_recipe_file(tmp_path / "r.json", LOSSY, layers=[1, 3])))
    with refused(ParamsError, "params.no-such-layer", "layer 3", "0 to 2"):
        vllm_worker.prepare(config_of(tiny_model))


def test_a_calibration_is_used_and_must_be_the_served_models_own(tiny_model, tiny_files, tmp_path, monkeypatch):
    path = write_recipe_file(tmp_path / "r.json", CALIBRATED, calibration=tiny_files)
    monkeypatch.setenv(RECIPE_VARIABLE, str(path))
    assert vllm_worker.prepare(config_of(tiny_model)).calibration_hash
    with pytest.raises(CalibrationMismatch):
        vllm_worker.prepare(config_of(tiny.write_model(tmp_path / "other", seed=1)))


@pytest.mark.parametrize("recipe", [CALIBRATED, Recipe(k=IntStream(bits=4, whiten=True), v=IdentityStream())])
def test_a_calibration_that_is_missing_is_missed_before_any_request(tiny_model, tmp_path, monkeypatch, recipe):
    monkeypatch.setenv(RECIPE_VARIABLE, str(write_recipe_file(tmp_path / "r.json", recipe)))
    with pytest.raises(CalibrationMismatch):
        vllm_worker.prepare(config_of(tiny_model))


# -- the worker


class Projection(nn.Module):
    """As vLLM's fused projection: q, k and v side by side, and a bias apart."""

    def forward(self, x):
        return x.repeat(1, 3), None


class Called(nn.Module):
    """As vLLM's attention after the rotary embedding: called with q, k and v, which it gives back for a look."""

    def forward(self, q, k, v):
        return q, k, v


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = nn.Module()
        self.self_attn.qkv_proj = Projection()
        self.self_attn.attn = Called()


class Worker:
    """A vLLM worker as far as the plugin knows one; `skips` is a layer whose hooks vLLM would leave out."""

    vllm_config = None

    def __init__(self, skips: int | None = None):
        self.model = nn.ModuleDict({"layers": nn.ModuleList(Attention() for _ in range(LAYERS))})
        self.skips, self.loaded = skips, False

    def load_model(self):
        self.loaded = True

    def get_model(self):
        return self.model

    def execute_model(self, scheduled):
        x = torch.randn(scheduled.rows, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(0))
        self.attended = [layer.self_attn.attn(x, x + 1, x - 1) for layer in self.model["layers"]]
        projections = [layer.self_attn.qkv_proj for layer in self.model["layers"]]
        return [p.forward(x) if n == self.skips else p(x) for n, p in enumerate(projections)]


def step(tokens: int, rows: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(total_num_scheduled_tokens=tokens, rows=tokens if rows is None else rows)


@pytest.fixture
def armed(monkeypatch):
    """Makes a worker with a recipe's hooks on it."""

    def make(recipe: Recipe = LOSSY, layers=(0, 2), **kwargs) -> Worker:
        info = SimpleNamespace(n_layers=LAYERS, n_heads=HEADS, n_kv_heads=HEADS, head_dim=HEAD_DIM, model_hash="m")
        codecs = {"k": build(recipe.k), "v": build(recipe.v)}
        monkeypatch.setattr(vllm_worker, "_log", lambda served: None)
        worker = Worker(**kwargs)
        vllm_worker.arm(worker, vllm_worker.ReadyRecipe(recipe, info, None, layers, codecs))
        worker.load_model()
        return worker

    return make


def test_k_is_coded_where_the_recipe_says(armed):
    """Before its rotary embedding the projection is hooked, after it what attention is called with; never both."""
    x = torch.randn(5, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(0))
    heads = x.view(5, HEADS, HEAD_DIM).transpose(0, 1)
    for rotary in ("before", "after"):
        recipe = Recipe(k=LOSSY.k, v=LOSSY.v, rotary=rotary)
        worker = armed(recipe)
        projected = worker.execute_model(step(5))[0][0].split(HEADS * HEAD_DIM, dim=1)
        q, k, v = worker.attended[0]
        assert torch.equal(q, x) and torch.equal(projected[0], x)
        assert torch.equal(k, x + 1) == torch.equal(v, x - 1) == (rotary == "before")
        assert torch.equal(projected[1], x) == (rotary == "after")
        if rotary == "after":
            codec = build(recipe.k)
            due = codec.decode(codec.encode(heads + 1, Site(0, 0, "k"))).transpose(0, 1).reshape(5, -1)
            assert torch.equal(k, due)
        assert worker.kvlab_status()["fires"]["k"] == [1, 1]


def test_a_served_step_is_coded_layer_by_layer_and_counted(armed):
    worker = armed()
    outputs = [worker.execute_model(step(n)) for n in (5, 1)]
    status = vllm_plugin.Status.from_answer(json.loads(json.dumps(worker.kvlab_status())))
    assert (status.steps, status.tokens, status.layers) == (2, 6, (0, 2))
    assert status.fires == {"k": (2, 2), "v": (2, 2)}
    assert status.recipe_id == LOSSY.recipe_id
    assert 4 < status.bits_per_value["k"] < 8 and 3 < status.bits_per_value["v"] < status.bits_per_value["k"]
    for layer, (fused, _) in enumerate(outputs[0]):
        q, k, v = fused.split(HEADS * HEAD_DIM, dim=-1)
        wanted = q.reshape(5, HEADS, HEAD_DIM).transpose(0, 1)
        for part, coded in (("k", k), ("v", v)):
            codec, site = build(getattr(LOSSY, part)), Site(0, layer, part)
            expected = codec.decode(codec.encode(wanted, site)) if layer in (0, 2) else wanted
            assert torch.equal(coded.reshape(5, HEADS, HEAD_DIM).transpose(0, 1), expected)


def test_a_pass_past_a_hook_does_not_return(armed):
    worker = armed(skips=2)
    with refused(CodecNotActive, "not-active.pass", "k of layer 2 (0 of 5 tokens); v of layer 2"):
        worker.execute_model(step(5))


def test_a_pass_that_codes_fewer_tokens_than_it_serves_does_not_return(armed):
    with refused(CodecNotActive, "not-active.pass", "k of layer 0 (4 of 5 tokens)"):
        armed().execute_model(step(5, rows=4))


def test_passes_without_requests_are_neither_coded_nor_counted(armed):
    worker = armed()
    before = [
        layer.self_attn.qkv_proj(torch.full((2, HEADS * HEAD_DIM), torch.nan)) for layer in worker.model["layers"]
    ]
    worker.execute_model(step(0, rows=3))
    assert all(fused.isnan().all() for fused, _ in before)
    assert worker.kvlab_status()["steps"] == 0
    assert worker.kvlab_status()["bits_per_value"] == {"k": None, "v": None}


def test_a_model_loaded_past_the_hooks_gets_no_cache(monkeypatch):
    monkeypatch.setenv(RECIPE_VARIABLE, "r.json")
    wrapper = SimpleNamespace(worker=Worker())
    with refused(CodecNotActive, "not-active.no-hooks"):
        vllm_plugin._around_cache(lambda *_: "a cache", wrapper, ())
    monkeypatch.delenv(RECIPE_VARIABLE)
    assert vllm_plugin._around_cache(lambda *_: "a cache", wrapper, ()) == "a cache"


def test_both_variables_at_once_are_refused(monkeypatch):
    monkeypatch.setenv(RECIPE_VARIABLE, "r.json")
    monkeypatch.setenv(PAGES_VARIABLE, "r.json")
    with refused(CapabilityError, "capability.coded-twice", RECIPE_VARIABLE, PAGES_VARIABLE):
        vllm_plugin.register()


def test_a_vllm_without_the_place_to_hold_on_to_is_refused():
    with refused(CapabilityError, "capability.vllm-version", "Worker.init_device"):
        vllm_plugin._wrap(Worker, "init_device", None)


def test_status_of_a_plain_vllm_says_how_to_activate():
    def no_such_method(name):
        raise Exception(f"Worker failed with error: no attribute {name!r}")

    with refused(CodecNotActive, "not-active.no-recipe", RECIPE_VARIABLE):
        vllm_plugin.status(SimpleNamespace(collective_rpc=no_such_method))


# -- inside vLLM


def test_vllm_finds_the_plugin():
    (found,) = entry_points(group="vllm.general_plugins", name="kvlab")
    assert found.load() is vllm_plugin.register


def test_without_the_variable_it_touches_nothing():
    program = (
        "import sys; from kvlab.cache.vllm_plugin import register; register();"
        "print(sorted({'torch', 'vllm', 'polars', 'numpy', 'kvlab.cache.vllm.worker'} & set(sys.modules)))"
    )
    clean = {name: value for name, value in os.environ.items() if name not in (RECIPE_VARIABLE, PAGES_VARIABLE)}
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=clean)
    assert answer.stdout.strip() == "[]", answer.stderr


@pytest.mark.engine
def test_our_own_engine_refuses_to_be_coded_twice(hf_engine, monkeypatch):
    monkeypatch.setenv(RECIPE_VARIABLE, "r.json")
    with refused(CapabilityError, "capability.coded-twice", RECIPE_VARIABLE):
        start("vllm", hf_engine.info, "float32", max_tokens=96)


@pytest.fixture(scope="module")
def user(tiny_model, tiny_files, tmp_path_factory):
    """What a person's program saw: refused when compiled, then `CALIBRATED`, then identity in its own process."""
    folder = tmp_path_factory.mktemp("recipes")
    recipes = [
        write_recipe_file(folder / "calibrated.json", CALIBRATED, calibration=tiny_files),
        write_recipe_file(folder / "identity.json", IDENTITY),
    ]
    ours = ("VLLM_", "KVLAB_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("vllm_user.py"), tiny_model, *recipes],
        capture_output=True,
        text=True,
        timeout=300,
        env=clean | settings,
    )
    answers = [json.loads(line.split(" ", 1)[1]) for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(answers) == 3, done.stdout[-4000:] + done.stderr[-4000:]
    return SimpleNamespace(
        refused=answers[0], calibrated=answers[1], identity=answers[2], log=done.stdout + done.stderr
    )


@pytest.mark.full
@pytest.mark.engine
def test_compiled_vllm_is_refused_in_the_persons_own_process(user):
    assert user.refused["error"] == "CapabilityError"
    assert "enforce_eager=True" in user.refused["message"]


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.parametrize(("run", "recipe"), [("calibrated", CALIBRATED), ("identity", IDENTITY)])
def test_every_step_fired_on_every_layer_and_stream(user, run, recipe):
    status = getattr(user, run)["status"]
    assert status["recipe_id"] == recipe.recipe_id
    assert status["layers"] == [0, 1, 2]
    assert status["steps"] >= 55 / CHUNK + 5
    assert status["fires"] == {"k": [status["steps"]] * 3, "v": [status["steps"]] * 3}
    assert status["tokens"] == 30 + 25 + 2 * 5
    assert f"kvlab: recipe {recipe.recipe_id} codes K ({recipe.k.codec})" in user.log


@pytest.mark.full
@pytest.mark.engine
def test_vllm_says_what_transformers_says_with_the_same_codecs(user, hf_engine, tiny_files):
    """Whatever else was in a pass: requests were mixed and prompts cut, and every token was coded by itself."""
    fitted = load(FittedFiles(**dict(tiny_files)), hf_engine.info.model_hash)
    codecs = {s: build(recipe, fitted.stream(recipe, s)) for s in "kv" for recipe in [getattr(CALIBRATED, s)]}

    def every_token(layer, part, x):
        if part in codecs:
            return codecs[part].decode(codecs[part].encode(x, Site(0, layer, part)))

    for ids, identity, coded in zip(PROMPTS, user.identity["logprobs"], user.calibrated["logprobs"], strict=True):
        said, plain = logprobs(hf_engine, ids, every_token), logprobs(hf_engine, ids)
        torch.testing.assert_close(torch.tensor(identity), plain, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(torch.tensor(coded), said, atol=1e-3, rtol=1e-3)
        assert (said - plain).abs().max() > 0.02


def logprobs(engine, ids: list[int], tap=None) -> torch.Tensor:
    return engine.score(ids, 0, tap).log_softmax(-1)[range(len(ids) - 1), ids[1:]]


@pytest.mark.full
@pytest.mark.engine
def test_identity_leaves_greedy_text_alone(user, hf_engine):
    for ids, theirs in zip(PROMPTS, user.identity["generated"], strict=True):
        for token in theirs:
            logits = hf_engine.score([*ids, 0], len(ids) - 1)[-1]
            assert logits[token] >= logits.max() - 1e-3
            ids = [*ids, token]
