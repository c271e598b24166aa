"""Coded caches as files: what is written is what the codec says, piece by piece and in little memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tiny
from kvlab.cache.files import coded as streams
from kvlab.cache.files.prepared import prepared
from kvlab.cache.files.recipe import CalibrationFiles, RecipeFile, read_recipe_file, write_recipe_file
from kvlab.cache.transformers_cache import Cache
from kvlab.calibration import load as calibration
from kvlab.calibration.capture import Captured
from kvlab.calibration.moments import names
from kvlab.codecs.base import Site
from kvlab.codecs.block.studied import studied_recipe
from kvlab.codecs.cast import CastStream
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.int import IntStream
from kvlab.codecs.isotropic import IsotropicStream
from kvlab.codecs.klt import KltStream
from kvlab.codecs.noise import NoiseStream
from kvlab.codecs.recipes import STUDIED, named_recipe
from kvlab.codecs.registry import build
from kvlab.codecs.stream.bitstream import STREAMS
from kvlab.codecs.stream.cache_file import CacheReader
from kvlab.core.errors import (
    CalibrationMismatch,
    CapabilityError,
    ParamsError,
    StorageError,
    StreamError,
    UnknownName,
    UserError,
)
from kvlab.core.model import resolve
from kvlab.core.paramfile import overlay
from kvlab.core.recipe import Recipe
from kvlab.core.records import to_header
from refusals import refused

PLAIN = Recipe(k=IntStream(bits=4, group=16), v=HadamardStream(bits=3))
WINDOW = 2


@pytest.fixture
def files(tiny_calibration) -> CalibrationFiles:
    return CalibrationFiles(**{name: tiny_calibration[name] for name in ("sigma", "codebooks", "components")})


def recipes(params) -> dict[str, Recipe]:
    return {"plain": PLAIN, "klt": named_recipe("klt", params=params), "studied": studied_recipe(params)}


@pytest.mark.parametrize("name", ["plain", "klt", "studied"])
def test_a_window_comes_back_as_the_codec_decodes_it(tiny_params, tiny_calibration, tiny_fitted, files, tmp_path, name):
    recipe, layers = recipes(tiny_params)[name], None if name == "klt" else [1, 2]
    path = write_recipe_file(tmp_path / "r.json", recipe, layers, files)
    reader = streams.encode(tiny_params.model, path, tiny_calibration["capture"], WINDOW, tmp_path / "c.kvls")
    streams.decode(tiny_params.model, path, tmp_path / "c.kvls", tmp_path / "c.safetensors")
    assert reader.nbytes == (tmp_path / "c.kvls").stat().st_size
    got, captured = load_file(tmp_path / "c.safetensors"), load_file(tiny_calibration["capture"])
    fitted = calibration.load(tiny_fitted, resolve(tiny_params.model).model_hash)
    assert list(got) == [f"layer_{layer}_{stream}" for layer in range(3) for stream in STREAMS]
    for layer in range(3):
        for stream in STREAMS:
            x = captured[f"layer_{layer}_{stream}"][WINDOW]
            codec = build(getattr(recipe, stream), fitted.stream(getattr(recipe, stream), stream))
            wanted = codec.decode(codec.encode(x, Site(WINDOW, layer, stream))).to(x.dtype)
            wanted = wanted if layers is None or layer in layers else x
            assert torch.equal(got[f"layer_{layer}_{stream}"], wanted)


def test_the_decoded_file_is_the_one_that_safetensors_writes(tiny_params, tiny_calibration, tmp_path):
    path = write_recipe_file(tmp_path / "r.json", PLAIN)
    streams.encode(tiny_params.model, path, tiny_calibration["capture"], 0, tmp_path / "c.kvls")
    streams.decode(tiny_params.model, path, tmp_path / "c.kvls", tmp_path / "c.safetensors")
    with safe_open(tmp_path / "c.safetensors", "pt") as file:
        save_file(load_file(tmp_path / "c.safetensors"), tmp_path / "again.safetensors", metadata=file.metadata())
    assert (tmp_path / "again.safetensors").stat().st_size == (tmp_path / "c.safetensors").stat().st_size


def test_one_window_is_read_as_it_was_kept(tiny_params, tiny_calibration, info):
    captured = Captured(tiny_calibration["capture"], info.model_hash)
    assert captured.n_windows == len(captured.sampled) == tiny_params.windows.calib
    one = captured.window(1, "k", WINDOW)
    assert one.dtype == torch.bfloat16 and captured.dtype == "float32"
    assert torch.equal(one.float(), captured.layer(1, "k")[WINDOW])


# -- whose a stream is


def test_a_calibration_that_is_not_needed_is_no_part_of_a_stream(tiny_params, tiny_calibration, files, tmp_path):
    path = write_recipe_file(tmp_path / "r.json", PLAIN, calibration=files)
    reader = streams.encode(tiny_params.model, path, tiny_calibration["capture"], 0, tmp_path / "c.kvls")
    assert reader.header.calibration_hash is None
    streams.decode(
        tiny_params.model, write_recipe_file(tmp_path / "r.json", PLAIN), tmp_path / "c.kvls", tmp_path / "x"
    )


@pytest.mark.parametrize("other", [None, [1], [0, 1]])
def test_a_recipe_file_of_other_layers_does_not_decode(tiny_params, tiny_calibration, tmp_path, other):
    path = write_recipe_file(tmp_path / "r.json", PLAIN, layers=[2, 1])
    streams.encode(tiny_params.model, path, tiny_calibration["capture"], 0, tmp_path / "c.kvls")
    streams.decode(
        tiny_params.model, write_recipe_file(path, PLAIN, layers=[1, 2]), tmp_path / "c.kvls", tmp_path / "x"
    )
    (tmp_path / "x").unlink()
    with refused(StreamError, "stream.other-identity", "recipe_id", "layers"):
        streams.decode(
            tiny_params.model, write_recipe_file(path, PLAIN, layers=other), tmp_path / "c.kvls", tmp_path / "x"
        )
    assert not (tmp_path / "x").exists()


def test_all_layers_are_the_same_named_or_not(info):
    named, unnamed = (prepared(RecipeFile(recipe=PLAIN, layers=layers), info) for layers in ((0, 1, 2), None))
    assert named.identity == unnamed.identity == PLAIN.recipe_id


def test_what_cannot_be_a_stream_is_refused(tiny_params, tiny_calibration, tmp_path):
    noise = Recipe(k=NoiseStream(sigma=0.1, seed=0), v=PLAIN.v)
    cast = Recipe(k=PLAIN.k, v=CastStream())
    isotropic = Recipe(k=IsotropicStream(of=KltStream(bits=2), seed=0), v=PLAIN.v)
    for recipe, layers, window, error, code, data in (
        (noise, None, 0, CapabilityError, "capability.no-codes", ["'noise' of stream k", "identity, klt"]),
        (cast, None, 0, CapabilityError, "capability.no-codes", ["'cast' of stream v"]),
        (isotropic, None, 0, CapabilityError, "capability.no-codes", ["'isotropic' of stream k"]),
        (PLAIN, [3], 0, ParamsError, "params.no-such-layer", ["layer 3", "0 to 2"]),
        (PLAIN, None, 6, UserError, "user.no-such-window", [6, "0..5"]),
        (PLAIN, None, -1, UserError, "user.no-such-window", [-1, "0..5"]),
    ):
        path = write_recipe_file(tmp_path / "r.json", recipe, layers)
        with refused(error, code, *data):
            streams.encode(tiny_params.model, path, tiny_calibration["capture"], window, tmp_path / "c.kvls")
        assert not (tmp_path / "c.kvls").exists()


def test_a_calibration_is_asked_for_by_its_flags(info):
    with refused(CalibrationMismatch, "calibration.missing", "--sigma FILE --components FILE"):
        prepared(RecipeFile(recipe=Recipe(k=KltStream(bits=2), v=KltStream(bits=2))), info)
    missing = CalibrationFiles(sigma="gone.safetensors", components="gone.safetensors")
    with refused(StorageError, "storage.cannot-read", "gone.safetensors", "kvlab step sigma"):
        prepared(RecipeFile(recipe=Recipe(k=KltStream(bits=2), v=PLAIN.v), calibration=missing), info)


@pytest.mark.parametrize("place", ["nothing", "folder"])
def test_a_stream_that_is_not_there_cannot_be_read(tmp_path, place):
    (tmp_path / "folder").mkdir()
    with refused(StorageError, None, tmp_path / place):
        CacheReader(tmp_path / place)


# -- memory

MEASURE = """
import json, re, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from kvlab_pipeline.studies.settings import read_params
from kvlab.cache.files import coded as streams

