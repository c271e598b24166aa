"""One file of a calibration: what is written comes back, everywhere, and a file that is another one is refused."""

import json
import struct
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvlab import Cache, recipe
from kvlab.cache.files.calibration import load_calibration, read_header, write_calibration
from kvlab.cache.files.prepared import prepared
from kvlab.cache.files.recipe import CalibrationFiles, RecipeFile, read_recipe_file, write_recipe_file
from kvlab.codecs.base import Site
from kvlab.codecs.block.studied import studied_recipe
from kvlab.codecs.klt import KltStream
from kvlab.codecs.klt.codec import KltCodec
from kvlab.codecs.noise import NoiseStream
from kvlab.codecs.shared.turning import RUN
from kvlab.core.errors import CalibrationMismatch, CapabilityError, ParamsError, StorageError, UserError
from kvlab.core.filekind import is_calibration_file
from kvlab.core.recipe import Recipe, digest
from kvlab.core.records import to_header
from refusals import refused

KLT = recipe("klt", bits=4, v_bits=3, block_size=64)
RECIPES = {
    "klt": KLT,
    "oscar": recipe("oscar", bits=4),
    "whiten": recipe("int+center+whiten", bits=3),
    "plain": recipe("hadamard", bits=4),
}


@pytest.fixture
def klt4(calibrated, info, tmp_path):
    return write_calibration(tmp_path / "klt4.kv", KLT, calibrated, info, n_tokens=576)


def coded(ready, info, tokens=40):
    """What both codecs of a prepared recipe make of one tensor."""
    x = torch.randn(info.n_kv_heads, tokens, info.head_dim, generator=torch.Generator().manual_seed(0))
    codecs = {s: ready.codec(s) for s in ("k", "v")}
    return [c.decode(c.encode(x, Site(0, layer, s))) for s, c in codecs.items() for layer in ready.layers]


@pytest.mark.parametrize("name", [*RECIPES, "studied"])
def test_a_file_codes_as_the_calibration_it_was_made_of(
    name, tiny_params, tiny_calibration, calibrated, info, tmp_path
):
    chosen = RECIPES.get(name) or studied_recipe(tiny_params)
    layers = (1, 2) if name == "whiten" else None
    path = write_calibration(tmp_path / "a.kv", chosen, calibrated, info, layers)
    files = CalibrationFiles(**{kind: tiny_calibration[kind] for kind in ("sigma", "codebooks", "components")})
    apart = prepared(RecipeFile(recipe=chosen, layers=layers, calibration=files), info)
    whole = prepared(read_recipe_file(path), info)
    assert (whole.recipe, whole.layers, whole.identity) == (apart.recipe, apart.layers, apart.identity)
    for ours, theirs in zip(coded(whole, info), coded(apart, info), strict=True):
        assert torch.equal(ours, theirs)


def test_only_what_the_recipe_reads_is_in_it(calibrated, info, tmp_path):
    def names(chosen, layers=None):
        with safe_open(write_calibration(tmp_path / "a.kv", chosen, calibrated, info, layers), "pt") as file:
            return {name.rpartition("/")[0] for name in file.keys()}  # noqa: SIM118 (no mapping)

    assert names(RECIPES["plain"]) == set()
    assert names(KLT, [1]) == {"k/components/1", "v/components/1", "k/spectra", "v/spectra"}
    assert names(recipe("oscar", bits=4), [0, 2]) == {
        "k/whitener/0",
        "k/whitener/2",
        "v/components/0",
        "v/components/2",
    }


def test_one_calibration_at_several_bits_has_one_hash(calibrated, info, tmp_path):
    two, four = (
        read_header(write_calibration(tmp_path / f"{bits}.kv", recipe("klt", bits=bits), calibrated, info))
        for bits in (2, 4)
    )
    assert two.calibration_hash == four.calibration_hash and two.recipe != four.recipe
    other = replace(calibrated, corpus_hash="f" * 16)
    written = write_calibration(tmp_path / "o.kv", recipe("klt", bits=2), other, info)
    assert read_header(written).calibration_hash != two.calibration_hash


