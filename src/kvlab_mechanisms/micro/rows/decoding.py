"""Rows of `kvlab_mechanisms.decoding`: sampler, drafter, verifier, parallel samples, watermark, schema, probe."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    PretrainedConfig,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    WatermarkDetector,
    WatermarkLogitsProcessor,
)

from kvlab_mechanisms.decoding.best_of_n import candidates
from kvlab_mechanisms.decoding.heads import HeadDrafter, Heads
from kvlab_mechanisms.decoding.law import Sampling, law
from kvlab_mechanisms.decoding.probe import LinearProbe, counted, expected
from kvlab_mechanisms.decoding.sampler import sample
from kvlab_mechanisms.decoding.schema import Steps, compiled, tokens
from kvlab_mechanisms.decoding.verify import Draft, TargetLogits, draws_of, verify
from kvlab_mechanisms.decoding.watermark import Watermark
from kvlab_mechanisms.micro.row import BenchRow, hold

OWN = Sampling(temperature=0.8, top_k=50, top_p=0.9, min_p=0.05)
PENALISED = Sampling(temperature=0.8, top_k=50, top_p=0.9, min_p=0.05, repetition_penalty=1.1)
SEEN = torch.tensor([5, 90, 1_000, 7, 20])
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"enum": ["x", "y"]}},
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}


def rows() -> Iterator[BenchRow]:
    """All of them."""
    yield from sampler()
    yield from drafter()
    yield from verifier()
    yield from parallel()
    yield from watermark()
    yield from schema()
    yield from probe()


def drawn(*shape: int) -> Tensor:
    """Logits of a model that is unsure, always the same."""
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def transformers_chain(own: Sampling) -> Callable[[Tensor], Tensor]:
    """The law of transformers' processors, [rows, vocabulary]."""
    chain = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(own.repetition_penalty),
            TemperatureLogitsWarper(own.temperature),
            TopKLogitsWarper(own.top_k),
            TopPLogitsWarper(own.top_p),
            MinPLogitsWarper(own.min_p),
        ]
    )
    return lambda z: chain(SEEN.expand(len(z), -1), z).softmax(-1)


def sampler() -> Iterator[BenchRow]:
    """One token, and one for each of a batch."""
    for name, own, count, vocabulary in (
        ("r07", PENALISED, 1, 32_000),
        ("r08", PENALISED, 1, 32_000),
        ("r09", OWN, 16, 32_000),
        ("r07-128k", PENALISED, 1, 128_256),
    ):
        yield tokens_of(name, own, drawn(count, vocabulary))


def tokens_of(name: str, own: Sampling, z: Tensor) -> BenchRow:
    """A row of the sampler; its check is of the whole law."""
    count, vocabulary = z.shape
    seen = [SEEN] * count if own.repetition_penalty != 1 else None
    chain, settings = transformers_chain(own), [own] * count

    def check() -> None:
        apart = float((law(z, settings, seen).dense(vocabulary) - chain(z)).abs().max())
        hold(apart < 1e-6, f"the law is {apart:.1e} from transformers'")

    shape = f"{count} of {vocabulary:,}: T .8, k 50, p .9, min p .05" + (", 5 ids penalised" if seen else "")
    note = "the page's minimum of the sample above; here another median" if name == "r08" else ""
    return BenchRow(
        name, shape, check, lambda: sample(z, settings, [0] * count, seen),
        lambda: torch.multinomial(chain(z), 1), "transformers' processors and torch.multinomial", note,
    )  # fmt: skip


def drafter() -> Iterator[BenchRow]:
    """Four tokens drafted by heads, each after those before it."""
    for name, vocabulary in (("r20", 8192), ("r20-49k", 49_152)):
        yield drafts_over(name, vocabulary)


