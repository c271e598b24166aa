"""What the gap and the factors are said to do to KL, from the parts ``gap`` and ``factors`` of ``metrics.json``."""

from __future__ import annotations

from kvlab_pipeline.studies.estimates import claim

WHERE = {"gap": "between the published corners", "factors": "over the whole factorial"}


def claims(part: dict | None, about: str) -> list[dict]:
    """One claim for a gap and one for each factor's share of it; none where nothing varies.

    Parameters
    ----------
    part : dict or None
        A decomposition.
    about : str
        ``gap`` or ``factors``.
    """
    if not part or not part["factors"]:
        return []
    kl, where, compared = part["measures"]["kl"], WHERE[about], part["compared"]
    found = [claim(about, f"Going from low to high {where}", kl["gap"], compared, of_engine=False)]
    for one in kl["parts"]:
        name = one["factor"]
        subject = f"`{name}` going from `{part['low'][name]}` to `{part['high'][name]}`, its share {where},"
        found.append(claim(about, subject, one["share"], compared, of_engine=name == "engine"))
    return found
