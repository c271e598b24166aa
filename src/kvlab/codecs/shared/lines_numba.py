"""Sums over lines of numbers that numba compiles to vectors: the inner loops of attention over coded tokens.

What a compiler does not find by itself is written as blocks: sums of three rows and some vectors of sixteen columns
stay in registers while lines pass. Where numba is not installed, nothing imports this module.
"""

from __future__ import annotations

from numba import float32, types
from numba.core import cgutils
from numba.extending import intrinsic

from kvlab.codecs.shared.compiled import compiled
from kvlab.codecs.shared.lanes_numba import FLOATS, LANES, row_at, splat

WIDE = 4  # vectors of a block
WEIGHTS, LINES, OUT = 0, 1, 3  # which of a block's arguments they are


def _block(rows, vectors):
    """Add lines [n, columns] by weights [rows, n] to some vectors of `out` [rows, columns], from its column `to` on.

    The columns of lines begin at `at`. All are float32.
    """

    def made(context, builder, signature, given):
        kinds, (_, lines, at, _, to) = signature.args, given

        def place(which, row, column):
            return builder.gep(row_at(context, builder, kinds[which], given[which], row), [column])

        def vector(which, row, column, number):
            column = builder.add(column, context.get_constant(types.intp, number * LANES))
            return builder.bitcast(place(which, row, column), FLOATS.as_pointer())

        index = [context.get_constant(types.intp, row) for row in range(rows)]
        sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(vectors)] for _ in range(rows)]
        for row in range(rows):
            for number in range(vectors):
                builder.store(builder.load(vector(OUT, index[row], to, number), align=4), sums[row][number])
        count = builder.extract_value(context.make_array(kinds[LINES])(context, builder, lines).shape, 0)
        with cgutils.for_range(builder, count, intp=count.type) as loop:
            parts = [builder.load(vector(LINES, loop.index, at, number), align=4) for number in range(vectors)]
            for row in range(rows):
                weight = splat(builder, builder.load(place(WEIGHTS, index[row], loop.index)), FLOATS)
                for number in range(vectors):
                    product = builder.fmul(weight, parts[number], flags=("fast",))
                    total = builder.fadd(builder.load(sums[row][number]), product, flags=("fast",))
                    builder.store(total, sums[row][number])
        for row in range(rows):
            for number in range(vectors):
                builder.store(builder.load(sums[row][number]), vector(OUT, index[row], to, number), align=4)
        return context.get_dummy_value()

    @intrinsic
    def block(_typing, weights, lines, at, out, to):
        return types.void(weights, lines, types.intp, out, types.intp), made

    return block


_three_wide, _three, _one_wide, _one = _block(3, WIDE), _block(3, 1), _block(1, WIDE), _block(1, 1)


@compiled
def add_lines(weights, lines, at, out):
    """Add to `out` [rows, columns] lines [n, ..], their columns from `at` on, by weights [rows, n]; all float32."""
    rows, columns = out.shape
    whole, wide = columns // LANES * LANES, columns // (WIDE * LANES) * WIDE * LANES
    for row in range(0, rows - 2, 3):
        own, to = weights[row : row + 3], out[row : row + 3]
        for column in range(0, wide, WIDE * LANES):
            _three_wide(own, lines, at + column, to, column)
        for column in range(wide, whole, LANES):
            _three(own, lines, at + column, to, column)
    for row in range(rows // 3 * 3, rows):
        own, to = weights[row : row + 1], out[row : row + 1]
        for column in range(0, wide, WIDE * LANES):
            _one_wide(own, lines, at + column, to, column)
        for column in range(wide, whole, LANES):
            _one(own, lines, at + column, to, column)
    for row in range(rows if whole < columns else 0):
        for number in range(len(lines)):
            weight, line = weights[row, number], lines[number]
            for column in range(whole, columns):
                out[row, column] += weight * line[at + column]


@compiled
def products(weights, z, at, count, out):
    """Sums of the rows of z, `count` of their columns from `at` on, by three rows of weights, into float32 [3, rows].

    Four rows at once: what is read of weights and rows serves twelve sums.
    """
    u, v, w = weights[0], weights[1], weights[2]
    for line in range(0, len(z) - 3, 4):
        a, b = z[line, at : at + count], z[line + 1, at : at + count]
        c, d = z[line + 2, at : at + count], z[line + 3, at : at + count]
        ua = ub = uc = ud = va = vb = vc = vd = wa = wb = wc = wd = float32(0)
        for token in range(count):
            ua += u[token] * a[token]
            ub += u[token] * b[token]
            uc += u[token] * c[token]
            ud += u[token] * d[token]
            va += v[token] * a[token]
            vb += v[token] * b[token]
            vc += v[token] * c[token]
            vd += v[token] * d[token]
            wa += w[token] * a[token]
            wb += w[token] * b[token]
            wc += w[token] * c[token]
            wd += w[token] * d[token]
        out[0, line], out[0, line + 1], out[0, line + 2], out[0, line + 3] = ua, ub, uc, ud
        out[1, line], out[1, line + 1], out[1, line + 2], out[1, line + 3] = va, vb, vc, vd
        out[2, line], out[2, line + 1], out[2, line + 2], out[2, line + 3] = wa, wb, wc, wd
    for line in range(len(z) // 4 * 4, len(z)):
        ua = va = wa = float32(0)
        for token in range(count):
            one = z[line, at + token]
            ua += u[token] * one
            va += v[token] * one
            wa += w[token] * one
        out[0, line], out[1, line], out[2, line] = ua, va, wa
