"""Regular languages of bytes, put together of parts (Thompson 1968, CACM 11:419).

A part is a nondeterministic automaton with one way in and one way out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlab.core.errors import CapabilityError

MOST_STATES = 200_000  # of the nondeterministic automaton


@dataclass
class Net:
    """States of a nondeterministic automaton under construction.

    Attributes
    ----------
    free : list of lists of int
        Of each state, those that are reached by no byte.
    ranges : list of lists of (low, high, state)
        Of each state, those that are reached by a byte of a range, both ends included.
    """

    free: list[list[int]] = field(default_factory=list)
    ranges: list[list[tuple[int, int, int]]] = field(default_factory=list)

    def state(self) -> int:
        """A new one."""
        if len(self.free) >= MOST_STATES:
            raise CapabilityError(f"the schema needs more than {MOST_STATES} states; lower its maxima, or use xgrammar")
        self.free.append([])
        self.ranges.append([])
        return len(self.free) - 1


class Part:
    """A language; `put` writes it into a net after a state and says in which state it ends."""

    def put(self, net: Net, begin: int) -> int:
        """See the class."""
        raise NotImplementedError


@dataclass(frozen=True)
class Bytes(Part):
    """Sequences of one byte each from a range."""

    ranges: tuple[tuple[int, int], ...]

    def put(self, net: Net, begin: int) -> int:
        """See `Part`."""
        for low, high in self.ranges:
            end = net.state()
            net.ranges[begin].append((low, high, end))
            begin = end
        return begin


def text(exact: str | bytes) -> Bytes:
    """One text."""
    raw = exact.encode() if isinstance(exact, str) else exact
    return Bytes(tuple((byte, byte) for byte in raw))


@dataclass(frozen=True)
class Then(Part):
    """One after the other."""

    parts: tuple[Part, ...]

    def put(self, net: Net, begin: int) -> int:
        """See `Part`."""
        for part in self.parts:
            begin = part.put(net, begin)
        return begin


@dataclass(frozen=True)
class Either(Part):
    """One of them; of none, no text at all."""

    parts: tuple[Part, ...]

    def put(self, net: Net, begin: int) -> int:
        """See `Part`."""
        end = net.state()
        for part in self.parts:
            entry = net.state()  # a way in of its own: a repetition inside must not lead back to the others
            net.free[begin].append(entry)
            net.free[part.put(net, entry)].append(end)
        return end


@dataclass(frozen=True)
class Repeated(Part):
    """A part `least` to `most` times; without a `most`, as often as one likes."""

    part: Part
    least: int = 0
    most: int | None = None

    def put(self, net: Net, begin: int) -> int:
        """See `Part`."""
        for _ in range(self.least):
            begin = self.part.put(net, begin)
        end = net.state()
        if self.most is None:
            loop = net.state()
            net.free[begin].append(loop)
            net.free[self.part.put(net, loop)].append(loop)
            net.free[loop].append(end)
            return end
        for _ in range(self.most - self.least):
            net.free[begin].append(end)
            begin = self.part.put(net, begin)
        net.free[begin].append(end)
        return end


EMPTY = Then(())


def optional(part: Part) -> Part:
    """The part, or nothing."""
    return Either((EMPTY, part))
