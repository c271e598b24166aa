"""Indices as bits: an asymmetric numeral system with whole-number tables, one for each ratio of deviation to step.

A component's index is coded with the table of its class: its deviation, as the calibration expects it, over the step
of its token, in quarter octaves. Encoder and decoder know both before they see an index, so that floating point has no
part in the probabilities. Where a deviation is many steps, the low bits of an index are as good as even, and are coded
as such. The entropy coder is constriction's (Bamler 2022, arXiv 2201.01741).
"""

from __future__ import annotations

import constriction
import numpy as np
import torch
from torch import Tensor

from kvlab.base.errors import StreamError
from kvlab.codec.archive.steps import EMERGENCY, MOST

QUARTER = 4  # log2 of a quarter octave
LOWEST, HIGHEST = -24, 16  # classes that have a table, in quarter octaves
CLASSES = HIGHEST - LOWEST + 1
LARGEST = 127  # magnitudes below have a place in a table; this one says that the rest follows
REST = 20  # bits of it
MOST_INDEX = (1 << REST) - 1
MOST_CLASS = HIGHEST + 4 * (REST - 1)
LOW_BITS = (torch.arange(LOWEST, MOST_CLASS + 1) - HIGHEST + 3).clamp(min=0) >> 2
"""Of each class, how many low bits of an index are coded as even."""
TABLES = torch.arange(MOST_CLASS - LOWEST + 1) - 4 * LOW_BITS
"""Of each class the number of its table."""
SPLIT = list(zip(LOW_BITS.tolist(), TABLES.tolist(), strict=True))
EXPONENTS = MOST - EMERGENCY + 1
WORD = np.dtype("<u4")

Coder, models = constriction.stream.stack.AnsCoder, constriction.stream.model


def classes(spectrum: Tensor, log_step: Tensor) -> Tensor:
    """Deviations over steps in quarter octaves, counted from the lowest, uint8 [tokens, width].

    Parameters
    ----------
    spectrum : Tensor
        log2 of the components' deviations in 64ths, int32 [width].
    log_step : Tensor
        The same of the tokens' steps, int32 [tokens].
    """
    ratio = spectrum[None] - log_step[:, None] + (1 << QUARTER - 1)
    return ((ratio >> QUARTER).clamp(LOWEST, MOST_CLASS) - LOWEST).to(torch.uint8)


class Symbols:
    """Writes and reads the indices of one stream.

    Parameters
    ----------
    counts : Tensor
        How often each magnitude was seen, whole numbers above 0 [CLASSES, LARGEST + 1]; a sign is even.
    """

    def __init__(self, counts: Tensor):
        both = torch.cat((counts[:, 1:].flip(1), 2 * counts[:, :1], counts[:, 1:]), dim=1)
        self._tables = [models.Categorical(row, perfect=False) for row in both.double().numpy()]

    def write(self, coder: Coder, index: Tensor, found: Tensor) -> None:
        """Put indices [tokens, width] of such classes onto a stack: last what is read first."""
        order, runs = _runs(found)
        values = index.reshape(-1).numpy()[order]
        coarse = values.copy()
        for number, run in reversed(runs):
            if bits := SPLIT[number][0]:
                coder.encode_reverse(values[run] & ((1 << bits) - 1), models.Uniform(1 << bits))
                coarse[run] >>= bits
        size = np.abs(coarse)
        if len(rest := size[size >= LARGEST]):
            coder.encode_reverse(rest - LARGEST, models.Uniform(1 << REST))
        coarse = coarse.clip(-LARGEST, LARGEST) + LARGEST
        for number, run in reversed(runs):
            coder.encode_reverse(coarse[run], self._tables[SPLIT[number][1]])

    def read(self, coder: Coder, found: Tensor) -> Tensor:
        """Take them off again, int32 [tokens, width]: what the tables say, the rest of large ones, low bits."""
        order, runs = _runs(found)
        values = np.empty(len(order), dtype=np.int32)
        for number, run in runs:
            values[run] = coder.decode(self._tables[SPLIT[number][1]], run.stop - run.start)
        values -= LARGEST
        if len(far := np.flatnonzero(np.abs(values) == LARGEST)):
            values[far] += np.sign(values[far]) * coder.decode(models.Uniform(1 << REST), len(far))
        for number, run in runs:
            if bits := SPLIT[number][0]:
                values[run] = (values[run] << bits) | coder.decode(models.Uniform(1 << bits), run.stop - run.start)
        out = np.empty_like(values)
        out[order] = values
        return torch.from_numpy(out).view(found.shape)


def _runs(found: Tensor) -> tuple[np.ndarray, list[tuple[int, slice]]]:
    """An order in which equal classes stand together, and the run of each class that there is."""
    flat = found.reshape(-1).numpy()
    ends = np.cumsum(np.bincount(flat))
    starts = np.concatenate(([0], ends[:-1]))
    runs = [(number, slice(a, b)) for number, (a, b) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True))]
    return np.argsort(flat, kind="stable"), [(number, run) for number, run in runs if run.stop > run.start]


class Exponents:
    """Writes and reads the exponents of a layer's tokens.

    Parameters
    ----------
    counts : Tensor
        How often each was seen, above 0 [EXPONENTS].
    """

    def __init__(self, counts: Tensor):
        self._table = models.Categorical(counts.double().numpy(), perfect=False)

    def write(self, coder: Coder, exponent: Tensor) -> None:
        """Put exponents [tokens] onto a stack."""
        coder.encode_reverse((exponent - EMERGENCY).numpy().astype(np.int32), self._table)

    def read(self, coder: Coder, tokens: int) -> Tensor:
        """Take them off again, int64 [tokens]."""
        return torch.from_numpy(coder.decode(self._table, tokens).astype(np.int64)) + EMERGENCY


def packed(coder: Coder) -> bytes:
    """What a stack holds."""
    return coder.get_compressed().astype(WORD).tobytes()


def unpacked(data: bytes | memoryview) -> Coder:
    """A stack of these bytes; `StreamError` when they are none."""
    words = np.frombuffer(data, WORD).astype(np.uint32)
    try:
        return Coder(words)
    except ValueError as error:
        raise StreamError(f"what an archive's entropy coder wrote cannot be read: {error}") from None
