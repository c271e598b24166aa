"""A hash tree that grows, and proofs of what is in it: RFC 6962, section 2.1, with SHA-256.

Hashing is that of sealed caches (`kvlab.codecs.stream.tree`). Kept are the roots of all full subtrees: a leaf is added
in constant time on average, and a root or a proof of any earlier size is put together of a logarithm of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from kvlab.codecs.stream.tree import NODE
from kvlab.core.errors import UserError

EMPTY = hashlib.sha256().digest()  # the root of no leaves


def node(left: bytes, right: bytes) -> bytes:
    """The digest of two subtrees, 32 bytes."""
    return hashlib.sha256(NODE + left + right).digest()


class Tree:
    """A tree of leaves in their order.

    Parameters
    ----------
    leaves : iterable of bytes
        The digests of leaves, `kvlab.codecs.stream.tree.leaf` of each.
    """

    def __init__(self, leaves: Iterable[bytes] = ()):
        self._levels, hashed = [list(leaves)], hashlib.sha256
        while len(below := self._levels[-1]) > 1:  # `node` of each two, written out: nothing else takes time here
            pairs = zip(below[::2], below[1::2], strict=False)
            self._levels.append([hashed(NODE + left + right).digest() for left, right in pairs])

    def __len__(self) -> int:
        return len(self._levels[0])

    def append(self, leaf: bytes) -> None:
        """Add a leaf after the others."""
        self._levels[0].append(leaf)
        height = 0
        while len(self._levels[height]) % 2 == 0:
            if height + 1 == len(self._levels):
                self._levels.append([])
            self._levels[height + 1].append(node(*self._levels[height][-2:]))
            height += 1

    def root(self, size: int | None = None) -> bytes:
        """The root of the first `size` leaves, 32 bytes; of all by default."""
        size = len(self) if size is None else size
        self._refuse_beyond(size)
        return self._of(0, size) if size else EMPTY

    def inclusion(self, index: int, size: int | None = None) -> list[bytes]:
        """The digests that lead from a leaf to the root of the first `size` (section 2.1.1), lowest first."""
        size = len(self) if size is None else size
        self._refuse_beyond(size)
        if not 0 <= index < size:
            raise UserError(f"a log of {size} entries has no entry {index}", code="user.no-entry")
        low, high, found = 0, size, []
        while high - low > 1:
            middle = low + _left(high - low)
            found.append(self._of(middle, high) if index < middle else self._of(low, middle))
            low, high = (low, middle) if index < middle else (middle, high)
        return found[::-1]

    def consistency(self, old: int, size: int | None = None) -> list[bytes]:
        """The digests that show the first `old` leaves to be the beginning of the first `size` (section 2.1.2)."""
        size = len(self) if size is None else size
        self._refuse_beyond(size)
        if not 0 <= old <= size:
            raise UserError(f"a log of {size} entries has no beginning of {old}", code="user.no-beginning")
        if old in (0, size):
            return []
        low, high, found, whole = 0, size, [], True
        while high != old:
            middle = low + _left(high - low)
            if old <= middle:
                found.append(self._of(middle, high))
                high = middle
            else:
                found.append(self._of(low, middle))
                low, whole = middle, False
        return ([] if whole else [self._of(low, high)]) + found[::-1]

    def _of(self, low: int, high: int) -> bytes:
        """The root of leaves from `low` to before `high`, where a recursion of the RFC cuts."""
        size = high - low
        if size & (size - 1) == 0:
            height = size.bit_length() - 1
            return self._levels[height][low >> height]
        middle = low + _left(size)
        return node(self._of(low, middle), self._of(middle, high))

    def _refuse_beyond(self, size: int) -> None:
        if not 0 <= size <= len(self):
            raise UserError(f"the log has {len(self)} entries, not {size}", code="user.log-size")


def _left(size: int) -> int:
    """The largest power of two below a size: the leaves of the left subtree."""
    return 1 << (size - 1).bit_length() - 1


def proves_inclusion(leaf: bytes, index: int, size: int, root: bytes, path: Sequence[bytes]) -> bool:
    """Whether a path shows a leaf to be entry `index` of the log of this size and root (RFC 9162, section 2.1.3.2)."""
    if not 0 <= index < size:
        return False
    first, last, found = index, size - 1, leaf
    for step in path:
        if last == 0:
            return False
        if first & 1 or first == last:
            found = node(step, found)
            while not first & 1 and first:
                first, last = first >> 1, last >> 1
        else:
            found = node(found, step)
        first, last = first >> 1, last >> 1
    return last == 0 and found == root


def proves_consistency(old: int, old_root: bytes, size: int, root: bytes, path: Sequence[bytes]) -> bool:
    """Whether a path shows the log of `old` entries to be the beginning of that of `size` (RFC 9162, 2.1.4.2)."""
    if not 0 <= old <= size:
        return False
    if old == size:
        return not path and old_root == root
    if old == 0:
        return not path and old_root == EMPTY
    steps = [old_root, *path] if old & (old - 1) == 0 else list(path)
    if not steps:
        return False
    first, last = old - 1, size - 1
    while first & 1:
        first, last = first >> 1, last >> 1
    before = after = steps[0]
    for step in steps[1:]:
        if last == 0:
            return False
        if first & 1 or first == last:
            before, after = node(step, before), node(step, after)
            while not first & 1 and first:
                first, last = first >> 1, last >> 1
        else:
            after = node(after, step)
        first, last = first >> 1, last >> 1
    return last == 0 and before == old_root and after == root
