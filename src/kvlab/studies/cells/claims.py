"""What each cell of params.yaml changes beside its counterpart, from the part ``cells`` of ``metrics.json``."""

from __future__ import annotations

from kvlab.studies.estimates import claim


def claims(cells: list[dict]) -> list[dict]:
    """One claim, in net KL, for each cell that has a counterpart."""
    return [claim("cells", subject(cell), cell["difference"], cell["compared"]) for cell in cells if cell["difference"]]


def subject(cell: dict) -> str:
    """A cell in place of its counterpart, and where."""
    other = f"`{cell['against']}`" if cell["against"] else "the studied cell"
    return f"`{cell['label']}` in place of {other} (`{cell['engine']}`, `{cell['protocol']}`)"
