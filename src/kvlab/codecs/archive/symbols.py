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

from kvlab.codecs.archive.steps import EMERGENCY, MOST
from kvlab.core.errors import StreamError

QUARTER = 4  # log2 of a quarter octave
LOWEST, HIGHEST = -24, 16  # classes that have a table, in quarter octaves
CLASSES = HIGHEST - LOWEST + 1
LARGEST = 127  # magnitudes below may have a place in a table
RARE = 12  # a share of 2**-12 of the indices of a class are too large for its table
REST = 20  # bits of it
MOST_INDEX = (1 << REST) - 1
MOST_CLASS = HIGHEST + 4 * (REST - 1)
LOW_BITS = (torch.arange(LOWEST, MOST_CLASS + 1) - HIGHEST + 3).clamp(min=0) >> 2
"""Of each class, how many low bits of an index are coded as even."""
TABLES = torch.arange(MOST_CLASS - LOWEST + 1) - 4 * LOW_BITS
"""Of each class the number of its table."""
FIRST_SPLIT = int(TABLES[LOW_BITS > 0].min())  # tables before it have indices without low bits alone
_LOW_BITS, _TABLES = (of_class.numpy().astype(np.uint8) for of_class in (LOW_BITS, TABLES))
EXPONENTS = MOST - EMERGENCY + 1
WORD = np.dtype("<u4")

Coder, models = constriction.stream.stack.AnsCoder, constriction.stream.model
FALLING = [(1 << REST) // ((rest + 1) * (rest + 2)) for rest in range(LARGEST)]
TAIL = models.Categorical(np.array([*FALLING, (1 << REST) // (LARGEST + 1)], dtype=float), perfect=False)
"""Of what a magnitude is beyond its table: r with probability 1 / ((r + 1) (r + 2)), the last for all that is more."""


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
        self._caps = _caps(counts)
        self._tables = [
            models.Categorical(_both_signs(row, int(cap)), perfect=False)
            for row, cap in zip(counts.double(), self._caps, strict=True)
        ]

    def write(self, coder: Coder, index: Tensor, found: Tensor) -> None:
        """Put indices [tokens, width] of such classes onto a stack: last what is read first."""
        order, runs, low = _sorted(found)
        values = index.reshape(-1).numpy()[order]
        for bits, places in reversed(low):
            coder.encode_reverse(values[places] & ((1 << bits) - 1), models.Uniform(1 << bits))
            values[places] >>= bits
        caps = self._caps_of(runs)
        if len(far := np.flatnonzero(np.abs(values) >= caps)):
            _write_rest(coder, np.abs(values[far]) - caps[far])
        values = values.clip(-caps, caps) + caps
        ends = np.cumsum([length for _, length in runs])
        for (number, length), end in zip(reversed(runs), reversed(ends), strict=True):
            coder.encode_reverse(values[end - length : end], self._tables[number])

    def read(self, coder: Coder, found: Tensor) -> Tensor:
        """Take them off again, int32 [tokens, width]: what the tables say, the rest of large ones, low bits."""
        order, runs, low = _sorted(found)
        caps = self._caps_of(runs)
        values = np.concatenate([coder.decode(self._tables[number], length) for number, length in runs]) - caps
        if len(far := np.flatnonzero(np.abs(values) == caps)):
            values[far] += np.sign(values[far]) * _read_rest(coder, len(far))
        for bits, places in low:
            values[places] = (values[places] << bits) | coder.decode(models.Uniform(1 << bits), len(places))
        out = np.empty_like(values)
        out[order] = values
        return torch.from_numpy(out).view(found.shape)

    def _caps_of(self, runs: list[tuple[int, int]]) -> np.ndarray:
        """The largest magnitude in the table of each index, int32, in the order of the runs."""
        numbers, lengths = zip(*runs, strict=True)
        return np.repeat(self._caps[[*numbers]], lengths)


def _sorted(found: Tensor) -> tuple[np.ndarray, list[tuple[int, int]], list[tuple[int, np.ndarray]]]:
    """An order in which the indices of a table stand together; table and length of each run; low bits, and whose."""
    flat = found.reshape(-1).numpy()
    numbers = _TABLES.take(flat)
    order = np.argsort(numbers, kind="stable")
    runs = [(number, length) for number, length in enumerate(np.bincount(numbers).tolist()) if length]
    begins = sum(length for number, length in runs if number < FIRST_SPLIT)
    low = _LOW_BITS.take(flat[order[begins:]])
    return order, runs, [(bits, begins + np.flatnonzero(low == bits)) for bits in np.unique(low).tolist() if bits]


def _write_rest(coder: Coder, rest: np.ndarray) -> None:
    """Put what large magnitudes are beyond their tables onto a stack."""
    if len(larger := rest[rest >= LARGEST]):
        coder.encode_reverse(larger - LARGEST, models.Uniform(1 << REST))
    coder.encode_reverse(rest.clip(max=LARGEST), TAIL)


def _read_rest(coder: Coder, count: int) -> np.ndarray:
    """Take it off again, int32 [count]."""
    rest = coder.decode(TAIL, count)
    if len(larger := np.flatnonzero(rest == LARGEST)):
        rest[larger] += coder.decode(models.Uniform(1 << REST), len(larger))
    return rest


def _caps(counts: Tensor) -> np.ndarray:
    """Of each class the magnitude from which on a table says only that the rest follows, int32 [CLASSES].

    What is larger is rare enough to cost nothing, and a table is searched faster the shorter it is.
    """
    beyond = counts.long().flip(1).cumsum(1).flip(1)  # of this magnitude and all larger ones
    rare = beyond << RARE <= beyond[:, :1]
    rare[:, 0], rare[:, LARGEST] = False, True
    return rare.int().argmax(1).numpy().astype(np.int32)


def _both_signs(counts: Tensor, cap: int) -> np.ndarray:
    """Counts of -cap to cap, float64 [2 cap + 1], of those of magnitudes [LARGEST + 1]; a sign is even."""
    ends = counts[cap:].sum()[None]
    positive = torch.cat((counts[1:cap], ends))
    return torch.cat((positive.flip(0), 2 * counts[:1], positive)).numpy()


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
