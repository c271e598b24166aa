"""Where bytes are better spent, from the part ``mitigations`` of ``metrics.json``."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab_pipeline.studies.estimates import claim

UNIT = "times that of uniform spending"
SUBJECTS = {
    "moved": "Leaving another set of layers uncoded, {many} `params.yaml` names: {layers}",
    "greedy": "Leaving the layers uncoded that a greedy search finds: {layers}",
    "extended": "Leaving more layers uncoded: {layers}",
    "hot": "One bit more for K on {layers}",
    "klt boundary": "`klt` with uncoded layers: {layers}",
    "klt hot": "`klt` with one bit more for K on {layers}",
}


def claims(mitigations: dict | None, before: int) -> list[dict]:
    """One claim for each arm of an engine and protocol that is another cell than its rival and than another arm.

    Parameters
    ----------
    mitigations : dict or None
    before : int
        How many layers params.yaml leaves uncoded.
    """
    found, claimed = [], set()
    for row in (mitigations or {}).get("comparisons") or []:
        arm = row["engine"], row["protocol"], row["compared"][0][0]["cell_id"]
        if row["same"] or arm in claimed:
            continue
        claimed.add(arm)
        subject = f"{arm_words(row['arm'], row['layers'], before)} (`{row['engine']}`, `{row['protocol']}`)"
        subject += f", {against_words(row)}"
        found.append(claim("mitigations", subject, row["ratio"], row["compared"], null=1.0, unit=UNIT))
    return found


def arm_words(name: str, layers: Sequence[int], before: int) -> str:
    """What an arm does to its layers; a search may have found fewer than params.yaml names."""
    many = "as many as" if len(layers) == before else "fewer than" if len(layers) < before else "more than"
    return SUBJECTS[name].format(layers=layer_words(layers), many=many)


def layer_words(layers: Sequence[int]) -> str:
    """Layers in words."""
    if not layers:
        return "no layer"
    *head, last = map(str, layers)
    return f"layers {', '.join(head)} and {last}" if head else f"layer {last}"


def against_words(row: dict) -> str:
    """What an arm is held against, and how their bytes compare."""
    if row["beyond"] is None:
        return "against uniform spending of as many bytes,"
    than = {"above": "fewer", "below": "more"}[row["beyond"]]
    return f"against `{row['against']}`, which takes {than} bytes,"
