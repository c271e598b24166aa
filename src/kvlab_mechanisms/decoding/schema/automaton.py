"""The automaton that runs a language of bytes.

The deterministic automaton is made while it is run, a state at a time (Rabin & Scott 1959, IBM Journal 3:114,
definition 11), and kept. Its states are whole numbers; those from which no text can be completed are cut off, so that
whatever it allows can be ended.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvlab.core.errors import CapabilityError
from kvlab_mechanisms.decoding.schema.parts import Net, Part

DEAD = -1


class Automaton:
    """The deterministic automaton of a language, made as it is run.

    Parameters
    ----------
    part : Part

    Attributes
    ----------
    start : int
    """

    def __init__(self, part: Part):
        self._net = Net()
        begin = self._net.state()
        self._end = part.put(self._net, begin)
        self._live = self._completable()
        self._numbers: dict[frozenset[int], int] = {}
        self._sets: list[frozenset[int]] = []
        self._rows: list[dict[int, int] | None] = []
        self.start = self._number(self._closed([begin]))
        if self.start == DEAD:
            raise CapabilityError("the schema allows no text at all")

    def step(self, state: int, byte: int) -> int:
        """The state after a byte; `DEAD` where it is not allowed."""
        return self.row(state).get(byte, DEAD)

    def row(self, state: int) -> dict[int, int]:
        """Allowed bytes and the states after them."""
        known = self._rows[state]
        if known is None:
            reached: dict[int, set[int]] = {}
            for member in self._sets[state]:
                for low, high, after in self._net.ranges[member]:
                    for byte in range(low, high + 1):
                        reached.setdefault(byte, set()).add(after)
            numbered: dict[frozenset[int], int] = {}
            known = {}
            for byte in sorted(reached):
                members = frozenset(reached[byte])
                if members not in numbered:
                    numbered[members] = self._number(self._closed(members))
                if numbered[members] != DEAD:
                    known[byte] = numbered[members]
            self._rows[state] = known
        return known

    def accepts(self, state: int) -> bool:
        """Whether a text may end here."""
        return self._end in self._sets[state]

    def run(self, raw: bytes, state: int | None = None) -> int:
        """The state after a text, or `DEAD`."""
        state = self.start if state is None else state
        for byte in raw:
            state = self.step(state, byte)
            if state == DEAD:
                return DEAD
        return state

    def matches(self, raw: bytes) -> bool:
        """Whether a text is of the language."""
        state = self.run(raw)
        return state != DEAD and self.accepts(state)

    def _closed(self, states: Iterable[int]) -> frozenset[int]:
        """With all that is reached by no byte; without what leads nowhere."""
        found, left = set(), list(states)
        while left:
            state = left.pop()
            if state not in found and state in self._live:
                found.add(state)
                left += self._net.free[state]
        return frozenset(found)

    def _number(self, members: frozenset[int]) -> int:
        if not members:
            return DEAD
        if members not in self._numbers:
            self._numbers[members] = len(self._sets)
            self._sets.append(members)
            self._rows.append(None)
        return self._numbers[members]

    def _completable(self) -> frozenset[int]:
        """States from which the end can be reached."""
        before: list[list[int]] = [[] for _ in self._net.free]
        for state, (free, ranges) in enumerate(zip(self._net.free, self._net.ranges, strict=True)):
            for after in (*free, *(end for _, _, end in ranges)):
                before[after].append(state)
        found, left = set(), [self._end]
        while left:
            state = left.pop()
            if state not in found:
                found.add(state)
                left += before[state]
        return frozenset(found)
