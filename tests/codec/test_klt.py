from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec.making import SITE, relative_error, second_moment, stream
from kvlab.codecs.base import Site, StreamCalibration
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.int import IntStream
from kvlab.codecs.kivi import KiviStream
from kvlab.codecs.klt import KltStream
from kvlab.codecs.klt.allocation import shared, spending_order
from kvlab.codecs.klt.codec import KltCodec
from kvlab.codecs.klt.marginal import Marginals
from kvlab.codecs.klt.planes import Planes
from kvlab.codecs.klt.trees import Nearest
from kvlab.codecs.registry import build
from kvlab.codecs.shared import components
from kvlab.codecs.shared.grouping import block_diagonal, diagonal_blocks, heads_together, joined, parted
from kvlab.codecs.shared.quantizer import gaussian_table, mse, quantise
from kvlab.codecs.shared.sketch import gaussian_sketch, ranks
from kvlab.codecs.stream.bitstream import frame_bytes, read_frame
from kvlab.core.errors import CalibrationMismatch, CapabilityError, NonFinite, ParamsError, StreamError, UserError
from refusals import refused
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
    return drawn(own, joined(white, len(own.variance)))


def drawn(own, white):
    """Tokens of standardised components [groups, tokens, width]."""
    rows = (white * own.variance.sqrt()[:, None]) @ own.inverse
    return parted(rows, len(own.mean)) + own.mean[:, None]


