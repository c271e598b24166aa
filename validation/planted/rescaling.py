"""Case: the same function written with other channels, which no whitened codec may notice.

Both dimensions of a rotary pair are multiplied by 2^a in Q and by 2^-a in K. Scores, and with them the model, stay
the same bit by bit, since a power of two rounds nothing; but Sigma_q becomes D Sigma_q D, as ill-conditioned as
the exponents are far apart. Sigma_q, the means and the components are then fitted anew, by the calibration's own
functions, and every codec that works in Sigma_q's frame has to code the same numbers as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvlab.calibration.components import ridged_sigma
from kvlab.calibration.load import Calibrated
from kvlab.calibration.metrics import ErrorMetrics
from kvlab.calibration.sigma import second_moment
from kvlab.codecs.base import Site
from kvlab.codecs.block import BlockStream
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.int import IntStream
from kvlab.codecs.klt import KltStream
from kvlab.codecs.shared import components, whitening
from kvlab.codecs.shared.metric import ridged, rotated
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.recipe import Recipe, StreamRecipe
from kvlab.engines.base import Engine, Part
from kvlab.engines.hooks import attention_layers
from kvlab.measure.coding import Coded, Coder
from kvlab.stats.bootstrap import Column
from validation.planted.claims import Case, at_least, exactly, up_to
from validation.planted.ground import EXACT, Ground

CASE = "rescaled channels"
UNIT = "nats per token"
RIDGE = 1e-3
REACH = 5  # the exponents of a head's pairs run from -REACH to REACH
GROWTH = 1e4  # of the condition number, at least
MOVED = 1e-4  # nats per token by which a codec that is not whitened has to notice, or the case could not fail
BITS = 2
BLOCK = BlockStream(
    bits=BITS,
    variance_ratio=1.0,
    block_size=512,
    layout="per_head",
    n_centres=16,
    kmeans_iterations=8,
    pca="randomized",
    rank_fraction=0.5,
    oversample=8,
    power_iterations=2,
    skeleton="fp16",
    outlier_threshold=2.0,
    share_basis=False,
    whiten=True,
    codebook="gaussian",
    seed=0,
)
WHITENED: dict[str, tuple[StreamRecipe, str]] = {
    "`block`": (BLOCK, "pre_rope"),
    "`block` after RoPE": (BLOCK, "post_rope"),
    "`klt`": (KltStream(bits=BITS), "pre_rope"),
    "`hadamard+center+whiten`": (HadamardStream(bits=BITS, center=True, whiten=True), "pre_rope"),
    "`int+center+whiten`": (IntStream(bits=BITS, center=True, whiten=True), "pre_rope"),
}
CONTROL = "`int` without whitening"
CODECS = WHITENED | {CONTROL: (IntStream(bits=BITS), "pre_rope")}
PROTOCOLS = ("in_forward", "snapshot")


@dataclass
class Writing:
    """The model in one writing of its channels.

    Parameters
    ----------
    condition : float64 array [layers, heads]
        Of Sigma_q, without a ridge.
    logits : list of Tensor
        Clean logits of the scored windows.
    kl : dict of tuple of str to list of array
        KL of every token by codec and protocol, window by window.
    decoded : dict of tuple of str to list of (int, Tensor)
        Layer and decoded K by codec and protocol, in the order of coding.
    """

    condition: np.ndarray
    logits: list[Tensor] = field(default_factory=list)
    kl: dict[tuple[str, str], list[np.ndarray]] = field(default_factory=dict)
    decoded: dict[tuple[str, str], list[tuple[int, Tensor]]] = field(default_factory=dict)


class KeepingCoder(Coder):
    """A coder that keeps what was decoded."""

    def __init__(self, *given):
        super().__init__(*given)
        self.decoded: list[tuple[int, Tensor]] = []

    def _code(self, x: Tensor, site: Site) -> Coded:
        coded = super()._code(x, site)
        self.decoded.append((site.layer, coded.tensor))
        return coded


ABOUT = (
    "Both dimensions of a rotary pair are multiplied by a power of two in Q and divided by it in K, in the model's"
    " weights. The function stays, bit by bit, and Sigma_q becomes ill-conditioned. Calibrated anew, every codec that"
    " whitens must code the same numbers; one that does not must notice, or the case could not fail."
)


def case(ground: Ground) -> Case:
    """The model as it is against the model rewritten."""
    kept = calibration_pass(ground)
    factors = {layer: factor(kept[layer]["q"], ground) for layer in ground.layers}
    before = written(ground, kept)
    with rescaled(ground.engine, factors):
        after = written(ground, calibration_pass(ground))
    windows, tokens = len(before.logits), sum(map(len, before.logits))
    apart = max(float((a - b).abs().max()) for a, b in zip(before.logits, after.logits, strict=True))
    growth = float((after.condition / before.condition).min())
    found = [
        at_least(CASE, "least growth of cond(Σ_q) over layers and heads", "times", GROWTH, growth),
        up_to(CASE, "logits before and after: largest difference", "logits", 0.0, apart, 0.0, windows, tokens),
    ]
    for codec, protocol in before.kl:
        name = f"{codec}, {protocol}"
        difference = apart_by_token(before.kl[codec, protocol], after.kl[codec, protocol])
        if codec == CONTROL:
            moved = float(difference.sums.sum() / difference.counts.sum())
            found.append(at_least(CASE, f"{name}: difference in KL", UNIT, MOVED, moved))
            continue
        worst = counterpart(before.decoded[codec, protocol], after.decoded[codec, protocol], factors)
        found.append(exactly(CASE, f"{name}: difference in KL", UNIT, 0.0, difference))
        name = f"{name}: decoded K, scaled back: largest difference"
        found.append(up_to(CASE, name, "values", 0.0, worst, 0.0, windows, tokens))
    return Case(CASE, ABOUT, found, facts(before, after))


def facts(before: Writing, after: Writing) -> dict[str, float]:
    """How ill-conditioned Sigma_q is in either writing."""
    found = {}
    for name, writing in (("before", before), ("after", after)):
        found[f"least cond(Σ_q) of a head {name}"] = float(writing.condition.min())
        found[f"largest cond(Σ_q) of a head {name}"] = float(writing.condition.max())
    return found


# --------------------------------------------------------------------------------- the two writings


def factor(q: Tensor, ground: Ground) -> Tensor:
    """What a layer's queries are multiplied by: powers of two [head_dim], equal in both dimensions of a rotary pair.

    The stronger a pair is already, the larger its factor, so that the condition number grows as far as it can.
    """
    dim = ground.engine.info.head_dim
    strength = q.double().square().mean((0, 1, 2)).unflatten(0, (2, dim // 2)).sum(0)
    exponents = torch.empty(dim // 2, dtype=torch.float64)
    exponents[strength.argsort().cpu()] = torch.linspace(-REACH, REACH, dim // 2, dtype=torch.float64).round()
    return torch.exp2(exponents).repeat(2).float()


@contextmanager
def rescaled(engine: Engine, factors: dict[int, Tensor]) -> Iterator[None]:
    """The engine's model with its channels rewritten for the length of a `with` block."""
    scale(engine, factors)
    try:
        yield
    finally:
        scale(engine, {layer: 1 / values for layer, values in factors.items()})


