"""`klt`'s rows read by the loops that numba compiles: a plan's tables as their arrays, and what calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlab.codecs.klt import attention_numba, tiles_numba
from kvlab.codecs.klt.bits import VALUE_BITS, low_bits, value_of
from kvlab.codecs.klt.halves import HalfMatrix, lent
from kvlab.codecs.klt.plain import turn
from kvlab.codecs.klt.reading import Looked, RowReader, digits_of, plain_of, refuse
from kvlab.codecs.klt.synthesis import Synthesis
from kvlab.codecs.klt.tiles_numba import TILE, Beside
from kvlab.codecs.shared.apart import apart

SHARE = 256  # tokens that are worth a thread of their own
COLUMNS = 64  # of K that a product makes are so many or a multiple: in bfloat16 each new size takes torch a millisecond
BESIDE = 8192  # values of components without bits that escaped vectors of a part may hold; usual ones hold some 20


class TileTables:
    """A layer's tables as the compiled loops read them, and the way from a tile's rows to tokens.

    Parameters
    ----------
    plan : Synthesis
        The layer's decoder.
    """

    def __init__(self, plan: Synthesis):
        self.plan, self.groups, self.width = plan, plan.groups, plan.width
        self.active, self.escapes, self.way = active_of(plan), escapes_of(plan), way_of(plan, plan.back)
        self.lines = len(self.active.component) + 2 * plan.groups

    def room(self) -> tuple[NDArray, NDArray, Beside]:
        """What `tiles_numba.values` works in: symbols, components, and what escaped vectors hold beside them."""
        most = TILE * self.groups * self.width if self.escapes.there else 0
        # a row is 64 bytes longer than it has to be: at powers of two rows drive each other out of the near cache
        symbols = lent("symbols", (self.groups * (self.width + 1), TILE + 64), np.uint8)
        return symbols, lent("tile", (self.lines, TILE + 16)), further(most, "tile")

    def to_tokens(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        """What makes tokens less their mean of a tile's rows, of each group [rows, width].

        In memory that the next call in this thread is given too.
        """
        out = numbers("to_tokens", (self.lines, self.width), dtype)
        tiles_numba.to_tokens(self.way, self.active, out)
        return torch.from_numpy(out).view(dtype).split(self.rows)

    @cached_property
    def rows(self) -> list[int]:
        """Rows of a tile that each group has."""
        return np.diff(self.active.end, prepend=-2).tolist()

    def beside(self, held: Beside, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and groups int64 [count] of what lies beside, and what it adds to each, float32 [count, width]."""
        token, component, value = (torch.from_numpy(part[:count]) for part in held)
        group, own, back = component.long() // self.width, component.long() % self.width, self.plan.back
        more = back.values[group, own].float() * (back.row[group, own] * value[:, None]) * back.column[group, 0]
        return token.long(), group, more


