"""Score the real keys of a model by a few of their bits, and see which of the attention that finds.

Every query head is held against its own KV head, in every layer, at several positions of many windows. Intervals are
over windows: the tokens, heads and layers of one text are not independent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from kvlab.cache.hf.rope import find_rotary, turns_by_layer
from kvlab.codecs.shared.seeding import generator
from kvlab.core.errors import ParamsError
from kvlab.core.model import resolve
from kvlab.core.params import Params
from kvlab.core.records import forget, write_json
from kvlab.engines.hf.engine import HFEngine
from kvlab.engines.hooks import attention_layers
from kvlab.engines.registry import start
from kvlab.stats.bootstrap import Bootstrap
from kvlab.text import corpus
from kvlab_pipeline.jobs.measure import provenance
from kvlab_pipeline.studies.bitplanes import recall
from kvlab_pipeline.studies.bitplanes.planes import PlanesVariant, arms, controls, saturated, turned
from kvlab_pipeline.studies.bitplanes.record import Basis, BitplanesRecord
from kvlab_pipeline.studies.bitplanes.summary import Sums, summary
from kvlab_pipeline.studies.kvstore_params import BitplanesStudy

FULL_BITS = 16  # a number of K that is kept whole, as caches are stored


class RankedVariant(NamedTuple):
    """An arm in a basis; `control` tells a mistake of the published study from what is compared."""

    arm: PlanesVariant
    basis: Basis
    control: bool = False


def measure(params: Params, windows_path: Path, out: Path) -> None:
    """Run the first test windows through the model and write the record; `params.kvstore.bitplanes` says what is asked.

    Raises
    ------
    ParamsError
        More windows are asked for than there are, or more positions than a window has after its context.
    CapabilityError
        The model's keys cannot be rotated or grouped, or its rotary embedding cannot be repeated.
    NonFinite
        Attention holds NaN or infinity, or a ranking is constant.
    """
    torch.set_num_threads(params.jobs.threads)
    settings, info = params.kvstore.bitplanes, resolve(params.model)
    windows = corpus.load(windows_path, info.model_hash)
    positions, given = places(settings, windows), ranked_variants(settings)
    forget(out)
    sums = Sums(len(given))
    with closing(start("hf", info, params.kvstore.dtype, max_tokens=windows.test.shape[1])) as engine:
        rows = windows.test[: settings.windows].tolist()
        for number, ids in enumerate(tqdm(rows, desc="bit planes", unit="window")):
            for depth, layer in enumerate(layers(engine, ids)):
                said = [scores(one, layer, positions, (number, depth)) for one in given]
                sums.saturation([saturated(one.arm, turned(layer.k, one.basis)) for one in given])
                for position, of_all in zip(positions, torch.stack(said).unbind(2), strict=True):
                    sums.add(number, depth, at(layer, position, of_all, settings))
        record = BitplanesRecord(
            provenance=provenance(engine.info, windows, {}),
            settings=settings,
            dtype=params.kvstore.dtype,
            layers=info.n_layers,
            heads=info.n_heads,
            kv_heads=info.n_kv_heads,
            head_dim=info.head_dim,
            positions=positions,
            confidence=params.stats.confidence,
            spent=spent(settings, positions),
            **summary(sums, given, settings, info.head_dim, Bootstrap(**params.stats.model_dump())),
        )
    write_json(out, record.model_dump(mode="json"))


def ranked_variants(settings: BitplanesStudy) -> list[RankedVariant]:
    """Every arm in every basis in which it differs, then the controls."""
    found = [RankedVariant(arm, "rotated") for arm in arms(settings.groups, FULL_BITS)]
    raw = [RankedVariant(one.arm, "raw") for one in found if one.arm.name not in ("random", "full")]
    wrong = [*controls(), PlanesVariant("full, KV head 0", FULL_BITS, lambda keys: keys[:1].expand_as(keys))]
    return [*found, *raw, *(RankedVariant(arm, "rotated", control=True) for arm in wrong)]


def places(settings: BitplanesStudy, windows: corpus.TokenWindows) -> tuple[int, ...]:
    """Positions of the queries: the first and the last token after the context, and others evenly between them."""
    available = len(windows.test)
    if settings.windows > available:
        raise ParamsError(
            f"{settings.windows} windows are asked for, and there are {available}", code="params.too-few-windows"
        )
    if settings.queries > windows.eval:
        raise ParamsError(
            f"{settings.queries} positions are asked for, and a window has {windows.eval}",
            code="params.too-few-positions",
        )
    last = windows.test.shape[1] - 1
    return tuple(np.linspace(windows.context, last, settings.queries).round().astype(int).tolist())


def scores(one: RankedVariant, layer: Layer, positions: Sequence[int], place: tuple[int, int]) -> Tensor:
    """What an arm says of every token to every query, later tokens included; float64 [q_heads, queries, tokens].

    `place` is the window and the layer, which the random arm draws by.
    """
    q = layer.q[:, list(positions)]
    if one.arm.read is None:
        return torch.rand(
            *q.shape[:2], layer.q.shape[1], dtype=torch.float64, generator=generator("random arm", *place)
        )
    return turned(q, one.basis) @ layer.own(one.arm.read(turned(layer.k, one.basis))).mT


def at(layer: Layer, position: int, said: Tensor, settings: BitplanesStudy) -> tuple[Tensor, Tensor, Tensor]:
    """All numbers of one query position: of the arms, of the best choice of chunks, and of attention itself.

    Parameters
    ----------
    said : Tensor
        [arms, q_heads, tokens]; what is said of tokens after the position is not looked at.

    Returns
    -------
    tuple of Tensor
        float64 [arms, q_heads, numbers] in the order of `summary.arm_record`, [q_heads, budgets], and [q_heads, 2],
        entropy (nats) and largest weight.
    """
    n, size, shares = position + 1, settings.chunk_tokens, settings.kept
    logits, weights = layer.logits(position), layer.weights(position)
    said = said[..., :n]
    chunk_mass = recall.by_chunk(weights, size, "sum", 0.0)
    chunks = recall.by_chunk(said, size, "amax", -torch.inf)
    must = recall.forced(n, settings.sinks, settings.recent)
    numbers = [
        recall.spearman(said, logits)[..., None],
        recall.recalled(said, weights, shares),
        recall.recalled(chunks, chunk_mass, shares),
        recall.recalled_with(must, said, weights, shares),
        recall.needed(said, weights)[..., None],
    ]
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    own = torch.stack([entropy, weights.amax(-1)], dim=-1)
    return torch.cat(numbers, dim=-1), recall.recalled(chunk_mass, chunk_mass, shares), own


def spent(settings: BitplanesStudy, positions: tuple[int, ...]) -> Iterator[dict]:
    """What the variant with forced tokens keeps at each budget; means over the positions."""
    musts = [recall.forced(position + 1, settings.sinks, settings.recent) for position in positions]
    for share in settings.kept:
        counts = [
            (recall.budget(share, len(must)), recall.kept_with(must, share), recall.kept_by_slip(must, share))
            for must in musts
        ]
        means = np.mean(counts, axis=0).tolist()
        yield dict(zip(("budget", "asked", "kept", "slipped"), (share, *means), strict=True))


# Queries and keys of whole windows as attention multiplies them: projected, turned by position, scaled.


@dataclass(frozen=True)
class Layer:
    """One layer over one window.

    Attributes
    ----------
    q : Tensor
        float32 [q_heads, tokens, head_dim], after the rotary embedding.
    k : Tensor
        float32 [kv_heads, tokens, head_dim], after it too. Query head h reads KV head ``h // (q_heads / kv_heads)``.
    scaling : float
        What attention multiplies q . k by.
    """

    q: Tensor
    k: Tensor
    scaling: float

    def own(self, keys: Tensor) -> Tensor:
        """Keys [..., kv_heads, tokens, head_dim] as each query head reads them [..., q_heads, tokens, head_dim]."""
        return keys.repeat_interleave(self.q.shape[0] // self.k.shape[0], dim=-3)

    def weights(self, position: int) -> Tensor:
        """Attention of every head at a position over the tokens up to it, float64 [q_heads, position + 1]."""
        return self.logits(position).softmax(-1)

    def logits(self, position: int) -> Tensor:
        """What the softmax is taken of, float64 [q_heads, position + 1]."""
        keys = self.own(self.k[:, : position + 1]).double()
        return self.scaling * (keys @ self.q[:, position, :, None].double())[..., 0]


def layers(engine: HFEngine, ids: Sequence[int]) -> Iterator[Layer]:
    """The layers of one window in order of depth.

    Parameters
    ----------
    engine : HFEngine
    ids : sequence of int
        Token ids; attention is causal.

    Raises
    ------
    CapabilityError
        When the model's rotary embedding is not one that can be repeated.
    """
    seen: dict[tuple[int, str], Tensor] = {}

    def keep(layer: int, part: str, x: Tensor) -> None:
        if part in "qk":
            seen[layer, part] = x.detach().float().cpu().clone()

    engine.score(ids, len(ids) - 2, keep)
    model = engine.model
    rotary = find_rotary(model, engine.info.head_dim)
    places = torch.arange(len(ids), device=model.device)[None]
    turn_of = turns_by_layer(rotary, places, torch.empty(0, dtype=torch.float32, device=model.device))
    for number, module in enumerate(attention_layers(model, engine.info)):
        (turn,) = turn_of[number]
        q, k = (turn.redo(seen[number, part].to(model.device), 0).cpu() for part in "qk")
        yield Layer(q, k, module.scaling)
