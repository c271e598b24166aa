"""What may be said across engines: nothing where they differ, and numbers without a reading where that is open."""

from __future__ import annotations

from kvlab.output import format as fmt

TRUTH_ENGINE = "hf"
FEW = 2.0  # rounding errors


def withheld_because(metrics: dict, verdict: dict) -> str | None:
    """The reason why no number that compares engines may be printed; None when they may, or there is none."""
    if not compares_engines(metrics):
        return None
    agreement = metrics.get("agreement")
    if not agreement:
        why = "; ".join(metrics.get("agreement_why") or [])
        return fmt.safe(why or "the agreement of the engines in float32 was not measured")
    if agreement["state"] != "differ" and verdict.get("cross_engine_allowed", True):
        return None
    reasons = metrics.get("agreement_why") or [
        f"{row['name']}: {row['detail']}" for row in verdict.get("preconditions") or [] if not row["holds"]
    ]
    return fmt.safe("; ".join(reasons) or "the gate does not allow it").rstrip(".")


def undecided(metrics: dict) -> dict | None:
    """The agreement of the engines where it is open: numbers stand side by side, but none is laid to the engine."""
    agreement = metrics.get("agreement")
    return agreement if agreement and agreement["state"] == "open" else None


def settling(agreement: dict) -> str:
    """What would decide an open agreement, in a sentence or two; empty where it is not open.

    Where a rounding error moves the codec's own result as far as the other engine does, windows are not what is
    missing.
    """
    if agreement["state"] != "open":
        return ""
    by_rounding = [one for one in (agreement.get("codec") or {}).values() if _as_rounding(one)]
    if by_rounding:
        worst = max(by_rounding, key=lambda one: one["cross_kl"]["value"])
        apart, own = (fmt.number(worst[name]["value"], 2) for name in ("cross_kl", "jitter_kl"))
        return (
            f"With this codec one engine is KL {apart} from the other and {own} from itself after a rounding error, so"
            " that what is open is of the size of the codec's own noise; `baseline.jitters` averages that over several"
            " rounding errors of each window."
        )
    if agreement["windows_needed"] is None or agreement["windows_needed"] >= fmt.OUT_OF_REACH:
        return "No number of windows would decide it, were the differences what they are here."
    needed = fmt.whole(agreement["windows_needed"])
    return f"About {needed} windows would decide it ({fmt.POST_HOC})."


def _as_rounding(one: dict) -> bool:
    """Whether the engines' coded runs are no further apart than a few rounding errors on one of them."""
    return one["cross_kl"]["value"] <= FEW * one["jitter_kl"]["value"]


def compares_engines(metrics: dict) -> bool:
    """Whether anything in the metrics sets one engine against another."""
    residual = metrics.get("residual") or {}
    return bool(
        metrics.get("agreement")
        or metrics.get("baseline_peers")
        or any(crosses(metrics.get(name)) for name in ("gap", "factors"))
        or any(row["engine"] != TRUTH_ENGINE for row in metrics.get("baseline") or [])
        or metrics.get("sigma_drift")
        or residual.get("ratios")
    )


def crosses(gap: dict | None) -> bool:
    """Whether the corners of a decomposition are of two engines."""
    return bool(gap) and gap["low"]["engine"] != gap["high"]["engine"]


def without_cross_engine(metrics: dict) -> dict:
    """The metrics without every part that compares engines."""
    return metrics | {
        **{name: None if crosses(gap := metrics.get(name)) else gap for name in ("gap", "factors")},
        "agreement": None,
        "baseline_peers": [],
        # A cast is held against its own engine, an engine's run in another dtype against the truth's.
        "closure": [
            row for row in metrics.get("closure") or [] if row["engine"] == TRUTH_ENGINE or row["against"] == "cast"
        ],
        "residual": {key: value for key, value in (metrics.get("residual") or {}).items() if key != "ratios"},
        "baseline": [row for row in metrics.get("baseline") or [] if row["engine"] == TRUTH_ENGINE],
        "sigma_drift": None,
    }
