"""Documents as one stream of tokens, and the stream as batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

SHORT, MIDDLE, LONG = (8, 512), (4, 1024), (2, 2304)  # (rows, tokens per row)
# One after the other. Short rows are cheap; the long ones teach the distances of long evaluations.
SHAPES = (SHORT, SHORT, MIDDLE, SHORT, SHORT, MIDDLE, SHORT, LONG)


def pack(tokenizer, texts: Sequence[str]) -> torch.Tensor:
    """Join texts into one stream: end-of-text, document, end-of-text, document, ..., end-of-text."""
    separator = tokenizer.eos_token_id
    ids = [separator]
    for encoded in tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]:
        ids.extend(encoded)
        ids.append(separator)
    return torch.tensor(ids, dtype=torch.int32)


def batch(stream: torch.Tensor, step: int, seen: int, shapes: Sequence[tuple[int, int]] = SHAPES):
    """The inputs and targets of one step: the next tokens of the stream, from its start again at its end.

    Parameters
    ----------
    stream : torch.Tensor
        The result of `pack`.
    step : int
        Number of the step, which chooses the shape.
    seen : int
        Tokens already trained on, which choose the place; no other state is needed to resume.
    shapes : sequence of (int, int)
        Rows and tokens per row, in turn.

    Returns
    -------
    tuple of torch.Tensor
        Inputs and targets, both of shape (rows, tokens per row).
    """
    rows, length = shapes[step % len(shapes)]
    places = torch.arange(seen, seen + rows * length + 1) % len(stream)
    tokens = stream[places].long()
    return tokens[:-1].view(rows, length), tokens[1:].view(rows, length)