class TileLoop(TileTables):
    """Reads rows in the memory of a CPU (`reading.Loop`)."""

    def __init__(self, plan: Synthesis):
        super().__init__(plan)
        self.bytes = plan.planes.bytes(1)

    def __call__(self, rows: Tensor, slots: Tensor, first: int) -> Tensor:
        """See `reading.Loop`."""
        return self.in_parts(rows, slots.numpy(), first, max(1, len(slots) // SHARE))

    def in_parts(self, rows: Tensor, slots: NDArray, first: int, most: int) -> Tensor:
        """The same in at most so many threads; a thread of `pool` has to do it in itself, which waits for no other."""
        out = np.empty((self.groups, len(slots), self.width + 1), np.float32)
        threads = min(torch.get_num_threads(), most)

        def part(number: int) -> int:
            own = slice(len(slots) * number // threads, len(slots) * (number + 1) // threads)
            return self.vectors(rows.numpy(), slots[own], first, out[:, own])

        for fault in in_threads(part, threads):
            refuse(fault)
        return torch.from_numpy(out)

    def vectors(self, rows: NDArray, slots: NDArray, first: int, out: NDArray) -> int:
        """See `tiles_numba.vectors`."""
        return tiles_numba.vectors(rows, slots, first, *self.tables(), out)

    def tables(self) -> tuple:
        """What `tiles_numba.tile` reads, and what it works in."""
        return self.active, self.escapes, lent("columns", (self.bytes, TILE), np.uint8), *self.room()


class TileAttention:
    """Attention of few queries over rows of one layer.

    K is made whole by a matrix product in the model's dtype. In bfloat16 its components, of which few bits are known,
    and the matrix are rounded to 8 bits, and so is what comes out, before the mean is added, which may be large. Of V
    the components are summed by weight, and one product for each query makes tokens of them.

    Parameters
    ----------
    k, v : RowReader
        Of the layer, read by a `TileLoop`.
    """

    def __init__(self, k: RowReader, v: RowReader):
        self.k, self.v = k, v
        self.mean, self.half = k.plan.mean.flatten().numpy(), k.plan.shape[1] // 2

    def __call__(
        self, rows: NDArray, first: int, x: Looked, q: Tensor, scale: float, turning: tuple[NDArray, NDArray]
    ) -> tuple[Tensor, Tensor]:
        """Means of values by the softmax over what queries look at, and the logarithms of the sums under it.

        Parameters
        ----------
        rows : array
            All pages as rows uint8 [slots, bytes]; K's bytes come first.
        first : int
            Where V's begin.
        x : Looked
            Which tokens.
        q : Tensor
            Queries [queries, heads, head_dim]; K is made in their dtype.
        scale : float
            Of the scores.
        turning : pair of array
            Cosines and sines float32 [head_dim / 2, positions] that K is turned by; of no positions where it is not.

        Returns
        -------
        mean : Tensor
            float32 [queries, heads, head_dim]; finite where a query sees nothing.
        log_sum : Tensor
            float32 [queries, heads]; -inf there.

        Raises
        ------
        StreamError
            A row is none that could have been written.
        """
        queries, heads, head_dim = q.shape
        of_runs = x.queries
        seen = attention_numba.Seen(
            np.full(len(of_runs) * heads, -np.inf, np.float32),
            np.zeros(len(of_runs) * heads, np.float32),
            np.zeros((len(of_runs) * heads, self.v.read.width + 1), np.float32),
        )
        scaled = (q.float() * scale).flatten(0, 1).contiguous().numpy()
        part = self._part(rows, first, x, scaled, heads, turning, q.dtype, seen)
        for fault in in_threads(part, len(x.parts)):
            refuse(fault)
        mean, log_sum = np.zeros((queries * heads, head_dim), np.float32), np.empty(queries * heads, np.float32)
        attention_numba.finish(seen, of_runs, heads, self.v.read.way, mean, log_sum)
        return torch.from_numpy(mean).view(q.shape), torch.from_numpy(log_sum).view(queries, heads)

    def _part(
        self,
        pages: NDArray,
        first: int,
        x: Looked,
        q: NDArray,
        heads: int,
        turning: tuple[NDArray, NDArray],
        dtype: torch.dtype,
        seen: attention_numba.Seen,
    ) -> Callable[[int], int]:
        """What attends to one of `Looked.parts`: its number to a fault."""
        to_keys, turned = self.k.read.to_tokens(made_in(dtype)), attention_numba.Turned(self.mean, *turning, self.half)

        def part(number: int) -> int:
            runs = x.runs[slice(*x.parts[number])].copy()
            begin, end = int(runs[0, 0]), int(runs[-1, :2].sum())
            slots, runs[:, 0] = x.slots[begin:end], runs[:, 0] - begin
            k = self._keys(pages, slots, to_keys)
            tables = self.v.read.tables()
            return attention_numba.attend(runs, pages, slots, first, *tables, k, turned, heads, q, x.until, seen)

        return part

    def _keys(self, pages: NDArray, slots: NDArray, to_keys: tuple[Tensor, ...]) -> NDArray:
        """K less its mean [groups * width, n or more], as `Turned`'s; what is after n means nothing."""
        loop, held, dtype = self.k.read, further(BESIDE, "keys"), to_keys[0].dtype
        size = len(slots) + -len(slots) % COLUMNS
        z = numbers("components", (loop.lines, size), dtype)
        count = tiles_numba.components(pages, slots, 0, *loop.tables(), z, held)
        refuse(max(-count, 0))
        if count > BESIDE:
            out = lent("keys", (loop.groups * loop.width, size))
            whole = loop.in_parts(torch.from_numpy(pages), slots, 0, 1) @ self.k.plan.inverse
            torch.from_numpy(out)[:, : len(slots)] = whole.mT.flatten(0, 1)
            return out
        out = numbers("keys", (loop.groups * loop.width, size), dtype)
        made, parts = (torch.from_numpy(array).view(dtype) for array in (out, z))
        first = 0
        for matrix, own in zip(to_keys, made.split(loop.width), strict=True):
            part, first = parts[first : first + len(matrix)], first + len(matrix)
            torch.mm(matrix.mT, part, out=own)
        if count:
            tiles_numba.add_beside(held, count, loop.way, out)
        return out


def made_in(dtype: torch.dtype) -> torch.dtype:
    """What K is made in for a model of a dtype."""
    return dtype if dtype == torch.bfloat16 else torch.float32


def numbers(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> NDArray:
    """`lent` for numbers of a dtype; bfloat16 as its bits."""
    return lent(f"{name} {dtype}", shape, np.uint16 if dtype == torch.bfloat16 else np.float32)


def in_threads(part: Callable[[int], int], parts: int) -> Iterator[int]:
    """What the parts of a piece of work answer, in torch's number of threads."""
    threads = min(torch.get_num_threads(), parts)
    return map(part, range(parts)) if threads < 2 else pool(threads).map(part, range(parts))


@cache
def pool(threads: int) -> ThreadPoolExecutor:
    """Threads for the compiled loop, which needs no interpreter."""
    return ThreadPoolExecutor(threads, thread_name_prefix="kvlab-pages")


def further(most: int, name: str) -> Beside:
    """Room for so many values, which the next call of that name in this thread is given too."""
    kinds = zip(Beside._fields, (np.int32, np.int32, np.float32), strict=True)
    return Beside(*(lent(f"{name} {field}", (most,), kind) for field, kind in kinds))


def way_of(plan: Synthesis, matrix: HalfMatrix) -> tiles_numba.Way:
    """One of a plan's matrices with its means, in the plan's memory."""
    arrays = (
        plan.mean[:, 0],
        plan.shift[:, 0],
        matrix.values.view(torch.uint16),
        matrix.row[..., 0],
        matrix.column[:, 0],
    )
    return tiles_numba.Way(*(part.numpy() for part in arrays))


def digits(plan: Synthesis) -> tuple[Tensor, ...]:
    """Digits of all planes one after the other: symbol, byte, down, mask and up (`reading.PlaneDigits`)."""
    found = digits_of(plan.planes)
    symbol, byte, down, up = (torch.cat(parts) for parts in list(zip(*found, strict=True))[1:])
    mask = torch.cat([torch.full_like(own.up, (1 << own.size) - 1) for own in found])
    return symbol.int(), byte.int(), *(part.to(torch.uint8) for part in (down, mask, up))


def active_of(plan: Synthesis) -> tiles_numba.Active:
    """The components of a plan that have bits, and where their digits lie."""
    widths, (symbol, byte, *bits) = plan.widths.flatten(), digits(plan)
    order = symbol.argsort(stable=True)
    component = widths.nonzero()[:, 0].int()
    group = component // plan.width
    row = torch.arange(len(component), dtype=torch.int32) + 2 * group
    place = torch.full((plan.rows,), -1, dtype=torch.int32)
    place[component.long()] = row
    edges = torch.searchsorted(symbol[order], torch.cat((component, component.new_tensor([plan.rows])))).int()
    end = torch.bincount(group, minlength=plan.groups).cumsum(0) + 2 * torch.arange(plan.groups)
    values, first = values_of(plan)
    return tiles_numba.Active(
        *(part.numpy() for part in (component, row, edges, byte[order], *(part[order] for part in bits))),
        values,
        first[component.numpy()],
        ((1 << widths[component.long()]) - 1).int().numpy(),
        place.numpy(),
        np.where(widths.numpy() == 0, values[first], np.float32(0)),
        end.int().numpy(),
    )


def values_of(plan: Synthesis) -> tuple[NDArray, NDArray]:
    """The values of a plan's components, and where each table begins; the plan's own memory."""
    return plan.trees.values.numpy(), plan.trees.first.flatten().numpy()


def escapes_of(plan: Synthesis) -> tiles_numba.Escapes:
    """Where the escapes of a layer lie; of none, arrays without content and of the same kinds."""
    kinds = torch.int16, torch.int32, torch.uint8, torch.float32
    short, whole, byte, real = (torch.zeros(0, dtype=kind) for kind in kinds)
    if not plan.escaping:
        none = short.view(0, 0), byte.view(0, 0), byte.view(0, 0, 0), whole.view(0, 0, 0)
        arrays = [whole, byte, *none, whole, whole.view(0, 0), real, real, real]
        counts, plain = (0, 0), ()
    else:
        tails, (symbol, own, down, *_) = plan.tails, digits(plan)
        losing, first_losing = losing_of(tails.lost)
        flag = symbol >= plan.rows
        arrays = [own[flag], down[flag], tails.component, tails.place, tails.lost, tails.start]
        arrays += [losing, first_losing, tails.trees.values, tails.scales, halves()]
        counts, plain = (tails.index_bits, tails.room), tails.plain
    units = torch.tensor([own.unit for own in plain], dtype=torch.float64)
    last = [*plain_of(plain, plan.width), back_turn(plan.width), units, plan.deviation]
    arrays, last = ([part.contiguous().numpy() for part in parts] for parts in (arrays, last))
    return tiles_numba.Escapes(plan.escaping, *arrays, *counts, *last)


def losing_of(lost: Tensor) -> tuple[Tensor, Tensor]:
    """The components that give up bits, and where those of a group and count begin, of `Tails.lost`."""
    some = lost > 0
    ends = some.sum(2).flatten().cumsum(0)
    first = torch.nn.functional.pad(ends, (1, 0))
    counts = lost.shape[1]
    edges = torch.stack([first[group * counts : (group + 1) * counts + 1] for group in range(len(lost))])
    return some.nonzero()[:, 2].int(), edges.int()


@cache
@apart
def halves() -> Tensor:
    """The number that each 16 bits stand for, float32 [65536]."""
    return value_of(low_bits(torch.arange(1 << VALUE_BITS), VALUE_BITS))


@cache
@apart
def back_turn(width: int) -> Tensor:
    """`plain.turn` as rows of coefficients, float32 [width, width]."""
    return turn(width).T.float().contiguous()
