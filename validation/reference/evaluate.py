"""Perplexity and bits per byte of the reference model on held-out documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from kvlab.core.errors import CorpusError, NonFinite
from validation.reference.stream import pack

WINDOW = 1024


@dataclass(frozen=True)
class HeldOutScore:
    """Held-out quality.

    Attributes
    ----------
    perplexity : float
        exp of the mean loss per predicted token, end-of-text tokens included.
    bits_per_byte : float
        The whole loss in bits, that of end-of-text tokens included, over the UTF-8 bytes of the
        documents; an end-of-text token counts no bytes.
    tokens, bytes : int
        The denominators.
    """

    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: int


@torch.inference_mode()
def evaluate(model, tokenizer, texts: Sequence[str], window: int = WINDOW, rows: int = 4) -> HeldOutScore:
    """Score the model on texts, packed into one stream as in training.

    The stream is cut into windows that predict every token once, each from what precedes it in its
    window. The model is used in the dtype it has; give it in fp32.

    Parameters
    ----------
    model, tokenizer
        The model and its tokenizer.
    texts : sequence of str
        Held-out documents.
    window : int
        Tokens predicted per window.
    rows : int
        Windows per forward pass; it changes nothing but speed.

    Returns
    -------
    Score
        Perplexity, bits per byte and their denominators.
    """
    if not texts:
        raise CorpusError(
            "there are no held-out documents to score the model on; give more documents", code="corpus.no-documents"
        )
    model.eval()
    stream = pack(tokenizer, texts).long()
    nats = 0.0
    for start in range(0, len(stream) - 1, rows * window):
        piece = stream[start : start + rows * window + 1]
        nats += _loss(model, piece[:-1], piece[1:], window)
    if not math.isfinite(nats):
        raise NonFinite("the loss on the held-out documents is not finite")
    tokens, size = len(stream) - 1, sum(len(text.encode()) for text in texts)
    return HeldOutScore(math.exp(nats / tokens), nats / math.log(2) / size, tokens, size)


def _loss(model, inputs: torch.Tensor, targets: torch.Tensor, window: int) -> float:
    if len(inputs) % window:  # the end of the stream: one short row at a time
        rows = [(inputs[at : at + window], targets[at : at + window]) for at in range(0, len(inputs), window)]
    else:
        rows = [(inputs.view(-1, window), targets.view(-1, window))]
    total = 0.0
    for row, wanted in rows:
        logits = model(input_ids=row.view(-1, row.shape[-1]), use_cache=False).logits.float()
        total += functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum").item()
    return total
