"""From two sets of logits to one record per scored token. The only file of `stats` that needs torch."""

from __future__ import annotations

from functools import cached_property

import torch

from kvlab.core.errors import Fault, NonFinite

ROUNDING = 1e-12
FAR = 300.0  # nats; e to this power, times any probability that float64 holds, is far from its end


@torch.no_grad()
def token_record(
    ref_logits: torch.Tensor, alt_logits: torch.Tensor, labels: torch.Tensor, *, chunk: int = 8
) -> dict[str, torch.Tensor]:
    r"""Compare two predictions of the same labels, token by token, over the full vocabulary.

    With :math:`p = softmax(ref)` and :math:`q = softmax(alt)`,
    :math:`nll = -\log p(label)` and :math:`kl = \sum_v p_v (\log p_v - \log q_v)` (Kullback & Leibler,
    1951), all in float64 and in nats. Rows are taken `chunk` at a time, so the working memory is a few
    times ``chunk x vocabulary x 8`` bytes, whatever the number of tokens.

    `kl` cannot be negative; a result in (-1e-12, 0) is rounding and becomes 0. Anything below is left
    as it is, for the reader of the table to refuse.

    Parameters
    ----------
    ref_logits, alt_logits : Tensor [tokens, vocabulary], any floating dtype
        Row t predicts ``labels[t]``.
    labels : Tensor [tokens], integer
    chunk : int
        Rows that are in float64 at a time.

    Returns
    -------
    dict of CPU tensors [tokens]
        ``label``, ``top1_ref``, ``top1_alt`` int32; ``nll_ref``, ``nll_alt``, ``kl``, ``p_ref_max``
        float64: the columns of ``records.TOKENS`` but for the cell, the window and the position.

    Raises
    ------
    NonFinite
        With the count, when a logit is NaN or infinite.
    Fault
        When shapes do not agree or a label is outside the vocabulary.
    """
    return ReferenceLogits(ref_logits, labels, chunk=chunk).compare(alt_logits)


class ReferenceLogits:
    """A prediction that several others are compared with: its half of `token_record`, computed once.

    Parameters
    ----------
    logits : Tensor [tokens, vocabulary], any floating dtype
        Row t predicts ``labels[t]``.
    labels : Tensor [tokens], integer
    chunk : int
        Rows that are compared at a time; its probabilities are held, ``tokens x vocabulary x 8`` bytes.

    Attributes
    ----------
    logits, labels : Tensor
        As given, the labels as int64 where the logits are.
    itself : dict of CPU tensors [tokens]
        The record of the prediction beside itself.

    Raises
    ------
    NonFinite
        With the count, when a logit is NaN or infinite.
    Fault
        When shapes do not agree or a label is outside the vocabulary.
    """

    @torch.no_grad()
    def __init__(self, logits: torch.Tensor, labels: torch.Tensor, *, chunk: int = 8):
        _check_labels(logits, labels)
        _check_finite(logits, "reference")
        self.logits, self.labels = logits, labels.to(logits.device, torch.int64)
        self._spans = [slice(i, i + chunk) for i in range(0, labels.numel(), chunk)]
        log_p = [torch.log_softmax(logits[span].to(torch.float64), dim=-1) for span in self._spans]
        best = [chunk.max(dim=-1) for chunk in log_p]
        column = self.labels[:, None]
        own = torch.cat([chunk.gather(1, column[span]) for span, chunk in zip(self._spans, log_p, strict=True)])
        self._own = {
            "label": self.labels.to(torch.int32).cpu(),
            "nll_ref": -own[:, 0].cpu(),
            "top1_ref": torch.cat([top for _, top in best]).to(torch.int32).cpu(),
            "p_ref_max": torch.cat([most for most, _ in best]).exp().cpu(),
        }
        self._log_label, self._p = own[:, 0], [chunk.exp_() for chunk in log_p]

    @cached_property
    def itself(self) -> dict[str, torch.Tensor]:
        """What nothing costs."""
        return self.compare(self.logits)

    @torch.no_grad()
    def compare(self, alternative: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `token_record`; `alternative` are logits of the same rows."""
        if alternative.shape != self.logits.shape:
            raise Fault(
                f"logits {list(alternative.shape)}; expected are {list(self.logits.shape)}, as of the reference",
                code="fault.shape",
            )
        _check_finite(alternative, "alternative")
        parts = [self._chunk(i, alternative[span]) for i, span in enumerate(self._spans)]
        return self._own | {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _chunk(self, number: int, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        r"""One chunk's half of the record.

        With :math:`d_v` the difference of the logits less its mean under p, :math:`q_v = p_v e^{d_v} / Z`, so that
        :math:`KL = \log Z = \log(1 + \sum_v p_v (e^{d_v} - 1))`: no difference of two logarithms is rounded, and equal
        logits give 0. Where :math:`e^{d_v}` would leave float64 the sum is the one of the definition.
        """
        span, p = self._spans[number], self._p[number]
        moved = rows.to(p.device, torch.float64, copy=True).sub_(self.logits[span].to(torch.float64))
        moved -= _dot(p, moved)[:, None]
        label = moved.gather(1, self.labels[span][:, None])[:, 0]
        # The exponential less one is rounded to 1e-16, all that is asked of a sum over p, in half the time of `expm1`.
        near = max(abs(float(end)) for end in moved.aminmax()) < FAR
        log_z = _dot(p, moved.exp_().sub_(1)).log1p_() if near else _log_z(self.logits[span], moved)
        record = {
            "nll_alt": log_z - label - self._log_label[span],
            "kl": torch.where(log_z > -ROUNDING, log_z.clamp(min=0), log_z),
            "top1_alt": _top(rows),
        }
        return {name: values.cpu() for name, values in record.items()}


def _log_z(logits: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """Log of the mean of e to the power of `moved`, under the softmax of `logits`, however far they are apart."""
    return torch.logsumexp(torch.log_softmax(logits.to(torch.float64), dim=-1) + moved, dim=-1)


def _top(rows: torch.Tensor) -> torch.Tensor:
    """Index of the first greatest logit of each row, int32; on a CPU numpy finds it faster."""
    if rows.is_cuda:
        return rows.argmax(dim=-1).to(torch.int32)
    return torch.from_numpy(rows.float().numpy().argmax(axis=-1)).to(torch.int32)


def _dot(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The mean of each row under its own distribution."""
    return torch.linalg.vecdot(p, x)


def _check_labels(logits: torch.Tensor, labels: torch.Tensor) -> None:
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or not labels.numel():
        raise Fault(
            f"logits {list(logits.shape)} with labels {list(labels.shape)}; expected [tokens, vocabulary] and [tokens],"
            " at least one token",
            code="fault.shape",
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= logits.shape[1]:
        raise Fault(
            f"labels run from {low} to {high}, the vocabulary from 0 to {logits.shape[1] - 1}", code="fault.labels"
        )


def _check_finite(logits: torch.Tensor, name: str) -> None:
    if not torch.isfinite(torch.stack(logits.aminmax())).all():  # NaN comes out as NaN
        broken = int((~torch.isfinite(logits)).sum())
        raise NonFinite(f"{broken} of {logits.numel()} {name} logits are NaN or infinite")
