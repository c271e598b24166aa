from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec.making import SITE, relative_error, second_moment, stream
from kvlab.base.errors import CalibrationMismatch, CapabilityError, NonFinite, ParamsError, StreamError, UserError
from kvlab.base.recipe import KltStream
from kvlab.codec.base import Site, StreamCalibration
from kvlab.codec.klt import components
from kvlab.codec.klt.allocation import spending_order
from kvlab.codec.klt.codec import KltCodec
from kvlab.codec.klt.marginal import Marginals, gaussian_sketch, ranks
from kvlab.codec.klt.nearest import Nearest
from kvlab.codec.klt.planes import Planes
from kvlab.codec.quantizer import gaussian_table, mse, quantise
from kvlab.codec.stream.bitstream import frame_bytes, read_frame
from tiers import examples


@lru_cache
def calibration(heads=2, dim=64, weighted=False):
    metric = second_moment(heads, dim) + 0.01 * torch.eye(dim) if weighted else None
    fitted = components.fit(stream(heads=heads, tokens=1024, dim=dim)[:, None], metric)
    return StreamCalibration(components={SITE.layer: fitted})


def codec(heads=2, dim=64, weighted=False, **settings):
    return KltCodec(KltStream(**{"bits": 2.0, **settings}), calibration(heads, dim, weighted))


