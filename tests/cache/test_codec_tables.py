"""What a cache's codecs hold: as little as they say, once a process and calibration, gone with the last cache."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from codec import ladder_making
from codec.ladder_making import LAYER, planted
from kvlab import Cache, recipe
from kvlab.cache.files import prepared
from kvlab.cache.files.calibration import write_calibration
from kvlab.cache.files.recipe import CalibrationFiles, read_recipe_file, write_recipe_file
from kvlab.cache.hf import codec_tables
from kvlab.cache.hf.kv_cache import KVCache
from kvlab.cache.vllm.worker import _try_out
from kvlab.codecs.base import Site
from kvlab.codecs.klt import KltStream
from kvlab.codecs.klt.trees import MANY, Nearest, Trees
from kvlab.codecs.registry import build
from kvlab.core.errors import CalibrationMismatch, StorageError
from refusals import refused

RECIPES = {
    "klt": recipe("klt", bits=4, v_bits=3, block_size=64),
    "oscar": recipe("oscar", bits=4),
    "whiten": recipe("int+center+whiten", bits=3),
    "weigh": recipe("int+center+weigh", bits=3),
}
CPU = torch.device("cpu")
IDS = torch.arange(1, 81)[None]


@pytest.fixture
def klt4(calibrated, info, tmp_path):
    return write_calibration(tmp_path / "klt4.kv", RECIPES["klt"], calibrated, info)


def arrays(root) -> dict[int, int]:
    """Bytes by where they begin, of all tensors and arrays that the collector sees from an object, but the model's."""
    seen, due, found = {}, [root], {}
    while due:
        one = due.pop()
        if id(one) in seen or isinstance(one, type | torch.nn.Module) or (callable(one) and hasattr(one, "__code__")):
            continue
        seen[id(one)] = one
        if isinstance(one, np.ndarray):
            if one.base is None:
                found[one.__array_interface__["data"][0]] = one.nbytes
            else:
                due.append(one.base)
        elif isinstance(one, torch.Tensor):
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif type(one).__module__ != "builtins" or isinstance(one, dict | list | tuple | set):
            due += gc.get_referents(one)
    return {at: size for at, size in found.items() if size}


def altered(calibrated):
    """Another calibration of the same model: every mean a little elsewhere."""
    moved = {
        stream: {layer: replace(one, mean=one.mean + 0.1, sink=one.sink + 0.1) for layer, one in layers.items()}
        for stream, layers in calibrated.components.items()
    }
    return replace(calibrated, components=moved)


@torch.inference_mode()
def seen(model, cache):
    """K and V of all layers after a text."""
    cache.reset()
    model(IDS, past_key_values=cache)
    return [x for layer in range(len(cache.layers)) for x in cache.decoded(layer)]


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_said_to_be_held_is_what_is_held(name, model, calibrated, info, tmp_path):
    cache = Cache(model, write_calibration(tmp_path / "a.kv", RECIPES[name], calibrated, info))
    held = arrays([cache.layers, cache._tables])
    assert sum(held.values()) == cache.tables_bytes == cache.resident_bytes > 0
    seen(model, cache)
    rows = [layer.rows for layer in cache.layers]
    assert sum(arrays(rows).values()) == sum(entry.nbytes for entry in cache.coding())
    assert cache.resident_bytes == cache.nbytes + cache.tables_bytes


def test_nothing_is_held_that_the_codec_does_not_read(model, calibrated, info, tmp_path):
    """The mean alone of components, for a codec that only takes it away: neither axes nor sketches."""
    center = recipe("hadamard+center", bits=4)
    cache = Cache(model, write_calibration(tmp_path / "a.kv", center, calibrated, info))
    means = 2 * info.n_layers * info.n_kv_heads * info.head_dim * 4
    assert means <= cache.tables_bytes <= means + 20_000  # and a rotation, which all layers share


@pytest.mark.parametrize("escape", [True, False])
def test_a_layer_of_klt_holds_two_matrices_and_its_tables(escape):
    heads, dim = 3, 64
    codec = build(KltStream(bits=4, block_size=64, escape=escape), ladder_making.calibration(heads, dim))
    x = planted(heads, 300, dim)
    x[:, ::7] *= 30  # whatever is made when it is first asked for is there
    codec.decode(codec.encode(x, Site(0, LAYER, "k")))
    codec.let_go()
    plan = codec.plan(LAYER, x.shape, CPU)
    needed = 2 * (heads * dim) ** 2 * 2 + plan.trees.values.nbytes
    assert needed < codec_tables.bytes_of(codec) < 1.1 * needed + 30_000


def test_caches_of_one_file_share_all_and_the_last_one_takes_it_along(model, klt4):
    first = Cache(model, klt4)
    due = seen(model, first)
    held = weakref.ref(first._tables)
    one, second = arrays([first._tables]), Cache(model, klt4, window_bytes=None)
    assert arrays([second._tables, second.layers]) == one and second.tables_bytes == first.tables_bytes
    assert [entry.fires for entry in second.coding()] == [0] * 6  # each counts for itself
    assert all(map(torch.equal, due, seen(model, second)))
    elsewhere = klt4.rename(klt4.with_name("renamed.kv"))
    assert Cache(model, elsewhere)._tables is first._tables
    del first
    assert held() is second._tables
    del second
    gc.collect()
    assert held() is None


