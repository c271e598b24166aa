"""The loops that serving spends its time in, compiled by numba: rows of `klt` to components, a tile of tokens at once.

A token's bytes lie together in a page. A tile turns that round: what tokens hold of one component lies side by side, so
that each step is a run over tokens, which a compiler makes vectors of. What torch does in some thirty passes over
arrays (`Planes.unpack`, `Synthesis`, `Tails.read`) is one pass here. vLLM depends on numba; where it is not installed,
nothing imports this module, and torch does all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import float32, int32, uint8, uint16
from numpy.typing import NDArray

from kvlab.codecs.klt.bits import VALUE_BITS
from kvlab.codecs.klt.fields import COUNT_BITS
from kvlab.codecs.klt.reading import IMPOSSIBLE, NO_PLAIN, OK, TOO_MANY
from kvlab.codecs.klt.scales import PLAIN, SCALE_BITS
from kvlab.codecs.klt.vectors_numba import floats_of, look_up, symbols_of, turned_round
from kvlab.codecs.shared.compiled import compiled

TILE = 256  # tokens: their symbols and components stay in a near cache, and a step over them pays its beginning
MANY = 24  # tokens of a tile from which it is sooner to read the bits of all of them
SCALE_END = COUNT_BITS + SCALE_BITS


class Way(NamedTuple):
    """A way between tokens and components.

    Parameters
    ----------
    mean, shift : array
        The first mean, and the way from there to the second one, float32 [groups, width].
    halves : array
        The matrix in float16, as its bits (`codecs.klt.halves`): uint16 [groups, width, width].
    row, column : array
        What its rows and columns are multiplied by, float32 [groups, width].
    """

    mean: NDArray
    shift: NDArray
    halves: NDArray
    row: NDArray
    column: NDArray


class Active(NamedTuple):
    """The components that have bits, in their order, and where their digits lie in a row.

    Of each group two rows of a tile follow its components: the scale that its tokens are coded at, and whether they
    are about the second mean.

    Parameters
    ----------
    component : array
        Which ones of all groups' components, int32 [active].
    row : array
        The row of a tile that each has, int32 [active].
    digit : array
        Where the digits of each begin in the next four, and the last one's end, int32 [active + 1].
    byte, down, mask, up : array
        A digit's byte in a token's row, int32; it is ``(byte >> down & mask) << up`` of the symbol, uint8 [digits].
    values : array
        Those of all components (`codecs.klt.trees.Trees`), float32 [all].
    table : array
        Where the table of each active component begins in them, int64 [active].
    most : array
        The largest symbol of each, int32 [active].
    place : array
        The row of a tile of every component, -1 where it has no bits, int32 [groups * width].
    constant : array
        The value of those without bits, 0 of the others, float32 [groups * width].
    end : array
        The row of a tile that holds a group's scales, int32 [groups].
    """

    component: NDArray
    row: NDArray
    digit: NDArray
    byte: NDArray
    down: NDArray
    mask: NDArray
    up: NDArray
    values: NDArray
    table: NDArray
    most: NDArray
    place: NDArray
    constant: NDArray
    end: NDArray


class Escapes(NamedTuple):
    """Where escapes lie (`codecs.klt.escapes.Tails`), as arrays.

    Parameters
    ----------
    there : bool
        Whether the recipe has them; the rest is empty where not.
    flag_byte, flag_down : array
        Where the bit lies that says that a group's vector is escaped, int32 and uint8 [groups].
    component, place : array
        Where each of their bits lies, int16 and uint8 [groups, bits].
    lost, start : array
        Bits that components give up, uint8, and where the values of what is left begin, int32 [groups, counts, width].
    losing : array
        The components that give up any, int32, of all groups and counts one after the other.
    first_losing : array
        Where those of a group and count begin, and the last one's end, int32 [groups, counts + 1].
    values : array
        Those of all components at every number of known bits, float32 [all].
    scales : array
        float32 [32].
    halves : array
        The number that each 16 bits stand for, float32 [65536].
    index_bits, room : int
        Bits that name a component, and pairs that a vector can hold.
    plain_component, plain_place : array
        Where the bits of a vector without tables lie, int16 and uint8 [groups, bits]; no group where it has too few.
    plain_wide, plain_bits, plain_table : array
        How many coefficients have a bit more, int64 [groups]; bits of those and of the others, int64 [groups, 2]; their
        tables, float32 [groups, 2, most].
    turn, unit, deviation : array
        What the way back to components is made of (`codecs.klt.plain`): the matrix, a coefficient's row after the
        other, float32 [width, width], the same for all layers; float64 [groups]; float32 [groups, width].
    """

    there: bool
    flag_byte: NDArray
    flag_down: NDArray
    component: NDArray
    place: NDArray
    lost: NDArray
    start: NDArray
    losing: NDArray
    first_losing: NDArray
    values: NDArray
    scales: NDArray
    halves: NDArray
    index_bits: int
    room: int
    plain_component: NDArray
    plain_place: NDArray
    plain_wide: NDArray
    plain_bits: NDArray
    plain_table: NDArray
    turn: NDArray
    unit: NDArray
    deviation: NDArray


class Beside(NamedTuple):
    """What escaped vectors hold of components that have no bits: how far it is from their one value.

    Parameters
    ----------
    token, component : array
        Of which token, and which component of all groups, int32 [room].
    value : array
        float32 [room].
    """

    token: NDArray
    component: NDArray
    value: NDArray


@compiled
def first_of(group, a):
    """The first active component of a group."""
    return a.end[group - 1] - 2 * (group - 1) if group else 0


# ------------------------------------------------------------------------------------------- rows to components


@compiled
def _symbols(columns, count, a, e, symbols):
    """Symbols of `count` tokens, and whether each group's vector is escaped, into uint8 [groups * (width + 1), TILE].

    Those of components without bits are not written.
    """
    for group in range(len(e.flag_byte)):
        bytes, down, own = columns[e.flag_byte[group]], e.flag_down[group], symbols[len(a.place) + group]
        for token in range(count):
            own[token] = uint8(bytes[token] >> down) & uint8(1)
    for number in range(len(a.component)):
        first, last = a.digit[number], a.digit[number + 1]
        symbols_of(columns, count, first, last, a.byte, a.down, a.mask, a.up, symbols[a.component[number]])


@compiled
def _numbers(symbols, tokens, component, place, first, last, out):
    """The number of each token whose bits, lowest first, lie at `first` to `last`, into int32 [tokens]."""
    if len(tokens) < MANY:
        out[: len(tokens)] = 0
        for at in range(first, last):
            own, down, up = symbols[component[at]], place[at], at - first
            for number in range(len(tokens)):
                out[number] |= int32((own[tokens[number]] >> down) & 1) << up
        return
    whole = np.zeros(TILE, np.int32)
    for at in range(first, last):
        own, down, up = symbols[component[at]], place[at] & 7, int32(at - first)
        for token in range(TILE):
            whole[token] |= int32(uint8(own[token] >> down) & uint8(1)) << up
    for number in range(len(tokens)):
        out[number] = whole[tokens[number]]


@compiled
def _place(value, group, index, token, a, z, further, count):
    """Put the value of a component into z, or beside it where that has no bits; how many are beside it then."""
    width = len(a.place) // len(a.end)
    row = a.place[group * width + index]
    if row >= 0:
        z[row, token] = value
        return count
    further.token[count], further.component[count] = token, group * width + index
    further.value[count] = value - a.constant[group * width + index]
    return count + 1


@compiled
def _without_tables(symbols, tokens, group, a, e, z, further, count):
    """Put vectors without tables into z: how many values are beside it then, or a fault below 0."""
    if len(tokens) and e.plain_table.shape[0] == 0:
        return -NO_PLAIN
    width, index = len(symbols), np.empty(len(tokens), np.int32)
    vectors = np.zeros((len(tokens), width), np.float32)
    size = np.empty(len(tokens), np.float32)
    if len(tokens):
        _numbers(symbols, tokens, e.component[group], e.place[group], SCALE_END, SCALE_END + VALUE_BITS, index)
    for number in range(len(tokens)):
        size[number] = e.halves[index[number]]
        if not np.isfinite(size[number]):
            return -IMPOSSIBLE
    first = 0
    for row in range(width if len(tokens) else 0):
        narrow = 0 if row < e.plain_wide[group] else 1
        last = first + e.plain_bits[group, narrow]
        _numbers(symbols, tokens, e.plain_component[group], e.plain_place[group], first, last, index)
        first = last
        for number in range(len(tokens)):
            value = e.plain_table[group, narrow, index[number]] * size[number]
            for at in range(width):
                vectors[number, at] += value * e.turn[row, at]
    for number in range(len(tokens)):
        for at in range(width):
            value = vectors[number, at] * e.unit[group] / e.deviation[group, at]
            count = _place(float32(value), group, at, tokens[number], a, z, further, count)
    return count


@compiled
def _escaped(symbols, tokens, pairs, group, a, e, z, further, count):
    """Put escaped vectors that all hold so many pairs into z: how many values are beside it then, or a fault below 0.

    `symbols` are the group's, uint8 [width, TILE]. What vectors are to be multiplied by goes to the rows of the group.
    """
    width, component, place = len(symbols), e.component[group], e.place[group]
    for at in range(e.first_losing[group, pairs], e.first_losing[group, pairs + 1]):
        index = e.losing[at]
        own, down, out = symbols[index], e.lost[group, pairs, index], z[a.place[group * width + index]]
        table = e.values[e.start[group, pairs, index] :]
        for number in range(len(tokens)):
            out[tokens[number]] = table[own[tokens[number]] >> down]
    index, half, first = np.empty(len(tokens), np.int32), np.empty(len(tokens), np.int32), COUNT_BITS
    begun = count
    for pair in range(pairs):
        middle = first + e.index_bits
        _numbers(symbols, tokens, component, place, first, middle, index)
        first = middle + VALUE_BITS
        _numbers(symbols, tokens, component, place, middle, first, half)
        for number in range(len(tokens)):
            value = e.halves[half[number]]
            if index[number] >= width or not np.isfinite(value):
                return -IMPOSSIBLE
            same = -1  # what a forged row names twice is what it says last, as for the codec
            for at in range(begun if pair else count, count):
                if further.token[at] == tokens[number] and further.component[at] == group * width + index[number]:
                    same = at
            if same >= 0:
                _place(value, group, index[number], tokens[number], a, z, further, same)
            else:
                count = _place(value, group, index[number], tokens[number], a, z, further, count)
    return count


@compiled
def _escapes(symbols, flags, group, a, e, z, further, beside):
    """Put a group's escaped vectors, those of the tokens that have `flags` uint8 [n], into z; see `_escaped`."""
    tokens = np.flatnonzero(flags)
    if not len(tokens):
        return beside
    component, place, scale = e.component[group], e.place[group], a.end[group]
    pairs, number = np.empty(len(tokens), np.int32), np.empty(len(tokens), np.int32)
    _numbers(symbols, tokens, component, place, 0, COUNT_BITS, pairs)
    _numbers(symbols, tokens, component, place, COUNT_BITS, SCALE_END, number)
    if pairs.max() > e.room:
        return -TOO_MANY
    for at in range(len(tokens)):
        if pairs[at] == 0 and number[at] != PLAIN:
            z[scale, tokens[at]] = e.scales[number[at]]
            z[scale + 1, tokens[at]] = 1 if number[at] < PLAIN else 0
    for count in range(pairs.max() + 1):
        own = tokens[(pairs == count) & ((count > 0) | (number != PLAIN))]
        if len(own):
            beside = _escaped(symbols, own, count, group, a, e, z, further, beside)
            if beside < 0:
                return beside
    own = tokens[(pairs == 0) & (number == PLAIN)]
    return _without_tables(symbols, own, group, a, e, z, further, beside)


