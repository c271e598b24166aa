"""Tables of the engines without a codec, beyond those against the truth: ``baseline_peers`` of ``metrics.json``."""

from __future__ import annotations

from kvlab.report import format as fmt
from kvlab.report.tables.parts import KL_UNIT


def peers(rows: list[dict]) -> str:
    """Uncompressed runs of two engines in the same dtype, against each other."""
    lines = [
        [
            *(f"`{row[key]}`" for key in ("run", "against", "dtype")),
            fmt.estimate(row["kl"]),
            fmt.estimate(row["ppl_ratio"], 100, 1),
            fmt.estimate(row["top1_agreement"], 100),
        ]
        for row in rows
    ]
    headers = ["run", "against", "dtype", f"KL, {KL_UNIT}", "perplexity change, %", "same top token, %"]
    return fmt.table(headers, lines)
