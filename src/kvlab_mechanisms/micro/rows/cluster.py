"""Rows of `kvlab_mechanisms.cluster`: shards, exchanges between ranks, prefill and decode apart."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch.nn import functional as F

from kvlab_mechanisms.cluster.handover import DecodingWorker, Exact, prefill
from kvlab_mechanisms.cluster.ranks import all_to_all_bytes, even, run
from kvlab_mechanisms.micro.row import BenchRow, hold

RANKS = 2  # as many as this project's machine has cores


def rows() -> Iterator[BenchRow]:
    """All of them."""
    yield from shards(8, 256, 512, "")
    yield from shards(64, 2048, 8192, "-2048")
    yield from tokens(8, 256, 64, "")
    yield from tokens(8, 8192, 128, "-8192")
    yield from between()
    yield from apart(64, "")
    yield from apart(512, "-512")


def shards(batch: int, inside: int, outside: int, name: str) -> Iterator[BenchRow]:
    """A weight cut into four, and used so in one process."""
    torch.manual_seed(0)
    weight, x = torch.randn(outside, inside), torch.randn(batch, inside)
    parts, sizes = weight.split(even(outside, 4)), even(outside, 4)

    def forward() -> torch.Tensor:
        return torch.cat([F.linear(x, part) for part in parts], 1)

    def check() -> None:
        hold(torch.allclose(forward(), F.linear(x, weight), atol=1e-5 * inside, rtol=1e-5))
        hold(torch.equal(torch.cat(parts), weight))

    yield BenchRow(
        f"r34{name}", f"[{inside}, {outside}] into 4", check, lambda: weight.split(sizes), lambda: weight.chunk(4),
        "torch chunk", "views; ours also where 4 does not divide",
    )  # fmt: skip
    yield BenchRow(
        f"r35{name}", f"[{batch}, {inside}] by 4 x [{inside}, {outside // 4}], in one process", check, forward,
        lambda: F.linear(x, weight), "one dense product of torch", "no rank is involved; see r35-ranks",
    )  # fmt: skip


def tokens(heads: int, length: int, width: int, name: str) -> Iterator[BenchRow]:
    """Tokens cut into four, and put together."""
    torch.manual_seed(0)
    x, lengths = torch.randn(heads, length, width), even(length, 4)
    parts = x.split(lengths, 1)

    def check() -> None:
        hold(torch.equal(torch.cat(parts, 1), x))

    shape = f"[{heads}, {length}, {width}] float32 in 4"
    yield BenchRow(
        f"r36{name}", shape, check, lambda: x.split(lengths, 1), lambda: x.chunk(4, 1), "torch chunk", "views"
    )
    if not name:
        out = torch.empty_like(x)
        yield BenchRow(
            "r37", shape, check, lambda: torch.cat(parts, 1, out=out), lambda: torch.cat(parts, 1), "torch cat",
            "in one process, ours into a buffer that is there; see r37-ranks",
        )  # fmt: skip


@cache
def measured() -> dict[str, dict]:
    """What real ranks found, by collective."""
    from kvlab_mechanisms.micro.collectives import collectives

    return {row["name"]: row for row in run(RANKS, collectives)[0]}


def between() -> Iterator[BenchRow]:
    """The real exchanges: microseconds and bytes are numbers, for they are taken in other processes."""

    def check() -> None:
        hold(all(row["bytes"] == row["formula"] for row in measured().values()))

    def of(name: str, which: str):
        return lambda: measured()[name][which]

    told = "us between real ranks over gloo, medians"
    for seed, name, shape in (("r35", "all-reduce", "[8, 512]"), ("r37", "tokens to heads", "[8, 256, 64]")):
        asked = f"{name} of {shape} float32, {RANKS} ranks"
        yield BenchRow(
            f"{seed}-ranks", asked, check, value=of(name, "ours_us"), note=f"{told}; sums in the ranks' order"
        )
        yield BenchRow(
            f"{seed}-ranks gloo", asked, check, value=of(name, "theirs_us"), note=f"{told}; torch's own collective"
        )
    for which, library in (("ours_us", ""), ("theirs_us", " DTensor")):
        yield BenchRow(
            f"r35-ranks linear{library}", f"[8, 256] by [256, 512], split by rows, {RANKS} ranks", check,
            value=of("row-parallel linear, beside DTensor", which), note=f"{told}; one product and one sum",
        )  # fmt: skip
    yield BenchRow(
        "r38", "[8, 256, 64] float32 on 4 ranks", check, value=lambda: float(all_to_all_bytes(8 * 256 * 64 * 4, 4)),
        note="(n - 1) / n of the tensor, equal to what real ranks count; the page has 4 times as much",
    )  # fmt: skip


@cache
def model():
    """A random Llama of four layers, eight heads of 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32000, **sizes)).eval()


def apart(length: int, name: str) -> Iterator[BenchRow]:
    """A prompt that is read, and a step of the process that decodes."""
    from transformers import DynamicCache

    ids = torch.randint(5, 32000, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    given = torch.tensor([ids])
    decoder, read = DecodingWorker(model()), prefill(model(), ids)
    plain = DynamicCache(config=model().config)
    for layer, one in enumerate(read.cache.layers):
        plain.update(one.keys.clone(), one.values.clone(), layer)
    decoder.load("one", {place: x.clone() for place, x in Exact().payloads(read.cache)}, read.first)
    own = decoder._caches["one"]

    def step() -> torch.Tensor:
        own.crop(length)
        return decoder.step("one", read.first)[1]

    @torch.no_grad()
    def theirs() -> torch.Tensor:
        plain.crop(length)
        return model()(torch.tensor([[read.first]]), past_key_values=plain).logits[0, -1].float()

    @torch.no_grad()
    def whole() -> torch.Tensor:
        return model()(given, past_key_values=DynamicCache(config=model().config)).logits[0, -1]

    def check() -> None:
        hold(torch.equal(step(), theirs()) and torch.allclose(prefill(model(), ids).logits, whole(), atol=1e-4))

    shape = f"{length} tokens, a random Llama of 4 layers, 8 heads of 64"
    told = "the original draws random numbers and has no model: not comparable"
    yield BenchRow(
        f"r42{name}", shape, check, lambda: prefill(model(), ids), whole, "transformers' forward",
        f"{told}; ours makes logits of the last token alone",
    )  # fmt: skip
    told = "the original has no model and reads no cache: not comparable"
    yield BenchRow(f"r43{name}", f"{shape}, one step", check, step, theirs, "transformers' forward", told)
