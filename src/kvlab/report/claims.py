"""Claims as sentences: each says how many windows, which interval, and which cells, or that it is not resolved.

A claim is derived from the entries of ``metrics.json`` whenever it is told and stands in no file, so that no sentence
can differ from the number it is about.
"""

from __future__ import annotations

from itertools import groupby

from kvlab.pages import format as fmt
from kvlab.studies.register import chapters

MOST_NAMED = 3  # cells that a side of a comparison names before it counts them
SAME_BYTES = 0.005  # relative; more apart, a sentence says how many bits per value each side stores


def derived(metrics: dict) -> list[dict]:
    """Every claim that the entries of ``metrics.json`` make, section by section.

    Parameters
    ----------
    metrics : dict
        A part that was not measured, or was withheld, may be None, empty or absent: it makes no claim.
    """
    return [claim for chapter in chapters().values() for claim in chapter.claims(metrics)]


def sections(claims: list[dict] | None) -> list[dict]:
    """Sentences by what they are about, in the order given: ``about``, ``sentences``."""
    groups = groupby(claims or [], key=lambda claim: claim["about"])
    return [{"about": about, "sentences": [sentence(claim) for claim in found]} for about, found in groups]


def resolved(claim: dict) -> bool:
    """Whether the interval leaves out the effect that is no effect, and no test that came with it speaks against."""
    effect, null = claim["effect"], claim["null"]
    return not effect["low"] <= null <= effect["high"] and claim.get("borne_out", True)


def sentence(claim: dict) -> str:
    """One claim as one sentence, evidence included."""
    effect, lowered = claim["effect"], claim["effect"]["value"] < claim["null"]
    if not resolved(claim):
        size = sized(fmt.estimate(effect), claim["unit"])
        return f"{claim['subject'].rstrip(',:')}: not resolved, {size}{needing(claim)} ({evidence(claim)})."
    by = "to" if claim["null"] else "by"
    # "Lowers by" already says which way; a ratio is read as it stands.
    size = fmt.estimate(effect, -1.0 if lowered and not claim["null"] else 1.0)
    verb = claim["down"] if lowered else claim["up"]
    return f"{claim['subject']} {verb} {by} {sized(size, claim['unit'])} ({evidence(claim)})."


def sized(text: str, unit: str) -> str:
    """A number and its unit."""
    return " ".join(filter(None, [text, unit]))


def needing(claim: dict) -> str:
    """How many windows a claim that is not resolved would take."""
    needed = claim["windows_needed"]
    if needed is None or needed >= fmt.OUT_OF_REACH:
        return ", and no effect is to be seen"
    return f", about {fmt.whole(needed)} windows needed"


def evidence(claim: dict) -> str:
    """On how much a claim rests, and which cells it compares."""
    effect, compared = claim["effect"], claim["compared"]
    bits = [side[0].get("bits_per_value") if len(side) == 1 else None for side in compared]
    told = None not in bits and abs(bits[0] / bits[1] - 1) > SAME_BYTES
    first, second = (side_words(side, stored if told else None) for side, stored in zip(compared, bits, strict=True))
    return f"{effect['n_windows']} windows, {effect['n_tokens']} tokens; {first} against {second}"


def side_words(side: list[dict], bits: float | None = None) -> str:
    """The cells of one side by id, a single one with its bits per value if given; of many, their number.

    Where models are compared, the cells name theirs.
    """
    ids = [f"`{cell['cell_id']}`" for cell in side]
    model = side[0].get("model")
    whose = f" of `{model}`" if model else ""
    if len(ids) == 1:
        return f"cell {ids[0]}{whose}" + (f" at {fmt.number(bits)} bits per value" if bits else "")
    if len(ids) <= MOST_NAMED:
        return f"cells {', '.join(ids)}{whose} together"
    return f"{len(ids)} cells{whose} together ({ids[0]} to {ids[-1]})"
