"""Score the real keys of a model by a few of their bits, and see which of the attention that finds.

Every query head is held against its own KV head, in every layer, at several positions of many windows. Intervals are
over windows: the tokens, heads and layers of one text are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor
from tqdm import tqdm

from kvlab.cache.hf.rope import find_rotary, turns_by_layer
from kvlab.codecs.shared.seeding import generator
from kvlab.core.errors import NonFinite, ParamsError
from kvlab.core.model import resolve
from kvlab.core.params import Params
from kvlab.core.records import forget, write_json
from kvlab.engines.hf.engine import HFEngine
from kvlab.engines.hooks import attention_layers
from kvlab.engines.registry import start
from kvlab.stats.bootstrap import Bootstrap, Column, Estimate
from kvlab.text import corpus
from kvlab_pipeline.jobs.measure import provenance
from kvlab_pipeline.studies.bitplanes.planes import PlanesVariant, arms, controls, saturated, turned
from kvlab_pipeline.studies.bitplanes.record import (
    ArmQuantity,
    ArmRecord,
    Basis,
    BitplanesRecord,
    BudgetUse,
    Difference,
    compared_at,
)
from kvlab_pipeline.studies.kvstore_params import BitplanesStudy

DIGITS = 6  # of means that have no interval
MOST = 0.9  # of the mass, of which `needed` says how many tokens hold it


class RankedVariant(NamedTuple):
    """An arm in a basis; `control` tells a mistake of the published study from what is compared."""

    arm: PlanesVariant
    basis: Basis
    control: bool = False


Found = tuple[Tensor, Tensor, Tensor]  # of one query position, see `at`


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
    rows: list[list[list[Found]]] = []  # by window, layer and position
    shares: list[list[float]] = [[] for _ in given]
    with closing(start("hf", info, params.kvstore.dtype, max_tokens=windows.test.shape[1])) as engine:
        texts = tqdm(windows.test[: settings.windows].tolist(), desc="bit planes", unit="window")
        for number, ids in enumerate(texts):
            rows.append([])
            for depth, layer in enumerate(layers(engine, ids)):
                said = torch.stack([scores(one, layer, positions, (number, depth)) for one in given])
                for kept, one in zip(shares, given, strict=True):
                    share = saturated(one.arm, turned(layer.k, one.basis))
                    kept += [] if share is None else [share]
                pairs = zip(positions, said.unbind(2), strict=True)
                rows[-1].append([at(layer, position, of_all, settings) for position, of_all in pairs])
        of_arms, best, own = (stacked(rows, part) for part in range(3))
        bootstrap = Bootstrap(**params.stats.model_dump())
        by_arm = np.moveaxis(of_arms, 3, 4)  # [windows, layers, positions, q_heads, arms, numbers]
        numbers = by_arm.shape[-1]
        means = Means(by_arm.reshape(*by_arm.shape[:4], -1), bootstrap)
        ceiling = Means(best, bootstrap)
        records = [
            arm_record(means, place * numbers, one, settings, info.head_dim, kept)
            for place, (one, kept) in enumerate(zip(given, shares, strict=True))
        ]
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
            spent=list(spent(settings, positions)),
            arms=[found for found, one in zip(records, given, strict=True) if not one.control],
            controls=[found for found, one in zip(records, given, strict=True) if one.control],
            ceiling=[ceiling.measured(i) for i in range(len(settings.kept))],
            differences=list(differences(means, numbers, records, settings)),
            entropy=float(own[..., 0].mean()),
            largest=float(own[..., 1].mean()),
        )
    write_json(out, record.model_dump(mode="json"))


def ranked_variants(settings: BitplanesStudy) -> list[RankedVariant]:
    """Every arm in every basis in which it differs, then the controls."""
    found = arms(settings.groups)
    return [
        *(RankedVariant(arm, "rotated") for arm in found),
        *(RankedVariant(arm, "raw") for arm in found if arm.name not in ("random", "full")),
        *(RankedVariant(arm, "rotated", control=True) for arm in controls()),
    ]


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


def at(layer: Layer, position: int, said: Tensor, settings: BitplanesStudy) -> Found:
    """All numbers of one query position: of the arms, of the best choice of chunks, and of attention itself.

    Parameters
    ----------
    said : Tensor
        [arms, q_heads, tokens]; what is said of tokens after the position is not looked at.

    Returns
    -------
    tuple of Tensor
        float64 [arms, q_heads, numbers] in the order of `arm_record`, [q_heads, budgets], and [q_heads, 2],
        entropy (nats) and largest weight.
    """
    n, size, shares = position + 1, settings.chunk_tokens, settings.kept
    logits, weights = layer.logits(position), layer.weights(position)
    said = said[..., :n]
    chunk_mass = by_chunk(weights, size, "sum", 0.0)
    chunks = by_chunk(said, size, "amax", -torch.inf)
    numbers = [
        spearman(said, logits)[..., None],
        recalled(said, weights, shares),
        recalled(chunks, chunk_mass, shares),
        recalled(said, weights, shares, forced(n, settings.sinks, settings.recent)),
        needed(said, weights)[..., None],
    ]
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    own = torch.stack([entropy, weights.amax(-1)], dim=-1)
    return torch.cat(numbers, dim=-1), recalled(chunk_mass, chunk_mass, shares), own


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


# What scores keep of the attention that was really paid: rank correlation, and mass on what they rank first.


def budget(share: float, n: int) -> int:
    """How many of n a share is: rounded up, so at least one; a hair above a whole number is rounding, not more."""
    return min(n, max(1, math.ceil(share * n - 1e-9)))


def spearman(scores: Tensor, truth: Tensor) -> Tensor:
    """Rank correlation along the last axis, equal numbers sharing the mean of their ranks.

    Pearson's correlation of the ranks (Spearman 1904), which is right with ties, as the formula with squared
    differences is not.

    Parameters
    ----------
    scores : Tensor
        [..., n].
    truth : Tensor
        Broadcast against it.

    Returns
    -------
    Tensor
        float64 [...]; NaN where one side is constant.
    """
    ranks = [rankdata(x.double().numpy(), method="average", axis=-1) for x in (scores, truth)]
    a, b = (x - x.mean(-1, keepdims=True) for x in ranks)
    with np.errstate(invalid="ignore"):
        rho = (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    return torch.from_numpy(np.asarray(rho))


def gained(scores: Tensor, mass: Tensor) -> Tensor:
    """Mass of the highest ranked one, two, ... of n; of equals the first comes first.

    Parameters
    ----------
    scores : Tensor
        [..., n].
    mass : Tensor
        float64, broadcast against it.

    Returns
    -------
    Tensor
        float64 [..., n]; the last one is all of the mass.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return mass.expand(scores.shape).gather(-1, order).cumsum(-1)