@pytest.mark.parametrize(("heads", "tokens"), [(1, 200), (2, 1), (2, 15), (8, 64)])
def test_shapes(heads, tokens):
    own = codec(heads=heads, dim=63, bits=2.5, block_size=64)
    x = from_the_source(heads, tokens, 63)
    encoded = own.encode(x.bfloat16(), SITE)
    decoded = own.decode(encoded)
    assert decoded.shape == x.shape and decoded.dtype == torch.float32
    assert len(encoded.blocks) == -(-tokens // 64) and all(len(arrays) == 1 for arrays in encoded.blocks)
    assert relative_error(x, decoded) < 0.2 if tokens > 1 else torch.isfinite(decoded).all()


@pytest.mark.full
@pytest.mark.parametrize(
    ("bits", "heads", "block"),
    [
        (0.3, 1, 512),
        (7.9, 1, 512),
        (1.0, 2, 256),
        (2.0, 2, 256),
        (2.5, 2, 256),
        (4.0, 2, 256),
        (0.3, 8, 64),
        (7.9, 8, 64),
    ],
)
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
    for cut, tokens in ((1, 48), (3, 48), (16, 600), (100, 600), (513, 600)):
        parts = [own.decode(own.encode(part, SITE)) for part in x[:, :tokens].split(cut, dim=1)]
        assert torch.equal(torch.cat(parts, dim=1), whole[:, :tokens])


def test_two_encodings_are_equal_whatever_the_threads():
    x, sizes = from_the_source(tokens=600), []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        sizes.append(frame_bytes(codec().encode(x, SITE)))
    torch.set_num_threads(before)
    assert sizes[0] == sizes[1]


@pytest.mark.full
def test_what_a_plan_buys_is_what_all_tables_would_buy():
    """Tables are made where they are used only; the order of spending is that of all of them."""
    own = calibration(heads=4, dim=128).components[SITE.layer]
    energy = own.variance.double()
    marginals, heads = Marginals(own.sketch.flatten(0, 1)), [Marginals(sketch) for sketch in own.sketch]
    for totals in ([0, 1], [40, 130], [1600, 1600], [256 * 8, 3]):
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
        expected = (own.variance * share).sum()
        error = (joined(x - decoded, 1) @ own.forward).square().sum(-1).mean()
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
    x[:, 0] += ((30 * own.variance[0].sqrt() * (torch.arange(128) == 3)) @ own.inverse[0]).view(2, 64)
    without, caught = (outlier_error(x, 0, 0, bits=bits, escape=e) for e in (False, True))
    assert caught < 0.02 * without and caught < signal
    encoded = codec(bits=bits).encode(x, SITE)
    assert encoded.stats.n_outliers >= 1 and encoded.stats.n_coefficients == x.numel()


@pytest.mark.parametrize("metric", [None, torch.diag_embed(second_moment().diagonal(dim1=1, dim2=2))])
@pytest.mark.parametrize("woken", [8.0, -300.0, 5.01])
def test_a_channel_that_was_constant_in_the_calibration_is_caught_when_it_wakes_up(metric, woken):
    """Calibrated at 5.0, coded at another value: however far it goes, and whatever it is weighed by."""
    seen, x = stream(tokens=1124).split((1024, 100), dim=1)
    seen, x = seen.clone(), x.clone()
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
    x = drawn(own, tails.sample((1, 2000, 128)))
    errors = [
        relative_error(x, codec(bits=3, escape=e).decode(codec(bits=3, escape=e).encode(x, SITE))) for e in (0, 1)
    ]
    assert errors[1] < 0.7 * errors[0]


def test_a_token_at_the_second_mean_is_coded_about_it():
    """As the first token of any text is: what is left of it there is small, and its error in proportion."""
    own = replace(calibration().components[SITE.layer], sink=40 * torch.randn(2, 64, generator=torch.Generator()))
    coder = KltCodec(KltStream(bits=2), StreamCalibration(components={SITE.layer: own}))
    x = from_the_source(tokens=200)
    usual = (coder.decode(coder.encode(x, SITE)) - x).square().sum((0, 2)).mean()
    for off in (0.0, 1e-3, 0.05):
        x[:, 3] = own.sink + off * (from_the_source(tokens=1)[:, 0] - own.mean)
        encoded = coder.encode(x, SITE)
        error = (coder.decode(encoded) - x)[:, 3].square().sum()
        assert error < 3 * max(off, 1e-4) ** 2 * usual


@pytest.mark.parametrize("factor", [2, 5, 14])
def test_a_large_vector_is_coded_at_a_scale(factor):
    """Its error is that of the others in proportion, not that of values clipped."""
    x, coder = from_the_source(tokens=400), codec(bits=3)
    usual = (coder.decode(coder.encode(x, SITE)) - x).square().sum((0, 2)).mean()
    mean = calibration().components[SITE.layer].mean[:, None]
    large = mean + factor * (x - mean)
    error = (coder.decode(coder.encode(large, SITE)) - large).square().sum((0, 2)).mean()
    assert error < 1.6 * factor**2 * usual
    clipped = codec(bits=3, escape=False)
    assert error < 0.5 * (clipped.decode(clipped.encode(large, SITE)) - large).square().sum((0, 2)).mean()


SOURCES = {  # of standardised values [heads, tokens, dim]: none of them is the Gaussian of a decaying spectrum
    "low gain": lambda source: torch.randn(2, 4096, 64, generator=source),
    "heavy tails": lambda source: normal(source) / normal(source, 3).square().mean(-1, keepdim=True).sqrt(),
    "heavy tails in each value": lambda source: normal(source) * normal(source).exp(),
    "a sink": lambda source: torch.cat((30 * normal(source)[:, :1], normal(source)[:, 1:]), dim=1),
    "a channel that wakes up": lambda source: normal(source) + 60 * (torch.arange(64) == 7) * far_apart(),
}


def normal(source, last=64):
    return torch.randn(2, 4096, last, generator=source) * (torch.logspace(0, -1, last) if last == 64 else 1)


def far_apart():
    """Every 50th of the later tokens, which calibrate nothing."""
    token = torch.arange(4096)
    return ((token % 50 == 0) & (token >= 3584))[:, None]


@pytest.mark.full
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("bits", [2, 4])
def test_no_plain_codec_beats_it_at_more_bits_on_any_source(kind, bits):
    rows = SOURCES[kind](torch.Generator().manual_seed(0))
    fitted = replace(components.fit(rows[:, None, 1:3584], None), sink=rows[:, 0])
    x = torch.cat((rows[:, :1], rows[:, 3584:4095]), dim=1)
    ours = error_at(KltStream(bits=bits + 0.25), x, fitted)
    plain = [HadamardStream(bits=bits), IntStream(bits=bits), KiviStream(bits=bits, axis="channel")]
    assert all(ours < 1.05 * error_at(recipe, x, fitted) for recipe in plain)


def error_at(recipe, x, fitted):
    """Squared error; `HadamardStream` stores a scale too, of .25 bit per value, and the others more."""
    coder = build(recipe, StreamCalibration(components={SITE.layer: fitted}))
    return (coder.decode(coder.encode(x, SITE)) - x).square().sum().item()


def test_values_beyond_all_reach_stay_finite_or_are_refused():
    x = from_the_source(tokens=4)
    x[0, 1] = 3e30
    assert torch.isfinite(codec().decode(codec().encode(x, SITE))).all()
    x[0, 1] = 3e38
    with refused(NonFinite, "non-finite.too-large", "layer 1 k", "window 0"):
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
        with refused(StreamError, "stream.other-calibration"):
            own.decode(replace(encoded, **changes))
    with pytest.raises(IndexError):
        own.decode_block(encoded, 2)


def test_forged_bytes_decode_or_are_refused():
    own, x = codec(bits=3), from_the_source(tokens=64)
    encoded = own.encode(x, SITE)
    (data,) = encoded.blocks[0]
    source, caught = torch.Generator().manual_seed(3), 0
    for _ in range(60):
        noise = torch.randint(0, 256, data.shape, dtype=torch.uint8, generator=source)
        try:
            assert torch.isfinite(own.decode(replace(encoded, blocks=((noise,),)))).all()
        except StreamError:
            caught += 1
    assert caught


def test_what_cannot_be_coded_is_refused():
    x = from_the_source(tokens=20)
    with refused(CalibrationMismatch, "calibration.missing", "components", "layer 5"):
        codec().encode(x, Site(0, 5, "k"))
    with refused(CalibrationMismatch, "calibration.other-shape", "2 KV heads of 64", "1 of 64"):
        codec().encode(x[:1], SITE)
    with refused(CapabilityError, "capability.too-few-bits", "`bits`", "`block_size`"):
        codec(bits=1.0, block_size=1).encode(x, SITE)
    for wrong in (x[0], x[None], x.long()):
        with refused(UserError, "user.tensor", "layer 1 k", wrong.dtype, list(wrong.shape)):
            codec().encode(wrong, SITE)
    x[0, 0, 0] = torch.nan
    with pytest.raises(NonFinite):
        codec().encode(x, SITE)


# A stream as it was written once, and what it decodes to. Both follow from the recipe's settings and a calibration:
# when they change, streams with the same recipe id change their meaning. That takes a new version of the stream.
GOLDEN = (
    "7f0000000100000002000c000700000001000000071b66365f00000001105c68347416cca836ac5723f6ca568accab466585b9bcb9fc"
    "9b053336cb74b9cdad35ca963385cabc8a05434632853cbcdb249b372371cb0369c58d8d9a5efb6400e37ec6986f1ad59e3a62c63c6a"
    "2b4201217290d3cf4b884433353234b8fe244d"
)
DECODED = [
    [-0.87519, -0.44026, 0.26178],
    [-0.93406, -0.92821, 0.50669],
    [-1.99851, -4.5284, 2.75468],
    [-36.90385, 403.48489, -351.8125],
    [-1.03741, 0.34132, 0.26178],
    [19.00049, -13.34468, -2.45433],
    [-0.87519, -0.72622, 0.37529],
]


def made_by_hand(dim=12):
    """Components without an eigendecomposition, whose rounding would be the machine's; the second head is skewed."""
    turn = torch.eye(dim).roll(1, 0) * torch.tensor([1.0, -1.0]).repeat(dim // 2)
    deviation = 1.12 ** -torch.arange(2.0 * dim).view(dim, 2).mT
    skewed = (ranks(256) / 3).exp() - 1.05
    sketch = torch.stack((gaussian_sketch(dim), (skewed / skewed.square().mean().sqrt()).expand(dim, -1)))
    mean = torch.stack((torch.linspace(-1, 1, dim), torch.linspace(3, -2, dim)))
    return components.Components(
        mean=mean,
        sink=mean + 20 * torch.cos(torch.arange(2.0 * dim)).view(2, dim),
        covariance=torch.eye(2 * dim)[None],
        forward=torch.block_diag(turn, 2 * turn)[None],
        inverse=torch.block_diag(turn.mT, turn.mT / 2)[None],
        variance=deviation.square().view(1, -1),
        sketch=sketch.float().flatten(0, 1)[None],
    )


def golden_tokens(own):
    """One with a component far out, one at the second mean, a large one, one like no other, and three usual ones."""
    z = 1.3 * torch.sin(torch.arange(168.0)).view(1, 7, 24) + 0.1
    z[0, 2] *= 9
    z[0, 3] = 400 * torch.cos(torch.arange(24.0)) / own.variance[0].sqrt()
    x = drawn(own, z)
    x[1, 1, 4] = -777
    x[:, 5] = own.sink + 0.001
    return x


def test_the_golden_stream_is_written_and_read_as_it_always_was():
    own = made_by_hand()
    coder = KltCodec(KltStream(bits=5, block_size=24), StreamCalibration(components={SITE.layer: own}))
    decoded = coder.decode(read_frame(bytes.fromhex(GOLDEN)))
    x = golden_tokens(own)
    shown = torch.tensor(DECODED)
    torch.testing.assert_close(decoded[0, :, ::4], shown, atol=2e-5, rtol=1e-5)
    encoded = coder.encode(x, SITE)
    assert encoded.stats.n_outliers == 4
    assert frame_bytes(encoded).hex() == GOLDEN
    near = ((decoded - x).square().sum((0, 2)) / x.square().sum((0, 2))).tolist()
    assert max(near) < 0.05 and near[5] < 1e-8


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


@examples(30)
@given(st.sampled_from([(1, 8), (2, 6), (3, 64), (4, 128), (6, 80), (8, 256), (5, 300)]), st.integers(1, 9))
def test_joined_heads_are_parted_again(shape, tokens):
    heads, dim = shape
    together = heads_together(heads, dim)
    assert heads % together == 0 and (together == 1 or together * dim <= 256)
    x, blocks = torch.randn(heads, tokens, dim), torch.randn(heads, dim, dim)
    groups = heads // together
    assert torch.equal(parted(joined(x, groups), heads), x)
    assert torch.equal(diagonal_blocks(block_diagonal(blocks, groups), heads), blocks)
    whole = joined(x, groups) @ block_diagonal(blocks, groups)
    torch.testing.assert_close(parted(whole, heads), x @ blocks)


def spectra(*scales):
    """Variances of K of as many layers, alike but for a factor."""
    falling = torch.logspace(0, -2, 64)[None]
    return {("k", layer): scale * falling for layer, scale in enumerate(scales)}


def test_bits_go_where_they_lower_the_loss_most():
    variances = torch.cat(list(spectra(1.0, 16.0, 1e-9).values()))
    bits = shared(variances, 400)
    assert int(bits.sum()) == 400
    assert bits[1] - bits[0] == pytest.approx(2 * 64, abs=32)  # 16 times the variance is two bits per value
    assert bits[2] == 64 // 8  # what every vector keeps
    assert shared(variances[:1], 77).tolist() == [77]


def test_a_budget_of_several_tensors_is_kept_on_their_average():
    own = StreamCalibration(components=calibration().components, stream="k", spectra=spectra(1.0, 4.0, 0.1, 9.0))
    fitted = components.fit(stream(heads=1, tokens=1024)[:, None], None)
    held = replace(own, components=dict.fromkeys(range(4), fitted))
    coder = KltCodec(KltStream(bits=2, budget="stream"), held)
    x = stream(heads=1, tokens=512)
    sizes = [8 * len(frame_bytes(coder.encode(x, Site(0, layer, "k")))) / x.numel() for layer in range(4)]
    assert sizes[3] > sizes[1] > sizes[0] > sizes[2] and sum(sizes) / 4 <= 2
    assert sum(sizes) / 4 > 1.9
    with refused(CalibrationMismatch, "calibration.no-variances"):
        KltCodec(KltStream(bits=2, budget="cache"), held).encode(x, Site(0, 0, "k"))


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
    with refused(ParamsError, "params.no-tables", "'gaussian'"):
        codec(transform="none").plan(SITE.layer, (2, 8, 64), torch.device("cpu"))
    assert "transform" not in KltStream(bits=2).model_dump()