for case in json.loads(sys.argv[1]):
    params, folder = read_params(json.dumps(case["params"])), Path(case["folder"])
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    streams.encode(params.model, folder / "r.json", folder / "capture.safetensors", case["window"], folder / "c.kvls")
    streams.decode(params.model, folder / "r.json", folder / "c.kvls", folder / "c.safetensors")
    # not ru_maxrss, which a process takes over from the one that started it
    print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024)
"""
TOKENS = 16384  # one layer's K is 2 MiB


def large_case(params, folder, layers: int, windows: int) -> dict:
    """A model of so many layers, and a capture of it that is made up."""
    model = tiny.write_model(folder / "model", num_hidden_layers=layers)
    data = overlay(params.model_dump(mode="json"), {"model": {"path": str(model), "n_layers": layers}})
    header = {"engine": "hf", "corpus_hash": "c", "context": TOKENS, "tokens": TOKENS, "dtype": "float32"}
    header |= {"windows": windows, "sample": list(range(windows)), "sample_dtype": "bfloat16", "sample_bytes": 0}
    header |= {"across": False}
    header["model_hash"] = resolve(type(params).complete(data).model).model_hash
    tensors = {name: torch.zeros(1) for name in names(layers)}
    for frame in (f"layer_{n}_{stream}" for n in range(layers) for stream in STREAMS):
        tensors[frame] = torch.randn(1, 2, TOKENS, 32).bfloat16().repeat(windows, 1, 1, 1)
        tensors[f"{frame}_loss"] = torch.zeros(1)
    save_file(tensors, folder / "capture.safetensors", metadata=to_header(header))
    write_recipe_file(folder / "r.json", PLAIN)
    return {"params": data, "folder": str(folder), "window": windows - 1}


@pytest.mark.nightly
def test_memory_grows_neither_with_layers_nor_with_windows(tiny_params, tmp_path):
    """Peak memory of `encode` and `decode`: all layers decoded are 32 MiB, so are all windows of one K in float32."""
    few = large_case(tiny_params, tmp_path / "few", layers=2, windows=1)
    many = large_case(tiny_params, tmp_path / "many", layers=8, windows=8)
    run = [sys.executable, "-c", MEASURE, json.dumps([few, few, many])]
    answer = subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()
    (tmp_path / "many" / "capture.safetensors").unlink()
    assert int(answer[2]) - int(answer[1]) <= 16, answer


# -- recipes by name, and the same file as a transformers cache


def test_a_recipe_is_named_as_the_ladder_names_it(tiny_params):
    for name, whole in (("int", "int"), ("int+none", "int"), ("int+center",) * 2, ("int+center+whiten",) * 2):
        wanted = [named_recipe(whole, b, params=tiny_params) for b in (tiny_params.bits, tiny_params.v_bits)]
        assert named_recipe(name, params=tiny_params) == Recipe(k=wanted[0].k, v=wanted[1].v)
    assert named_recipe("fp8", params=tiny_params).k.codec == "fp8"
    assert named_recipe("klt", params=tiny_params) == named_recipe("klt", tiny_params.bits, tiny_params.v_bits)
    assert named_recipe(STUDIED, params=tiny_params) == studied_recipe(tiny_params)


@pytest.mark.parametrize(
    ("name", "error", "code", "data"),
    [
        ("inr", UnknownName, None, ["'inr'", "'int'"]),
        ("studid", UnknownName, None, ["'studid'", "'studied'"]),
        ("int+centre", UnknownName, None, ["'centre'", "center, center+weigh, center+whiten, none"]),
        ("klt+center", ParamsError, "params.not-conditionable", ["'klt'"]),
    ],
)
def test_a_name_that_is_none_says_what_is_allowed(tiny_params, name, error, code, data):
    with refused(error, code, *data):
        named_recipe(name, params=tiny_params)


def test_a_recipe_file_is_a_cache(model, tiny_params, tiny_fitted, files, info, tmp_path):
    path = write_recipe_file(tmp_path / "r.json", named_recipe("klt", params=tiny_params), calibration=files)
    cache = Cache(model, path, semantics="in_forward")
    ids = torch.arange(1, 41)[None]
    with torch.inference_mode():
        model(ids, past_key_values=cache)
    assert cache.recipe == named_recipe("klt", params=tiny_params) and cache.semantics == "in_forward"
    assert all(entry.fires for entry in cache.check())
    with torch.inference_mode():
        model(ids, past_key_values=Cache(model, write_recipe_file(tmp_path / "r.json", PLAIN)))


def test_a_file_that_is_no_cache_is_refused(model, tiny_params, files, tmp_path):
    with refused(CapabilityError, "capability.some-layers", [1]):
        Cache(model, write_recipe_file(tmp_path / "r.json", PLAIN, layers=[1]))
    path = write_recipe_file(tmp_path / "r.json", named_recipe("klt", params=tiny_params))
    with refused(CalibrationMismatch, "calibration.missing", "--components"):
        Cache(model, path)
    other = AutoModelForCausalLM.from_pretrained(tiny.write_model(tmp_path / "other", seed=1))
    path = write_recipe_file(tmp_path / "r.json", named_recipe("klt", params=tiny_params), calibration=files)
    with refused(CalibrationMismatch, "calibration.other-model"):
        Cache(other, path)
    assert read_recipe_file(path).calibration.sigma.is_file()


def test_a_model_of_the_hub_is_looked_for_at_its_own_commit(model, tiny_params, files, tmp_path, monkeypatch):
    asked = []

    def found(name, loads=True):
        asked.append(name)
        return resolve(tiny_params.model, loads=loads)

    monkeypatch.setattr("kvlab.cache.transformers_cache.resolve", found)
    monkeypatch.setattr(model.config, "_commit_hash", "abc", raising=False)
    Cache(model, write_recipe_file(tmp_path / "r.json", named_recipe("klt", params=tiny_params), calibration=files))
    assert asked[0].revision == "abc"
