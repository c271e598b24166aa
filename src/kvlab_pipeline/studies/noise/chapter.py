"""Plain noise in the report: how KL grows with an error, what rounding costs, whether direction matters."""

from __future__ import annotations

from kvlab_pipeline.studies.chapter import Chapter, ChapterInputs, Drawn, PageSection, estimates_of
from kvlab_pipeline.studies.estimates import claim
from kvlab_pipeline.studies.noise.figure import noise, noise_table
from kvlab_pipeline.studies.noise.numbers import (
    CLOSES,
    FAILS,
    OPEN,
    closure_entries,
    noise_entries,
    noise_slope_entries,
    structure_entries,
)
from kvlab_pipeline.studies.noise.tables import context
from kvlab_pipeline.studies.tidy import COUNT, NATS, RATIO, Compared, Estimand, Level, Several, VerdictField

CURVE = {"engine": Level(), "stream": Level(), "group": Level("of layers: all, coded or boundary")}
NOISE = Several(
    CURVE
    | {
        "protocol": Level(),
        "sigma": Level("of the noise, over the root mean square of K or V"),
        "kl": Estimand(NATS, "of Gaussian noise in the codec's place, net of the identity cell's"),
    }
)
# How KL grows with the noise, over the range where a power law holds; null where there is no such range.
SLOPE = Several(
    CURVE
    | {
        "slope": Estimand("exponent"),
        "range": Level("the least and the largest sigma of the range"),
        "points": Estimand(COUNT),
        "coefficient": Estimand(NATS, "c of KL = c sigma squared"),
    }
)
# A dtype's KL, predicted from the noise curves and measured.
CLOSURE = Several(
    {
        "engine": Level(),
        "stream": Level(),
        "against": Level("cast: K, V or both of a float32 engine, rounded; else a run of the engine in that dtype"),
        "dtype": Level(),
        "sigma": Level(),
        "in_range": Level(),
        "predicted": Estimand(NATS),
        "measured": Estimand(NATS),
        "ratio": Estimand(RATIO, "measured over predicted"),
        "factor": Estimand(RATIO, "that the ratio may be away from 1 by, either way"),
        "reading": VerdictField((CLOSES, OPEN, FAILS)),
        "share": Estimand(RATIO, "of a run's KL, what rounding K and V is predicted to cause"),
        "cast_share": Estimand(RATIO, "of a run's KL, what rounding K and V was measured to cause"),
        "compared": Compared(),
    }
)
# The codec's KL, and that of an error of the same size and random direction.
STRUCTURE = Several(
    {
        "engine": Level(),
        "stream": Level(),
        "codec": Estimand(NATS),
        "isotropic": Estimand(NATS),
        "ratio": Estimand(RATIO),
        "compared": Compared(),
    }
)


# Whether roundings cost what the curves predict, and whether an error's direction matters, from ``metrics.json``.


def claims(closure: list[dict], structure: list[dict]) -> list[dict]:
    """One claim for each rounding that the curves predict, and one for each cell of the codec with its control."""
    casts = [rounded(row) for row in closure if row["against"] == "cast"]
    return casts + [turned(row) for row in structure if row["ratio"]]


def rounded(row: dict) -> dict:
    """The claim that a rounding costs what the noise curve predicts, or does not."""
    subject = f"Rounding {words(row['stream'])} to {row['dtype']} (`{row['engine']}`)"
    unit = "times what the noise curve predicts"
    how = {"up": "brings KL", "down": "brings KL only", "null": 1.0, "unit": unit}
    return claim("noise", subject, row["ratio"], row["compared"], **how)


def turned(row: dict) -> dict:
    """The claim that the direction of the codec's error matters, or does not."""
    subject = f"The studied codec's error on {words(row['stream'])} (`{row['engine']}`)"
    unit = "times what an error of the same size and random direction costs"
    return claim("noise", subject, row["ratio"], row["compared"], null=1.0, unit=unit)


def words(stream: str) -> str:
    """A stream in words."""
    return " and ".join(stream.upper())


def entries(measured: ChapterInputs) -> dict:
    """Its parts of ``metrics.json``."""
    given = (measured.params, measured.results, measured.boot)
    return {
        "noise": noise_entries(*given),
        "noise_slope": noise_slope_entries(*given),
        "closure": closure_entries(*given),
        "structure": structure_entries(*given),
    }


def limits(metrics: dict) -> list[tuple[str, list[dict]]]:
    """The effects of noise."""
    return [
        ("noise, KL", estimates_of(metrics, "noise", "kl")),
        ("noise, slope", estimates_of(metrics, "noise_slope", "slope")),
    ]


CHAPTER = Chapter(
    parts={
        "noise": NOISE,
        "noise_slope": SLOPE,
        "closure": CLOSURE,
        "structure": STRUCTURE,
    },
    entries=entries,
    sections={
        "noise": PageSection(
            80, "How KL grows with an error, and what rounding costs", asks="rounding and the direction of the error"
        )
    },
    context=lambda metrics, basis: {"noise": context(metrics, basis)},
    claims=lambda metrics: claims(metrics.get("closure") or [], metrics.get("structure") or []),
    figures={"noise": Drawn(noise_table, noise)},
    limits=limits,
)