@torch.no_grad()
def scale(engine: Engine, factors: dict[int, Tensor]) -> None:
    """Q's channels times the factors and K's divided by them, in the weights that the tap sits after."""
    for layer, attention in enumerate(attention_layers(engine.model, engine.info)):
        for part, values in (("q", factors[layer]), ("k", 1 / factors[layer])):
            module = getattr(attention, f"{part}_norm", None) or getattr(attention, f"{part}_proj")
            for weight in (module.weight, getattr(module, "bias", None)):
                if weight is not None:
                    rows = values.to(weight).repeat(len(weight) // len(values))
                    weight.mul_(rows.reshape(-1, *[1] * (weight.ndim - 1)))


def calibration_pass(ground: Ground) -> dict[int, dict[str, Tensor]]:
    """Q, K and V of the calibration windows by layer and part, [windows, heads, tokens, head_dim]."""
    kept: dict[int, dict[str, list[Tensor]]] = {}

    def tap(layer: int, part: Part, x: Tensor) -> None:
        kept.setdefault(layer, {}).setdefault(part, []).append(x.detach().clone())

    for ids in ground.calib:
        ground.engine.score(ids, len(ids) - 2, tap)
    return {layer: {part: torch.stack(xs) for part, xs in parts.items()} for layer, parts in kept.items()}


def calibrate(ground: Ground, kept: dict[int, dict[str, Tensor]]) -> tuple[Calibrated, np.ndarray]:
    """The calibration, by its own functions, and the condition numbers of Sigma_q [layers, heads]."""
    info = ground.engine.info
    metrics = ErrorMetrics(info, len(ground.calib[0]))
    whiteners, after_rope, fitted, condition = {}, {}, {}, []
    for layer, parts in kept.items():
        sigma = second_moment(parts["q"], info.n_kv_heads)
        turned = second_moment(rotated(parts["q"].double(), *metrics.angles[layer]), info.n_kv_heads)
        whiteners[layer], after_rope[layer] = (whitening.fit(moment, RIDGE) for moment in (sigma, turned))
        metric = ridged(metrics.k(layer, ridged_sigma(whiteners[layer])), RIDGE)
        fitted[layer] = components.fit(parts["k"][:, :, : ground.context].transpose(0, 1).contiguous(), metric)
        condition.append(torch.linalg.cond(sigma).numpy())
    names = {"origin": "hf", "corpus_hash": "", "sigma_hash": "", "calibration_hash": ""}
    calibrated = Calibrated(whiteners=whiteners, rotated=after_rope, tables={}, components={"k": fitted}, **names)
    return calibrated, np.stack(condition)


def written(ground: Ground, kept: dict[int, dict[str, Tensor]]) -> Writing:
    """Every codec under both protocols on the first windows."""
    calibrated, condition = calibrate(ground, kept)
    writing, windows = Writing(condition), min(EXACT, len(ground.test))
    coders = {}
    for codec, (stream, placement) in CODECS.items():
        for protocol in PROTOCOLS:
            recipe = Recipe(k=stream, v=IdentityStream())
            settings = {"protocol": protocol, "placement": placement, "windows": windows, "stream": "k"}
            coders[codec, protocol] = KeepingCoder(ground.cell(codec, recipe, **settings), calibrated)
    for window in range(windows):
        run = ground.run(window)
        writing.logits.append(run.reference)
        for key, coder in coders.items():
            rows = run.measured(coder.cell, coder)
            writing.kl.setdefault(key, []).append(rows["kl"].to_numpy())
    for key, coder in coders.items():
        coder.refuse_idle()
        writing.decoded[key] = coder.decoded
    return writing


# ---------------------------------------------------------------------------------- the comparison


def apart_by_token(before: list[np.ndarray], after: list[np.ndarray]) -> Column:
    """Absolute differences, token by token, so that none can make up for another."""
    values = np.abs(np.stack(before) - np.stack(after))
    windows, tokens = values.shape
    return Column.of(np.repeat(np.arange(windows), tokens), np.tile(np.arange(tokens), windows), values.ravel())


def counterpart(before: list[tuple[int, Tensor]], after: list[tuple[int, Tensor]], factors: dict[int, Tensor]) -> float:
    """Largest difference between decoded K and the rewritten model's decoded K, scaled back."""
    return max(
        float((x - y * factors[layer].to(y)).abs().max()) for (layer, x), (_, y) in zip(before, after, strict=True)
    )
