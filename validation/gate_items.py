"""How many windows would settle a row at the gate: those of a run, drawn anew, judged at the registered margins.

    python -m validation.gate_items results/mechanisms/MODEL/hf.parquet results/mechanisms/MODEL/vllm.parquet --tested 7

Each row's windows are taken for a population. Of it n are drawn with replacement, and each draw is certified (inside
the margin at the level that Holm's adjustment asks of the first of so many rows tested), refused (beyond it) or
neither. A line is a row and metric: its loss, and the fewest of `SIZES` at which one of the two is found in four of
five draws. A tail that the run did not see is in no draw. Needles and tasks are counted by
`validation.gate.power.items_needed`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import polars as pl

from kvlab.gate.evidence.measures import ALPHA, carried, measured
from kvlab.gate.registry.reading import load
from kvlab.stats.power import POWER
from kvlab_pipeline.studies.mechanisms.plan import FIDELITY
from validation.gate_error import losses

SIZES = (96, 128, 192, 256, 384, 512, 1024)


def shares(lost: np.ndarray, margin: float, n: int, level: float, draws: int, seed: int = 0) -> dict[str, float]:
    """How often n windows, drawn from the losses of some, are certified at a level, and how often refused."""
    rng, certified, refused = np.random.default_rng([seed, n]), 0, 0
    deep = [place for place, one in enumerate(carried(n)) if one <= level]
    for _ in range(draws):
        found = measured(rng.choice(lost, n), False)
        certified += bool(deep) and found.highs[deep[0]] <= margin
        refused += found.low > margin
    return {"certified": certified / draws, "refused": refused / draws}


def settled(lost: np.ndarray, margin: float, level: float, draws: int) -> tuple[int, str] | None:
    """The fewest of `SIZES` that settle it with the usual power, and as what; None where none of them does."""
    for n in SIZES:
        word, share = max(shares(lost, margin, n, level, draws).items(), key=lambda one: one[1])
        if share >= POWER:
            return n, word
    return None


def main() -> None:
    """Print a line for each row and metric."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scores", type=Path, nargs="+", help="results/mechanisms/MODEL/ENGINE.parquet of a run")
    parser.add_argument("--tested", type=int, required=True, help="rows that are tested together")
    parser.add_argument("--draws", type=int, default=50)
    given = parser.parse_args()
    margins = {one.key: one.margin for one in load().evals[FIDELITY].metrics}
    for path in given.scores:
        for label, metric, lost in losses(pl.read_parquet(path)):
            found = settled(lost, margins[metric], ALPHA / given.tested, given.draws)
            told = f"{found[0]} windows, {found[1]}" if found else f"not by {SIZES[-1]} windows"
            print(f"{label:24} {metric:15} loses {lost.mean():8.5f} of {margins[metric]:g}: {told}", flush=True)


if __name__ == "__main__":
    main()
