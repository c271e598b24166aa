"""The detection curve as a table and as a picture: how often a planted loss is certified, and how often it is found."""

from __future__ import annotations

import polars as pl

from kvlab.report import format as fmt
from kvlab.report.figures.canvas import DOWN, GREY, INK, OTHER_COLOUR, PALE, UP, canvas, sentence, styled, title

COLOURS = (GREY, OTHER_COLOUR, DOWN, UP)
COLUMNS = pl.Schema(
    {name: pl.Float64 for name in ("base_rate", "churn", "loss")}
    | {"n_items": pl.Int64}
    | {word: pl.Float64 for word in ("within", "open", "beyond")}
)
PANELS = {"within": "certified", "beyond": "found to lose too much"}


def table(curve: list[dict]) -> pl.DataFrame:
    """One row per baseline, loss and number of items, with the share of repeats in which each word was given."""
    return pl.DataFrame(curve, schema=COLUMNS)


@styled
def draw(table: pl.DataFrame):
    """Both shares against the number of items, a line for each planted loss; of the first baseline of the table."""
    if table.is_empty():
        return sentence(pl.DataFrame({"not_drawn": ["No eval is registered that losses are planted in."]}))
    table = table.filter(pl.col("base_rate") == table["base_rate"][0])
    figure, axes = canvas(2.9, len(PANELS), share=True)
    losses = list(dict.fromkeys(table["loss"]))
    for axis, (word, words) in zip(axes, PANELS.items(), strict=True):
        axis.set_title(words, fontsize=9, fontweight="normal", color=GREY, loc="right")
        axis.set(xscale="log", ylim=(-0.03, 1.03))
        axis.grid(color=PALE, linewidth=0.5)
        sizes = list(dict.fromkeys(table["n_items"]))
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
        axis.set_xlabel("items")
        for number, loss in enumerate(losses):
            mine = table.filter(pl.col("loss") == loss).sort("n_items")
            look = {"color": COLOURS[number % len(COLOURS)], "marker": "os^D"[number % 4], "markersize": 4.5}
            axis.plot(mine["n_items"], mine[word], linewidth=1.4, label=f"loses {fmt.percent(loss)}", **look)
    axes[0].set_ylabel("share of repeats")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(losses), frameon=False)
    title(figure, "What the gate says of planted losses")
    for axis in axes:
        axis.tick_params(colors=INK)
    return figure
