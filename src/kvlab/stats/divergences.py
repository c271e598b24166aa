"""From two sets of logits to one record per scored token. The only file of `stats` that needs torch."""

from __future__ import annotations

import torch

from kvlab.errors import Fault, NonFinite

ROUNDING = 1e-12


@torch.no_grad()
def token_record(
    ref_logits: torch.Tensor, alt_logits: torch.Tensor, labels: torch.Tensor, *, chunk: int = 32
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
    _check_shapes(ref_logits, alt_logits, labels)
    _check_finite(ref_logits, "reference", chunk)
    _check_finite(alt_logits, "alternative", chunk)
    rows = range(0, labels.numel(), chunk)
    parts = [_chunk(*(t[i : i + chunk] for t in (ref_logits, alt_logits, labels))) for i in rows]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _chunk(ref: torch.Tensor, alt: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    labels = labels.to(ref.device, torch.int64)
    log_p = torch.log_softmax(ref.to(torch.float64), dim=-1)
    log_q = torch.log_softmax(alt.to(log_p.device, torch.float64), dim=-1)
    column = labels[:, None]
    p_max, top1_ref = log_p.max(dim=-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    record = {
        "label": labels.to(torch.int32),
        "nll_ref": -log_p.gather(1, column)[:, 0],
        "nll_alt": -log_q.gather(1, column)[:, 0],
        "kl": torch.where(kl > -ROUNDING, kl.clamp(min=0), kl),
        "top1_ref": top1_ref.to(torch.int32),
        "top1_alt": log_q.argmax(dim=-1).to(torch.int32),
        "p_ref_max": p_max.exp(),
    }
    return {name: values.cpu() for name, values in record.items()}


def _check_shapes(ref: torch.Tensor, alt: torch.Tensor, labels: torch.Tensor) -> None:
    if ref.ndim != 2 or ref.shape != alt.shape or labels.shape != ref.shape[:1] or not labels.numel():
        raise Fault(
            f"logits {list(ref.shape)} and {list(alt.shape)} with labels {list(labels.shape)}; "
            "expected [tokens, vocabulary] twice and [tokens], at least one token"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= ref.shape[1]:
        raise Fault(f"labels run from {low} to {high}, the vocabulary from 0 to {ref.shape[1] - 1}")


def _check_finite(logits: torch.Tensor, name: str, chunk: int) -> None:
    wrong = sum(int((~torch.isfinite(rows)).sum()) for rows in logits.split(chunk))
    if wrong:
        raise NonFinite(f"{wrong} of {logits.numel()} {name} logits are NaN or infinite")
