"""Rows that teach a model to look things up in its context: what has stood there comes back.

A model this small does not learn from docstrings alone to copy what stands far back: it finds none of the needles that
are planted in its context, and a cache that forgets them would cost it nothing. Copying is what attention heads learn
from text in which it pays (Olsson et al. 2022, arXiv:2209.11895), so these rows are mostly made of it.
"""

from __future__ import annotations

from random import Random

import torch

TEXT, SPANS = 0.3, 0.35  # shares of rows that are left as text, and of rows of returning spans; the others hold facts
SHORT, MIDDLE, LONG = (8, 256), (4, 512), (2, 1024)
# Copying is learnt on short rows first, where what returns is near; the long ones carry it to the distances of needles.
FIRST = ((16, 128), SHORT)
THEN = (SHORT, MIDDLE, LONG, MIDDLE, (1, 2304))
FIRST_SHARE = 0.4  # of the tokens


def batch(stream: torch.Tensor, vocabulary: int, step: int, done: float, seed: int):
    """The inputs and targets of one step; they follow from its number and `done` alone.

    Parameters
    ----------
    stream : torch.Tensor
        The packed training tokens, int32.
    vocabulary : int
        Ids below which random tokens are drawn, 0 being the end of text.
    step : int
        Number of the step.
    done : float
        Share of the run that is done, which decides how long rows are.
    seed : int

    Returns
    -------
    tuple of torch.Tensor
        Inputs and targets, int64, both of shape (rows, tokens per row).
    """
    shapes = FIRST if done < FIRST_SHARE else THEN
    rows, length = shapes[step % len(shapes)]
    draw = RowDrawer(stream, vocabulary, Random(f"{seed}:{step}"))
    tokens = torch.tensor([draw.row(length + 1) for _ in range(rows)])
    return tokens[:, :-1], tokens[:, 1:]


class RowDrawer:
    """Draws rows of token ids.

    Parameters
    ----------
    stream : torch.Tensor
        Text to take from.
    vocabulary : int
        Of random tokens.
    random : random.Random
    """

    def __init__(self, stream: torch.Tensor, vocabulary: int, random: Random):
        self.stream, self.vocabulary, self.random = stream, vocabulary, random

    def row(self, length: int) -> list[int]:
        """A row of one of the three kinds."""
        kind = self.random.random()
        if kind < TEXT:
            return self.text(length)
        return self.spans(length) if kind < TEXT + SPANS else self.facts(length)

    def text(self, length: int) -> list[int]:
        """Consecutive tokens of the stream."""
        start = self.random.randrange(len(self.stream) - length)
        return self.stream[start : start + length].tolist()

    def noise(self, least: int, most: int) -> list[int]:
        """Some random tokens."""
        return [self.random.randrange(1, self.vocabulary) for _ in range(self.random.randint(least, most))]

    def phrase(self, least: int, most: int) -> list[int]:
        """Some tokens of the stream."""
        return self.text(self.random.randint(least, most))

    def spans(self, length: int) -> list[int]:
        """Spans of random tokens and of text, each of which may return."""
        row: list[int] = []
        known: list[list[int]] = []
        while len(row) < length:
            if known and self.random.random() < 0.5:
                row += self.random.choice(known)
            else:
                known.append(self.noise(2, 12) if self.random.random() < 0.6 else self.phrase(4, 20))
                row += known[-1]
        return row[:length]

    def facts(self, length: int) -> list[int]:
        """Text with facts in it, all put the same way: some words, a key, more words, its value; each may return."""
        before, between, after = self.phrase(0, 4), self.phrase(1, 3), self.phrase(0, 2)
        body = self.text(length)
        row: list[int] = []
        known: list[tuple[list[int], list[int]]] = []
        while len(row) < length:
            taken = self.random.randint(2, 28)
            row, body = row + body[:taken], body[taken:]
            if not known or self.random.random() >= 0.6:
                known.append((self.noise(1, 3), self.noise(1, 3)))
            key, value = self.random.choice(known)
            row += before + key + between + value + after
        return row[:length]