def drafts_over(name: str, vocabulary: int) -> BenchRow:
    """A chain of four greedy tokens, from a hidden state of 256 numbers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, vocab_size=vocabulary
    )
    heads, hidden = Heads(256, 4), torch.randn(256)
    for layer in heads.layers:
        torch.nn.init.normal_(layer.weight, std=0.02)
    found = HeadDrafter(LlamaForCausalLM(config).eval(), heads, Sampling(0.0))
    found.observe(hidden)
    states = torch.randn(4, 256)

    def ours() -> list[int]:
        return found.draft([3], 4, 0).tokens[0]

    @torch.no_grad()
    def written_out() -> list[int]:
        ids = [3]
        for layer in heads.layers:
            state = torch.cat([hidden, *(found.embed[one] for one in ids)])
            z = found.unembed @ (hidden + torch.nn.functional.silu(layer.weight @ state + layer.bias))
            ids.append(int(z.argmax()))
        return ids[1:]

    def rival() -> Tensor:
        return (states @ found.unembed.T).topk(1).indices

    def check() -> None:
        hold(ours() == written_out(), "the chain is not that of the formula")

    told = "the rival knows all four states beforehand, as heads that do not hang on one another do"
    return BenchRow(
        name, f"4 heads of width 256, vocabulary {vocabulary:,}", check, ours, rival, "one fused GEMM and topk", told
    )


def verifier() -> Iterator[BenchRow]:
    """Four chains of five tokens against a target."""
    z, own = drawn(4, 6, 8192), Sampling()
    chains = torch.randint(8192, (4, 5), generator=torch.Generator().manual_seed(1)).tolist()

    def ours():
        return verify(Draft(chains), TargetLogits(z, own, chains=chains), draws_of(0, 0))

    def check() -> None:
        best = z.argmax(-1)
        chain = [int(best[0, depth]) for depth in range(5)]
        certain = verify(Draft([chain]), TargetLogits(1e4 * z[:1], own, chains=[chain]), draws_of(0, 0))
        hold(certain.accepted == 5 and len(certain.tokens) == 6, "a draft that is certain is not accepted")

    yield BenchRow(
        "r21", "4 chains of 5 tokens, vocabulary 8,192", check, ours, lambda: z.double().softmax(-1),
        "torch softmax of all rows, which a verifier that is not lazy begins with",
        "exact; the original's verifier is not",
    )  # fmt: skip


def parallel() -> Iterator[BenchRow]:
    """Candidates for one place."""
    for name, count, n in (("r26", 1, 8), ("r27", 16, 1)):
        z, own = drawn(count, 32_000), Sampling(temperature=0.8)

        def check(z: Tensor = z, own: Sampling = own, n: int = n) -> None:
            ids = candidates(z, n, own)
            hold(ids.shape == (len(z), n) and bool((np.diff(np.sort(ids)) >= 0).all()), "not n candidates a row")
            # many draws of one row: their mean log p is minus the law's entropy
            p = (z[0].double() / own.temperature).softmax(-1)
            told = p[candidates(z[:1], 20_000, own)[0]].log()
            off = abs(float(told.mean() - (p * p.log()).sum())) / float(told.std()) * 20_000**0.5
            hold(off < 5, f"mean log p is {off:.1f} standard errors from the entropy")

        yield BenchRow(
            name, f"{n} draws of {count} x 32,000", check, lambda z=z, n=n, own=own: candidates(z, n, own),
            lambda z=z, n=n: torch.multinomial((z / 0.8).softmax(-1), n, replacement=True), "torch.multinomial",
            "loses at one row: ours draws the same for a seed and a place whatever else is in the batch, in float64",
        )  # fmt: skip


def watermark() -> Iterator[BenchRow]:
    """Marking a row of logits, and finding the mark in 128 tokens."""
    z, mark = drawn(1, 8192), Watermark(key=7)
    ids = torch.randint(8192, (1, 128), generator=torch.Generator().manual_seed(2))
    theirs = WatermarkLogitsProcessor(8192, "cpu", greenlist_ratio=0.5, bias=2.0)

    def check() -> None:
        green = (mark.marked(z, ids) - z).round().bool()
        hold(abs(float(green.double().mean()) - 0.5) < 5 * 0.5 / 8192**0.5, "green is not half of the vocabulary")
        hold(mark.detect(ids[0].numpy()).z < 4, "a random text is found to be marked")
        hold(mark.detect(written(mark, 128)).z > 4, "a marked text is not found")

    yield BenchRow(
        "r30", "logits of 8,192", check, lambda: mark.marked(z, ids), lambda: theirs(ids, z),
        "transformers' WatermarkLogitsProcessor",
        "a hash for each of the vocabulary, where the rival permutes it",
    )  # fmt: skip
    detector = WatermarkDetector(PretrainedConfig(vocab_size=8192, bos_token_id=0), "cpu", dict(greenlist_ratio=0.5))
    one = ids[0].numpy()

    def cold():
        detector._get_ngram_score_cached.cache_clear()
        return detector(ids)

    yield BenchRow(
        "r31", "128 tokens, vocabulary 8,192", check, lambda: mark.detect(one), cold,
        "transformers' WatermarkDetector, its cache empty",
    )  # fmt: skip


def written(mark: Watermark, tokens: int) -> np.ndarray:
    """A text whose tokens are the likeliest of marked random logits."""
    ids = torch.zeros(1, 1, dtype=torch.int64)
    chance = torch.Generator().manual_seed(3)
    for _ in range(tokens):
        best = mark.marked(torch.randn(1, 8192, generator=chance), ids).argmax(-1, keepdim=True)
        ids = torch.cat([ids, best], 1)
    return ids[0].numpy()


def schema() -> Iterator[BenchRow]:
    """What a schema allows next: a mask on logits, and a step."""
    yield from allowed_next([bytes([byte]) for byte in range(255)], "")
    yield from allowed_next(strings(128_255), "-128k")


def strings(count: int) -> list[bytes]:
    """Every byte but the last, and strings of some of them, as a tokenizer's: no two are the same."""
    chance, found = random.Random(0), dict.fromkeys(bytes([byte]) for byte in range(255))
    while len(found) < count:
        found[bytes(chance.choices(range(32, 127), k=chance.randint(2, 7)))] = None
    return list(found)


