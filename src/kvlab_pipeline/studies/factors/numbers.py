"""The gap between two corners of the factorial, divided among the factors in which they differ."""

from __future__ import annotations

from itertools import product

import numpy as np

from kvlab.core.params import Params
from kvlab.stats.bootstrap import Bootstrap, Column
from kvlab.stats.power import windows_for_sign
from kvlab.stats.shapley import corner_index, interactions, pairs, shapley
from kvlab_pipeline.studies.baselines import LEVELS, corner_cell
from kvlab_pipeline.studies.estimates import sides
from kvlab_pipeline.studies.gather import comparable
from kvlab_pipeline.studies.measured import Measured, Results
from kvlab_pipeline.studies.tidy import NATS, TOKENS, WINDOWS, By, Compared, Estimand, Level, Several, Single

# A gap between two corners, divided among factors.
CORNER = {name: Level() for name in ("engine", "protocol", "dtype", "variance_ratio", "origin")}

SHARES = Several(
    {
        "factor": Level(),
        "share": Estimand(NATS, "of the gap: its Shapley value; the shares add up to the gap exactly"),
        "windows_needed": Estimand(
            WINDOWS,
            "at which the share would stand clear of zero, were it what it is; null where nothing is to be seen",
        ),
    }
)

ENDS = {"low": Estimand(NATS), "high": Estimand(NATS), "gap": Estimand(NATS)}

DECOMPOSITION = {
    "factors": Level("those that vary; the other levels of a corner are shared", name="varied"),
    "dtype": Level(name="shared_dtype"),
    "stream": Level(),
    "low": CORNER,
    "high": CORNER,
    "measures": By(
        "measure",
        ENDS
        | {
            "parts": SHARES,
            "interactions": Several(
                {"factors": Level(), "effect": Estimand(NATS, "of two factors together beyond what each does alone")}
            ),
            "corners": Several(CORNER | {"value": Estimand(NATS)}),
        },
    ),
    "compared": Compared(),
}

# Between the two published corners, and window by window, of which another model's differences are made.
GAP = Single(
    DECOMPOSITION
    | {
        "windows": Several(
            {
                "key": Level("digest of every window and position; equal keys are equal tokens"),
                "window": Level(),
                "document": Level("of the window, where that is known"),
                "corner": Level("by number: bit i says whether factor i is high"),
                "tokens": Estimand(TOKENS),
                "kl": Estimand("nats", "the sum over the window's tokens"),
            }
        )
    }
)

BY_TEXT = Several(
    {
        "text": Level("test is held out of the text that calibrates, other is of another domain"),
        "source": Level(),
        "factors": Level(name="varied"),
        "compared": Compared(),
        **ENDS,
        "parts": SHARES,
    }
)

PARTS = {"gap": GAP, "gap_by_text": BY_TEXT, "factors": Single(DECOMPOSITION)}

QUANTITIES = ("kl", "delta_nll")


def gap_entry(params: Params, results: Results, boot: Bootstrap) -> dict:
    """Between the two published corners, which share their dtype and the origin of their calibration.

    `windows` holds KL by window, from which `report.comparison` makes paired differences between models.
    """
    levels = gap_levels(params) | {"dtype": [params.gap.dtype], "origin": [params.calibration.origin]}
    corners = [cell.column("kl") for cell in factorial(params, results, levels)[2]]
    return decomposition(params, results, boot, levels) | {"windows": by_window(corners)}


def text_entries(params: Params, results: Results, boot: Bootstrap) -> list[dict]:
    """The gap between the published corners on each scored text alone; none where one text is all there is."""
    texts = params.corpus.scored
    if len(texts) < 2:
        return []
    levels = gap_levels(params) | {"dtype": [params.gap.dtype], "origin": [params.calibration.origin]}
    factors, corners, cells = factorial(params, results, levels)
    columns = [cell.column("kl") for cell in cells]
    found = []
    for text in texts:
        own = [window for window in columns[0].windows if params.corpus.text_of(window) == text]
        divided = decompose(boot, [column.of_windows(own) for column in columns], factors, corners)
        named = params.corpus.other if text == "other" else params.corpus.source
        kept = {name: divided[name] for name in ("low", "high", "gap", "parts")}
        found.append({"text": text, "source": named, "factors": factors, "compared": sides(cells[-1], cells[0])} | kept)
    return found


