"""Patterns of a schema as parts of an automaton: the regular core of ECMA-262 that all dialects share.

Literals, ``.``, classes, ``\\d \\w \\s``, groups, ``|``, ``* + ? {m,n}``, and anchors at the very ends. A pattern
without anchors may stand anywhere in a string, as JSON Schema says (Validation 2020-12, section 6.3.3).
"""

from __future__ import annotations

import re

from kvlab.core.errors import ParamsError
from kvlab_mechanisms.decoding.schema.parts import EMPTY, Either, Part, Repeated, Then
from kvlab_mechanisms.decoding.schema.ranges import utf8

Ranges = list[tuple[int, int]]
LAST = 0x10FFFF
NAMED = {
    "d": [(48, 57)],
    "w": [(48, 57), (65, 90), (95, 95), (97, 122)],
    "s": [(9, 13), (32, 32)],
}
CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
PRINTED: Ranges = [(0x20, 0x21), (0x23, 0x5B), (0x5D, LAST)]
"""Characters that stand for themselves in a JSON string."""


def complement(ranges: Ranges) -> Ranges:
    """All other characters."""
    found, begin = [], 0
    for low, high in sorted(ranges):
        if low > begin:
            found.append((begin, low - 1))
        begin = max(begin, high + 1)
    return [*found, (begin, LAST)] if begin <= LAST else found


def meet(a: Ranges, b: Ranges) -> Ranges:
    """Characters of both."""
    both = ((max(low, other), min(high, last)) for low, high in a for other, last in b)
    return [(low, high) for low, high in both if low <= high]


def characters(ranges: Ranges) -> Part:
    """One character of these that a JSON string may hold unescaped."""
    return Either(tuple(utf8(low, high) for low, high in meet(ranges, PRINTED)))


ANY = [(0, LAST)]


def pattern(source: str) -> Part:
    """The inside of JSON strings, without escapes, in which a pattern is found; `ParamsError` for what is not read."""
    begins, ends = source.startswith("^"), source.endswith("$") and not source.endswith("\\$")
    inner = source[begins : len(source) - ends]
    reader = _Reader(inner, source)
    alternatives = reader.alternatives()
    if reader.left():
        raise reader.refusal("a bracket that nothing opens")
    if (begins or ends) and reader.bare_or:
        raise reader.refusal("an anchor beside |; put the alternatives into a group")
    around = Repeated(characters(ANY))
    return Then((EMPTY if begins else around, alternatives, EMPTY if ends else around))


class _Reader:
    """A descent through a pattern."""

    def __init__(self, inner: str, source: str):
        self.inner, self.source, self.at, self.bare_or, self.depth = inner, source, 0, False, 0

    def left(self) -> str:
        """The next character; empty at the end."""
        return self.inner[self.at : self.at + 1]

    def refusal(self, what: str) -> ParamsError:
        """The error for a pattern."""
        return ParamsError(f"pattern {self.source!r} has {what}, which the reference automaton does not read")

    def alternatives(self) -> Part:
        """Sequences with | between them."""
        found = [self.sequence()]
        while self.left() == "|":
            self.at += 1
            self.bare_or = self.bare_or or self.depth == 0
            found.append(self.sequence())
        return found[0] if len(found) == 1 else Either(tuple(found))

    def sequence(self) -> Part:
        """Atoms, each with how often it stands."""
        found: list[Part] = []
        while self.left() and self.left() not in "|)":
            found.append(self.counted(self.atom()))
        return Then(tuple(found))

    def counted(self, atom: Part) -> Part:
        """An atom with what stands after it."""
        found = re.compile(r"\*|\+|\?|\{(\d+)(,?)(\d*)\}").match(self.inner, self.at)
        if not found:
            return atom
        self.at = found.end()
        if self.left() and self.left() in "*+?{":
            raise self.refusal("a lazy, possessive or doubled quantifier")
        if found[0] in "*+?":
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[found[0]]
        else:
            least = int(found[1])
            most = least if not found[2] else int(found[3]) if found[3] else None
        if most is not None and most < least:
            raise self.refusal(f"a repetition of {least} to {most}")
        return Repeated(atom, least, most)

    def atom(self) -> Part:
        """A group, a class, an escape or a character."""
        sign = self.left()
        self.at += 1
        if sign == "(":
            return self.group()
        if sign == "[":
            return characters(self.members())
        if sign == "\\":
            return characters(self.escaped())
        if sign in "^$*+?{}":
            raise self.refusal(f"{sign!r} where a character is expected")
        return characters(complement([(10, 10), (13, 13)]) if sign == "." else [(ord(sign), ord(sign))])

    def group(self) -> Part:
        """What is in brackets."""
        if self.inner.startswith("?:", self.at):
            self.at += 2
        elif self.left() == "?":
            raise self.refusal("a look around or a named group")
        self.depth += 1
        found = self.alternatives()
        self.depth -= 1
        if self.left() != ")":
            raise self.refusal("a bracket that is not closed")
        self.at += 1
        return found

    def members(self) -> Ranges:
        """Of a class."""
        negated = self.left() == "^"
        self.at += negated
        found: Ranges = []
        while self.left() != "]":
            low = self.member()
            if self.left() == "-" and self.inner[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self.member()
                if len(low) != 1 or len(high) != 1 or low[0][0] > high[0][1]:
                    raise self.refusal("a range that runs backwards")
                low = [(low[0][0], high[0][1])]
            found += low
        self.at += 1
        return complement(found) if negated else found

    def member(self) -> Ranges:
        """One of a class."""
        sign = self.left()
        if not sign:
            raise self.refusal("a class that is not closed")
        self.at += 1
        return self.escaped() if sign == "\\" else [(ord(sign), ord(sign))]

    def escaped(self) -> Ranges:
        """What stands after a backslash."""
        sign = self.left()
        self.at += 1
        if sign.lower() in NAMED and sign:
            return NAMED[sign] if sign in NAMED else complement(NAMED[sign.lower()])
        if sign in CONTROLS:
            return [(CONTROLS[sign], CONTROLS[sign])]
        if not sign or sign.isalnum():
            raise self.refusal(f"the escape \\{sign}")
        return [(ord(sign), ord(sign))]
