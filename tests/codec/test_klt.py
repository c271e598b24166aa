from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.making import SITE, relative_error, second_moment, stream
from kvlab.codec import components
from kvlab.codec.base import Site, StreamCalibration
from kvlab.codec.bitstream import frame_bytes, read_frame
from kvlab.codec.klt import KltCodec
from kvlab.codec.nearest import Nearest
from kvlab.codec.planes import Planes
from kvlab.codec.quantizer import gaussian_table, mse, quantise
from kvlab.errors import CalibrationMismatch, CapabilityError, NonFinite, StreamError
from kvlab.recipe import KltStream


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


def test_values_beyond_half_precision_are_stored_as_its_largest():
    x = from_the_source(tokens=4)
    x[0, 1] = 3e30
    assert torch.isfinite(codec().decode(codec().encode(x, SITE))).all()
    x[0, 1] = 3e38
    with pytest.raises(NonFinite, match="do not fit float32"):
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
    with pytest.raises(CalibrationMismatch):
        own.decode(replace(encoded, shape=(2, 600, 32)))
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
    x[0, 0, 0] = torch.nan
    with pytest.raises(NonFinite):
        codec().encode(x, SITE)


@settings(max_examples=30, deadline=None)
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


@settings(max_examples=30, deadline=None)
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
