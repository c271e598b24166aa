"""Ranges of characters and of numbers as parts of an automaton of bytes."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab_mechanisms.decoding.schema.parts import Bytes, Either, Part, Repeated, Then, text

DIGITS = (0x30, 0x39)


def utf8(low: int, high: int) -> Part:
    """Characters of code points from low to high, without surrogates, as UTF-8 writes them (RFC 3629, section 4)."""
    found: list[Part] = []
    for begin, end in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)):
        for first, last in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x10FFFF)):
            if max(begin, first) <= min(end, last):
                ends = chr(max(begin, first)).encode(), chr(min(end, last)).encode()
                found += [Bytes(one) for one in sequences(*ends, (0x80, 0xBF))]
    return Either(tuple(found))


def sequences(low: Sequence[int], high: Sequence[int], end: tuple[int, int]) -> list[tuple[tuple[int, int], ...]]:
    """Ranges whose products are all byte sequences between two of one length; bytes after the first are of `end`."""
    if len(low) == 1:
        return [((low[0], high[0]),)]
    if low[0] == high[0]:
        return [((low[0], low[0]), *rest) for rest in sequences(low[1:], high[1:], end)]
    least, most = [end[0]] * (len(low) - 1), [end[1]] * (len(low) - 1)
    first, last, found = low[0], high[0], []
    if list(low[1:]) != least:
        found += [((first, first), *rest) for rest in sequences(low[1:], most, end)]
        first += 1
    if list(high[1:]) != most:
        found += [((last, last), *rest) for rest in sequences(least, high[1:], end)]
        last -= 1
    if first <= last:
        found.append(((first, last), *((end,) * len(least))))
    return found


def integers(low: int | None, high: int | None) -> Part:
    """Whole numbers between two, both included, as JSON writes them: no plus, no leading or negative zero."""
    found: list[Part] = []
    if low is None or low < 0:
        found.append(
            Then((text("-"), naturals(1 if high is None or high >= 0 else -high, None if low is None else -low)))
        )
    if high is None or high >= 0:
        found.append(naturals(max(low or 0, 0), high))
    return Either(tuple(found))


def naturals(low: int, high: int | None) -> Part:
    """Those from `low`, to `high` if there is one."""
    found: list[Part] = []
    last = high if high is not None else 10 ** len(str(low)) - 1
    for count in range(len(str(low)), len(str(last)) + 1):
        begin, end = max(low, 10 ** (count - 1) if count > 1 else 0), min(last, 10**count - 1)
        if begin <= end:
            found += map(Bytes, sequences(str(begin).encode(), str(end).encode(), DIGITS))
    if high is None:
        more = len(str(low))
        found.append(Then((Bytes(((0x31, 0x39), *((DIGITS,) * more))), Repeated(Bytes((DIGITS,))))))
    return Either(tuple(found))