def allowed_next(texts: list[bytes], name: str) -> Iterator[BenchRow]:
    """Over a vocabulary of these and an end."""
    size, brace = len(texts) + 1, ord("{")
    grammar = compiled(SCHEMA, tokens([*texts, None], [size - 1]))
    steps, z, scratch = Steps(grammar), drawn(size), torch.empty(size)

    def walked() -> bool:
        own = Steps(grammar)
        for byte in b'{"a":12,"b":true,"c":"y"}':
            own.advance(byte)
        return bool(torch.isfinite(own.constrain(drawn(size)))[-1])

    def check() -> None:
        hold(walked(), "a text of the schema does not end")
        open_ = torch.isfinite(steps.constrain(drawn(size))).nonzero().flatten().tolist()
        hold(all(texts[token][:1] == b"{" for token in open_), f"a text may begin with {open_}")
        fill()
        hold(open_ == torch.isfinite(scratch).nonzero().flatten().tolist() and brace in open_, "not xgrammar's mask")

    def step() -> None:
        steps.advance(brace)
        steps.back()

    bare, fill = xgrammar_of(texts, scratch, z)
    why = "ours is the same library behind an adapter, which"
    yield BenchRow(
        f"r32{name}", f"{size:,} logits, at the start", check, lambda: steps.constrain(scratch.copy_(z)), fill,
        "xgrammar, mask filled and applied", f"{why} also refuses a place where nothing may follow",
    )  # fmt: skip
    yield BenchRow(
        f"r33{name}", "the open brace there and back" + (f" of {size:,} tokens" if name else ""), check, step, bare,
        "xgrammar accept, rollback", f"{why} also refuses a token that leaves the schema; both take the step back",
    )  # fmt: skip


def xgrammar_of(texts: list[bytes], scratch: Tensor, z: Tensor) -> tuple[Callable, Callable]:
    """A step there and back, and a mask applied."""
    import json

    import xgrammar

    info = xgrammar.TokenizerInfo([*texts, b"</s>"], stop_token_ids=[len(texts)])
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(
        json.dumps(SCHEMA), any_whitespace=False, separators=(",", ":")
    )
    matcher = xgrammar.GrammarMatcher(grammar)
    bits = xgrammar.allocate_token_bitmask(1, len(texts) + 1)

    def step() -> None:
        matcher.accept_token(ord("{"))
        matcher.rollback(1)

    def fill() -> None:
        matcher.fill_next_token_bitmask(bits)
        xgrammar.apply_token_bitmask_inplace(scratch.copy_(z)[None], bits)

    return step, fill


def probe() -> Iterator[BenchRow]:
    """A verdict on 64 tokens, and on what is about to be said."""
    weight = drawn(4, 8192).double()
    trained = LinearProbe(weight, torch.zeros(4, dtype=torch.float64), 1.0, "planted")
    ids, z = torch.arange(64), drawn(1, 8192)

    def check() -> None:
        told, twice = trained.of_tokens(ids), torch.cat([ids, ids[:7]])
        hold(torch.allclose(told, weight[:, :64].mean(1)), "not the mean weight of the tokens")
        hold(torch.allclose(trained.of_tokens(twice), trained.logits(counted(twice, 8192))), "not of what is counted")

    def rival() -> Tensor:
        return weight.T[ids].mean(0).softmax(-1)

    yield BenchRow(
        "r54",
        "64 ids of 8,192, 4 classes",
        check,
        lambda: trained.of_tokens(ids).softmax(-1),
        rival,
        "torch, rows of W",
        "the same rows on both sides; ours divides by the temperature that calibrates it",
    )

    def same() -> None:
        hold(torch.allclose(trained.logits(expected(z)), weight @ z[0].double().softmax(-1)), "not W times the law")

    yield BenchRow(
        "r55", "one row of 8,192", same, lambda: trained.probabilities(expected(z)),
        lambda: (weight @ z[0].double().softmax(-1)).softmax(-1), "torch, in float64",
        "loses: ours checks its input, and divides by the temperature that calibrates it",
    )  # fmt: skip
