"""What passes between a tap and its coder, and what attention then reads, kept for a witness."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvlab.engines.base import ContextCache, Part, Reading, Tap

Tensors = dict[tuple[int, Part], torch.Tensor]


@dataclass
class Overheard:
    """One pass of a cell.

    Parameters
    ----------
    tokens : int
        Of a window that are coded, from its first on.
    given, answered : dict
        What came to the coder and what left it, [kv_heads, tokens, head_dim].
    reading : Reading or None
        What attention used; None from an engine that cannot be looked into.
    """

    tokens: int
    given: Tensors = field(default_factory=dict)
    answered: Tensors = field(default_factory=dict)
    reading: Reading | None = None

    def around(self, tap: Tap) -> Tap:
        """The same tap, which is listened to."""

        def heard(layer: int, part: Part, x: torch.Tensor) -> torch.Tensor | None:
            """See `Tap`."""
            given = x[:, : self.tokens].clone()
            answer = tap(layer, part, x)
            if answer is not None:
                self.note(layer, part, given, answer[:, : self.tokens])
            return answer

        return heard

    def exchanged(self, clean: ContextCache, coded: ContextCache, places: list[tuple[int, Part]]) -> None:
        """What a coded cache holds at some places, and what it was coded from."""
        for place in places:
            self.note(*place, clean[place], coded[place])

    def note(self, layer: int, part: Part, given: torch.Tensor, answered: torch.Tensor) -> None:
        """One tensor's round trip."""
        self.given[layer, part], self.answered[layer, part] = given, answered.to(given.dtype)