def from_the_source(heads=2, tokens=512, dim=64):
    """New tokens of the source that `calibration` saw, by its own components."""
    own = calibration(heads, dim).components[SITE.layer]
    white = torch.randn(heads, tokens, dim, generator=torch.Generator().manual_seed(11))
    return (white * own.variance.sqrt()[:, None]) @ own.inverse + own.mean[:, None]


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("tokens", [1, 15, 64, 200])
def test_shapes(heads, tokens):
    own = codec(heads=heads, dim=63, bits=2.5, block_size=64)
    x = from_the_source(heads, tokens, 63)
    encoded = own.encode(x.bfloat16(), SITE)
    decoded = own.decode(encoded)
    assert decoded.shape == x.shape and decoded.dtype == torch.float32
    assert len(encoded.blocks) == -(-tokens // 64) and all(len(arrays) == 1 for arrays in encoded.blocks)
    assert relative_error(x, decoded) < 0.2 if tokens > 1 else torch.isfinite(decoded).all()


@pytest.mark.parametrize("bits", [0.3, 1.0, 2.0, 2.5, 3.0, 4.0, 7.9])
@pytest.mark.parametrize("heads, block", [(1, 512), (2, 256), (8, 64)])
def test_a_full_block_keeps_to_the_budget_headers_included(bits, heads, block):
    x = from_the_source(heads, block)
    x[0, ::7] *= 40  # no outlier takes a byte more
    size = len(frame_bytes(codec(heads=heads, bits=bits, block_size=block).encode(x, SITE)))
    assert bits - 0.1 - 100 * 8 / x.numel() < size * 8 / x.numel() <= bits


def test_the_length_of_a_block_depends_on_nothing_but_the_number_of_tokens():
    own, x = codec(), from_the_source(tokens=700)
    calm, wild = own.encode(x, SITE), own.encode(x * 30, SITE)
    assert [len(a) for (a,) in calm.blocks] == [len(a) for (a,) in wild.blocks]


def test_the_bytes_decode_to_the_same_values_and_each_block_alone():
    own, x = codec(weighted=True, block_size=100), from_the_source(tokens=330)
    encoded = own.encode(x, SITE)
    decoded = own.decode(encoded)
    again = read_frame(frame_bytes(encoded))
    assert torch.equal(own.decode(again), decoded)
    for index in range(4):
        place, values = own.decode_block(again, index)
        assert torch.equal(decoded[place], values)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_code_of_a_token_depends_on_no_other_token(weighted):
    own, x = codec(weighted=weighted, bits=2.2), from_the_source(tokens=600)
    x[1, 37] *= 25
    whole = own.decode(own.encode(x, SITE))
    for cut in (1, 3, 16, 100, 513):
        parts = [own.decode(own.encode(part, SITE)) for part in x.split(cut, dim=1)]
        assert torch.equal(torch.cat(parts, dim=1), whole)


def test_two_encodings_are_equal_whatever_the_threads():
    x, sizes = from_the_source(tokens=600), []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        sizes.append(frame_bytes(codec().encode(x, SITE)))
    torch.set_num_threads(before)
    assert sizes[0] == sizes[1]


def test_what_a_plan_buys_is_what_all_tables_would_buy():
    """Tables are made where they are used only; the order of spending is that of all of them."""
    own = calibration().components[SITE.layer]
    energy = own.variance[:2].double()
    marginals, heads = Marginals(own.sketch[:2].flatten(0, 1)), [Marginals(sketch) for sketch in own.sketch[:2]]
    for totals in ([0, 1], [40, 130], [400, 400], [64 * 8, 3]):
        orders, bits, values, mass = marginals.spend(energy, totals)
        for head, total in enumerate(totals):
            expected = spending_order(energy[head][:, None] * heads[head].distortion())[:total]
            assert torch.equal(orders[head], expected)
        for component, width in enumerate(bits.flatten().tolist()):
            table = marginals.tables[width]
            assert torch.equal(values[component, : 1 << width], table.values[component])
            assert torch.equal(mass[component, : 1 << width], table.mass[component])
            assert not values[component, 1 << width :].any()


def test_error_falls_with_the_rate_and_lands_where_the_gaussian_theory_says():
    x = from_the_source(tokens=4000)
    own = calibration().components[SITE.layer]
    errors = []
    for bits in (1, 2, 3, 4, 5, 6):
        coder = codec(bits=bits, escape=False)
        decoded = coder.decode(coder.encode(x, SITE))
        widths = coder.plan(SITE.layer, x.shape, x.device).widths
        share = torch.tensor([1.0] + [mse(gaussian_table(width)) for width in range(1, 9)])[widths]
        expected = (own.variance * share).sum() / 2
        error = ((x - decoded) @ own.forward).square().sum(-1).mean()
        assert error.item() == pytest.approx(expected.item(), rel=0.03)
        errors.append(error.item())
    assert errors == sorted(errors, reverse=True)
    assert errors[1] / errors[2] > 2.5


def test_the_weighted_error_is_what_is_kept_small():
    metric = second_moment() + 0.01 * torch.eye(64)
    x = stream(tokens=1024)
    weighted, plain = (codec(weighted=w, bits=2).encode(x, SITE) for w in (True, False))
    error = [
        torch.einsum("htd,hde,hte->", e, metric, e).item()
        for e in (
            (codec(weighted=True).decode(weighted) - x).double(),
            (codec().decode(plain) - x).double(),
        )
    ]
    assert error[0] < 0.8 * error[1]


def outlier_error(x, token, head, **settings):
    own = codec(**settings)
    return (own.decode(own.encode(x, SITE)) - x)[head, token].square().sum().item()


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_escapes_catch_a_planted_sink(bits):
    x, own = from_the_source(), calibration().components[SITE.layer]
    signal = x.var(1).sum().item()
    x[0, 0] += (30 * own.variance[0].sqrt() * (torch.arange(64) == 3)) @ own.inverse[0]
    without, caught = (outlier_error(x, 0, 0, bits=bits, escape=e) for e in (False, True))
    assert caught < 0.02 * without and caught < signal
    encoded = codec(bits=bits).encode(x, SITE)
    assert encoded.stats.n_outliers >= 1 and encoded.stats.n_coefficients == x.numel()


@pytest.mark.parametrize("metric", [None, torch.diag_embed(second_moment().diagonal(dim1=1, dim2=2))])
@pytest.mark.parametrize("woken", [8.0, -300.0, 5.01])
def test_a_channel_that_was_constant_in_the_calibration_is_caught_when_it_wakes_up(metric, woken):
    """Calibrated at 5.0, coded at another value: however far it goes, and whatever it is weighed by."""
    seen, x = stream(tokens=1024), stream(tokens=100, seed=3)
    seen[..., 7] = x[..., 7] = 5.0
    fitted = components.fit(seen[:, None], metric)
    own = KltCodec(KltStream(bits=3), StreamCalibration(components={SITE.layer: fitted}))
    before = relative_error(x, own.decode(own.encode(x, SITE)))
    x[0, ::9, 7] = woken
    encoded = own.encode(x, SITE)
    decoded = own.decode(encoded)
    if woken != 5.01:  # which is less than what an escape takes from the other components
        assert encoded.stats.n_outliers >= 12
        assert (decoded - x)[..., 7].abs().max() < 2e-3 * abs(woken - 5) + 0.05
    assert (decoded - x).square().sum() < 2 * before * (x - x.mean(1, keepdim=True)).square().sum() + 1


def test_escapes_cost_nothing_where_none_are_needed():
    x = from_the_source(tokens=2000)
    x = x.clamp(*(x.mean() + x.std() * torch.tensor([-6.0, 6.0])))
    errors = []
    for escape in (False, True):
        own = codec(escape=escape)
        errors.append(relative_error(x, own.decode(own.encode(x, SITE))))
    assert errors[1] < 1.03 * errors[0]  # the bit per vector that says so, at most


def test_escapes_lower_the_error_of_heavy_tails():
    own = calibration().components[SITE.layer]
    tails = torch.distributions.StudentT(3.0)
    torch.manual_seed(0)
    x = (tails.sample((2, 2000, 64)) * own.variance.sqrt()[:, None]) @ own.inverse + own.mean[:, None]
    errors = [
        relative_error(x, codec(bits=3, escape=e).decode(codec(bits=3, escape=e).encode(x, SITE))) for e in (0, 1)
    ]
    assert errors[1] < 0.7 * errors[0]


def test_values_beyond_all_reach_stay_finite_or_are_refused():
    x = from_the_source(tokens=4)
    x[0, 1] = 3e30
    assert torch.isfinite(codec().decode(codec().encode(x, SITE))).all()
    x[0, 1] = 3e38
    with pytest.raises(NonFinite, match=r"layer 1 k: a value in window 0 .* do not fit float32"):
        codec().encode(x, SITE)


def test_forged_arrays_are_refused():
    own, x = codec(), from_the_source(tokens=600)
    encoded = own.encode(x, SITE)
    (data,), tail = encoded.blocks[0], encoded.blocks[1]
    forged = [
        (tail,),
        (tail, tail),
        ((data,), (data,)),
        ((data[:-1],), tail),
        ((data.view(torch.int8),), tail),
        ((data, data), tail),
        ((), ()),
    ]
    for blocks in forged:
        with pytest.raises(StreamError):
            own.decode(replace(encoded, blocks=blocks))
    for changes in ({"shape": (2, 600, 32)}, {"shape": (1, 600, 64)}, {"layer": 7}):
        with pytest.raises(StreamError, match="decode with the one that it was coded with"):
            own.decode(replace(encoded, **changes))
    with pytest.raises(IndexError):
        own.decode_block(encoded, 2)


def test_forged_bytes_decode_or_are_refused():
    own, x = codec(bits=3), from_the_source(tokens=64)
    encoded = own.encode(x, SITE)
    (data,) = encoded.blocks[0]
    source, refused = torch.Generator().manual_seed(3), 0
    for _ in range(60):
        noise = torch.randint(0, 256, data.shape, dtype=torch.uint8, generator=source)
        try:
            assert torch.isfinite(own.decode(replace(encoded, blocks=((noise,),)))).all()
        except StreamError:
            refused += 1
    assert refused


def test_what_cannot_be_coded_is_refused():
    x = from_the_source(tokens=20)
    with pytest.raises(CalibrationMismatch, match="no components for layer 5"):
        codec().encode(x, Site(0, 5, "k"))
    with pytest.raises(CalibrationMismatch, match="2 KV heads of 64 dimensions, the tensor has 1 of 64"):
        codec().encode(x[:1], SITE)
    with pytest.raises(CapabilityError, match="raise `bits` or `block_size`"):
        codec(bits=1.0, block_size=1).encode(x, SITE)
    for wrong in (x[0], x[None], x.long()):
        with pytest.raises(UserError, match=r"layer 1 k: a codec takes floating \[heads, tokens, head_dim\], given is"):
            codec().encode(wrong, SITE)
    x[0, 0, 0] = torch.nan
    with pytest.raises(NonFinite):
        codec().encode(x, SITE)


# A stream as it was written once, and what it decodes to. Both follow from the recipe's settings and a calibration:
# when they change, streams with the same recipe id change their meaning. That takes a new version of the stream.
GOLDEN = (
    "4b0000000100000002000c000300000001000000db6668442b0000000110283845745c3a37ac7c4bc9eb9cb4c6c983a3c53654833b29"
    "36a9db5cacd58a49b2a307030228292b6f5ce0ae86"
)
DECODED = [
    [-0.87519, -0.71715, -1.58519, 0.35671, -0.4402, -0.45228, 0.49545, 0.17329, 0.26176, 0.85553, 0.7199, 0.92165],
    [-0.87519, -1.39654, -1.15464, 0.41342, -0.72604, -0.22441, 0.49545, 0.03089, 0.37528, 0.85553, 0.64347, 1.02543],
    [-0.96259, -1.92498, -0.55582, 0.24885, -0.97502, 0.09752, 0.30225, -0.04977, 0.53381, 0.75965, 0.64347, 1.07835],
    [3.00746, 2.0066, 2.35153, 1.76492, 0.89342, 0.91609, 0.28339, -0.30141, -0.54103, -1.07059, -1.59719, -1.96519],
    [2.99928, 2.16005, 2.49009, 1.56286, -776.9845, 1.0213, 0.16594, -0.24071, -0.52279, -1.13931, -1.59871, -1.99909],
    [2.97225, 2.41589, 2.50153, 1.39883, 1.10573, 0.95718, 0.08944, -0.17919, -0.54103, -1.16506, -1.53347, -1.96519],
]


def made_by_hand(dim=12):
    """Components without an eigendecomposition, whose rounding would be the machine's; the second head is skewed."""
    turn = torch.eye(dim).roll(1, 0) * torch.tensor([1.0, -1.0]).repeat(dim // 2)
    deviation = 1.12 ** -torch.arange(2.0 * dim).view(dim, 2).mT
    skewed = (ranks(256) / 3).exp() - 1.05
    sketch = torch.stack((gaussian_sketch(dim), (skewed / skewed.square().mean().sqrt()).expand(dim, -1)))
    return components.Components(
        mean=torch.stack((torch.linspace(-1, 1, dim), torch.linspace(3, -2, dim))),
        covariance=torch.eye(dim).expand(2, -1, -1),
        forward=torch.stack((turn, 2 * turn)),
        inverse=torch.stack((turn.mT, turn.mT / 2)),
        variance=deviation.square(),
        sketch=sketch.float(),
    )


def test_the_golden_stream_is_written_and_read_as_it_always_was():
    own = made_by_hand()
    coder = KltCodec(KltStream(bits=5, block_size=24), StreamCalibration(components={SITE.layer: own}))
    decoded = coder.decode(read_frame(bytes.fromhex(GOLDEN)))
    torch.testing.assert_close(decoded.flatten(0, 1), torch.tensor(DECODED), atol=2e-5, rtol=1e-5)
    z = 1.3 * torch.sin(torch.arange(72.0)).view(2, 3, 12) + 0.1
    x = (z * own.variance.sqrt()[:, None]) @ own.inverse + own.mean[:, None]
    x[1, 1, 4] = -777
    encoded = coder.encode(x, SITE)
    assert encoded.stats.n_outliers == 1
    assert frame_bytes(encoded).hex() == GOLDEN


@examples(30)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=12), st.integers(1, 40), st.integers(1, 3), st.integers(0, 99))
def test_planes_return_what_was_packed_in_the_bytes_they_promise(widths, tokens, blocks, seed):
    source, widths = torch.Generator().manual_seed(seed), torch.tensor(widths)
    raw = torch.randint(0, 256, (blocks, len(widths), tokens), generator=source)
    symbols = (raw % (1 << widths)[:, None]).to(torch.uint8)
    planes = Planes(widths)
    if not widths.any():
        return
    data = planes.pack(symbols)
    assert data.shape == (blocks, planes.bytes(tokens))
    assert planes.bytes(tokens) - int(widths.sum()) * tokens / 8 < 4
    assert torch.equal(planes.unpack(data, tokens), symbols)


