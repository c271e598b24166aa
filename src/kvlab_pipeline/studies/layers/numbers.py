"""Which layers a codec's cost comes from: each layer coded alone, each left out, and whether the layers add up.

Every KL is net of the identity cell of the same engine, dtype and protocol. A sum over layers would otherwise
count the engine's own noise once per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from kvlab.codecs.block.studied import coded_layers
from kvlab.core.params import Params
from kvlab.stats.bootstrap import Bootstrap, Column, Estimate
from kvlab.stats.multiple import benjamini_hochberg, sign_flip_p, sign_flip_two_sided_p
from kvlab_pipeline.studies.columns import added, divides, net_kl, subtracted
from kvlab_pipeline.studies.estimates import sides
from kvlab_pipeline.studies.gather import comparable
from kvlab_pipeline.studies.measured import Measured, Results
from kvlab_pipeline.studies.tidy import BITS, NATS, PROBABILITY, RATIO, Compared, Estimand, Level, Several

# Single layers, and whether their costs add up.
LAYERS = Several(
    {
        "engine": Level(),
        "protocol": Level(),
        "stream": Level(),
        "kind": Level("only: this layer and nothing else is coded; but: all layers, minus all layers without this one"),
        "layer": Level(),
        "boundary": Level(),
        "label": Level(),
        "cell_id": Level(),
        "kl": Estimand(NATS, "net of the identity cell's"),
        "p_value": Estimand(PROBABILITY),
        "q_value": Estimand(
            PROBABILITY, "corrected for the layers of one engine, protocol, stream and kind (Benjamini and Hochberg)"
        ),
        "q_stands_out": Estimand(
            PROBABILITY, "of the layer's cost against the mean over layers; null where there is one layer"
        ),
        "bits_per_value": Estimand(BITS),
    }
)

ADDITIVITY = Several(
    {
        "engine": Level(),
        "protocol": Level(),
        "stream": Level(),
        "parts": Level("what is added up: layers, or streams"),
        "joint": Estimand(NATS),
        "sum": Estimand(NATS),
        "ratio": Estimand(RATIO, "joint over sum; null where the sum cannot be told from zero"),
        "interaction": Estimand(NATS, "joint minus sum"),
        "left_out_sum": Estimand(NATS),
        "boundary_excess": Estimand(NATS, "what a boundary layer costs alone minus what another layer does"),
        "compared": Compared(),
    }
)

PARTS = {"layers": LAYERS, "additivity": ADDITIVITY}

ONLY, BUT = "only", "but"


@dataclass(frozen=True)
class StreamCells:
    """The cells of one stream under one engine and protocol.

    Parameters
    ----------
    only : tuple of Measured
        Each layer alone, by layer.
    but : tuple of Measured
        All layers but one, by the one; empty when there is one layer only, or none is left out.
    joint : Measured
        All layers.
    """

    only: tuple[Measured, ...]
    but: tuple[Measured, ...]
    joint: Measured

    @classmethod
    def of(cls, params: Params, results: Results, engine: str, protocol: str, stream: str) -> StreamCells:
        """Found by their layers: with two layers, one alone *is* all but the other."""
        found = results.select("layers", "codec", engine=engine, protocol=protocol, stream=stream)
        comparable(found, {"layers"})
        by_layers = {measured.cell.layers: measured for measured in found}
        everything = tuple(range(params.model.n_layers))
        rests = [tuple(j for j in everything if j != i) for i in everything]
        return cls(
            only=tuple(by_layers[i,] for i in everything),
            but=tuple(by_layers[rest] for rest in rests if rest) if params.layers.left_out else (),
            joint=by_layers[everything],
        )


# ----------------------------------------------------------------------------------- single layers


def layer_entries(params: Params, results: Results, boot: Bootstrap) -> list[dict]:
    """What each layer costs alone (``only``) and on top of all the others (``but``).

    `kl` is, for ``only``, the KL of coding that layer and nothing else; for ``but``, the KL of coding all layers
    minus that of coding all but this one. The q-values correct for the layers of one engine, protocol, stream and
    kind (Benjamini & Hochberg 1995).

    KL is never negative, so "no effect" cannot mean KL = 0: the null hypothesis of ``only`` is that the cell is
    exchangeable, window by window, with the identity cell, against costing more. That of ``but`` is that coding
    the layer too is exchangeable with leaving it out, against either direction, for the errors of two layers can
    cancel. Where the floor is exactly zero, as of an engine that repeats itself to the last bit, every codec that
    does anything is told from the identity cell; so `q_value` of ``only`` then says that a codec fired, and no more.

    `q_stands_out` asks what tells layers apart: see `standing_out`.
    """
    entries, asked = [], params.layers
    for engine, protocol, stream in product(asked.engines, asked.protocols, asked.streams):
        cells = StreamCells.of(params, results, engine, protocol, stream)
        for kind, measured, effects in kinds(results, cells):
            tests = discovered(boot, effects, two_sided=kind == BUT), standing_out(boot, effects)
            for layer, (one, effect, (p, q), out) in enumerate(zip(measured, effects, *tests, strict=True)):
                entry = {
                    "engine": engine,
                    "protocol": protocol,
                    "stream": stream,
                    "kind": kind,
                    "layer": layer,
                    "boundary": layer not in coded_layers(params),
                    "label": one.cell.label,
                    "cell_id": one.record.cell_id,
                    "kl": boot.mean(effect).to_json(),
                    "p_value": p,
                    "q_value": q,
                    "q_stands_out": out,
                    "bits_per_value": one.record.coding.bits_per_value,
                }
                entries.append(entry)
    return entries


def kinds(results: Results, cells: StreamCells) -> list[tuple[str, tuple[Measured, ...], list[Column]]]:
    """Per kind its cells and each layer's effect, by layer; without ``but`` when there is one layer only."""
    alone = (ONLY, cells.only, [net_kl(results, one) for one in cells.only])
    return [alone, (BUT, cells.but, left_out(cells))] if cells.but else [alone]


