import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvlab.calibration.capture import Captured
from kvlab.calibration.metrics import ErrorMetrics
from kvlab.core.errors import StorageError, UserError
from kvlab.core.model import resolve
from refusals import refused
from validation.bench import sources
from validation.limit import theory as limit

pytestmark = pytest.mark.full


def first_of(source, stream):
    return next(sample for sample in source.samples if sample.stream == stream)


def test_captured_windows_are_split_and_weighed_by_their_own_queries(tiny_params, tiny_calibration):
    info = resolve(tiny_params.model)
    capture, metrics = Captured(tiny_calibration["capture"], info.model_hash), ErrorMetrics(info, 64)
    source = sources.captured(tiny_calibration["capture"], info)
    assert [(s.layer, s.stream) for s in source.samples] == [(layer, s) for layer in range(3) for s in ("k", "v")]
    first = first_of(source, "k")
    assert first.calib.shape == first.scored.shape == (3, 2, 64, 32) and first.scored.dtype == torch.bfloat16
    assert torch.equal(first.scored, capture.layer(0, "k")[3:].bfloat16())
    sigma, scored = (capture.queries(0).second_moment("pre_rope", half) for half in (0, 1))
    assert torch.equal(first.sigma, sigma) and torch.equal(first.calib_weight, metrics.k(first.layer, sigma))
    assert torch.equal(first.weight, metrics.k(first.layer, scored)) and not torch.equal(
        first.weight, first.calib_weight
    )
    assert torch.equal(first_of(source, "v").weight, metrics.v(0))


def test_planted_is_what_it_says():
    source = sources.planted(heads=2, tokens=512, head_dim=32)
    keys, values = first_of(source, "k"), first_of(source, "v")
    assert torch.equal(keys.scored, first_of(sources.planted(heads=2, tokens=512, head_dim=32), "k").scored)
    assert not torch.equal(keys.scored, keys.calib)
    rows = keys.scored.float().transpose(0, 1).flatten(1, 2)
    scale = rows.std(1)
    assert (scale.amax(1) > 3 * scale.median(1).values).all()  # outlier channels
    lag = rows - rows.mean(1, keepdim=True)
    assert (lag[:, 1:] * lag[:, :-1]).mean() > 0.2 * lag.square().mean()  # neighbours are alike
    spectrum = limit.spectrum(limit.covariance(values.scored.float().transpose(0, 1).flatten(1, 2)))
    assert (spectrum[:, 0] / spectrum[:, -1] > 30).all()


def test_real_sigma_is_read_by_layer(tmp_path):
    sigma = {f"layer_{layer}_sigma": torch.eye(16).expand(2, 16, 16) * (layer + 1) for layer in range(6)}
    save_file({name: tensor.contiguous() for name, tensor in sigma.items()}, tmp_path / "s.safetensors")
    source = sources.planted_with(tmp_path / "s.safetensors", layers=3, tokens=64)
    assert sorted({sample.layer for sample in source.samples}) == [1, 3, 5]
    assert first_of(source, "k").scored.shape == (1, 2, 64, 16)
    assert torch.equal(first_of(source, "k").weight, 2 * torch.eye(16).double().expand(2, 16, 16))
    save_file({"other": torch.zeros(1)}, tmp_path / "o.safetensors")
    with refused(StorageError, "storage.no-sigma", tmp_path / "o.safetensors"):
        sources.planted_with(tmp_path / "o.safetensors")


