"""Rows of `klt` written by compiled loops: from a layer's tokens to their bytes, what is escaped included.

Each step is that of torch's code, which says what it means (`codec.Plan`, `choosing.Chooser`, `escapes.Tails`), for one
vector after the other. Sums are taken in another order than torch takes them, so that a value within their rounding of
the edge of two cells, or of two ways of an escape that lose the same, may fall on its other side.

Where numba is not installed, nothing imports this module.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import float32, int32
from numpy.typing import NDArray
from torch import Tensor

from kvlab.codecs.klt.bits import LARGEST, VALUE_BITS
from kvlab.codecs.klt.choosing import HOPE, PATIENCE, SLACK
from kvlab.codecs.klt.codec import STRIP, Plan
from kvlab.codecs.klt.fields import COUNT_BITS
from kvlab.codecs.klt.reading_numba import TileTables, way_of
from kvlab.codecs.klt.rows import KltRows
from kvlab.codecs.klt.scales import ABOUT_SINK, LOUD, NEAR, PLAIN, UPWARD
from kvlab.codecs.klt.tiles_numba import SCALE_END, TILE, compiled, first_of
from kvlab.codecs.klt.vectors_numba import floats_of
from kvlab.codecs.shared.grouping import parted
from kvlab.codecs.shared.softmax_numba import as_numbers, widen

FEW = 24  # tokens from which torch's matrix product is sooner, the matrix made anew for it
SEVERAL = 8  # tokens from which it is sooner to count all boundaries below their components than to search
UNTURNED = np.empty((0, 0), np.float32)


class Choice(NamedTuple):
    """What escapes are chosen by (`codecs.klt.choosing.Chooser`, whose memory this is).

    Parameters
    ----------
    least, most : array
        The values at the ends of each component's table, float32 [groups, width].
    middle, by_reach : array
        Of the range in which no component is worth a pair, and 2 over its length, float32 [groups, width].
    share, toward : array
        Weights of squares in a vector's level, and of its components in what it has of the second mean [groups, width].
    sink : array
        Level of the second mean itself, float32 [groups].
    energy : array
        Variance of each component in the metric, float32 [groups, width].
    prices : array
        Of 0, 1, 2, ... pairs, float32 [groups, room + 1].
    usual, scale, plain : array
        Errors of a vector, of the bits of a scale, and of a vector without tables, float32 [groups].
    """

    least: NDArray
    most: NDArray
    middle: NDArray
    by_reach: NDArray
    share: NDArray
    toward: NDArray
    sink: NDArray
    energy: NDArray
    prices: NDArray
    usual: NDArray
    scale: NDArray
    plain: NDArray


class QuickRows(KltRows):
    """The same rows, sooner.

    Parameters
    ----------
    rows : KltRows
        As torch writes them.
    tables : TileTables, optional
        Of its plan, where they are made already.
    """

    def __init__(self, rows: KltRows, tables: TileTables | None = None):
        self.site, self.plan, self.bytes = rows.site, rows.plan, rows.bytes
        tables = tables or TileTables(self.plan)
        self.tables = tables.active, tables.escapes
        self.way, self.choice = way_of(self.plan, self.plan.forward), choice_of(self.plan)

    def encode(self, x: Tensor) -> Tensor:
        """See `pages.rows.Rows`."""
        out = torch.empty(x.shape[1], self.bytes, dtype=torch.uint8)
        self.write(x, out, np.arange(len(out)), 0)
        return out

    @torch.no_grad()
    def write(
        self,
        x: Tensor,
        rows: Tensor,
        slots: NDArray,
        first: int,
        turn: tuple[NDArray, NDArray] = (UNTURNED, UNTURNED),
        positions: NDArray | None = None,
    ) -> None:
        """Code tokens into rows.

        Parameters
        ----------
        x : Tensor
            Tokens [heads, n, head_dim].
        rows : Tensor
            uint8 [slots, bytes of a row].
        slots : array
            The row of each token, int64 [n].
        first : int
            Where its bytes begin there.
        turn : pair of array
            Cosines and sines float32 [positions, head_dim / 2] that tokens are turned back by before they are coded.
        positions : array, optional
            Of the tokens there, int64 [n].

        Raises
        ------
        NonFinite
            A token holds NaN or infinity, or a component that does not fit float32; none of its strip is written.
        """
        plan, positions = self.plan, slots if positions is None else positions
        if len(slots) < FEW:
            few = as_numbers(x if x.dtype == torch.bfloat16 else x.float())
            rest = rows.numpy(), slots, first, self.bytes
            if write_few(few, *turn, positions, self.way, *self.tables, self.choice, *rest):
                return
        for start in range(0, len(slots), STRIP):
            own = slice(start, min(start + STRIP, len(slots)))
            flat = x[:, own].transpose(0, 1).float().flatten(1).contiguous().numpy()
            centred = np.empty((len(flat), plan.groups, plan.width), np.float32)
            to = centred.reshape(len(flat), -1)
            centre(flat, *turn, positions[own], self.way.mean.reshape(-1), to)
            z = plan._components(torch.from_numpy(centred).transpose(0, 1)).permute(2, 0, 1).contiguous().numpy()
            if not write(z, centred, self.way, *self.tables, self.choice, rows.numpy(), slots[own], first, self.bytes):
                vectors = torch.from_numpy(centred).transpose(0, 1)
                super().encode(parted(vectors + plan.mean, plan.heads))  # which says what is wrong


def choice_of(plan: Plan) -> Choice:
    """What a plan chooses by; without escapes nothing reads it."""
    if not plan.escaping:
        none, nothing = np.zeros((0, 0), np.float32), np.zeros(0, np.float32)
        return Choice(*[none] * 6, nothing, none, none, *[nothing] * 3)
    own = plan.choose
    wide = own.first, own.last, own.middle[..., 0], own.by_reach[..., 0], own.share[:, 0], own.toward_sink[:, 0]
    rest = own.sink_square[:, 0], own.energy, own.prices, own.usual, own.price_of_scale, own.expected
    return Choice(*(part.contiguous().numpy() for part in (*wide, *rest)))


# ------------------------------------------------------------------------------------------- tokens to components


@compiled
def centre(x, cos, sin, positions, mean, out):
    """Tokens [n, heads * head_dim], turned back by their positions and less their mean, into as many."""
    half = cos.shape[1]
    for token in range(len(x)):
        own, to = x[token], out[token]
        if half:
            c, s = cos[positions[token]], sin[positions[token]]
            for first in range(0, len(own), 2 * half):
                for at in range(half):
                    a, b, square = own[first + at], own[first + half + at], c[at] * c[at] + s[at] * s[at]
                    to[first + at] = (a * c[at] + b * s[at]) / square - mean[first + at]
                    to[first + half + at] = (b * c[at] - a * s[at]) / square - mean[first + half + at]
        else:
            for at in range(len(own)):
                to[at] = own[at] - mean[at]


@compiled
def _product(vectors, group, way, out):
    """Components of a group's vectors [n, width], into [n, width]."""
    width = vectors.shape[1]
    numbers, scaled = np.empty(width, np.float32), np.empty(vectors.shape, np.float32)
    for token in range(len(vectors)):
        for at in range(width):
            scaled[token, at] = vectors[token, at] * way.column[group, at]
    for component in range(width):
        floats_of(way.halves[group, component], way.row[group, component], numbers)
        for token in range(len(vectors)):
            total = float32(0)
            for at in range(width):
                total += numbers[at] * scaled[token, at]
            out[token, component] = total