@compiled
def values(symbols, count, a, e, z, further):
    """Components of the symbols of `count` tokens: `tile`, after its first half.

    `symbols` are uint8 [groups * (width + 1), TILE]; the last rows say whether a group's vector is escaped.
    """
    groups, beside = len(a.end), 0
    width = len(a.place) // groups
    for number in range(len(a.component)):
        own, out = symbols[a.component[number]], z[a.row[number]]
        look_up(a.values, a.table[number], a.most[number], own, count, out)
    for group in range(groups):
        scale, start = a.end[group], 0 if group == 0 else a.end[group - 1] + 2
        for token in range(count):
            z[scale, token], z[scale + 1, token] = 1, 0
        if not e.there:
            continue
        flags, own = symbols[groups * width + group, :count], symbols[group * width : (group + 1) * width]
        beside = _escapes(own, flags, group, a, e, z, further, beside)
        if beside < 0:
            return beside
        for row in range(start, scale):
            for token in range(count):
                z[row, token] *= z[scale, token]
    return beside


@compiled
def tile(rows, slots, first, a, e, columns, symbols, z, further):
    """Components of at most `TILE` tokens.

    Parameters
    ----------
    rows : array
        All pages as rows, uint8 [slots, bytes].
    slots : array
        Which tokens, int64 [n].
    first : int
        Where the stream's bytes begin in a row.
    a, e : Active, Escapes
        Where digits and escapes lie.
    columns, symbols : array
        Room: uint8 [bytes of the stream, TILE] and [groups * (width + 1), TILE].
    z : array
        float32 [active + 2 * groups, TILE], written: components times their scale, scales and second means (`Active`).
    further : Beside
        Written.

    Returns
    -------
    int
        How many `further` values there are, or what is wrong with the first row that cannot be, below 0.
    """
    turned_round(rows, slots, first, columns)
    _symbols(columns, len(slots), a, e, symbols)
    return values(symbols, len(slots), a, e, z, further)


