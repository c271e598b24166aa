"""Claims as sentences: each says how many windows, which interval, and which cells, or that it is not resolved.

A claim is derived from the entries of ``metrics.json`` whenever it is told and stands in no file, so that no sentence
can differ from the number it is about.
"""

from __future__ import annotations

from itertools import groupby

from kvlab.output import format as fmt
from kvlab_pipeline.rendering.parts import HELD
from kvlab_pipeline.rendering.withheld import undecided
from kvlab_pipeline.studies.register import chapters

MOST_NAMED = 3  # cells that a side of a comparison names before it counts them
SAME_BYTES = 0.005  # relative; more apart, a sentence says how many bits per value each side stores


def derived(metrics: dict) -> list[dict]:
    """Every claim that the entries of ``metrics.json`` make, section by section.

    Parameters
    ----------
    metrics : dict
        A part that was not measured, or was withheld, may be None, empty or absent: it makes no claim.
    """
    found = [claim for chapter in chapters().values() for claim in chapter.claims(metrics)]
    agreement = undecided(metrics)
    return [while_engines_open(claim, agreement) if agreement and claim["of_engine"] else claim for claim in found]


def while_engines_open(claim: dict, *agreements: dict) -> dict:
    """A claim on the engine where it is open whether the engines agree: its number is told, but not as resolved."""
    counts = [one["windows_needed"] for one in (claim, *agreements)]
    needed = None if None in counts else max(counts)
    return claim | {"held": True, "windows_needed": needed}


def sections(claims: list[dict] | None) -> list[dict]:
    """Sentences by what they are about, in the order given: ``about``, ``sentences``."""
    groups = groupby(claims or [], key=lambda claim: claim["about"])
    return [{"about": about, "sentences": [sentence(claim) for claim in found]} for about, found in groups]


def resolved(claim: dict) -> bool:
    """Whether the interval leaves out the effect that is no effect, and nothing that came with it speaks against."""
    effect, null = claim["effect"], claim["null"]
    if claim.get("held"):
        return False
    return not effect["low"] <= null <= effect["high"] and claim.get("borne_out", True)


def sentence(claim: dict) -> str:
    """One claim as one sentence, evidence included."""
    effect, lowered = claim["effect"], claim["effect"]["value"] < claim["null"]
    if not resolved(claim):
        subject, size = claim["subject"].rstrip(",:"), sized(fmt.estimate(effect), claim["unit"])
        if claim.get("held"):
            said = f"{HELD}, {size}"
        else:
            said = f"not resolved, {size}{bounded(claim)}{objected(claim) or needing(claim)}"
        return f"{subject}: {said} ({evidence(claim)})."
    by = "to" if claim["null"] else "by"
    # "Lowers by" already says which way; a ratio is read as it stands.
    size = fmt.estimate(effect, -1.0 if lowered and not claim["null"] else 1.0)
    verb = claim["down"] if lowered else claim["up"]
    return f"{claim['subject']} {verb} {by} {sized(size, claim['unit'])} ({evidence(claim)})."


def sized(text: str, unit: str) -> str:
    """A number and its unit."""
    return " ".join(filter(None, [text, unit]))


def objected(claim: dict) -> str:
    """Why an effect whose interval lies to one side is not resolved; empty where the interval itself is open."""
    effect, null = claim["effect"], claim["null"]
    return "" if effect["low"] <= null <= effect["high"] else f", {claim['objection']}"


def bounded(claim: dict) -> str:
    """The largest effect that the interval of a claim leaves possible; a ratio's in per cent of its null."""
    null = claim["null"]
    largest = fmt.largest(claim["effect"], null, 100 / null if null else 1.0)
    return "" if largest == fmt.number(0.0) else f", at most {largest}{' %' if null else ''} either way"


def needing(claim: dict) -> str:
    """How many windows a claim that is not resolved would take, as if the effect were what was found."""
    needed = claim["windows_needed"]
    if needed is None or needed >= fmt.OUT_OF_REACH:
        return ", and no effect is to be seen"
    return f", about {fmt.whole(needed)} windows needed ({fmt.POST_HOC})"


def evidence(claim: dict) -> str:
    """On how much a claim rests, and which cells it compares."""
    effect, compared = claim["effect"], claim["compared"]
    bits = [side[0].get("bits_per_value") if len(side) == 1 else None for side in compared]
    told = None not in bits and abs(bits[0] / bits[1] - 1) > SAME_BYTES
    first, second = (side_words(side, stored if told else None) for side, stored in zip(compared, bits, strict=True))
    return f"{fmt.windows(effect)}, {effect['n_tokens']} tokens; {first} against {second}"


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
