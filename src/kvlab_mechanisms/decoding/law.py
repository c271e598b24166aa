"""What a request samples from: temperature, top-k, top-p, min-p and repetition penalty over a few candidates.

Sources: top-k of Fan et al. 2018 (1805.04833), top-p (nucleus) of Holtzman et al. 2020 (1904.09751), min-p of Nguyen
et al. 2024 (2407.01082), repetition penalty of Keskar et al. 2019 (CTRL, 1909.05858, section 4.1).

Engines apply them in different orders, which are different laws where top-p meets min-p:

- ``hf`` (transformers): penalty, temperature, top-k, top-p, min-p;
- ``vllm``: penalty, temperature, min-p, top-k, top-p.

Selection comes first: what no filter can keep is never sorted. Ties are kept as both engines keep them: all tokens as
likely as the k-th stay. Of equals at the edge of the nucleus as many stay as with the engines; here those of higher id,
there what their sort leaves last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from kvlab.core.errors import NonFinite, ParamsError, UnknownName

Order = Literal["hf", "vllm"]
ORDERS: dict[str, tuple[str, ...]] = {"hf": ("top_k", "top_p", "min_p"), "vllm": ("min_p", "top_k", "top_p")}
OFF = {"top_k": 0, "top_p": 1, "min_p": 0}  # the settings that keep all
FIRST_PREFIX = 64  # candidates of the first look for a nucleus; doubled until they hold its mass


@dataclass(frozen=True)
class Sampling:
    """How one request samples.

    Parameters
    ----------
    temperature : float
        0 is greedy: the token of highest logit, of equals the first.
    top_k : int
        0 keeps all.
    top_p : float in (0, 1]
        The smallest set of most likely tokens with more than this mass is kept; 1 keeps all.
    min_p : float in [0, 1)
        Tokens less likely than this times the most likely one go.
    repetition_penalty : float
        Logits of tokens that were seen are divided by it where positive, multiplied where negative.
    seed : int
        Key of the request's random numbers.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self):
        allowed = {
            "temperature": (self.temperature >= 0 and math.isfinite(self.temperature), "a number from 0"),
            "top_k": (self.top_k >= 0, "a whole number from 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p < 1, "from 0 and below 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0"),
        }
        wrong = {name: text for name, (fine, text) in allowed.items() if not fine}
        if wrong:
            raise ParamsError(*(f"{name} is {getattr(self, name)}; allowed: {text}" for name, text in wrong.items()))


class Law(NamedTuple):
    """Probabilities of a batch's next tokens over the candidates alone.

    Attributes
    ----------
    ids : int64 [rows, candidates]
        Shorter rows begin with copies of id 0 that have no mass.
    p : float64 [rows, candidates]
        Each row sums to 1; 0 for a candidate that a filter took out.
    """

    ids: np.ndarray
    p: np.ndarray

    def dense(self, vocabulary: int) -> Tensor:
        """The same over the whole vocabulary, float64 [rows, vocabulary]."""
        full = np.zeros((len(self.ids), vocabulary))
        np.add.at(full, (np.arange(len(full))[:, None], self.ids), self.p)
        return torch.from_numpy(full)


def law(logits: Tensor, settings: Sequence[Sampling], seen: Sequence[Tensor] | None = None, order: Order = "hf") -> Law:
    """The law that each row's next token is drawn from; a row's does not depend on the other rows.

    Parameters
    ----------
    logits : Tensor [rows, vocabulary]
    settings : sequence of Sampling
        One for each row.
    seen : sequence of int64 Tensor [tokens] or None
        Of each row, for its repetition penalty; an id that occurs twice counts once.
    order : {"hf", "vllm"}

    Raises
    ------
    NonFinite
        A row holds NaN or plus infinity, or nothing but minus infinity.
    """
    if order not in get_args(Order):
        raise UnknownName("sampling order", order, get_args(Order))
    rows = [
        _candidates(_penalised(row, own, seen[i] if seen is not None else None), own, order)
        for i, (row, own) in enumerate(zip(logits, settings, strict=True))
    ]
    width = max(len(row.ids) for row in rows)
    ids, w = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width))
    for i, row in enumerate(rows):
        ids[i, width - len(row.ids) :], w[i, width - len(row.ids) :] = row.ids, row.weights
    rest = np.array([row.rest for row in rows])[:, None]
    size = logits.shape[1]
    for name in ORDERS[order]:
        column = np.array([getattr(own, name) for own in settings])[:, None]
        if (column != OFF[name]).any():
            w, rest = FILTERS[name](w, np.where(column < size, column, 0) if name == "top_k" else column, rest)
    return Law(ids, w / w.sum(axis=1, keepdims=True))