@compiled
def components(centred, way, z):
    """Components of vectors float32 [n, groups, width] without their mean, of the same shape."""
    for group in range(centred.shape[1]):
        _product(centred[:, group], group, way, z[:, group])


# ------------------------------------------------------------------------------------------- components to bytes


@compiled
def place_of(value, values, first, count):
    """How many of the `count` boundaries, one less than a power of two, of the table at `first` lie below a value."""
    low, half = 0, (count + 1) >> 1
    while half:
        edge = first + low + half
        if value > (values[edge - 1] + values[edge]) * float32(0.5):
            low += half
        half >>= 1
    return low


@compiled
def places_of(line, values, first, count, found):
    """`place_of` of values [n], into int32 [n]; of many all boundaries are counted that lie below each, as vectors."""
    if len(line) < SEVERAL:
        for token in range(len(line)):
            found[token] = place_of(line[token], values, first, count)
        return
    found[:] = 0
    for edge in range(first, first + count):
        boundary = (values[edge] + values[edge + 1]) * float32(0.5)
        for token in range(len(line)):
            found[token] += 1 if line[token] > boundary else 0


@compiled
def _symbols(z, group, a, symbols):
    """Symbols of components z [n, width] of a group, into uint8 [n, width]; those without bits stay."""
    tokens, width = z.shape
    line, found = np.empty(tokens, np.float32), np.empty(tokens, np.int32)
    for number in range(first_of(group, a), first_of(group + 1, a)):
        at = a.component[number] - group * width
        for token in range(tokens):
            line[token] = z[token, at]
        places_of(line, a.values, a.table[number], a.most[number], found)
        for token in range(tokens):
            symbols[token, at] = found[token]


@compiled
def _error(z, symbols, group, a, energy):
    """Squared error of components z by their symbols [width]."""
    width, error = len(z), float32(0)
    for at in range(width):
        if a.place[group * width + at] < 0:
            apart = z[at] - a.constant[group * width + at]
            error += apart * apart * energy[at]
    for number in range(first_of(group, a), first_of(group + 1, a)):
        at = a.component[number] - group * width
        apart = z[at] - a.values[a.table[number] + symbols[at]]
        error += apart * apart * energy[at]
    return error


