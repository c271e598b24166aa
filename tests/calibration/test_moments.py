"""Moments that are folded up window by window, against the same numbers of everything that was there."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.calibration.moments import PLACEMENTS, Extent, ModelMoments, names, stored_first, stored_queries, stored_rows
from kvlab.calibration.sigma import second_moment
from kvlab.codecs.shared import components, covariance
from kvlab.codecs.shared.grouping import joined
from kvlab.codecs.shared.metric import rotated
from kvlab.codecs.shared.moments import Moments, folds
from kvlab.core.errors import Fault, NonFinite
from refusals import refused

INFO = SimpleNamespace(n_layers=2, n_kv_heads=2, head_dim=6)
EXTENT = Extent(windows=7, tokens=11, context=8)
ANGLES = tuple(turn(torch.arange(11.0)[:, None] * torch.tensor([1.0, 0.3, 0.1])) for turn in (torch.cos, torch.sin))
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def without(rows, fold):
    """Rows [..., n, D] without those of a fold."""
    return torch.cat((rows[..., : fold.start, :], rows[..., fold.stop :, :]), dim=-2)


def rows_of(seed: int, tokens: int, heads: int = 2, dim: int = 6) -> torch.Tensor:
    """Far from zero mean, of very different scales."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, tokens, dim, generator=generator) * torch.logspace(1, -1, dim) + 50


