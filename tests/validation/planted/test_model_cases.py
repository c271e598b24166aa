import numpy as np
import pytest
import torch

from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.shared import whitening
from kvlab.core.errors import Fault
from kvlab.core.recipe import Recipe
from kvlab.stats.bootstrap import Bootstrap
from refusals import refused
from validation.planted import identity, noise, rescaling, shim
from validation.planted.claims import recover

pytestmark = [pytest.mark.engine, pytest.mark.full]
BOOT = Bootstrap(500, 0.95, 0)


def missed(case):
    return [one.claim.name for one in recover(BOOT, case.claims) if not one.holds]


@pytest.mark.parametrize("study", [noise, identity, rescaling])
def test_every_value_is_recovered(study, ground):
    case = study.case(ground)
    assert missed(case) == []
    assert len(case.claims) > 5


def test_noise_of_another_covariance_is_found_out(ground, monkeypatch):
    trace = noise.trace
    monkeypatch.setattr(noise, "trace", lambda *given: 2 * trace(*given))
    found = [one.holds for one in recover(BOOT, noise.weighted_errors(ground))]
    assert not any(found)


def test_noise_has_the_covariance_that_was_planted(ground):
    roots = noise.unit_roots(2, 32, layer=1)
    covariance = roots.mT @ roots
    assert covariance.diagonal(dim1=-2, dim2=-1).mean(-1) == pytest.approx([1.0, 1.0])
    assert torch.linalg.cond(covariance).numpy() == pytest.approx(noise.SPREAD, rel=1e-6)


def test_a_shift_has_the_kl_that_was_planted():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    logits[4, 7] = 30.0  # one certain row
    kl = np.array([1e-8, 1e-3, 0.1, 2.0, 0.5])
    moved = shim.shifted(logits, kl)
    p, q = (x.double().log_softmax(-1) for x in (logits, moved))
    found = (p.exp() * (p - q)).sum(-1)
    assert found[:4].numpy() == pytest.approx(kl[:4], rel=1e-6)
    assert ((moved != logits.double()).sum(-1) == 1).all()


def test_only_marked_passes_are_shifted(ground):
    clean = ground.engine.score(ground.test[0], ground.context)
    shim_engine = shim.PlantedShift(ground.engine, shim.Planted({}, {}))
    assert torch.equal(shim_engine.score(ground.test[0], ground.context), clean)
    assert torch.equal(shim_engine.score(ground.test[0], ground.context, lambda *given: None), clean)


def test_a_tensor_that_is_changed_beside_its_mark_is_refused():
    def tap(_layer, _part, x):
        marked = x.clone()
        marked[0, 0, :4] = torch.tensor([shim.SIGN, 95.0, 1.0, 0.0])
        marked[1, 3, 5] += 1
        return marked

    with refused(Fault, "fault.more-than-the-mark", "layer 0 k"):
        shim.Watch(tap)(0, "k", torch.zeros(2, 4, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mark_is_read_in_any_dtype(dtype):
    x = torch.randn(2, 4, 8).to(dtype)
    assert shim.mark_of(x) is None
    for ratio in (1.0, 0.95):
        x[0, 0, :4] = torch.tensor([shim.SIGN, round(100 * ratio), 2.0, 0.0]).to(dtype)
        assert shim.mark_of(x) == (ratio, "vllm")


def test_a_layer_that_is_coded_after_all_is_found_out(ground, monkeypatch):
    one_bit = HadamardStream(bits=1)
    monkeypatch.setattr(identity, "IDENTITY", Recipe(k=one_bit, v=one_bit))
    names = missed(identity.case(ground))
    assert {"add-one-in, in_forward", "add-one-in, snapshot"} <= set(names)
    assert any("leave-one-out" in name for name in names)


def test_the_model_is_given_back_as_it_was(ground):
    before = {name: weight.clone() for name, weight in ground.engine.model.named_parameters()}
    factors = {layer: torch.exp2(torch.arange(32.0) % 5 - 2) for layer in ground.layers}
    with rescaling.rescaled(ground.engine, factors):
        moved = [name for name, w in ground.engine.model.named_parameters() if not torch.equal(w, before[name])]
    assert moved and all("q_" in name or "k_" in name for name in moved)
    assert all(torch.equal(w, before[name]) for name, w in ground.engine.model.named_parameters())


def test_both_dimensions_of_a_pair_share_a_power_of_two(ground):
    q = torch.randn(2, 4, 10, 32, generator=torch.Generator().manual_seed(0))
    values = rescaling.factor(q, ground)
    assert torch.equal(values[:16], values[16:])
    assert torch.equal(values.log2(), values.log2().round())
    assert (values.max() / values.min()).item() == 2.0 ** (2 * rescaling.REACH)


def test_a_ridge_in_units_of_the_mean_is_found_out(ground, monkeypatch):
    """What whitening did before its ridge knew no unit: the rescaled model is coded otherwise."""

    def by_the_mean(sigma, ridge):
        scale = sigma.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        return sigma + ridge * scale * torch.eye(sigma.shape[-1], dtype=sigma.dtype)

    monkeypatch.setattr(whitening, "ridged", by_the_mean)
    names = missed(rescaling.case(ground))
    assert any("`block`" in name for name in names)
    assert any("`int+center+whiten`" in name for name in names)


def test_a_factor_that_is_no_power_of_two_is_found_out(ground, monkeypatch):
    factor = rescaling.factor
    monkeypatch.setattr(rescaling, "factor", lambda q, on: 1.1 * factor(q, on))
    assert any("decoded K" in name for name in missed(rescaling.case(ground)))
