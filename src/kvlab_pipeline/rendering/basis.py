"""The line under a table of numbers with intervals: on how much it rests, and what it can tell from zero."""

from __future__ import annotations

from kvlab.output import format as fmt
from kvlab_pipeline.rendering.parts import KL_UNIT, scattered

METHODS = {
    "bca": "BCa bootstrap over windows, widened where Student's t is wider",
    "percentile": "percentile bootstrap over windows",
    "t": "Student's t over windows",
    "mover": "made of the two models' intervals",
}


class Basis:
    """Makes that line, for intervals of one confidence.

    Parameters
    ----------
    confidence : float
        Of the intervals, between 0 and 1.
    """

    def __init__(self, confidence: float):
        self.confidence, self.level = confidence, fmt.percent(confidence)

    def __call__(self, estimates: list[dict], unit: str = KL_UNIT) -> str:
        """The line for some numbers; empty where there are none."""
        estimates = scattered([given for given in estimates if given])
        if not estimates:
            return ""
        smallest = [fmt.number(pick(map(fmt.half_width, estimates)), 2) for pick in (min, max)]
        effect = smallest[0] if smallest[0] == smallest[1] else " to ".join(smallest)
        used = {given.get("method", "bca") for given in estimates}
        methods = " or ".join(words for method, words in METHODS.items() if method in used)
        windows, tokens = (fmt.span(given[key] for given in estimates) for key in ("n_windows", "n_tokens"))
        documents = [given["n_documents"] for given in estimates if given.get("n_documents")]
        drawn = ""
        if documents:
            named = "which are what is resampled (a window is of the one that fills most of it)"
            drawn = f" of {fmt.span(documents)} documents, {named}"
        return (
            f"*{windows} windows{drawn}, {tokens} scored tokens, {self.level} intervals in brackets ({methods}); "
            f"the smallest effect told from zero is {effect} {unit}{'' if effect in smallest else ', by row'}.*"
        )

    def under(self, rows: list[dict] | None, make, key: str) -> dict | None:
        """A table of rows, ``table``, and the line under it, ``basis``; None when there are no rows."""
        if not rows:
            return None
        return {"table": make(rows), "basis": self([row[key] for row in rows])}
