"""Which tokens of a vocabulary may follow: masks and steps by token over an automaton of bytes.

Willard & Louf 2023 (2307.09702, algorithm 4), with the vocabulary as a trie, so that a beginning that many tokens share
is walked once, and lazily: a state is looked at when it is first reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvlab.core.errors import CapabilityError, ParamsError
from kvlab_mechanisms.decoding.schema.automaton import Automaton

END = -2  # the state after the text has ended


@dataclass
class Node:
    """A beginning of tokens: the tokens that it is, and the bytes that go on."""

    tokens: list[int] = field(default_factory=list)
    after: dict[int, Node] = field(default_factory=dict)


class TokenIndex:
    """An automaton over tokens; its states are whole numbers.

    Parameters
    ----------
    automaton : Automaton
    vocabulary : sequence of bytes or None
        The bytes of each token; None for one that is no text.
    eos : int
        Allowed exactly where a text may end.
    """

    def __init__(self, automaton: Automaton, vocabulary: Sequence[bytes | None], eos: int):
        if not 0 <= eos < len(vocabulary):
            raise ParamsError(f"token {eos} is to end texts; the vocabulary has 0 to {len(vocabulary) - 1}")
        self.automaton, self.eos, self.size = automaton, eos, len(vocabulary)
        self.start = automaton.start
        self._trie = Node()
        for token, raw in enumerate(vocabulary):
            if raw and token != eos:
                node = self._trie
                for byte in raw:
                    node = node.after.setdefault(byte, Node())
                node.tokens.append(token)
        self._after: dict[int, dict[int, int]] = {}
        self._masks: dict[int, np.ndarray] = {}

    def after(self, state: int) -> dict[int, int]:
        """The tokens that are allowed in a state, and the states after them."""
        if state not in self._after:
            found, left = {}, [(self._trie, state)] if state != END else []
            while left:
                node, here = left.pop()
                row = self.automaton.row(here)
                # the shorter of the two is gone through
                for byte in node.after if len(node.after) < len(row) else row:
                    if byte in node.after and byte in row:
                        child = node.after[byte]
                        found.update(dict.fromkeys(child.tokens, row[byte]))
                        if child.after:
                            left.append((child, row[byte]))
            if state != END and self.automaton.accepts(state):
                found[self.eos] = END
            if state != END and not found:
                raise CapabilityError("the vocabulary has no token that goes on here; it lacks single bytes")
            self._after[state] = found
        return self._after[state]

    def mask(self, state: int) -> np.ndarray:
        """The allowed tokens as bits, uint32 [ceil(vocabulary / 32)], the lowest bit first: xgrammar's layout."""
        if state not in self._masks:
            bits = np.zeros(-(-self.size // 32) * 32, np.uint8)
            bits[list(self.after(state))] = 1
            self._masks[state] = np.packbits(bits, bitorder="little").view("<u4")
        return self._masks[state]

    def constrain(self, logits: Tensor, state: int) -> Tensor:
        """Logits [vocabulary] in which what is not allowed became minus infinity, in place.

        A row may be longer than the vocabulary, as models pad it; nothing beyond it is allowed.
        """
        bits = np.unpackbits(~self.mask(state).view(np.uint8), count=self.size, bitorder="little")
        refused, within = torch.from_numpy(bits.view(bool)).to(logits.device), logits
        if len(logits) > self.size:
            within = logits[: self.size]
            logits[self.size :] = -torch.inf
        within.masked_fill_(refused, -torch.inf)
        return logits

    def advance(self, state: int, token: int) -> int:
        """The state after a token; `ParamsError` for one that is not allowed."""
        found = self.after(state).get(token)
        if found is None:
            raise ParamsError(f"token {token} is not allowed here; allowed are {len(self.after(state))} others")
        return found

    def forced(self, state: int) -> bytes:
        """The bytes that must come next whatever is written: text that needs no forward (jump-forward)."""
        found = bytearray()
        while not self.automaton.accepts(state) and len(row := self.automaton.row(state)) == 1:
            ((byte, state),) = row.items()
            found.append(byte)
        return bytes(found)