class _Row(NamedTuple):
    """Candidates of a row by rising weight, of equals by rising id, and the mass of the tokens that are none."""

    ids: np.ndarray
    weights: np.ndarray  # of the most likely token 1
    rest: float = 0.0


def _penalised(row: Tensor, own: Sampling, seen: Tensor | None) -> Tensor:
    if own.repetition_penalty == 1 or seen is None or not len(seen):
        return row
    changed, at = row.clone(), torch.as_tensor(seen, device=row.device)
    old = row[at]
    changed[at] = torch.where(old > 0, old / own.repetition_penalty, old * own.repetition_penalty)
    return changed


def _candidates(z: Tensor, own: Sampling, order: Order) -> _Row:
    """The tokens that may survive: by top-k, else by min-p where it comes before top-p, else by the nucleus."""
    if own.temperature == 0:
        best = z.argmax()
        _peak(z[best])
        return _Row(best.cpu().numpy()[None], np.ones(1))
    if 0 < own.top_k < len(z):
        edge, ids = z.topk(own.top_k + 1)  # one more than asked for tells whether others tie with the last
        tied = edge[-1] == edge[-2]
        return _sorted(z, torch.nonzero(z >= edge[-2])[:, 0] if tied else ids[:-1], own, _peak(edge[0]))
    peak = _peak(z.max())
    if own.min_p > 0 and (order == "vllm" or own.top_p == 1):
        # a rounding below the edge: the filter itself decides about what lies on it
        least = peak + own.temperature * math.log(own.min_p) - 1e-5 * (1 + abs(peak))
        return _sorted(z, torch.nonzero(z >= least)[:, 0], own, peak)
    if own.top_p < 1:
        return _nucleus(z, own, peak)
    return _Row(np.arange(len(z)), _weights(z, own, peak))


def _nucleus(z: Tensor, own: Sampling, peak: float) -> _Row:
    """The most likely tokens that together have the mass of top-p, and every equal of the last of them."""
    mass, count = float(_weights(z, own, peak).sum()), FIRST_PREFIX
    while count < len(z):
        top = z.topk(count).values
        if _weights(top, own, peak).sum() > own.top_p * mass * (1 + 1e-9):
            found = _sorted(z, torch.nonzero(z >= top[-1])[:, 0], own, peak)
            return found._replace(rest=max(0.0, mass - float(found.weights.sum())))
        count *= 2
    return _sorted(z, torch.arange(len(z), device=z.device), own, peak)


def _sorted(z: Tensor, ids: Tensor, own: Sampling, peak: float) -> _Row:
    """These tokens as candidates."""
    weights, ids = _weights(z[ids], own, peak), ids.cpu().numpy()
    rising = np.lexsort((ids, weights))
    return _Row(ids[rising], weights[rising])


def _weights(z: Tensor, own: Sampling, peak: float) -> np.ndarray:
    r""":math:`e^{(z - \max z) / T}`, float64."""
    return z.detach().to("cpu", torch.float64, copy=True).sub_(peak).div_(own.temperature).exp_().numpy()


def _peak(value: Tensor) -> float:
    peak = float(value)
    if not math.isfinite(peak):
        raise NonFinite(f"the greatest logit is {peak}; a token cannot be drawn from that")
    return peak


def _top_k(w: np.ndarray, k: np.ndarray, rest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All as heavy as the k-th; rows rise, so it stands k places before the end."""
    edge = np.take_along_axis(w, np.maximum(w.shape[1] - k, 0) % w.shape[1], axis=1)
    return np.where((k == 0) | (w >= edge), w, 0), np.where(k > 0, 0, rest)


def _top_p(w: np.ndarray, p: np.ndarray, rest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What stands above the lightest 1 - p of the mass; the heaviest in any case."""
    below = rest + np.cumsum(w, axis=1)
    keep = (below / below[:, -1:] > 1 - p) | (p == 1)
    keep[:, -1] = True
    return np.where(keep, w, 0), np.where(p < 1, 0, rest)


def _min_p(w: np.ndarray, share: np.ndarray, rest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At least this share of the heaviest."""
    return np.where(w >= share * w.max(axis=1, keepdims=True), w, 0), rest


FILTERS = {"top_k": _top_k, "top_p": _top_p, "min_p": _min_p}
