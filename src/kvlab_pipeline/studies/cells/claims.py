"""What each cell of params.yaml changes beside its counterpart, from the part ``cells`` of ``metrics.json``."""

from __future__ import annotations

from kvlab.output import format as fmt
from kvlab_pipeline.studies.estimates import claim


def claims(cells: list[dict]) -> list[dict]:
    """One claim, in net KL, for each cell that has a counterpart; resolved only where its q-value bears it out."""
    return [one_claim(cell) for cell in cells if cell["difference"]]


def one_claim(cell: dict) -> dict:
    """The claim of a cell beside its counterpart."""
    found = claim("cells", subject(cell), cell["difference"], cell["compared"])
    if cell["q_value"] <= 1 - cell["difference"]["confidence"]:
        return found
    objection = f"its q-value among all changes is {fmt.number(cell['q_value'], 2)}"
    return found | {"borne_out": False, "objection": objection}


def subject(cell: dict) -> str:
    """A cell in place of its counterpart, and where."""
    other = f"`{cell['against']}`" if cell["against"] else "the studied cell"
    return f"`{cell['label']}` in place of {other} (`{cell['engine']}`, `{cell['protocol']}`)"
