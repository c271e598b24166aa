"""Latent attention: absorbed equals naive, the cache keeps what it is given; and the map that is fitted to K and V."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.drawing import after
from kvlab.attention.latent_svd import LatentMoments, attention_metric, fit, stacked
from kvlab.core.errors import LayoutMismatch, PoolExhausted, UserError
from kvlab_mechanisms.attention.latent import LatentCache, LatentWeights, attend_latent, attend_naive, ratio
from refusals import refused

pytestmark = pytest.mark.full


def drawn(seed=0, tokens=20, heads=4, d=16, latent=24, rope=0, queries=3, scale=1.0):
    chance = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=chance)  # noqa: E731
    weights = LatentWeights.absorb(normal(latent, heads * d), normal(latent, heads * d), heads, rope)
    q, cache = normal(2, heads, queries, d + rope) * scale, normal(2, tokens, latent + rope) * scale
    return q, cache, weights


@given(seed=st.integers(0, 10_000), rope=st.sampled_from([0, 8]), scale=st.sampled_from([1.0, 1e3]))
def test_absorbed_is_naive(seed, rope, scale):
    q, cache, weights = drawn(seed, rope=rope, scale=scale)
    found, due = attend_latent(q, cache, weights), attend_naive(q, cache, weights)
    assert (found - due).abs().max() <= 1e-4 * due.abs().max()


def test_one_token_is_read_whatever_is_asked():
    q, cache, weights = drawn(tokens=1)
    due = (cache[:, None] @ weights.up_v).expand(-1, -1, 3, -1)
    assert torch.allclose(attend_latent(1e3 * q, cache, weights), due, atol=1e-5)


def test_the_order_of_rows_does_not_matter():
    q, cache, weights = drawn()
    shuffled = cache[:, torch.randperm(20, generator=torch.Generator().manual_seed(1))]
    assert torch.allclose(attend_latent(q, cache, weights), attend_latent(q, shuffled, weights), atol=1e-4)


def test_latents_as_wide_as_the_heads_are_multi_head_attention():
    q, cache, weights = drawn(latent=64)  # 4 heads of 16, and maps that can be inverted
    k, v = cache[:, None] @ weights.up_k, cache[:, None] @ weights.up_v
    due = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert torch.allclose(attend_latent(q, cache, weights), due, atol=1e-3)


def test_the_rotated_key_is_a_part_of_every_heads_key():
    q, cache, weights = drawn(rope=8)
    c, rope = cache.split([24, 8], dim=-1)
    k = torch.cat([c[:, None] @ weights.up_k, rope[:, None].expand(-1, 4, -1, -1)], dim=-1)
    due = torch.nn.functional.scaled_dot_product_attention(q, k, c[:, None] @ weights.up_v)
    assert torch.allclose(attend_latent(q, cache, weights), due, atol=1e-4)


@given(seed=st.integers(0, 10_000), t=st.integers(0, 18), rope=st.sampled_from([0, 8]))
def test_nothing_that_comes_later_moves_a_bit(seed, t, rope):
    q, cache, weights = drawn(seed, queries=20, rope=rope)
    seen = torch.ones(20, 20, dtype=torch.bool).tril()
    (later,) = after(t, q)
    (rows,) = after(t, cache[:, None])
    before, now = (attend_latent(*x, weights, seen)[:, :, : t + 1] for x in ((q, cache), (later, rows[:, 0])))
    assert torch.equal(before, now)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_tokens_one_by_one_are_tokens_at_once(lengths):
    _, rows, _ = drawn(tokens=sum(lengths))
    one, many, began = LatentCache(24, 2), LatentCache(24, 2), 0
    many.append(rows)
    for length in lengths:
        one.append(rows[:, began : began + length])
        began += length
    assert torch.equal(one.rows, many.rows) and torch.equal(one.rows, rows)
    assert one.nbytes == rows.numel() * 4


def test_a_cache_refuses_what_does_not_fit_and_forgets():
    cache = LatentCache(8, capacity=3)
    cache.append(torch.ones(1, 2, 8))
    with refused(PoolExhausted, None, 4, 3):
        cache.append(torch.ones(1, 2, 8))
    assert cache.tokens == 2
    with refused(LayoutMismatch, None, (1, 1, 9), "(1, tokens, 8)"):
        cache.append(torch.ones(1, 1, 9))
    cache.reset()
    assert cache.tokens == cache.nbytes == 0
    q, _, weights = drawn()
    with refused(LayoutMismatch, "layout.latent-queries", tuple(q.shape), (2, 0, 24)):
        attend_latent(q, LatentCache(24, 2).rows, weights)


def test_the_ratio_is_that_of_the_bytes():
    held, kv = LatentCache(128 + 8, dtype=torch.bfloat16), torch.zeros(2, 8, 30, 64, dtype=torch.bfloat16)
    held.append(torch.zeros(1, 30, 136, dtype=torch.bfloat16))
    assert ratio(8, 64, 136) == kv.nbytes / held.nbytes
    assert ratio(8, 64, 128) == 8  # of the published layer: K and V both are replaced


def test_deepseeks_own_attention_says_the_same():
    """transformers' DeepSeek-V2, one layer of random weights: what it attends with, by the absorbed form."""
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek

    config = DeepseekV2Config(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        head_dim=4,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    layer = deepseek.DeepseekV2Attention(config, 0).eval()
    x, at = torch.randn(1, 9, 32), torch.arange(9)[None]
    turns = deepseek.DeepseekV2RotaryEmbedding(config)(x, at)
    mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    with torch.inference_mode():
        due = layer(x, attention_mask=mask, position_embeddings=turns)[0]
        q = layer.q_proj(x).view(1, 9, 4, 12).transpose(1, 2)
        c, k_rope = layer.kv_a_proj_with_mqa(x).split([12, 4], dim=-1)
        q_rope, k_rope = deepseek.apply_rotary_emb(q[..., 8:], k_rope[:, None], turns)
        up = layer.kv_b_proj.weight.T.unflatten(1, (4, 16))
        weights = LatentWeights.absorb(up[..., :8].flatten(1), up[..., 8:].flatten(1), 4, rope=4)
        cache = torch.cat([layer.kv_a_layernorm(c), k_rope[:, 0]], dim=-1)
        seen = torch.ones(9, 9, dtype=torch.bool).tril()
        found = attend_latent(torch.cat([q[..., :8], q_rope], dim=-1), cache, weights, seen)
        assert torch.allclose(layer.o_proj(found.transpose(1, 2).flatten(2)), due, atol=1e-5)


# ------------------------------------------------------------------------------------------- the fitted map


def moments(q, k, v):
    found = LatentMoments(2)
    for part in (slice(100), slice(100, None)):  # in two goes
        found.add(q[:, part], k[:, part], v[:, part])
    return found


def captured(rank: int | None = None, tokens=300):
    """Q of 4 heads, K and V of 2, 8 numbers each; K and V together of a planted rank."""
    chance = torch.Generator().manual_seed(3)
    normal = lambda *shape: torch.randn(*shape, generator=chance, dtype=torch.float64)  # noqa: E731
    y = normal(tokens, rank or 32) @ normal(rank or 32, 32) + normal(32)
    k, v = y.unflatten(1, (2, 2, 8)).permute(1, 2, 0, 3)
    return normal(4, tokens, 8), k, v


@pytest.mark.parametrize("weighed", [False, True])
def test_a_planted_rank_is_found(weighed):
    q, k, v = captured(rank=5)
    known = moments(q, k, v)
    metric = attention_metric(known) if weighed else None
    exact, short = (fit(known, rank, metric) for rank in (5, 4))
    for x, due in zip(exact.restored(exact.latents(k, v)), (k, v), strict=True):
        assert torch.allclose(x, due, atol=1e-8)
    assert not torch.allclose(short.restored(short.latents(k, v))[1], v, atol=1e-2)


@pytest.mark.parametrize("weighed", [False, True])
def test_a_wider_latent_loses_less_and_the_widest_nothing(weighed):
    q, k, v = captured()
    known = moments(q, k, v)
    metric = attention_metric(known) if weighed else None
    weigh = torch.eye(32, dtype=torch.float64) if metric is None else metric
    errors = []
    for rank in range(1, 33):
        one = fit(known, rank, metric)
        left = stacked(*one.restored(one.latents(k, v))) - stacked(k, v)
        errors.append((left @ weigh.T).square().sum().item())
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-12 * errors[0]


def test_in_its_metric_the_weighed_map_is_the_best():
    q, k, v = captured()
    known, y = moments(q, k, v), stacked(k, v)
    metric = attention_metric(known)
    lost = []
    for one in (fit(known, 10, metric), fit(known, 10)):
        lost.append(((stacked(*one.restored(one.latents(k, v))) - y) @ metric.T).square().sum())
    assert lost[0] < lost[1]


def test_the_plain_map_is_the_truncated_svd_of_the_weights_on_whitened_inputs():
    chance = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, generator=chance, dtype=torch.float64) for shape in ((200, 20), (32, 20)))
    x -= x.mean(0)
    root = torch.linalg.cholesky(x.T @ x)
    left = torch.linalg.svd(w @ root)[0][:, :6]
    k, v = (x @ w.T).unflatten(1, (2, 2, 8)).permute(1, 2, 0, 3)
    one = fit(moments(k.repeat(2, 1, 1), k, v), 6)
    assert torch.allclose(one.up @ one.down.T, left @ left.T, atol=1e-8)


def test_a_rank_is_of_the_heads_numbers():
    q, k, v = captured()
    with refused(UserError, None, 33, "1 to 32"):
        fit(moments(q, k, v), 33)
    with pytest.raises(LayoutMismatch):
        stacked(k, v[:1])