def test_given_tensors_find_their_sigma(tmp_path):
    rows = np.random.default_rng(0).standard_normal((40, 2, 8)).astype(np.float32)
    for name in ("K_L05", "K_L13", "V_L05"):
        np.save(tmp_path / f"{name}.npy", rows)
    sigma = np.stack([np.stack([np.eye(8) * (layer + 1)] * 2) for layer in range(2)])
    np.save(tmp_path / "sigma_q_L05_L13.npy", sigma)
    source = sources.given(tmp_path)
    by_place = {(s.stream, s.layer): s for s in source.samples}
    assert set(by_place) == {("k", 5), ("k", 13), ("v", 5)}
    assert torch.equal(by_place["k", 13].weight, 2 * torch.eye(8).double().expand(2, 8, 8))
    sample = by_place["k", 5]
    assert torch.equal(torch.cat((sample.calib[0], sample.scored[0]), dim=1), sample.whole)
    assert sample.whole.shape == (2, 40, 8)
    np.save(tmp_path / "K_L20.npy", rows)
    with refused(StorageError, "storage.no-sigma", "K_L20"):
        sources.given(tmp_path)


def full(path, changes):
    """A folder of one K, one V and a Sigma_q, some of it changed."""
    arrays = {"K_L05": np.ones((8, 2, 4)), "V_L05": np.ones((8, 2, 4)), "sigma_q_L05": np.stack([np.eye(4)] * 2)}
    for name, array in (arrays | changes).items():
        if array is not None:
            np.save(path / f"{name}.npy", array)
    return path


@pytest.mark.parametrize(
    ("changes", "code", "data"),
    [
        ({"K_L05": np.ones((8, 2))}, "storage.shape", ("K_L05.npy", (8, 2))),
        ({"K_L05": np.ones((8, 2, 6))}, "storage.sigma-misfit", ("K_L05.npy", (8, 2, 6), (2, 4, 4))),
        ({"K_L05": np.ones((8, 2, 4), dtype=int)}, "storage.dtype", ("K_L05.npy", "int64")),
        ({"K_L05": np.array([{}])}, "storage.unreadable", ("K_L05.npy",)),
        ({"V_L05": np.full((8, 2, 4), np.nan)}, "storage.not-finite", ("V_L05.npy", "NaN")),
        ({"V_L05": np.ones((3, 2, 4))}, "storage.shape", ("V_L05.npy", (3, 2, 4))),
        ({"V_L05": None}, "storage.no-tensors", ("K_L<l>.npy", "V_L<l>.npy")),
        ({"V_L05": None, "V_Lfive": np.ones((8, 2, 4))}, "storage.layer-names", ("V_Lfive.npy", "0 layers")),
        ({"V2_L05": np.ones((8, 2, 4))}, "storage.layer-twice", ("layer 5 of V",)),
        ({"sigma_q_L05": None}, "storage.no-sigma", ("K_L05.npy", "sigma_q_L05.npy")),
        ({"sigma_q_L05": None, "sigma": np.stack([np.eye(4)] * 2)}, "storage.layer-names", ("sigma.npy", "0 layers")),
        ({"sigma_q_L05": np.ones((2, 4, 3))}, "storage.sigma-shape", ("sigma_q_L05.npy",)),
        ({"sigma_q_L05": np.ones((2, 2, 4, 4))}, "storage.layer-names", ("sigma_q_L05.npy", "1 layers", "2;")),
    ],
)
def test_a_tensor_that_cannot_be_is_refused_in_one_line(tmp_path, changes, code, data):
    with refused(StorageError, code, *data) as raised:
        sources.given(full(tmp_path, changes))
    assert len(str(raised.value).splitlines()) == 1


def test_a_file_that_is_no_array_is_refused(tmp_path):
    (full(tmp_path, {}) / "K_L06.npy").write_bytes(b"")
    with refused(StorageError, "storage.unreadable", "K_L06"):
        sources.given(tmp_path)


def test_a_published_sigma_of_another_shape_is_refused(tmp_path):
    save_file({"layer_0_sigma": torch.zeros(2, 3, 4), "layer_x_sigma": torch.zeros(1)}, tmp_path / "s.safetensors")
    with refused(StorageError, "storage.sigma-shape", "layer_0_sigma"):
        sources.published_weights(tmp_path / "s.safetensors")


def test_one_window_cannot_be_split():
    with pytest.raises(UserError):
        sources.halves(torch.zeros(1, 2, 4, 8))
