"""A stream's tables of one layer, handed to a compiled loop as one array of where they lie.

numba takes every array of a call apart anew, and those in tuples by a slow way: for the tables of K and V that was a
good part of a short step. Where numba is not installed, nothing imports this module.
"""

from __future__ import annotations

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from kvlab.codecs.klt.tiles_numba import Active, Way
from kvlab.codecs.shared.compiled import compiled

WHOLES, BYTES, FLOATS = np.int32, np.uint8, np.float32
KINDS = (  # of `Active`'s arrays, then of `Way`'s, as `tables_of` reads them
    *(WHOLES, WHOLES, WHOLES, WHOLES, BYTES, BYTES, BYTES, FLOATS, np.int64, WHOLES, WHOLES, FLOATS, WHOLES),
    *(FLOATS, FLOATS, np.uint16, FLOATS, FLOATS),
)


class StreamTables:
    """What `tables_of` reads, kept as long as this is.

    Parameters
    ----------
    active : Active
        Components with bits.
    way : Way
        Between them and tokens.

    Attributes
    ----------
    addresses : array
        Where each array lies and how many values it has, int64 [arrays, 2].

    Raises
    ------
    TypeError
        An array is of another kind than the loops read, or does not lie in one run.
    """

    def __init__(self, active: Active, way: Way):
        self.active, self.way, arrays = active, way, (*active, *way)
        for one, kind in zip(arrays, KINDS, strict=True):
            if one.dtype != kind or not one.flags.carray:
                raise TypeError(f"a table of {one.dtype}, strides {one.strides}, where loops read a run of {kind}")
        self.addresses = np.array([(one.ctypes.data, one.size) for one in arrays], np.int64)

    def __reduce__(self) -> tuple[type[StreamTables], tuple[Active, Way]]:
        """A copy has addresses of its own arrays."""
        return StreamTables, (self.active, self.way)


@intrinsic
def _pointer(_typing, address):
    """An address as a pointer."""

    def made(_context, builder, _signature, given):
        return builder.inttoptr(given[0], cgutils.voidptr_t)

    return types.voidptr(address), made


@compiled
def _array(addresses, number, kind):
    """One of the arrays, all its values in a row."""
    return carray(_pointer(addresses[number, 0]), (addresses[number, 1],), kind)


@compiled
def tables_of(addresses):
    """The `Active` and the `Way` that `StreamTables.addresses` tells of."""
    active = Active(
        _array(addresses, 0, WHOLES),
        _array(addresses, 1, WHOLES),
        _array(addresses, 2, WHOLES),
        _array(addresses, 3, WHOLES),
        _array(addresses, 4, BYTES),
        _array(addresses, 5, BYTES),
        _array(addresses, 6, BYTES),
        _array(addresses, 7, FLOATS),
        _array(addresses, 8, np.int64),
        _array(addresses, 9, WHOLES),
        _array(addresses, 10, WHOLES),
        _array(addresses, 11, FLOATS),
        _array(addresses, 12, WHOLES),
    )
    groups = len(active.end)
    width = addresses[13, 1] // groups
    way = Way(
        _array(addresses, 13, FLOATS).reshape((groups, width)),
        _array(addresses, 14, FLOATS).reshape((groups, width)),
        _array(addresses, 15, np.uint16).reshape((groups, width, width)),
        _array(addresses, 16, FLOATS).reshape((groups, width)),
        _array(addresses, 17, FLOATS).reshape((groups, width)),
    )
    return active, way
