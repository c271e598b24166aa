import math

import pytest
import torch

from kvlab.core.errors import Fault, NonFinite
from kvlab.core.records import TOKENS
from kvlab.stats.divergences import token_record
from refusals import refused


def logits(tokens=7, vocabulary=50, seed=0, dtype=torch.float32):
    return torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_hand_example():
    ref = torch.tensor([[0.5, 0.25, 0.25]]).log()
    alt = torch.tensor([[0.25, 0.5, 0.25]]).log() + 3  # logits know no offset
    record = token_record(ref, alt, torch.tensor([0]))
    assert record["nll_ref"].item() == pytest.approx(math.log(2))
    assert record["nll_alt"].item() == pytest.approx(math.log(4))
    assert record["kl"].item() == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2), rel=1e-6)
    assert (record["top1_ref"].item(), record["top1_alt"].item()) == (0, 1)
    assert record["p_ref_max"].item() == pytest.approx(0.5)


def test_kl_is_reference_first():
    ref, alt = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    forward, back = (token_record(a, b, torch.tensor([0]))["kl"].item() for a, b in ((ref, alt), (alt, ref)))
    assert forward == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-6)
    assert back == pytest.approx(0.5 * math.log(5 / 9) + 0.5 * math.log(5), rel=1e-6)


def test_equal_logits_give_exactly_zero():
    same = logits()
    record = token_record(same, same.clone(), torch.arange(7))
    assert (record["kl"] == 0).all()
    assert torch.equal(record["nll_ref"], record["nll_alt"])


def test_kl_is_second_order_in_a_small_shift():
    ref = logits(tokens=3, vocabulary=200).double()
    shift = 1e-5 * logits(tokens=3, vocabulary=200, seed=1).double()
    p = ref.softmax(-1)
    variance = (p * shift**2).sum(-1) - (p * shift).sum(-1) ** 2
    record = token_record(ref, ref + shift, torch.zeros(3, dtype=torch.long))
    assert torch.allclose(record["kl"], variance / 2, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_float_dtype_and_any_chunk_give_the_same(dtype):
    ref, alt, labels = logits(dtype=dtype), logits(seed=1, dtype=dtype), torch.arange(7)
    whole = token_record(ref, alt, labels, chunk=100)
    small = token_record(ref, alt, labels, chunk=2)
    expected = token_record(ref.double(), alt.double(), labels)
    for name, values in whole.items():
        assert torch.equal(values, small[name])
        assert torch.equal(values, expected[name])


@pytest.mark.parametrize("scale", [1.0, 30.0, 200.0, 1000.0, 1e5])
def test_kl_is_that_of_the_definition_however_far_apart_the_logits_are(scale):
    ref, alt = scale * logits().double(), scale * logits(seed=1).double()
    log_p, log_q = ref.log_softmax(-1), alt.log_softmax(-1)
    record = token_record(ref, alt, torch.arange(7))
    assert torch.allclose(record["kl"], (log_p.exp() * (log_p - log_q)).sum(-1), rtol=1e-12, atol=1e-12 * scale)
    assert torch.allclose(record["nll_alt"], -log_q[torch.arange(7), torch.arange(7)], rtol=1e-12, atol=1e-12 * scale)


def test_columns_are_those_of_the_table():
    record = token_record(logits(), logits(seed=1), torch.arange(7))
    assert set(record) | {"cell_id", "window", "position"} == set(TOKENS)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_logits_are_refused_with_a_count(bad):
    wrong = logits()
    wrong[1, 3] = wrong[6, 0] = bad
    with refused(NonFinite, None, "2 of 350 alternative"):
        token_record(logits(), wrong, torch.arange(7), chunk=4)
    with refused(NonFinite, None, "2 of 350 reference"):
        token_record(wrong, logits(), torch.arange(7), chunk=4)


def test_wrong_shapes_and_labels_are_refused():
    with refused(Fault, "fault.labels", 50, "0 to 49"):
        token_record(logits(), logits(), torch.full((7,), 50))
    with refused(Fault, "fault.shape", [7, 50], [6]):
        token_record(logits(), logits(), torch.arange(6))
    with refused(Fault, "fault.shape", [7, 49], [7, 50]):
        token_record(logits(), logits(vocabulary=49), torch.arange(7))