def left_out(cells: StreamCells) -> list[Column]:
    """KL of coding all layers minus that of coding all but one, by the one; the floor cancels."""
    joint = cells.joint.column("kl")
    return [subtracted(joint, one.column("kl")) for one in cells.but]


def discovered(boot: Bootstrap, effects: Sequence[Column], two_sided: bool) -> list[tuple[float, float]]:
    """p-value and q-value of each effect, over windows, or over documents where they are known."""
    test = sign_flip_two_sided_p if two_sided else sign_flip_p
    p_values = [test(effect.by_document().sums, draws=boot.resamples, seed=boot.seed) for effect in effects]
    return list(zip(p_values, benjamini_hochberg(p_values).tolist(), strict=True))


def standing_out(boot: Bootstrap, effects: Sequence[Column]) -> list[float | None]:
    """q-value of each layer's cost against the mean of its stream's layers; None where there is one layer only.

    The null hypothesis is that a layer costs what the mean layer does: that its windows' differences from the mean
    over layers, paired by window, are centred on zero, against either direction. The mean counts the layer itself,
    which shrinks every difference alike and leaves p as it is against the mean of the others.
    """
    if len(effects) < 2:
        return [None] * len(effects)
    sums = [effect.by_document().sums for effect in effects]
    mean = sum(sums) / len(sums)
    apart = [one - mean for one in sums]
    p_values = [sign_flip_two_sided_p(one, draws=boot.resamples, seed=boot.seed) for one in apart]
    return benjamini_hochberg(p_values).tolist()


# -------------------------------------------------------------------------------------- additivity


def additivity_entries(params: Params, results: Results, boot: Bootstrap) -> list[dict]:
    """What is coded together against the sum of its parts, paired by window.

    Where `parts` is ``layers``, one stream's layers, or those of both; where it is ``streams``, K in all layers and V
    in all layers.
    `left_out_sum` adds what each layer costs on top of all the others, which is the same sum where the layers do
    not compound. `boundary_excess` is what a boundary layer costs alone minus what another layer does, on average;
    None unless there are both.
    """
    entries = []
    for engine, protocol in product(params.layers.engines, params.layers.protocols):
        place = {"engine": engine, "protocol": protocol}
        streams = {s: StreamCells.of(params, results, engine, protocol, s) for s in params.layers.streams}
        for stream, cells in streams.items():
            singles = [net_kl(results, one) for one in cells.only]
            excess = boundary_excess(params, boot, singles)
            entry = together(boot, net_kl(results, cells.joint), singles) | {
                "left_out_sum": boot.mean(added(left_out(cells))).to_json() if cells.but else None,
                "boundary_excess": excess and excess.to_json(),
                "compared": sides(cells.joint, cells.only),
            }
            entries.append(place | {"stream": stream, "parts": "layers"} | entry)
        if {"k", "v"} <= streams.keys():
            both, apart = streams_together(results, streams["k"], streams["v"])
            entry = together(boot, net_kl(results, both), [net_kl(results, one) for one in apart])
            empty = {"left_out_sum": None, "boundary_excess": None, "compared": sides(both, apart)}
            entries.append(place | {"stream": "kv", "parts": "streams"} | entry | empty)
    return entries


def together(boot: Bootstrap, joint: Column, parts: Sequence[Column]) -> dict:
    """Joint cost, sum of the parts, their ratio and their difference.

    No ratio where the sum cannot be told from zero (`net.divides`).
    """
    total = added(parts)
    ratio = boot.ratio(joint, total) if divides(boot, total) else None
    return {
        "joint": boot.mean(joint).to_json(),
        "sum": boot.mean(total).to_json(),
        "ratio": ratio and ratio.to_json(),
        "interaction": boot.difference(joint, total).to_json(),
    }


def streams_together(results: Results, k: StreamCells, v: StreamCells) -> tuple[Measured, list[Measured]]:
    """The cell of K and V in all layers, and the cells of K and of V in all layers."""
    apart = [k.joint, v.joint]
    same = {name: getattr(apart[0].cell, name) for name in ("engine", "protocol", "layers")}
    (both,) = results.select("layers", "codec", stream="kv", **same)
    comparable([both, *apart], {"stream"})
    return both, apart


def boundary_excess(params: Params, boot: Bootstrap, singles: Sequence[Column]) -> Estimate | None:
    """What a boundary layer costs minus what another layer costs, means over layers; None unless there are both."""
    inner = np.isin(np.arange(len(singles)), coded_layers(params))
    if inner.all() or not inner.any():
        return None
    pull = np.where(inner, -1 / inner.sum(), 1 / (~inner).sum())
    return boot.combine(singles, lambda means: means @ pull)
