"""A linear probe on token counts or hidden states: a meter of drift between two runs, and nothing that moderates.

Multinomial logistic regression (Bishop 2006, section 4.3.4), trained by L-BFGS on labelled features x, calibrated by
one temperature (Guo et al. 2017, 1706.04599, section 4.2):

.. math:: p = \\mathrm{softmax}\\big((W x + b) / T\\big), \\qquad
    \\min_{W, b} \\; \\sum_n -\\log p_{y_n}(x_n) + \\tfrac{\\lambda}{2} \\|W\\|^2

A probe that is read on a model's run with its exact cache and on one with a coded cache says how far the codec moved
what the probe was trained to see: by |difference| of its logits, and by how often its verdict flips.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvlab.core.errors import CalibrationMismatch, Fault, StorageError
from kvlab.core.records import atomic, from_header, sha256, to_header

FORMAT = "kvlab-probe"


@dataclass(frozen=True)
class LinearProbe:
    """What was trained.

    Attributes
    ----------
    weight : float64 Tensor [classes, features]
    bias : float64 Tensor [classes]
    temperature : float
    data : str
        Digest of the features and labels that it was trained on.
    """

    weight: Tensor
    bias: Tensor
    temperature: float
    data: str

    def logits(self, x: Tensor) -> Tensor:
        """Calibrated logits [..., classes] of features [..., features].

        Raises
        ------
        CalibrationMismatch
            The features are not those of the training.
        """
        if x.shape[-1] != self.weight.shape[1]:
            raise CalibrationMismatch(
                f"the probe reads {self.weight.shape[1]} features, {x.shape[-1]} were given",
                code="calibration.other-features",
            )
        return (x.to(self.weight) @ self.weight.T + self.bias) / self.temperature

    def of_tokens(self, ids: Tensor) -> Tensor:
        """`logits` of `counted` [classes], from the rows of the tokens that are there.

        Parameters
        ----------
        ids : int64 Tensor [tokens]
            A text, at least one token of it; each of them is a feature of the training.
        """
        return (self.weight.index_select(1, ids).mean(1) + self.bias) / self.temperature

    def probabilities(self, x: Tensor) -> Tensor:
        """Of the classes; they sum to 1."""
        return self.logits(x).softmax(-1)

    def verdicts(self, x: Tensor, category: int, threshold: float = 0.5) -> Tensor:
        """Whether a class is more probable than a threshold."""
        return self.probabilities(x)[..., category] > threshold

    def save(self, path: Path) -> None:
        """As safetensors, with the digest of the data and the temperature in its header."""
        about = {"format": FORMAT, "temperature": self.temperature, "data": self.data}
        with atomic(path) as temporary:
            save_file({"weight": self.weight, "bias": self.bias}, temporary, to_header(about))

    @classmethod
    def load(cls, path: Path) -> LinearProbe:
        """What `save` wrote; `StorageError` for anything else: there is no probe that was not trained."""
        try:
            with safe_open(path, "pt") as file:
                about = from_header(file.metadata())
                if about.get("format") == FORMAT:
                    weight, bias = file.get_tensor("weight"), file.get_tensor("bias")
                    return cls(weight, bias, about["temperature"], about["data"])
        except (OSError, SafetensorError, ValueError, AttributeError):
            pass
        raise StorageError(
            f"{path} is no trained probe; train one with fit_probe and LinearProbe.save", code="storage.no-probe"
        )


def fit_probe(x: Tensor, y: Tensor, ridge: float = 1.0, held: tuple[Tensor, Tensor] | None = None) -> LinearProbe:
    """Train a probe.

    Parameters
    ----------
    x : Tensor [samples, features]
    y : int64 Tensor [samples]
        Classes from 0, each of which occurs.
    ridge : float
        lambda above: one over scikit-learn's C.
    held : (Tensor, Tensor) or None
        Features and labels that calibrate it; without them the temperature is 1.

    Raises
    ------
    Fault
        Fewer than two classes, a class without samples, or no convergence.
    """
    x, y = x.to(torch.float64), y.to(torch.int64)
    counts = torch.bincount(y) if len(y) else y
    if len(counts) < 2 or not counts.all():
        raise Fault(
            f"a probe needs samples of each of at least two classes; counts are {counts.tolist()}",
            code="fault.too-few-classes",
        )
    weight = torch.zeros(len(counts), x.shape[1], dtype=torch.float64)
    bias = torch.zeros(len(counts), dtype=torch.float64)

    def loss() -> Tensor:
        told = torch.nn.functional.cross_entropy(x @ weight.T + bias, y, reduction="sum")
        return told + ridge / 2 * weight.square().sum()

    _minimise(loss, [weight, bias])
    data = sha256(x.numpy().tobytes(), y.numpy().tobytes())
    temperature = _temperature(held[0].to(torch.float64) @ weight.T + bias, held[1]) if held else 1.0
    return LinearProbe(weight, bias - bias.mean(), temperature, data)


def _temperature(logits: Tensor, y: Tensor) -> float:
    """Of the least cross-entropy."""
    log_t = torch.zeros((), dtype=torch.float64)
    _minimise(lambda: torch.nn.functional.cross_entropy(logits / log_t.exp(), y, reduction="sum"), [log_t])
    return float(log_t.exp())


def _minimise(loss, leaves: list[Tensor]) -> None:
    """By L-BFGS, to a gradient of 1e-5 of the loss; the leaves then ask for no gradient."""
    for leaf in leaves:
        leaf.requires_grad_()
    optimiser = torch.optim.LBFGS(
        leaves,
        max_iter=2000,
        tolerance_grad=1e-9,
        tolerance_change=1e-14,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss()
        value.backward()
        return value

    value = optimiser.step(closure)
    closure()
    steepest = max(float(leaf.grad.abs().max()) for leaf in leaves)
    for leaf in leaves:
        leaf.requires_grad_(False)
        leaf.grad = None
    if not steepest <= 1e-5 * (1 + abs(float(value.detach()))):
        raise Fault(f"the probe did not converge: a gradient of {steepest:.1e} is left; scale the features")


def counted(ids: Tensor, vocabulary: int) -> Tensor:
    """Features of a text: the share of each token [vocabulary]."""
    return torch.bincount(ids, minlength=vocabulary).to(torch.float64) / max(1, len(ids))


def expected(logits: Tensor) -> Tensor:
    """Features of what a model is about to say: the mean next-token law of rows of logits [rows, vocabulary]."""
    return logits.to(torch.float64).softmax(-1).mean(0)


@dataclass(frozen=True)
class Drift:
    """What a codec moved of what a probe sees.

    Attributes
    ----------
    logit : float
        Mean absolute difference of the probe's logits, each row's centred: softmax does not see their mean.
    flips : float
        Share of rows whose likeliest class changed.
    """

    logit: float
    flips: float


def drift(probe: LinearProbe, exact: Tensor, coded: Tensor) -> Drift:
    """Between features [rows, features] of a run with the exact cache and of one with the coded."""
    a, b = probe.logits(exact), probe.logits(coded)
    moved = (a - a.mean(-1, keepdim=True)) - (b - b.mean(-1, keepdim=True))
    return Drift(float(moved.abs().mean()), float((a.argmax(-1) != b.argmax(-1)).double().mean()))