@compiled
def _level(z, share):
    """The level of components (`codecs.klt.scales`)."""
    level = float32(0)
    for at in range(len(z)):
        level += share[at] * z[at] * z[at]
    return level


@compiled
def _pairs(z, group, room, c, places):
    """What a vector loses with pairs worth their price, and how many; their components into int32 [room]."""
    excess, count, cost = np.zeros(len(places), np.float32), 0, c.usual[group]
    for at in range(len(z)):
        if c.least[group, at] <= z[at] <= c.most[group, at]:
            continue
        over = z[at] - (c.most[group, at] if z[at] > c.most[group, at] else c.least[group, at])
        saved = over * over * c.energy[group, at]
        cost += saved
        to = min(count, room)
        count = min(count + 1, room)
        while to and excess[to - 1] < saved:
            if to < room:
                excess[to], places[to] = excess[to - 1], places[to - 1]
            to -= 1
        if to < room:
            excess[to], places[to] = saved, at
    best, pairs, saved = float32(0), 0, float32(0)
    for number in range(count):
        saved += excess[number]
        if saved - c.prices[group, number + 1] > best:
            best, pairs = saved - c.prices[group, number + 1], number + 1
    return cost - best, pairs


@compiled
def _half(value, bits, numbers):
    """The signed square root in float16, as its bits (`codecs.klt.bits.root_of`); `numbers` is a view of `bits`."""
    numbers[0] = min(np.sqrt(abs(value)), float32(LARGEST))
    if numbers[0] < float32(2.0**-14):
        found = int32(np.rint(numbers[0] * float32(2.0**24)))
    else:
        found = ((bits[0] + 0xFFF + ((bits[0] >> 13) & 1)) >> 13) - (112 << 10)
    return found | (0x8000 if value < 0 else 0)


@compiled
def _put(number, first, count, component, place, symbols):
    """Put a number of `count` bits, lowest first, where the bits from `first` on lie."""
    for at in range(count):
        symbols[component[first + at]] |= ((number >> at) & 1) << place[first + at]


@compiled
def _coefficients(z, group, e, out):
    """Coefficients of a vector without tables (`codecs.klt.plain`), into [width], and their root mean square."""
    width, square = len(z), float32(0)
    weighed = z * e.deviation[group] / float32(e.unit[group])
    for to in range(width):
        total = float32(0)
        for at in range(width):
            total += weighed[at] * e.turn[to, at]
        out[to] = total
        square += total * total
    return np.sqrt(square / width)


@compiled
def _without_tables(coefficients, size, group, e, places):
    """Squared error of coefficients that are coded at a size; their places in the tables, into int32 [width]."""
    error = float32(0)
    for at in range(len(coefficients)):
        narrow = 0 if at < e.plain_wide[group] else 1
        table, even = e.plain_table[group, narrow], coefficients[at] / max(size, float32(1e-30))
        places[at] = place_of(even, table, 0, (1 << e.plain_bits[group, narrow]) - 1)
        apart = even - table[places[at]]
        error += apart * apart
    return error * (size * float32(e.unit[group])) ** 2


