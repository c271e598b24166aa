"""The published study's file formats: read, written, and refused when they are not what they say."""

from __future__ import annotations

import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from codec.making import second_moment
from kvlab.codecs.shared import whitening
from kvlab.codecs.stream import published
from kvlab.codecs.stream.published import SigmaQ
from kvlab.core.errors import StreamError
from refusals import refused


def test_kktv_reads_back_and_has_the_published_layout(tmp_path):
    rows, path = torch.randn(7, 5), tmp_path / "rows.kktv"
    published.write_kktv(path, rows)
    data = path.read_bytes()
    assert data[:24] == b"VTKK" + struct.pack("<IQII", 1, 7, 5, 0)
    assert data[24:28] == struct.pack("<f", rows[0, 0].item()) and len(data) == 24 + 4 * 35
    assert torch.equal(published.read_kktv(path), rows)


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d + b"0", lambda d: b"0" + d[1:], lambda d: d[:10]])
def test_a_wrong_kktv_is_refused(tmp_path, change):
    path = tmp_path / "rows.kktv"
    published.write_kktv(path, torch.randn(3, 4))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(StreamError):
        published.read_kktv(path)


def test_a_kktv_that_promises_too_much_allocates_nothing(tmp_path):
    path = tmp_path / "rows.kktv"
    path.write_bytes(struct.pack("<IIQII", published.KKTV_MAGIC, 1, 1 << 60, 1 << 30, 0))
    with refused(StreamError, "stream.length", 24):
        published.read_kktv(path)


def test_centroids_read_back(tmp_path):
    path, table = tmp_path / "K.f32", torch.tensor([-1.5, -0.5, 0.25, 1.75])
    published.write_centroids(path, table)
    assert path.stat().st_size == 16
    assert torch.equal(published.read_centroids(path), table)


@pytest.mark.parametrize("values", [[1.0], [0.0, 1.0, 2.0], [1.0, 0.0], [0.0, float("nan")]])
def test_wrong_centroids_are_refused(tmp_path, values):
    path = tmp_path / "K.f32"
    path.write_bytes(struct.pack(f"<{len(values)}f", *values))
    with pytest.raises(StreamError):
        published.read_centroids(path)


@pytest.fixture
def sigma_q() -> SigmaQ:
    sigma = {layer: second_moment(seed=layer).float() for layer in range(2)}
    return SigmaQ(sigma, {layer: whitening.fit(moment, 1e-3) for layer, moment in sigma.items()}, {"ridge": 1e-3})


def test_sigma_reads_back(tmp_path, sigma_q):
    path = tmp_path / "sigma.safetensors"
    published.write_sigma(path, sigma_q, {"model_hash": "abc"})
    read = published.read_sigma(path)
    assert read.sidecar == {"ridge": 1e-3} and read.sigma.keys() == {0, 1}
    assert torch.equal(read.whiteners[1].chol, sigma_q.whiteners[1].chol)
    path.with_suffix(".json").unlink()
    assert published.read_sigma(path).sidecar == {}, "the published factors that survive have no sidecar"


@pytest.mark.parametrize("part", ["chol", "inv_chol", "sigma"])
def test_a_sigma_that_is_not_complete_or_not_its_own_inverse_is_refused(tmp_path, sigma_q, part):
    path = tmp_path / "sigma.safetensors"
    published.write_sigma(path, sigma_q, {})
    tensors = load_file(path)
    save_file({name: tensor for name, tensor in tensors.items() if name != f"layer_1_{part}"}, path)
    with refused(StreamError, "stream.incomplete", f"layer_1_{part}"):
        published.read_sigma(path)
    if part != "sigma":
        save_file(tensors | {f"layer_1_{part}": tensors[f"layer_0_{part}"] + 1}, path)
        with refused(StreamError, "stream.not-inverse", "layer 1"):
            published.read_sigma(path)
