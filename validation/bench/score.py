"""Error, bytes and distance to the limit of one codec on one sample."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from kvlab.codecs.base import Site, StreamCalibration
from kvlab.codecs.shared.components import FLOOR
from kvlab.codecs.shared.grouping import block_diagonal, heads_together, joined, parted
from kvlab.codecs.shared.seeding import generator
from kvlab.core.errors import UserError
from validation.bench.sources import StreamSample
from validation.bench.subjects import BenchCodec, BenchCoder, calibrate
from validation.limit import theory as limit


@dataclass(frozen=True)
class Run:
    """What coding some windows gave.

    Parameters
    ----------
    error : Tensor
        Mean squared error per value of each group of heads, weighted.
    bits, index : float
        Bits per value: real ones, and of the indices alone.
    loss : float or None
        What the quantiser loses on the source that it was made for, if that is known.
    """

    error: Tensor
    bits: float
    index: float
    loss: float | None


def code(coder: BenchCoder, windows: Tensor, sample: StreamSample, weight: Tensor | None) -> Run:
    """Code windows [windows, heads, tokens, head_dim] one by one."""
    errors, size, index = [], 0.0, 0.0
    half = None if weight is None else limit.root(weight)
    for number, x in enumerate(windows):
        coded = coder.encode(x, Site(number, sample.layer, sample.stream))
        error = coder.decode(coded).double() - x.double()
        weighted = error if half is None else error @ half
        errors.append(weighted.square().mean((-2, -1)))
        size += coder.nbytes(coded)
        index += coder.index_bits(coded, x.numel())
    groups = groups_of(windows)
    error = torch.stack(errors).mean(0).unflatten(0, (groups, -1)).mean(1)
    return Run(error, 8 * size / windows.numel(), index / len(windows), coder.known_loss(coded))


def groups_of(windows: Tensor) -> int:
    """Groups of heads [windows, heads, tokens, head_dim] that the limit is that of (`codecs.shared.grouping`)."""
    _, heads, _, head_dim = windows.shape
    return heads // heads_together(heads, head_dim)


def joint_spectrum(rows: Tensor, weight: Tensor | None, groups: int) -> Tensor:
    """That of rows [heads, n, head_dim] whose heads are joined in groups, float64 [groups, width].

    No value is below what rounding leaves: heads that together are wider than the model's hidden state have directions
    in which nothing lies, and their limit at any error is no number.
    """
    weight = None if weight is None else block_diagonal(weight, groups)
    found = limit.spectrum(limit.covariance(joined(rows, groups)), weight)
    return torch.maximum(found, FLOOR * found.mean(-1, keepdim=True))


class Scorer:
    """A sample with everything that does not depend on the codec, fitted once.

    The calibrations are three: on the calibration part, on the scored part itself, and on the Gaussian twin
    of the scored part.

    Parameters
    ----------
    sample : Sample
    ridge : float
        Of Sigma_q, times its own diagonal.
    losses : dict
        Shared by the scorers of a source: what quantisers lose on white Gaussian rows, by codec and shape.
    """

    def __init__(self, sample: StreamSample, ridge: float, losses: dict | None = None):
        self.losses = {} if losses is None else losses
        self.sample, (_, self.heads, _, self.head_dim) = sample, sample.scored.shape
        rows, groups = pooled(sample.scored), groups_of(sample.scored)
        self.spectrum = joint_spectrum(rows, sample.weight, groups)
        twin = limit.gaussian_twin(joined(rows, groups), generator("bench twin", sample.layer, sample.stream))
        self.twin = unpooled(parted(twin, self.heads), sample.scored)
        self.fits = {
            "calib": calibrate(sample.calib, sample, sample.calib_weight, ridge),
            "scored": calibrate(sample.scored, sample, sample.weight, ridge),
            "twin": calibrate(self.twin, sample, sample.weight, ridge),
        }

    def coder(self, subject: BenchCodec, fit: StreamCalibration | None = None) -> BenchCoder:
        """The subject's codec, calibrated on the calibration part if on nothing else."""
        return subject.coder(self.sample.stream, self.head_dim, fit or self.fits["calib"])

    def score(self, subject: BenchCodec) -> dict:
        """Bits, error and the split of the excess, means over groups of heads; None where there is no error at all."""
        sample, weight = self.sample, self.sample.weight
        run = code(self.coder(subject), sample.scored, sample, weight)
        found = {"layer": sample.layer, "stream": sample.stream, "bits": run.bits, "index_bits": run.index}
        if not run.error.min() > 0:
            return found | {"nmse_db": None, "above_db": None} | dict.fromkeys(("excess", *limit.PARTS))
        found["nmse_db"] = decibels(run.error.mean() / self.spectrum.mean())
        found["above_db"] = limit.decibels_above(self.spectrum, run.error, run.bits).mean().item()
        return found | asdict(self.split(subject, run))

    def split(self, subject: BenchCodec, run: Run) -> limit.ExcessBits:
        """Where the bits above the limit go."""
        sample, weight = self.sample, self.sample.weight
        oracle = run
        if subject.calibrated(sample.stream):
            oracle = code(self.coder(subject, self.fits["scored"]), sample.scored, sample, weight)
        twin = code(self.coder(subject, self.fits["twin"]), self.twin, sample, weight)
        return limit.split(
            real=run.bits,
            index=run.index,
            ideal=run.index - (self.white_loss(subject) if twin.loss is None else twin.loss),
            at_twin=self.least(twin),
            at_oracle=self.least(oracle),
            at_scored=self.least(run),
        )

    def white_loss(self, subject: BenchCodec) -> float:
        """What a quantiser of equal bits loses on white Gaussian rows, bits per value."""
        key = (subject.label, self.sample.stream, self.sample.scored.shape)
        if key not in self.losses:
            white = torch.randn(self.sample.scored.shape, generator=generator("bench white")).bfloat16()
            run = code(self.coder(subject.bare(), self.fits["twin"]), white, self.sample, None)
            self.losses[key] = run.index + run.error.mean().log2().item() / 2
        return self.losses[key]

    def least(self, run: Run) -> float:
        """The limit at a run's errors, mean over groups of heads."""
        return limit.rate_at(self.spectrum, run.error).mean().item()


