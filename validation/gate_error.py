"""How often the gate would certify what truly loses its margin: windows that were really measured, drawn anew.

    python -m validation.gate_error results/mechanisms/MODEL/hf.parquet [--draws 1000]

Each row's windows are taken for a population, whose mean is then the true loss. Of it n windows are drawn with
replacement, and the margin is put where the truth lies: every certification is wrong. A level says how often that may
happen, one-sided. What is found stands beside it, for each metric and n, at the printed level and at the smallest that
so few windows carry.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from kvlab.gate.evidence.measures import carried, measured, rate_bounds
from kvlab_pipeline.studies.mechanisms.plan import BASELINE, FIDELITY, METRICS

SIZES = (32, 64, 128)
WORSE = {"kl": 1.0, "delta_nll": 1.0, "top1_agreement": -1.0}  # which way is a loss


def losses(scores: pl.DataFrame) -> Iterator[tuple[str, str, np.ndarray]]:
    """Row, metric and what each window loses, of every row but the baseline whose windows differ."""
    for label in scores["label"].unique(maintain_order=True):
        for metric in METRICS[FIDELITY]:
            mine = scores.filter(label=label, quality_eval_id=FIDELITY, metric=metric).sort("item")
            lost = WORSE[metric] * (mine["variant"] - mine["baseline"]).to_numpy()
            if label != BASELINE and np.ptp(lost):
                yield label, metric, lost


def wrong(lost: np.ndarray, n: int, draws: int, seed: int = 0) -> list[int]:
    """In how many draws of n windows the upper end lies below the true mean, at the first and last level carried."""
    rng, truth, found = np.random.default_rng([seed, n]), lost.mean(), [0, 0]
    for _ in range(draws):
        highs = measured(rng.choice(lost, n), False).highs
        for place in (0, -1):
            found[place] += highs[place] < truth
    return found


def table(scores: pl.DataFrame, draws: int) -> list[dict[str, Any]]:
    """A line for each metric and n: over all rows, how many lie surely above, and the worst with its exact interval."""
    of = list(losses(scores))
    lines = []
    for metric in METRICS[FIDELITY]:
        for n in SIZES:
            counts = {label: wrong(lost, n, draws) for label, of_metric, lost in of if of_metric == metric}
            for place, level in enumerate((carried(n)[0], carried(n)[-1])):
                worst = max(counts, key=lambda label: counts[label][place])
                low, high = rate_bounds(counts[worst][place], draws)
                above = sum(bool(rate_bounds(one[place], draws)[0] > level) for one in counts.values())
                lines.append(
                    {"metric": metric, "n": n, "level": level, "rows": len(counts), "above": above}
                    | {"mean": sum(one[place] for one in counts.values()) / draws / len(counts)}
                    | {"worst": counts[worst][place] / draws, "low": float(low), "high": float(high), "row": worst}
                )
    return lines


def main() -> None:
    """Print the table as Markdown."""
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given.add_argument("scores", type=Path, help="table that `kvlab step mechanisms` wrote")
    given.add_argument("--draws", type=int, default=1000, help="of each row and number of windows; default: 1000")
    args = given.parse_args()
    print("| metric | windows | stated | found, mean of the rows | rows surely above | found, worst row | which |")
    print("|---|---:|---:|---:|---:|---:|---|")
    for line in table(pl.read_parquet(args.scores), args.draws):
        interval = f"{line['worst']:.4f} [{line['low']:.4f}, {line['high']:.4f}]"
        above = f"{line['above']} of {line['rows']}"
        told = (line["metric"], line["n"], f"{line['level']:.4g}", f"{line['mean']:.4f}", above, interval, line["row"])
        print(f"| {' | '.join(map(str, told))} |")


if __name__ == "__main__":
    main()