def test_the_header_says_whose_it_is(klt4, calibrated, info):
    header = read_header(klt4)
    assert (header.model.model_hash, header.corpus_hash, header.origin) == (
        info.model_hash,
        calibrated.corpus_hash,
        "hf",
    )
    assert header.n_tokens == 576 and "torch" in header.versions
    assert is_calibration_file(klt4) and not is_calibration_file(write_recipe_file(klt4.with_name("r.json"), KLT))
    renamed = klt4.rename(klt4.with_name("klt4.safetensors"))
    assert read_recipe_file(renamed).recipe == KLT


def test_the_cache_takes_it(klt4, tiny_model, tiny_params):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    cache = Cache(model, klt4, semantics="in_forward")
    with torch.inference_mode():
        model(torch.arange(1, 41)[None], past_key_values=cache)
    assert cache.recipe == KLT and all(entry.fires for entry in cache.check())
    with refused(ParamsError, "params.two-calibrations", klt4):
        Cache(model, klt4, calibration=object())
    with refused(ParamsError, "params.codec-name", "kvlab.recipe('klt', bits=4)"):
        Cache(model, "klt")
    with refused(UserError, "user.no-model", "'models/reference'", "from_pretrained"):
        Cache("models/reference", klt4)
    with refused(StorageError, None, "nothing.kv"):
        Cache(model, "nothing.kv")


# ------------------------------------------------------------------------------------- what is refused


def test_every_damaged_byte_is_found(klt4, info):
    """No file in which one bit is another is read as a calibration."""
    whole = klt4.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    chance = torch.Generator().manual_seed(0)
    header = torch.randint(0, 8 + length, (40,), generator=chance).tolist()
    data = torch.randint(8 + length, len(whole), (20,), generator=chance).tolist()
    for place in (*range(9), *header, *data):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        klt4.write_bytes(damaged)
        with pytest.raises((StorageError, CalibrationMismatch)) as caught:
            prepared(read_recipe_file(klt4), info)
        assert "\n" not in str(caught.value) and "klt4.kv" in str(caught.value), place


@pytest.mark.parametrize("left", [0, 1, 7, 8, 100, -1])
def test_a_file_that_is_cut_short_is_refused(klt4, info, left):
    klt4.write_bytes(klt4.read_bytes()[:left])
    with refused(StorageError, "storage.damaged", klt4):
        load_calibration(klt4, info)


def rewritten(path, **changes):
    """The file with another header, whose digest is right."""
    with safe_open(path, "pt") as file:
        said = json.loads(file.metadata()["kvlab"])
    form = {name: changes.pop(name, said[name]) for name in ("format", "version")}
    body = {name: value for name, value in (said | changes).items() if name not in (*form, "digest")}
    save_file(load_file(path), path, to_header(form | {"digest": digest(body)} | body))


@pytest.mark.parametrize(
    ("changes", "error", "code", "data"),
    [
        ({"version": 1}, CalibrationMismatch, "calibration.other-version", ["version 1", "reads 3"]),
        ({"format": "gguf"}, CalibrationMismatch, "calibration.other-file", []),
        ({"origin": 3}, CalibrationMismatch, "calibration.header", ["origin", "string"]),
        ({"tensors": {}}, StorageError, "storage.damaged", ["k/components/0/covariance"]),
    ],
)
def test_another_header_is_refused(klt4, info, changes, error, code, data):
    rewritten(klt4, **changes)
    with refused(error, code, klt4, *data):
        load_calibration(klt4, info)


def test_k_that_was_turned_by_other_runs_is_refused(calibrated, info, tmp_path):
    """As files of before runs were, which name none."""
    turned = replace(calibrated, turned=calibrated.components["k"])
    path = write_calibration(tmp_path / "a.kv", recipe("klt", bits=4, rotary="after"), turned, info)
    assert load_calibration(path, info).turned
    for run, said in ((None, "all positions"), (2 * RUN, f"{2 * RUN} positions")):
        rewritten(path, run=run)
        with refused(CalibrationMismatch, "calibration.other-run", path, said, f"runs of {RUN}", "kvlab calibrate"):
            load_calibration(path, info)