@examples(30)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=6), st.integers(0, 999))
def test_nearest_is_the_search_by_comparison(widths, seed):
    source = torch.Generator().manual_seed(seed)
    values = torch.zeros(len(widths), 256)
    z = torch.randn(len(widths), 300, generator=source) * 3
    for row, width in enumerate(widths):
        table = torch.randn(1 << width, generator=source).sort().values
        values[row, : 1 << width] = table
        if width:
            z[row, :20] = (table[1:] + table[:-1])[torch.arange(20) % ((1 << width) - 1)] / 2  # ties
    found = Nearest(values, 1 << torch.tensor(widths))(z)
    for row, width in enumerate(widths):
        assert torch.equal(found[row].long(), quantise(z[row], values[row, : 1 << width]))


@pytest.mark.parametrize("part", [{"allocation": "even"}, {"transform": "none"}, {"transform": "unweighted"}])
def test_a_part_that_is_taken_out_costs_what_it_was_worth(part):
    """Correlated channels of unlike size under a metric that is not white: every part lowers the weighted error."""
    rng = torch.Generator().manual_seed(0)
    scale = torch.logspace(1, -1, 8)
    mix = torch.linalg.qr(torch.randn(8, 8, generator=rng)).Q
    root = torch.diag(torch.logspace(-1, 1, 8)) @ torch.linalg.qr(torch.randn(8, 8, generator=rng)).Q

    def rows(count):
        return (torch.randn(1, count, 8, generator=rng) * scale) @ mix + 3.0

    found = components.fit(rows(4096)[:, None], (root @ root.mT)[None])
    x, errors = rows(512), {}
    for name, changed in {"whole": {}, "bare": {"tables": "gaussian"}, "less": {"tables": "gaussian"} | part}.items():
        coder = KltCodec(KltStream(bits=3, **changed), StreamCalibration(components={0: found}))
        decoded = coder.decode(coder.encode(x, Site(0, 0, "k")))
        errors[name] = ((decoded - x) @ root).square().mean().item()
        widths = coder.plan(0, tuple(x.shape), x.device).widths
        assert int(widths.sum()) in (23, 22)  # 3 bits of 8 components less headers, and less the flag of escapes
        if changed.get("allocation") == "even":
            assert int(widths.max() - widths.min()) <= 1
    assert errors["bare"] == pytest.approx(errors["whole"], rel=0.1)  # the components are Gaussian
    assert errors["less"] > 1.3 * errors["bare"]


def test_other_axes_have_no_fitted_tables():
    with pytest.raises(ParamsError, match="set tables to 'gaussian'"):
        codec(transform="none").plan(SITE.layer, (2, 8, 64), torch.device("cpu"))
    assert "transform" not in KltStream(bits=2).model_dump()