def by_window(columns: list[Column]) -> list[dict]:
    """Paired columns as rows, a row for each window and column, which is named by its number."""
    first = columns[0]
    documents = first.documents or [None] * len(first.windows)
    return [
        {"key": first.key, "window": window, "document": document, "corner": corner, "tokens": int(count), "kl": kl}
        for corner, column in enumerate(columns)
        for window, document, count, kl in zip(
            first.windows, documents, first.counts.tolist(), column.sums.tolist(), strict=True
        )
    ]


def from_windows(rows: list[dict]) -> list[Column]:
    """The columns that `by_window` wrote."""
    corners = {row["corner"]: [] for row in rows}
    for row in rows:
        corners[row["corner"]].append(row)
    found = []
    for mine in corners.values():
        windows, tokens, sums, documents = (
            [row[name] for row in mine] for name in ("window", "tokens", "kl", "document")
        )
        known = None if None in documents else tuple(documents)
        counts = np.array(tokens, np.float64)
        found.append(Column(np.array(sums), counts, tuple(windows), mine[0]["key"], sum(tokens), known))
    return found


def factors_entry(params: Params, results: Results, boot: Bootstrap) -> dict:
    """Between the corner with every factor low and the one with every factor high: the full factorial.

    Over the windows that all dtypes have.
    """
    shared = min(params.gap.windows_in(dtype, params) for dtype in params.gap.dtypes)
    return decomposition(params, results, boot, gap_levels(params), shared)


def gap_levels(params: Params) -> dict[str, list]:
    """Levels of each factor, low first; only those that were measured."""
    levels: dict[str, list] = {
        name: [level for level in both if level in getattr(params, f"{name}s")] for name, both in LEVELS.items()
    }
    gap = params.gap
    listed = {"variance_ratio": gap.variance_ratios, "dtype": gap.dtypes, "origin": gap.origins}
    return levels | {name: list(dict.fromkeys(values)) for name, values in listed.items()}


def decomposition(
    params: Params, results: Results, boot: Bootstrap, levels: dict[str, list], windows: int | None = None
) -> dict:
    """The gap between the low and the high corner, divided among the factors by Shapley value.

    A factor with one level (one engine measured, one protocol, equal ratios) is no factor; the corners
    still name it. KL is not net of the floor here: each corner carries its engine's. `windows` are the first ones that
    count, all if not given.
    """
    factors, corners, cells = factorial(params, results, levels)
    comparable(cells, {*factors, "windows"} if windows else set(factors))
    measures = {}
    for quantity in QUANTITIES:
        columns = [cell.column(quantity, windows) for cell in cells]
        measures[quantity] = decompose(boot, columns, factors, corners)
    return {
        "factors": factors,
        "dtype": None if "dtype" in factors else params.gap.dtype,
        "stream": "kv",
        "low": corners[0],
        "high": corners[-1],
        "measures": measures,
        "compared": sides(cells[-1], cells[0]),
    }


def factorial(
    params: Params, results: Results, levels: dict[str, list]
) -> tuple[list[str], list[dict], list[Measured]]:
    """Factors that vary, and by corner index (`stats.shapley`) each corner's levels and cell."""
    factors = [name for name, values in levels.items() if len(values) > 1]
    corners = [dict(zip(levels, choice, strict=True)) for choice in product(*levels.values())]
    corners.sort(key=lambda corner: corner_index([corner[name] != levels[name][0] for name in factors]))
    return factors, corners, [corner_cell(params, results, **corner) for corner in corners]


def decompose(boot: Bootstrap, columns: list[Column], factors: list[str], corners: list[dict]) -> dict:
    """Corner values, gap, each factor's share and each pair's interaction, all over the same resamples.

    Parameters
    ----------
    boot : Bootstrap
    columns : list of Column, paired
        By corner index (`stats.shapley`).
    factors : list of str
        By bit of the corner index.
    corners : list of dict
        The levels of each corner, in the order of `columns`.
    """
    values = boot.combine_many(columns, lambda m: m)
    shares = boot.combine_many(columns, shapley) if factors else []
    effects = boot.combine_many(columns, interactions) if len(factors) > 1 else []
    names = [[factors[i], factors[j]] for i, j in pairs(len(factors))]
    return {
        "low": values[0].to_json(),
        "high": values[-1].to_json(),
        "gap": boot.difference(columns[-1], columns[0]).to_json(),
        "parts": [
            {"factor": name, "share": share.to_json(), "windows_needed": windows_for_sign(share)}
            for name, share in zip(factors, shares, strict=True)
        ],
        "interactions": [{"factors": n, "effect": e.to_json()} for n, e in zip(names, effects, strict=True)],
        "corners": [corner | {"value": value.to_json()} for corner, value in zip(corners, values, strict=True)],
    }