def pooled(windows: Tensor) -> Tensor:
    """[windows, heads, tokens, n] -> float64 [heads, windows * tokens, n]."""
    return windows.double().transpose(0, 1).flatten(1, 2)


def unpooled(rows: Tensor, like: Tensor) -> Tensor:
    """Back to the windows of `like`, in its dtype."""
    return rows.unflatten(1, (like.shape[0], like.shape[2])).transpose(0, 1).contiguous().to(like.dtype)


def decibels(ratio: Tensor) -> float:
    """10 log10."""
    return 10 * ratio.log10().item()


def limit_row(scorer: Scorer) -> dict:
    """What is known of a sample's limit: coding gain, and how far its empirical covariance puts it too low."""
    windows, _, tokens, _ = scorer.sample.scored.shape
    return {
        "layer": scorer.sample.layer,
        "stream": scorer.sample.stream,
        "rows": windows * tokens,
        "dimensions": scorer.spectrum.shape[1],
        "coding_gain": limit.coding_gain(scorer.spectrum).mean().item(),
        "bias": limit.log_det_bias(scorer.spectrum.shape[1], windows * tokens),
    }


def whole(subject: BenchCodec, sample: StreamSample, ridge: float) -> dict:
    """A codec that needs no statistics of the stream, on all tokens at once: as the others' numbers were measured.

    Raises
    ------
    UserError
        When the sample has no such tensor.
    """
    if sample.whole is None:
        raise UserError(f"layer {sample.layer} {sample.stream} has no whole tensor")
    every = replace(sample, calib=sample.whole[None], scored=sample.whole[None])
    fit = calibrate(every.scored, every, sample.weight, ridge)
    run = code(subject.coder(sample.stream, sample.whole.shape[-1], fit), every.scored, every, sample.weight)
    spectrum = joint_spectrum(pooled(every.scored), sample.weight, groups_of(every.scored))
    return {
        "layer": sample.layer,
        "stream": sample.stream,
        "bits": run.bits,
        "nmse_db": decibels(run.error.mean() / spectrum.mean()),
    }