def test_another_model_is_refused_by_both_shapes(klt4, info):
    with refused(CalibrationMismatch, "calibration.other-model", info.model_hash, "0000 (7 layers, 2 KV heads"):
        load_calibration(klt4, replace(info, model_hash="0000", n_layers=7))


def test_another_safetensors_file_is_refused(tmp_path, info):
    save_file({"x": torch.zeros(2)}, tmp_path / "x.kv")
    with refused(CalibrationMismatch, "calibration.other-file", tmp_path / "x.kv", "kvlab calibrate"):
        read_recipe_file(tmp_path / "x.kv")
    (tmp_path / "x.kv").write_text('{"recipe": {}}')
    with refused(StorageError, "storage.damaged", tmp_path / "x.kv"):
        read_recipe_file(tmp_path / "x.kv")


def test_what_cannot_be_written_leaves_nothing(calibrated, info, tmp_path):
    few = replace(calibrated, components={"k": {}, "v": calibrated.components["v"]})
    some = replace(calibrated, components=calibrated.components | {"k": {0: calibrated.components["k"][0]}})
    for lacking in (few, some):
        with refused(CalibrationMismatch, "calibration.missing", "components", "K", "layer"):
            write_calibration(tmp_path / "a.kv", KLT, lacking, info)
    assert list(tmp_path.iterdir()) == []


def test_a_control_is_refused(calibrated, info, tmp_path):
    control = Recipe(k=NoiseStream(sigma=0.1, seed=0), v=KltStream(bits=3))
    path = write_calibration(tmp_path / "a.kv", control, calibrated, info)
    with refused(CapabilityError, "capability.no-codes", "'noise' of stream k"):
        read_recipe_file(path)


@pytest.mark.parametrize("name", [*RECIPES, "klt2"])
def test_a_decoders_file_decodes_to_the_same_bits(name, calibrated, info, tmp_path):
    chosen = recipe("klt", bits=2, block_size=64) if name == "klt2" else RECIPES[name]
    files = [write_calibration(tmp_path / f"{i}.kv", chosen, calibrated, info, decoder=i) for i in (False, True)]
    whole, decoder = (prepared(read_recipe_file(path), info) for path in files)
    assert whole.calibration_hash == decoder.calibration_hash and whole.identity == decoder.identity
    x = 3 * torch.randn(info.n_kv_heads, 40, info.head_dim, generator=torch.Generator().manual_seed(0))
    x[:, 0] *= 40  # far out of every table: escapes
    for stream in ("k", "v"):
        for layer in whole.layers:
            written = whole.codec(stream).encode(x, Site(0, layer, stream))
            assert torch.equal(decoder.codec(stream).decode(written), whole.codec(stream).decode(written))
    sizes = [path.stat().st_size for path in files]
    assert (
        sizes[1] < (0.4 if "klt" in name else 1.0) * sizes[0] + len(',"form":"decoder"') + 8
    )  # headers are padded to 8


def test_a_decoders_file_cannot_encode_and_serves_no_other_bits(calibrated, info, tmp_path):
    path = write_calibration(tmp_path / "a.kv", KLT, calibrated, info, decoder=True)
    assert read_header(path).form == "decoder"
    x = torch.zeros(info.n_kv_heads, 4, info.head_dim)
    with refused(CalibrationMismatch, "calibration.decoder-only", "layer 0"):
        prepared(read_recipe_file(path), info).codec("k").encode(x, Site(0, 0, "k"))
    fitted = load_calibration(path, info).stream(KLT.k, "k")
    other = KltCodec(KltStream(bits=2, block_size=64), fitted)
    with refused(CalibrationMismatch, "calibration.other-bits", "2 bits"):
        other.plan(0, tuple(x.shape), x.device)