def text(seed: int = 0) -> dict:
    """(window, layer, part) -> a tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {
        (window, layer, part): torch.randn(4 if part == "q" else 2, 11, 6, generator=generator) + layer
        for window in range(7)
        for layer in range(2)
        for part in "qkv"
    }


def folded(windows, given_text) -> ModelMoments:
    """The moments of some windows in the order given."""
    found = ModelMoments(INFO, EXTENT, [ANGLES] * 2)
    for window in windows:
        for (number, layer, part), x in given_text.items():
            if number == window:
                found.update(window, layer, part, x)
    return found


def exact(given_text, layer, part) -> torch.Tensor:
    """[windows, heads, tokens, head_dim] of one layer."""
    return torch.stack([given_text[window, layer, part] for window in range(7)]).double()


def same(ours: ModelMoments, theirs: ModelMoments) -> None:
    one, other = ours.tensors(), theirs.tensors()
    assert set(one) == set(other) == names(2)
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], **EXACT)


def test_they_are_those_of_everything_at_once():
    given_text = text()
    tensors = folded(range(7), given_text).tensors()
    for layer in range(2):
        queries, q = stored_queries(tensors.__getitem__, layer, EXTENT), exact(given_text, layer, "q")
        turned = {"pre_rope": q, "post_rope": rotated(q, *ANGLES)}
        for placement in PLACEMENTS:
            for half, part in ((None, slice(7)), (0, slice(3)), (1, slice(3, 7))):
                expected = second_moment(turned[placement][part], 2)
                torch.testing.assert_close(queries.second_moment(placement, half), expected, **EXACT)
        by_head = q.unflatten(1, (2, 2)).square().sum(-1).mean((2, 3))
        torch.testing.assert_close(queries.traces, by_head, **EXACT)
        for stream in "kv":
            contexts = exact(given_text, layer, stream)[:, :, :8].transpose(0, 1)
            rows = joined(contexts[:, :, 1:].flatten(1, 2), 1)
            count, mean, scatter = stored_rows(tensors.__getitem__, layer, stream, EXTENT).pooled()
            assert count == 7 * 7
            torch.testing.assert_close(mean, rows.mean(1), **EXACT)
            torch.testing.assert_close(scatter / 48, torch.stack([torch.cov(r.mT) for r in rows]), **EXACT)
            first = stored_first(tensors.__getitem__, layer, stream)
            torch.testing.assert_close(first, contexts[:, :, 0].mean(1), **EXACT)


@given(order=st.permutations(range(7)), cut=st.integers(0, 7))
@settings(max_examples=25, deadline=None)
def test_windows_may_come_in_any_order_and_on_several_machines(order, cut):
    given_text = text()
    whole = folded(range(7), given_text)
    same(folded(order, given_text), whole)
    same(folded(order[:cut], given_text).merge(folded(order[cut:], given_text)), whole)


@given(tokens=st.integers(4, 90), cuts=st.lists(st.integers(0, 90), max_size=6), data=st.data())
@settings(max_examples=60, deadline=None)
def test_pieces_of_any_length_make_up_the_whole(tokens, cuts, data):
    rows = rows_of(tokens, tokens)
    edges = sorted({0, tokens, *(cut for cut in cuts if cut < tokens)})
    pieces = data.draw(st.permutations(list(pairwise(edges))))
    parts = [Moments(tokens, 2, 6), Moments(tokens, 2, 6)]
    for place, (first, last) in enumerate(pieces):
        parts[place % 2].update(rows[:, first:last], first)
    whole, merged = Moments.of(rows), parts[0].merge(parts[1])
    for name in ("count", "mean", "scatter"):
        torch.testing.assert_close(getattr(merged, name), getattr(whole, name), rtol=1e-9, atol=1e-9)
    for number, run in enumerate(folds(tokens)):
        rest = without(rows.double(), run)
        count, mean, scatter = whole.pooled(leave_out=number)
        assert count == rest.shape[1]
        torch.testing.assert_close(mean, rest.mean(1), rtol=1e-10, atol=1e-10)
        expected = (rest - rest.mean(1, keepdim=True)).mT @ (rest - rest.mean(1, keepdim=True))
        torch.testing.assert_close(scatter, expected, rtol=1e-9, atol=1e-9)


def test_a_large_mean_costs_no_digits():
    """Sums of squares would lose all of a deviation of 1e-3 about 1e6."""
    generator = torch.Generator().manual_seed(0)
    noise = 1e-3 * torch.randn(1, 4000, 3, generator=generator, dtype=torch.float64)
    moments = Moments(4000, 1, 3)
    for first in range(0, 4000, 500):
        moments.update(1e6 + noise[:, first : first + 500], first)
    count, _, scatter = moments.pooled()
    torch.testing.assert_close(scatter[0] / (count - 1), torch.cov(noise[0].mT), rtol=1e-5, atol=1e-10)


def test_out_of_sample_variances_are_those_of_the_rows():
    """The moments of the folds say what projecting their rows would."""
    rows = rows_of(3, 200).double()
    total = torch.zeros(2, 6, dtype=torch.float64)
    for run in folds(200):
        rest, fold = without(rows, run), rows[:, run]
        for head in range(2):
            axes = torch.linalg.eigh(torch.cov(rest[head].mT)).eigenvectors.flip(-1)
            total[head] += ((fold[head] - rest[head].mean(0)) @ axes).square().sum(0)
    found = covariance.out_of_sample_variance(Moments.of(rows))
    torch.testing.assert_close(found, covariance.descending(total / 200), rtol=1e-9, atol=1e-12)


def test_components_of_moments_and_the_whole_sample_are_those_of_the_rows():
    rows = rows_of(4, 6 * 40).unflatten(1, (6, 40))
    moments = Moments(240, 1, 12)
    for window in (3, 0, 5, 1, 4, 2):
        moments.update(joined(rows[:, window], 1), 40 * window)
    ours, theirs = components.fit_moments(moments, rows, None), components.fit(rows, None)
    for name, tensor in vars(theirs).items():
        torch.testing.assert_close(getattr(ours, name), tensor, rtol=1e-5, atol=1e-6)


def test_a_planted_covariance_is_found_though_little_is_kept():
    """Variances come from all windows: a sample of one in twenty does not make them worse."""
    dim, windows, tokens = 16, 60, 200
    scale = torch.logspace(0, -1.5, dim, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(dim, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q
    truth, kept = turn.T @ torch.diag(scale.square()) @ turn, []
    moments = Moments(windows * tokens, 1, dim)
    for window in range(windows):
        generator = torch.Generator().manual_seed(10 + window)
        rows = (torch.randn(1, tokens, dim, generator=generator, dtype=torch.float64) * scale) @ turn + 3
        moments.update(rows, window * tokens)
        kept += [rows] if window % 20 == 0 else []
    fitted = components.fit_moments(moments, torch.stack(kept, dim=1), None)
    assert torch.allclose(fitted.mean[0].double(), torch.full((dim,), 3.0, dtype=torch.float64), atol=0.02)
    assert torch.allclose(fitted.covariance[0].double(), truth, atol=0.05 * truth.diagonal().mean())
    assert torch.allclose(fitted.variance[0].double(), torch.linalg.eigvalsh(truth).flip(0), rtol=0.08)
    other = components.fit(torch.stack(kept, dim=1), None)
    errors = [(one.variance[0].double() / scale.square()).log().square().mean() for one in (fitted, other)]
    assert errors[0] < 0.5 * errors[1]


def test_what_does_not_belong_together_is_refused():
    given_text = text()
    with refused(Fault, "fault.shared-window"):
        folded([0, 1], given_text).merge(folded([1], given_text))
    with refused(Fault, "fault.other-extent", "windows=8", "windows=7"):
        folded([0], given_text).merge(ModelMoments(INFO, Extent(8, 11, 8), [ANGLES] * 2))
    with refused(Fault, "fault.other-extent", "40 tokens", "41 tokens"):
        Moments(40, 2, 6).merge(Moments(41, 2, 6))
    with refused(Fault, "fault.token-range", "7 tokens", "3 to 8"):
        Moments(7, 2, 6).update(torch.zeros(2, 5, 6), 3)
    given_text[2, 1, "v"][0, 0, 0] = torch.inf
    with refused(NonFinite, "non-finite.capture", "layer_1_v", "window 2"):
        folded([2], given_text)