def recalled(scores: Tensor, mass: Tensor, shares: Sequence[float], must: Tensor | None = None) -> Tensor:
    """Share of the mass on what is kept at each budget, float64 [..., budgets].

    Tokens that `must` be kept, bool [n], take their part of a budget first, and more than all of it if need be: where
    they leave nothing, they alone are kept.
    """
    if must is None:
        must = torch.zeros(scores.shape[-1], dtype=torch.bool)
    running = gained(scores.masked_fill(must, math.inf), mass)
    kept = [kept_with(must, share) - 1 for share in shares]
    return running[..., kept] / running[..., -1:]


def needed(scores: Tensor, mass: Tensor) -> Tensor:
    """The smallest share of n that holds `MOST` of the mass, float64 [...]."""
    running = gained(scores, mass)
    enough = (running < MOST * running[..., -1:]).sum(-1) + 1
    return enough.double() / scores.shape[-1]


def by_chunk(x: Tensor, size: int, reduce: str, empty: float) -> Tensor:
    """Numbers of tokens [..., n] as numbers of chunks [..., ceil(n / size)]: their "sum" or their "amax"."""
    short = -x.shape[-1] % size
    chunks = torch.nn.functional.pad(x, (0, short), value=empty).unflatten(-1, (-1, size))
    return chunks.sum(-1) if reduce == "sum" else chunks.amax(-1)


def forced(n: int, sinks: int, recent: int) -> Tensor:
    """bool [n]: the first `sinks` and the last `recent` tokens."""
    place = torch.arange(n)
    return (place < sinks) | (place >= n - recent)


def kept_with(must: Tensor, share: float) -> int:
    """Tokens that are kept at a budget: never fewer than are forced."""
    return max(int(must.sum()), budget(share, len(must)))


def kept_by_slip(must: Tensor, share: float) -> int:
    """The same as the published study counted: its slice of the last 0 of an order took all of them."""
    extra = max(0, budget(share, len(must)) - int(must.sum()))
    order = torch.arange(len(must))[~must]
    return int(must.sum()) + len(order[-extra:])