@compiled
def vectors(rows, slots, first, a, e, columns, symbols, z, further, out):
    """Components of tokens one vector after the other, and 1 after those of vectors about the second mean.

    Parameters are those of `tile`, of any number of tokens; `out` is float32 [groups, n, width + 1]. OK, or what is
    wrong with the first row that cannot be.
    """
    groups, width = out.shape[0], out.shape[2] - 1
    for start in range(0, len(slots), TILE):
        own = slots[start : start + TILE]
        count = tile(rows, own, first, a, e, columns, symbols, z, further)
        if count < 0:
            return -count
        for group in range(groups):
            scale = a.end[group]
            for at in range(width):
                row, constant = a.place[group * width + at], a.constant[group * width + at]
                for token in range(len(own)):
                    out[group, start + token, at] = z[row, token] if row >= 0 else constant * z[scale, token]
            for token in range(len(own)):
                out[group, start + token, width] = z[scale + 1, token]
        for at in range(count):
            component = further.component[at]
            out[component // width, start + further.token[at], component % width] += further.value[at]
    return OK


# ------------------------------------------------------------------------------ any number of tokens, and the way back


@compiled
def _put(numbers, out):
    """Put numbers float32 into `out` [n], float32, or bfloat16 as its bits, uint16, to which they are rounded."""
    if out.itemsize == 2:
        bits = numbers.view(np.int32)
        for at in range(len(out)):  # 32 bits throughout: of wider ones no compiler makes vectors
            out[at] = uint16((bits[at] + int32(0x7FFF) + ((bits[at] >> int32(16)) & int32(1))) >> int32(16))
    else:
        for at in range(len(out)):
            out[at] = numbers[at]


@compiled
def to_tokens(way, a, out):
    """What makes tokens less their mean of a tile's rows [active + 2 * groups, width], written; see `_put`."""
    groups, width = way.shift.shape
    numbers, rest = np.empty(width, np.float32), np.empty(width, np.float32)
    for group in range(groups):
        scale = a.end[group]
        rest[:] = 0
        _put(way.shift[group], out[scale + 1])
        for component in range(width):
            to, constant = a.place[group * width + component], a.constant[group * width + component]
            if to < 0 and constant == 0:
                continue
            floats_of(way.halves[group, component], way.row[group, component], numbers)
            for at in range(width):
                numbers[at] *= way.column[group, at]
            if to >= 0:
                _put(numbers, out[to])
            else:
                for at in range(width):
                    rest[at] += constant * numbers[at]
        _put(rest, out[scale])


@compiled
def add_beside(beside, count, way, k):
    """Add to tokens [groups * width, n] what lies beside their rows; see `_put`."""
    width = way.shift.shape[1]
    numbers, whole = np.empty(width, np.float32), np.empty(1, np.float32)
    bits = whole.view(np.int32)
    for number in range(count):
        group, component = beside.component[number] // width, beside.component[number] % width
        floats_of(way.halves[group, component], way.row[group, component], numbers)
        for at in range(width):
            row, token = group * width + at, beside.token[number]
            if k.itemsize == 2:
                bits[0] = int32(k[row, token]) << 16
            else:
                whole[0] = k[row, token]
            whole[0] += numbers[at] * beside.value[number] * way.column[group, at]
            _put(whole, k[row, token : token + 1])


@compiled
def gathered(z, count, start, further, more, out, beside, found):
    """Put a tile's components at token `start` of `out`, and what lies beside them; how many lie there then."""
    for row in range(len(out)):
        _put(z[row, :count], out[row, start : start + count])
    for at in range(more):
        if found < len(beside.token):
            beside.token[found], beside.component[found] = start + further.token[at], further.component[at]
            beside.value[found] = further.value[at]
        found += 1
    return found


@compiled
def components(rows, slots, first, a, e, columns, symbols, z, further, out, beside):
    """Components of tokens as a tile's rows, but of any number of tokens.

    Parameters
    ----------
    rows, slots, first, a, e, columns, symbols, z, further
        See `tile`.
    out : array
        [active + 2 * groups, n], written; see `_put`.
    beside : Beside
        Written, of all tokens.

    Returns
    -------
    int
        How many `beside` there are, more than it has room for where they do not fit; or a fault below 0.
    """
    found = 0
    for start in range(0, len(slots), TILE):
        own = slots[start : start + TILE]
        more = tile(rows, own, first, a, e, columns, symbols, z, further)
        if more < 0:
            return more
        found = gathered(z, len(own), start, further, more, out, beside, found)
    return found
