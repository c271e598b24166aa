"""What leaving tokens out of a cache costs, at the bytes that a codec would take: eviction as an axis of its own.

    python -m validation.bench.eviction --model models/smollm2-135m --text notes.txt --bits 2 4 --out eviction.json

A policy keeps as many of a context's tokens, in 16 bits, as fit into `bits` per value of the whole context, the places
of those that are kept included. The tokens after the context are scored over what is left, at their own positions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache

from kvlab.cli.checked import config_of, info_of, readable_text
from kvlab.codecs.shared.metric import rotated
from kvlab.core.model import load_tokenizer
from kvlab.core.records import sha256, write_json
from kvlab.engines.base import Part
from kvlab.engines.registry import start
from kvlab.measure.scoring import WindowRun
from kvlab.stats.bootstrap import Bootstrap, Column
from kvlab.text.excerpts import windows_of

PLACE = 16  # bits of a kept token's number, per KV head
SINK = 4  # first tokens of the window policy (StreamingLLM, arXiv 2309.17453)
OBSERVED = 32  # last queries that SnapKV (arXiv 2404.14469) asks
POOLED = 7  # neighbours that it takes the largest of
Scores = dict[str, Tensor]
"""What a layer's queries give its keys, by policy, [kv_heads, context]: the more, the longer a token stays."""


def kept_tokens(bits: float, context: int, head_dim: int) -> int:
    """Tokens whose K and V in 16 bits, and whose number, fit into `bits` for every value of the context."""
    return min(context, int(bits * 2 * head_dim * context // (16 * 2 * head_dim + PLACE)))


def bits_of(kept: int, context: int, head_dim: int) -> float:
    """Bits per value of a context of which so many tokens are kept."""
    return kept * (16 * 2 * head_dim + PLACE) / (2 * head_dim * context)


def by_window(context: int, heads: int) -> Tensor:
    """The first `SINK` tokens before all, then the later the better."""
    score = torch.arange(context, dtype=torch.float32)
    score[:SINK] += context
    return score.expand(heads, -1)


def by_attention(attention: Tensor, group: int) -> Scores:
    """Scores from one layer's attention [heads, context, context], causal; `group` query heads share a KV head.

    ``h2o``: all that a token got (arXiv 2306.14048), of which the latest half of what stays is exempt; ``snapkv``: what
    the last `OBSERVED` queries gave it, the largest among `POOLED` neighbours, those queries' own tokens before all.
    """
    heads = attention.unflatten(0, (-1, group)).sum(1)
    last = torch.nn.functional.max_pool1d(heads[:, -OBSERVED:].sum(1)[None], POOLED, 1, POOLED // 2)[0]
    last[:, -OBSERVED:] += 1e6
    return {"h2o": heads.sum(1), "snapkv": last}


def chosen(policy: str, scores: Tensor, kept: int) -> Tensor:
    """Numbers of the tokens that stay, ascending [kv_heads, kept]."""
    if policy == "h2o":
        scores = scores.clone()
        scores[:, scores.shape[1] - kept // 2 :] += 1e6
    return scores.topk(kept, dim=-1).indices.sort(-1).values


class TensorTap:
    """Tap that keeps Q, K and V of the context before the rotary embedding."""

    def __init__(self, context: int):
        self.context, self.kept = context, {}

    def __call__(self, layer: int, part: Part, x: Tensor) -> None:
        """See `Tap`."""
        self.kept[layer, part] = x[:, : self.context].clone()


@torch.inference_mode()
def scores_of(seen: TensorTap, layers: int, turn: Callable[[Tensor], Tensor]) -> tuple[dict, list[Scores]]:
    """K and V as attention sees them, and what it gives, layer by layer."""
    cache, found = {}, []
    for layer in range(layers):
        q, k = (turn(seen.kept[layer, part].float()) for part in "qk")
        group = q.shape[0] // k.shape[0]
        logits = q @ k.repeat_interleave(group, dim=0).mT / q.shape[-1] ** 0.5
        hidden = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1)
        found.append(by_attention(logits.masked_fill(hidden, -torch.inf).softmax(-1), group))
        found[-1]["window"] = by_window(k.shape[1], k.shape[0])
        cache[layer] = (k, seen.kept[layer, "v"].float())
    return cache, found


@torch.inference_mode()
def logits_over(model, ids: list[int], context: int, cache: dict, places: list[Tensor]) -> Tensor:
    """Logits of the tokens after the context over what is kept, as `Engine.score_over` gives them."""
    filled = DynamicCache()
    for layer, (k, v) in cache.items():
        index = places[layer][..., None].expand(-1, -1, k.shape[-1])
        filled.update(k.gather(1, index)[None], v.gather(1, index)[None], layer)
    rest = torch.tensor([ids[context:]])
    positions = torch.arange(context, len(ids))[None]
    return model(rest, past_key_values=filled, position_ids=positions, use_cache=True).logits[0, :-1]


def measure(folder: Path, text: Path, bits: list[float], context: int, scored: int, most: int) -> dict:
    """KL and bits of every policy at every budget; `everything` keeps all, and must cost nothing."""
    info = info_of(folder)
    whole = readable_text(text, context + scored, config_of(folder))
    windows = windows_of([whole], load_tokenizer(info), context + scored, most, str(text))
    engine = start("hf", info, "float32", max_tokens=context + scored)
    budgets = {kept_tokens(one, context, info.head_dim) for one in bits} | {context}
    found: dict[tuple[str, int], list] = {}
    for number, ids in enumerate(windows.tolist()):
        run, seen = WindowRun(engine, ids, context, number), TensorTap(context)
        engine.score(ids, context, seen)
        angles = engine.model.base_model.rotary_emb(torch.empty(0), torch.arange(context)[None])
        cos, sin = (part[0, :, : info.head_dim // 2] for part in angles)
        cache, scores = scores_of(seen, info.n_layers, lambda x, angles=(cos, sin): rotated(x, *angles))
        for kept in sorted(budgets):
            for policy in ("window", "h2o", "snapkv") if kept < context else ("everything",):
                places = [chosen(policy, one.get(policy, one["window"]), kept) for one in scores]
                logits = logits_over(engine.model, ids, context, cache, places)
                table = run.rows(policy, logits, run.over_clean)
                found.setdefault((policy, kept), []).append(table)
        print(f"window {number + 1} of {len(windows)}", flush=True)
    engine.close()
    rows = [_row(policy, kept, tables, context, info.head_dim) for (policy, kept), tables in found.items()]
    return {"model": str(folder), "text_hash": sha256(windows.tobytes()), "windows": len(windows), "rows": rows}


def _row(policy: str, kept: int, tables: list, context: int, head_dim: int) -> dict:
    where = [[table[name].to_numpy() for table in tables] for name in ("window", "position", "kl")]
    column = Column.of(*(torch.cat([torch.tensor(part) for part in parts]).numpy() for parts in where))
    kl = Bootstrap(resamples=2000, confidence=0.95, seed=0).mean(column)
    return {"policy": policy, "kept": kept, "bits": bits_of(kept, context, head_dim), "kl": kl.to_json()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--bits", type=float, nargs="+", default=[2, 4])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--eval", type=int, default=128)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    write_json(args.out, measure(args.model, args.text, args.bits, args.context, args.eval, args.windows))


if __name__ == "__main__":
    main()
