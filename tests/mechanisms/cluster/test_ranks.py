"""Split between processes, attention is what it is in one; what is sent is what the formulas say."""

from __future__ import annotations

import pytest
import torch

from kvlab.codecs.base import Site, StreamCalibration
from kvlab.core.errors import CapabilityError, Fault, UserError
from kvlab_mechanisms.cluster.ranks import all_gather_bytes, all_reduce_bytes, all_to_all_bytes, even, run
from kvlab_mechanisms.cluster.tensor_parallel import attend, cut, partial, share
from mechanisms.cluster.work import CODECS, calibration, codec_of, drawn, everything, failing, spec_example, weights
from refusals import refused


@pytest.fixture(scope="module")
def two():
    """What two ranks found."""
    return run(2, everything)


def summed(parts):
    """In the order of the ranks."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def test_collectives_send_what_their_formulas_say(two):
    given = [drawn(5, 3, seed=rank) for rank in range(2)]
    for found in two:
        assert torch.equal(found["collectives"]["gathered"], torch.cat(given, 1))
        assert torch.equal(found["collectives"]["reduced"], summed(given))
    sent = [found["collectives"]["sent"] for found in two]
    assert sum(one["all_gather"] for one in sent) == all_gather_bytes(2 * 5 * 3 * 4, 2)
    assert sum(one["all_reduce"] for one in sent) == all_reduce_bytes(5 * 3 * 4, 2)


def test_columns_then_rows_are_the_dense_layers_with_one_sum(two):
    x, up, down = drawn(7, 24, seed=9), drawn(33, 24, seed=1), drawn(24, 33, seed=2)
    for found in two:
        torch.testing.assert_close(found["mlp"], torch.relu(x @ up.T) @ down.T, atol=1e-5 * 24, rtol=1e-5)
        torch.testing.assert_close(found["gathered"], x @ up.T, atol=1e-5, rtol=1e-5)
        assert list(found["mlp sends"]) == ["all_reduce"]
    assert sum(found["mlp sends"]["all_reduce"] for found in two) == all_reduce_bytes(7 * 24 * 4, 2)
    assert torch.equal(two[0]["mlp"], two[1]["mlp"]), "all ranks have the same bits"


def test_attention_by_heads_is_the_sum_of_its_heads_to_the_bit(two):
    x, whole = drawn(7, 24, seed=9), weights()
    shares = [whole.of(share(whole.heads, whole.kv_heads, 2, rank)) for rank in range(2)]
    wanted = summed([partial(x, own) for own in shares])
    for found in two:
        assert torch.equal(found["attention"], wanted)
        torch.testing.assert_close(found["attention"], partial(x, whole), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", CODECS)
def test_codecs_cut_by_head_code_as_they_do_in_one_process(two, name):
    """K and V of a rank's heads are those heads of the whole coded K and V, to the bit; so attention is too."""
    x, whole = drawn(7, 24, seed=9), weights()
    all_heads, k = codec_of(name, None, 2, 16), drawn(2, 40, 16, seed=3)
    for stream in ("k", "v"):
        site = Site(0, 0, stream)
        coded = all_heads(k, site)
        for heads in (slice(0, 1), slice(1, 2)):
            assert torch.equal(codec_of(name, heads, 2, 16)(k[heads], site), coded[heads])
    wanted = partial(x, whole, all_heads)
    for found in two:
        torch.testing.assert_close(found["coded"][name], wanted, atol=1e-4, rtol=1e-5)
        assert not torch.equal(found["coded"][name], found["attention"]), "the codec fired"


def test_attention_by_tokens_is_attention_over_the_whole_text(two):
    for kv_heads, causal in ((4, True), (2, True), (1, False), (1, True)):
        q, k, v = (drawn(heads, 9, 8, seed=n) for n, heads in enumerate((4, kv_heads, kv_heads)))
        wanted = attend(q, k, v, causal)
        found = torch.cat([one["sequence"][kv_heads, causal] for one in two], 1)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(torch.cat([one["sequence"]["heads"] for one in two]), drawn(4, 9, 8, seed=0))
    assert all(one["sequence"]["back"] for one in two), "there and back again"


@pytest.mark.nightly
def test_four_ranks_send_three_quarters_of_a_tensor():
    assert sum(run(4, spec_example)) == all_to_all_bytes(8 * 256 * 64 * 4, 4) == 393_216
    four = run(4, everything)
    wanted = attend(drawn(4, 9, 8), drawn(1, 9, 8, seed=1), drawn(1, 9, 8, seed=2))
    found = torch.cat([one["sequence"][1, True] for one in four], 1)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_two_ranks_send_half_of_a_tensor(two):
    assert sum(found["example"] for found in two) == all_to_all_bytes(8 * 256 * 64 * 4, 2) == 262_144


def test_a_rank_that_fails_ends_all_in_one_line(capfd):
    with refused(Fault, "fault.rank-failed", "rank 1", "ValueError: on purpose"):
        run(2, failing)


def test_there_has_to_be_a_rank():
    with refused(UserError, "user.no-ranks", 0):
        run(0, len)


def test_shares_cover_all_heads_once_and_the_kv_heads_that_they_read():
    for heads, kv_heads, world in ((8, 8, 4), (8, 2, 2), (8, 2, 4), (9, 3, 3), (9, 3, 9), (4, 1, 2), (6, 6, 1)):
        shares = [share(heads, kv_heads, world, rank) for rank in range(world)]
        assert [head for one in shares for head in range(heads)[one.q]] == list(range(heads))
        for one in shares:
            read = {head // (heads // kv_heads) for head in range(heads)[one.q]}
            assert sorted(read) == list(range(kv_heads)[one.kv])
    assert share(8, 2, 8, 0).kv_bytes(10, 4, 2) == share(8, 2, 2, 0).kv_bytes(10, 4, 2), (
        "no smaller beyond the KV heads"
    )
    with refused(UserError, "user.heads-not-split", "9 query heads", "3 KV heads", "2 ranks", "1, 3, 9"):
        share(9, 3, 2, 0)
    assert even(7, 3) == [3, 2, 2]


def test_what_was_fitted_over_heads_together_is_not_cut():
    cut(calibration(4, 8), slice(1, 3))
    with refused(CapabilityError, "capability.heads-together"):
        cut(StreamCalibration(own={0: object()}), slice(0, 1))