@compiled
def _escaped(z, centred, group, way, a, e, c, symbols, tried):
    """Whether a vector is escaped; then its symbols uint8 [width] say so. `tried` is room, uint8 [1, width]."""
    width, beyond, level, toward = len(z), 0, float32(0), float32(0)
    for at in range(width):
        level += c.share[group, at] * z[at] * z[at]
        toward += c.toward[group, at] * z[at]
        beyond += 1 if abs((z[at] - c.middle[group, at]) * c.by_reach[group, at]) > 1 else 0
    near = level - toward + c.sink[group] < float32(SLACK * NEAR) * level
    if not (beyond or near or float32(SLACK) * level > float32(LOUD)):
        return False
    places, energy = np.empty(max(1, e.room), np.int32), c.energy[group]
    cost, pairs = _pairs(z, group, e.room, c, places)
    up = min(max(int(np.rint(2 * np.log2(max(level, float32(1e-30))))), 0), len(UPWARD))
    number = PLAIN + up if up > 0 and (beyond or level > float32(LOUD)) else -1
    trial = np.empty((1, 2, width), np.float32)
    trial[0, 0] = z
    if near:
        trial[0, 1] = centred - way.shift[group]
        _product(trial[:, 1], group, way, trial[:, 0])
        left = _level(trial[0, 0], c.share[group])
        down = min(int(np.floor(-0.5 * np.log2(max(left, float32(1e-30))))), len(ABOUT_SINK) - 1)
        if left < float32(NEAR) * level and down >= 0:
            number = down
        else:
            trial[0, 0] = z
    if number >= 0:
        scale, tried[0] = e.scales[number], symbols
        for at in range(width):
            trial[0, 0, at] /= scale
        _symbols(trial[:, 0], group, a, tried)
        scaled = (_error(trial[0, 0], tried[0], group, a, energy) + c.scale[group]) * (scale * scale)
        cost = min(_error(z, symbols, group, a, energy), cost)
        if scaled < cost:
            cost, symbols[:] = scaled, tried[0]
        else:
            number = -1
    bits, found = np.empty(1, np.int32), np.empty(width, np.int32)
    numbers, root = bits.view(np.float32), 0
    hopeful = len(c.plain) and cost > max(float32(HOPE) * level * c.plain[group], float32(PATIENCE) * c.usual[group])
    if hopeful:
        coefficients = trial[0, 1]
        root = _half(_coefficients(z, group, e, coefficients), bits, numbers)
        hopeful = _without_tables(coefficients, e.halves[root], group, e, found) < cost
    if hopeful:
        number = PLAIN
    elif number < 0 and pairs == 0:
        return False
    pairs = 0 if number >= 0 else pairs
    component, place = e.component[group], e.place[group]
    for at in range(width):
        symbols[at] = 0 if hopeful else symbols[at] >> e.lost[group, pairs, at] << e.lost[group, pairs, at]
    _put(pairs, 0, COUNT_BITS, component, place, symbols)
    if number >= 0:
        _put(number, COUNT_BITS, SCALE_END - COUNT_BITS, component, place, symbols)
    first = 0
    if hopeful:
        _put(root, SCALE_END, VALUE_BITS, component, place, symbols)
        for at in range(width):
            count = e.plain_bits[group, 0 if at < e.plain_wide[group] else 1]
            _put(found[at], first, count, e.plain_component[group], e.plain_place[group], symbols)
            first += count
    for pair in range(pairs):
        first = COUNT_BITS + pair * (e.index_bits + VALUE_BITS)
        _put(places[pair], first, e.index_bits, component, place, symbols)
        _put(_half(z[places[pair]], bits, numbers), first + e.index_bits, VALUE_BITS, component, place, symbols)
    return True


@compiled
def write(z, centred, way, a, e, c, rows, slots, first, bytes):
    """Write vectors as rows.

    Parameters
    ----------
    z, centred : array
        Their components, and themselves less their mean, float32 [n, groups, width].
    way, a, e, c : Way, Active, Escapes, Choice
        Of the layer.
    rows, slots, first
        See `QuickRows.write`.
    bytes : int
        Of a token.

    Returns
    -------
    bool
        Whether it was done; nothing was where a component is not finite.
    """
    wrong, numbers = 0, z.reshape(-1)
    for at in range(len(numbers)):
        wrong += 0 if abs(numbers[at]) < np.inf else 1
    if wrong:
        return False
    groups, width = z.shape[1], z.shape[2]
    tried = np.empty((1, width), np.uint8)
    for start in range(0, len(z), TILE):
        count = min(TILE, len(z) - start)
        symbols = np.zeros((count, groups, width), np.uint8)
        for group in range(groups):
            _symbols(z[start : start + count, group], group, a, symbols[:, group])
        for token in range(count):
            row, flat = rows[slots[start + token], first : first + bytes], symbols[token].reshape(-1)
            row[:] = 0
            for group in range(groups):
                vectors = z[start + token, group], centred[start + token, group]
                if e.there and _escaped(*vectors, group, way, a, e, c, symbols[token, group], tried):
                    row[e.flag_byte[group]] |= 1 << e.flag_down[group]
            for number in range(len(a.component)):
                symbol = flat[a.component[number]]
                for digit in range(a.digit[number], a.digit[number + 1]):
                    row[a.byte[digit]] |= ((symbol >> a.up[digit]) & a.mask[digit]) << a.down[digit]
    return True


@compiled
def write_few(x, cos, sin, positions, way, a, e, c, rows, slots, first, bytes):
    """Write a few tokens [heads, n, head_dim], float32 or bfloat16 as its bits: `centre`, `components` and `write`.

    One call in the place of three: what a call hands over takes as long as what it does. Whether it was done.
    """
    heads, tokens, head_dim = x.shape
    flat = np.empty((tokens, heads * head_dim), np.float32)
    centred, z = np.empty((tokens, *way.mean.shape), np.float32), np.empty((tokens, *way.mean.shape), np.float32)
    for token in range(tokens):
        for head in range(heads):
            own = flat[token, head * head_dim : (head + 1) * head_dim]
            widen(x[head, token], own, own.view(np.int32))
    centre(flat, cos, sin, positions, way.mean.reshape(-1), centred.reshape(tokens, -1))
    components(centred, way, z)
    return write(z, centred, way, a, e, c, rows, slots, first, bytes)