def test_a_recipe_file_that_names_its_calibration_shares_it_too(model, tiny_calibration, tmp_path):
    files = CalibrationFiles(**{name: tiny_calibration[name] for name in ("sigma", "components")})
    path = write_recipe_file(tmp_path / "r.json", RECIPES["klt"], calibration=files)
    first, second = Cache(model, path), Cache(model, path)
    assert first._tables is second._tables


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("place", ["renamed", "written-over"])
def test_a_file_that_was_replaced_is_seen_and_older_caches_stay_as_they_were(
    place, name, model, calibrated, info, tmp_path
):
    """One that is written over in place too, as `cp` does: what was read before must not be mapped from it."""
    chosen, path = RECIPES[name], tmp_path / "a.kv"
    old = Cache(model, write_calibration(path, chosen, calibrated, info))
    before = seen(model, old)
    other = write_calibration(tmp_path / "b.kv", chosen, altered(calibrated), info)
    if place == "renamed":
        other.replace(path)
    else:
        path.write_bytes(other.read_bytes())
    new = Cache(model, path)
    assert new._tables is not old._tables
    assert all(map(torch.equal, before, seen(model, old)))
    found = seen(model, new)
    assert name == "oscar" or not any(map(torch.equal, before, found))  # which takes no means away


@pytest.mark.parametrize("name", ["klt", "whiten"])
def test_a_pipelines_components_that_are_written_over_change_no_cache(name, model, tiny_calibration, tmp_path):
    found = {kind: tiny_calibration[kind] for kind in ("sigma", "components")}
    own = shutil.copytree(found["components"].parent, tmp_path / "components") / found["components"].name
    files = CalibrationFiles(**found | {"components": own})
    cache = Cache(model, write_recipe_file(tmp_path / "r.json", RECIPES[name], calibration=files))
    before = seen(model, cache)
    own.write_bytes(bytes(own.stat().st_size))
    assert all(map(torch.equal, before, seen(model, cache)))


def test_a_file_that_is_replaced_while_it_is_read_is_refused(klt4, calibrated, info):
    source = prepared.FromFile(read_recipe_file(klt4), info)
    write_calibration(klt4, RECIPES["klt"], altered(calibrated), info)
    with refused(StorageError, "storage.replaced", klt4):
        source.stream(RECIPES["klt"].k, "k")


def test_a_calibration_in_memory_is_shared_with_none(model, calibrated):
    chosen = RECIPES["klt"]
    one, other = (KVCache(model, chosen, each) for each in (calibrated, altered(calibrated)))
    assert one._tables is not other._tables and KVCache(model, chosen, calibrated)._tables is not one._tables


def test_threads_that_make_caches_at_once_make_the_tables_once(model, klt4):
    found, start = [], threading.Barrier(4)

    def make():
        start.wait()
        found.append(Cache(model, klt4))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len({id(cache._tables) for cache in found}) == 1


@pytest.mark.parametrize("changes", [{"bits": 4}, {"bits": 2}, {"bits": 3, "escape": False}], ids=str)
@pytest.mark.parametrize("heads", [3, 6], ids=["one-group", "two-groups"])
def test_a_codec_that_let_go_codes_as_before_and_moves_to_other_devices(heads, changes):
    site, calibration = Site(0, LAYER, "k"), ladder_making.calibration(heads, 64)
    codec, again = (build(KltStream(block_size=64, **changes), calibration) for _ in range(2))
    x = planted(heads, 200, 64, 1)
    x[:, ::7] *= 30
    x[1, ::11, 7] += 1e4
    due = codec.encode(x, site)
    codec.let_go()
    with refused(CalibrationMismatch, "calibration.missing", "components", f"layer {LAYER + 1}"):
        codec.plan(LAYER + 1, x.shape, CPU)
    with refused(
        CalibrationMismatch, "calibration.other-shape", f"{heads} KV heads of 64 dimensions", f"layer {LAYER}"
    ):
        codec.plan(LAYER, (heads, 1, 32), CPU)
    again._plans[LAYER, CPU] = codec.plan(LAYER, x.shape, CPU).to(CPU)  # as to another device
    again.let_go()
    for other in (codec, again):
        found = other.encode(x, site)
        assert all(torch.equal(a, b) for (a,), (b,) in zip(found.blocks, due.blocks, strict=True))
        assert torch.equal(other.decode(found), codec.decode(due))


def test_served_codecs_of_vllm_let_go(calibrated, info):
    chosen = RECIPES["klt"].k
    codec = build(chosen, calibrated.stream(chosen, "k"))
    _try_out({"k": codec}, (0, 2), info)
    assert not codec.calibration.components and not codec.calibration.spectra
    assert {layer for layer, _ in codec._plans} == {0, 2}


def test_symbols_are_found_alike_in_few_and_in_many_vectors():
    widths = torch.tensor([[0, 1, 3, 8], [2, 0, 5, 1]])
    made = [torch.randn(1 << known).sort().values for width in widths.flatten() for known in range(int(width) + 1)]
    trees, z = Trees(torch.cat(made), widths, CPU), torch.randn(4, 3 * MANY)
    for group in range(2):
        table = trees.table(group)
        for row, width in enumerate(widths[group].tolist()):
            last = sum(int(w) + 1 for w in widths.flatten()[: 4 * group + row + 1]) - 1
            assert torch.equal(table[row, : 1 << width], made[last])
        z[:, :200] = ((table[:, 1:] + table[:, :-1]) / 2).repeat(1, 200)[:, :200]  # on a boundary, or at zero after it
        due = Nearest(table, 1 << widths[group])(z)
        assert torch.equal(trees.nearest(group, z), due)
        few = torch.cat([trees.nearest(group, part) for part in z.split(MANY - 1, dim=1)], dim=1)
        assert torch.equal(few, due)
    with refused(CalibrationMismatch, "calibration.table-size", len(torch.cat(made)) - 1, len(torch.cat(made))):
        Trees(torch.cat(made)[1:], widths, CPU)