def spent(settings: BitplanesStudy, positions: tuple[int, ...]) -> Iterator[BudgetUse]:
    """What the variant with forced tokens keeps at each budget; means over the positions."""
    musts = [forced(position + 1, settings.sinks, settings.recent) for position in positions]
    for share in settings.kept:
        asked, kept, slipped = np.mean(
            [(budget(share, len(must)), kept_with(must, share), kept_by_slip(must, share)) for must in musts], axis=0
        ).tolist()
        yield BudgetUse(budget=share, asked=asked, kept=kept, slipped=slipped)


# From the numbers of every query to means by head, and to intervals over windows.


def stacked(rows: Sequence[Sequence[Sequence[Found]]], part: int) -> np.ndarray:
    """One part of what `at` found, float64 [windows, layers, positions, ...].

    Raises
    ------
    NonFinite
        A number is NaN or infinite.
    """
    found = np.array([[[at_one[part].numpy() for at_one in layer] for layer in window] for window in rows])
    if not np.isfinite(found).all():
        raise NonFinite("attention or a ranking of its keys holds NaN or infinity", code="non-finite.ranking")
    return found


class Means:
    """Intervals over windows of numbers [windows, layers, positions, q_heads, columns], all in one go."""

    def __init__(self, values: np.ndarray, bootstrap: Bootstrap):
        self.values, self.bootstrap = values, bootstrap
        flat = values.reshape(len(values), -1, values.shape[-1])
        window, place = (index.ravel() for index in np.indices(flat.shape[:2]))
        self.columns = [Column.of(window, place, flat[..., i].ravel()) for i in range(flat.shape[-1])]
        self.overall = bootstrap.combine_many(self.columns, lambda means: means)

    def measured(self, column: int, lowest: float = 0.0) -> ArmQuantity:
        """One column: its interval, and its mean in every layer and head."""
        heads = self.values[..., column].mean((0, 2)).round(DIGITS)
        return ArmQuantity(overall=self.overall[column].within(lowest, 1.0), heads=heads.tolist())

    def difference(self, a: int, b: int) -> Estimate:
        """Column a minus column b, paired."""
        return self.bootstrap.difference(self.columns[a], self.columns[b])


def arm_record(
    means: Means, first: int, one: RankedVariant, settings: BitplanesStudy, head_dim: int, shares: list[float]
) -> ArmRecord:
    """One arm; its columns lie after one another from `first` on, in the order of `at`."""
    budgets = len(settings.kept)
    token, chunk, with_forced = (
        tuple(means.measured(first + 1 + part * budgets + i) for i in range(budgets)) for part in range(3)
    )
    return ArmRecord(
        name=one.arm.name,
        basis=one.basis,
        group=one.arm.group,
        width=one.arm.width(head_dim),
        bits_per_key=one.arm.bits_per_key(head_dim),
        saturated=float(np.mean(shares)) if shares else None,
        spearman=means.measured(first, lowest=-1.0),
        token=token,
        chunk=chunk,
        forced=with_forced,
        needed=means.measured(first + 1 + 3 * budgets),
    )


def differences(
    means: Means, numbers: int, records: Sequence[ArmRecord], settings: BitplanesStudy
) -> Iterator[Difference]:
    """What norms, further bits, the size of a group and the rotation change, at one budget."""
    place = {(one.name, one.group, one.basis): number for number, one in enumerate(records)}
    at = compared_at(settings.kept)
    columns = {"spearman": 0, "token": 1 + at, "chunk": 1 + len(settings.kept) + at}
    for pair in compared(settings.groups):
        a, b = (records[place[key]] for key in pair)
        for what, column in columns.items():
            yield Difference(
                what=what,
                budget=None if what == "spearman" else settings.kept[at],
                a=a.label,
                b=b.label,
                basis=a.basis,
                other_basis=b.basis,
                difference=means.difference(*(place[key] * numbers + column for key in pair)),
            )


def compared(groups: tuple[int, ...]) -> list[tuple[tuple, tuple]]:
    """Pairs of arms, each by its name, group and basis."""
    least, most = min(groups), max(groups)
    grouped = ("sign + norm", "top 2 bits", "3 bits")
    pairs = [((name, least, "rotated"), (name, most, "rotated")) for name in grouped if least != most]
    pairs += [(("sign + norm", least, "rotated"), ("sign", None, "rotated"))]
    pairs += [((a, least, "rotated"), (b, least, "rotated")) for b, a in pairwise(grouped)]
    pairs += [(("full", None, "rotated"), ("3 bits", least, "rotated"))]
    return [*pairs, (("sign", None, "rotated"), ("sign", None, "raw"))]
