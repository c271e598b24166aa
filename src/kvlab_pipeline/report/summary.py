"""A dozen headline numbers of a model, for a table of experiments."""

from __future__ import annotations

from kvlab.core.errors import Fault


def summary(metrics: dict) -> dict:
    """The headline scalars of a model's metrics, flat.

    Raises
    ------
    Fault
        When the metrics hold no decomposition.
    """
    if not metrics.get("gap"):
        raise Fault("these metrics hold no decomposition of the gap")
    kl = metrics["gap"]["measures"]["kl"]
    delta = metrics["gap"]["measures"]["delta_nll"]
    found = {f"kl.{name}": kl[name]["value"] for name in ("low", "high", "gap")}
    found |= {f"kl.gap.{end}": kl["gap"][end] for end in ("low", "high")}
    found |= {f"kl.share.{part['factor']}": part["share"]["value"] for part in kl["parts"]}
    found["delta_nll.gap"] = delta["gap"]["value"]
    corners = [cell for cell in metrics["cells"] if cell["study"] == "factors" and cell["role"] == "codec"]
    found["bits_per_value.min"] = min(cell["bits_per_value"] for cell in corners)
    for row in metrics["additivity"] or ():  # null without the study of layers
        if row["ratio"]:
            found[f"additivity.{row['engine']}.{row['protocol']}.{row['stream']}"] = row["ratio"]["value"]
    if metrics["agreement"]:
        found["engines_equivalent"] = metrics["agreement"]["state"] == "equivalent"
        found["engines_differ"] = metrics["agreement"]["state"] == "differ"
    return found
