"""The Triton kernel in Triton's interpreter, on a CPU: what it reads is what torch reads.

`test_compiled.py` runs these in a process of its own, with ``TRITON_INTERPRET=1``: Triton asks for it when a kernel is
defined.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache.pages.test_rows import DIM, HEADS, SITE, made
from codec import ladder_making
from codec.ladder_making import LAYER, planted
from kvlab.cache.pages import layer
from kvlab.cache.pages.layer import LayerPages, quick
from kvlab.cache.pages.rope import Unturned
from kvlab.cache.pages.token_bytes import rows_of
from kvlab.codecs.base import Site
from kvlab.codecs.klt import KltStream
from kvlab.codecs.klt.fields import Said
from kvlab.codecs.klt.reading_triton import TritonLoop
from kvlab.codecs.klt.scales import PLAIN, SCALES
from kvlab.codecs.registry import build
from kvlab.core.errors import StreamError
from tiers import examples

TOKENS = 24


def by_torch(plan, coded):
    """Components [groups, n, width], which vectors are about the second mean and which have no tables [groups, n]."""
    symbols = plan.planes.unpack(coded, 1)[..., 0].T.contiguous()
    z, second = (
        plan.trees.table().flatten(0, 1).gather(1, symbols[: plan.rows].long()),
        torch.zeros(plan.groups, len(coded)),
    )
    plain = second.bool()
    if plan.escaping:
        moved = plan._unescape(z, symbols)
        if moved is not None:
            second[moved] = 1
        group, token = symbols[plan.rows :].nonzero().unbind(1)
        said = plan.tails.said(group, plan.vectors(symbols)[group, :, token])
        plain[group, token] = (said.count == 0) & (said.number == PLAIN)
    return z.unflatten(0, (plan.groups, -1)).mT, second, plain


@pytest.mark.parametrize(("heads", "dim"), [(3, DIM), (6, DIM), (2, 24), (1, 40)], ids=str)
@pytest.mark.parametrize(
    "changes", [{"bits": 7.5}, {"bits": 4}, {"bits": 2}, {"bits": 0.5}, {"bits": 3, "escape": False}], ids=str
)
def test_the_kernel_reads_what_torch_reads(heads, dim, changes):
    """Bit for bit, but for the sum of a vector without tables; rows lie anywhere in pages, and others lie between."""
    codec = build(KltStream(block_size=64, **changes), ladder_making.calibration(heads, dim))
    rows = rows_of(codec, SITE, heads, dim)
    x = planted(heads, TOKENS, dim, 1)
    x[:, ::7] *= 30
    x[0, ::11, 7] += 1e4
    x[:, 5::13] = 1e3 * torch.randn(heads, 2, dim, generator=torch.Generator().manual_seed(1))
    coded = rows.encode(x)
    pages, slots = torch.full((200, rows.bytes + 8), 255, dtype=torch.uint8), torch.randperm(200)[:TOKENS]
    pages[slots, 5:-3] = coded
    found = quick(rows)
    assert isinstance(found.read, TritonLoop)
    z, (due, second, plain) = found.read(pages, slots, 5), by_torch(rows.plan, coded)
    assert torch.equal(z[..., -1], second)
    assert torch.equal(z[..., :-1][~plain], due[~plain])
    torch.testing.assert_close(z[..., :-1][plain], due[plain], rtol=0, atol=5e-6 * due.abs().max().item())
    assert plain.any() or changes["bits"] != 4  # vectors without tables are among them


@pytest.mark.parametrize("heads", [3, 6], ids=["one-group", "two-groups"])
def test_every_scale_and_every_number_of_pairs_is_read(heads):
    """Symbols at random: a vector at each of the 31 scales, then one with each number of pairs."""
    rows = rows_of(build(KltStream(bits=4, block_size=64), ladder_making.calibration(heads, DIM)), SITE, heads, DIM)
    plan, source = rows.plan, torch.Generator().manual_seed(0)
    numbers = torch.tensor([number for number in range(len(SCALES)) if number != PLAIN])
    counts = torch.arange(1, plan.tails.room + 1)
    tokens, most = len(numbers) + len(counts), (1 << plan.widths.flatten()) - 1
    symbols = (torch.rand(plan.rows, tokens, generator=source) * (most[:, None] + 1)).to(torch.uint8)
    symbols = torch.cat((symbols, torch.ones(plan.groups, tokens, dtype=torch.uint8)))
    places = torch.randint(0, plan.width, (len(counts), plan.tails.room), generator=source)
    values = 1e3 * torch.randn(len(counts), plan.tails.room, generator=source)
    none = torch.zeros(tokens - len(counts), plan.tails.room)
    said = Said(
        torch.cat((torch.zeros_like(numbers), counts)),
        torch.cat((numbers, torch.zeros_like(counts))),
        torch.zeros(tokens),
        torch.cat((none.long(), places)),
        torch.cat((none, values)),
    )
    for number in range(plan.groups):
        own = plan.vectors(symbols)[number]
        own[:] = plan.tails.write(torch.full((tokens,), number), own.mT, said, torch.zeros(0, plan.width)).mT
    coded = plan.planes.pack(symbols.T[..., None].contiguous())
    due, second, plain = by_torch(plan, coded)
    z = quick(rows).read(coded, torch.arange(tokens), 0)
    assert torch.equal(z[..., :-1], due) and torch.equal(z[..., -1], second) and not plain.any()
    assert second.sum() == plan.groups * PLAIN


@examples(40)
@given(st.binary(min_size=200, max_size=200), st.sampled_from([2, 4]))
def test_rows_that_no_encoder_wrote_are_read_alike_or_refused_alike(data, bits):
    rows = rows_of(made("klt", bits), SITE, HEADS, DIM)
    count = len(data) // rows.bytes
    forged = torch.frombuffer(bytearray(data[: count * rows.bytes]), dtype=torch.uint8).view(count, rows.bytes)
    read = quick(rows).read
    for row in forged.split(1):
        try:
            due, second, _ = by_torch(rows.plan, row)
        except StreamError:
            with pytest.raises(StreamError):
                read(row, torch.zeros(1, dtype=torch.int64), 0)
            continue
        z = read(row, torch.zeros(1, dtype=torch.int64), 0)
        torch.testing.assert_close(z[..., :-1], due, rtol=1e-5, atol=5e-6 * max(1.0, due.abs().max().item()))
        assert torch.equal(z[..., -1], second)


def test_of_no_token_nothing_is_read():
    rows = rows_of(made("klt", 4), SITE, HEADS, DIM)
    none = quick(rows).read(torch.zeros(3, rows.bytes, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64), 0)
    assert none.shape == (rows.plan.groups, 0, rows.plan.width + 1)


def test_pages_are_read_by_it(monkeypatch):
    """A layer's pages, K and V, in blocks that are not full, and as torch alone reads them."""
    heads, dim, block = 3, 24, 4
    codec = build(KltStream(bits=3, block_size=64), ladder_making.calibration(heads, dim))
    rows = [rows_of(codec, Site(0, LAYER, stream), heads, dim) for stream in "kv"]
    own = LayerPages(LAYER, *rows, Unturned())
    monkeypatch.setattr(layer, "by_triton", lambda device: False)
    monkeypatch.setattr(layer, "compiled", lambda: False)
    plain = LayerPages(LAYER, *rows, Unturned())
    assert plain.quick == (None, None)
    k, v, positions = planted(heads, 13, dim, 0), planted(heads, 13, dim, 1), torch.arange(13)
    pages, slots = torch.zeros(5, 1, block, own.bytes, dtype=torch.uint8), torch.randperm(20)[:13]
    own.write(k, v, pages, slots, positions)
    due, found = plain.read(pages, slots, positions), own.read(pages, slots, positions)
    torch.testing.assert_close(found.k, due.k, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.v, due.v, atol=1e-4, rtol=1e-4)


def test_which_loop_reads_hangs_on_where_the_rows_are(monkeypatch):
    assert layer.by_triton(torch.device("cuda")) and layer.by_triton(torch.device("cpu"))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert layer.by_triton(torch.device("cuda")) and not layer.by_triton(torch.device("cpu"))
