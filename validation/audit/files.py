"""Faults in files that were written as they should be: rows, records and pages changed by hand afterwards.

With ``made anew`` the digests are made anew as well, as somebody would who knows of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl

from kvlab.core.records import file_hash
from kvlab_pipeline.report.digest import with_digest
from validation.audit.plant import HF

Edit = Callable[[Path], None]
TABLES: dict[str, Edit] = {}
"""Name -> what is done to the rows or the record of a job in a folder of results that is whole."""
PAGES: dict[str, Edit] = {}
"""The same to what is made of them: metrics and verdict."""


def edit(name: str, among: dict[str, Edit] = TABLES) -> Callable[[Edit], Edit]:
    """Register a fault of files."""

    def registered(function: Edit) -> Edit:
        among[name] = function
        return function

    return registered


def job(folder: Path) -> Path:
    """The JSON of one job of cells."""
    study, _, name = HF.partition("/")
    return folder / study / "reference" / f"{name}.json"


def table(change, anew: bool) -> Edit:
    """Changes the rows of a job, given its record."""

    def apply(folder: Path) -> None:
        record, path = json.loads(job(folder).read_text()), job(folder).with_suffix(".parquet")
        change(pl.read_parquet(path), record).write_parquet(path)
        if anew:
            job(folder).write_text(json.dumps(record | {"table": file_hash(path)}))

    return apply


def record(change) -> Edit:
    """Changes the record of a job in place."""

    def apply(folder: Path) -> None:
        content = json.loads(job(folder).read_text())
        change(content)
        job(folder).write_text(json.dumps(content))

    return apply


def coded(content: dict) -> list[dict]:
    """The cells of a record that run a codec."""
    return [one for one in content["cells"] if one["cell"]["label"] == "kv"]


def _one_kl(rows: pl.DataFrame, content: dict) -> pl.DataFrame:
    seen = content["witnessed"][0]
    place = (pl.col("cell_id") == seen["cell_id"]) & (pl.col("window") == seen["window"])
    return rows.with_columns(pl.when(place).then(pl.col("kl") * 1000).otherwise("kl").alias("kl"))


def _cells_exchanged(rows: pl.DataFrame, content: dict) -> pl.DataFrame:
    ids = [one["cell_id"] for one in coded(content)]
    turned = dict(zip(ids, [*ids[1:], ids[0]], strict=True))
    return rows.with_columns(pl.col("cell_id").replace(turned))


def _other_reference(rows: pl.DataFrame, content: dict) -> pl.DataFrame:
    place = pl.col("cell_id") == coded(content)[-1]["cell_id"]
    return rows.with_columns(pl.when(place).then(pl.col("nll_ref") + 0.01).otherwise("nll_ref").alias("nll_ref"))


def _other_label(rows: pl.DataFrame, content: dict) -> pl.DataFrame:
    return rows.with_columns(label=pl.col("label") + 1)


def _negative(rows: pl.DataFrame, content: dict) -> pl.DataFrame:
    return rows.with_columns(kl=-pl.col("kl"))


for anew in (False, True):
    said = ", digest made anew" if anew else ""
    TABLES[f"KL of one window times a thousand{said}"] = table(_one_kl, anew)
    TABLES[f"rows of cells exchanged{said}"] = table(_cells_exchanged, anew)
    TABLES[f"reference column of one cell changed{said}"] = table(_other_reference, anew)
    TABLES[f"labels changed{said}"] = table(_other_label, anew)
TABLES["negative KL, digest made anew"] = table(_negative, True)


@edit("fires and expected fires both 1")
def _fires(folder: Path) -> None:
    record(lambda c: [one["coding"].update(fires=1, expected_fires=1) for one in coded(c)])(folder)


@edit("negative bytes")
def _bytes_below_zero(folder: Path) -> None:
    record(lambda c: [one["coding"].update(coded_bytes=-1) for one in coded(c)])(folder)


@edit("values doubled, so that bits per value halve")
def _values(folder: Path) -> None:
    record(lambda c: [one["coding"].update(values=2 * one["coding"]["values"]) for one in coded(c)])(folder)


@edit("a null canary")
def _canary(folder: Path) -> None:
    record(lambda c: [one.update(canary_kl=None) for one in coded(c)])(folder)


@edit("a null floor")
def _floor(folder: Path) -> None:
    record(lambda c: [one.update(floor_kl=None) for one in coded(c)])(folder)


@edit("testimonies taken out")
def _silent(folder: Path) -> None:
    record(lambda c: c.update(witnessed=[]))(folder)


@edit("the proof of another engine")
def _other_engine(folder: Path) -> None:
    record(lambda c: [one["engine"].update(library="vllm") for one in c["witnessed"]])(folder)


@edit("attention that read half of what the codec answered")
def _half_read(folder: Path) -> None:
    record(lambda c: [one.update(effects=one["effects"] // 2) for one in c["witnessed"]])(folder)


@edit("another model's hash in a job")
def _other_model(folder: Path) -> None:
    record(lambda c: c["provenance"].update(model_hash="f" * 16))(folder)


@edit("another calibration in a job")
def _other_calibration(folder: Path) -> None:
    record(lambda c: [one["fitted"].update(dict.fromkeys(one["fitted"], "f" * 12)) for one in coded(c)[:1]])(folder)


# ------------------------------------------------------------------------------------------- metrics and verdict


def metrics(change, anew: bool) -> Edit:
    """Changes metrics.json in place."""

    def apply(folder: Path) -> None:
        path = folder / "metrics.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(with_digest(content) if anew else content))

    return apply


def row(part: str, estimand: str, **columns) -> Callable[[dict], None]:
    """Other columns for the first row of an estimand; of a function its result on the column."""

    def change(content: dict) -> None:
        found = next(one for one in content["estimates"] if (one["part"], one["estimand"]) == (part, estimand))
        found.update({name: to(found[name]) if callable(to) else to for name, to in columns.items()})

    return change


PAGES["a value outside its own interval"] = metrics(row("cells", "kl", value=99.0), False)
PAGES["a value outside its own interval, digest made anew"] = metrics(row("cells", "kl", value=99.0), True)
PAGES["model hash of the metrics changed"] = metrics(lambda m: m["identity"].update(model_hash="f" * 16), False)
PAGES["a gap a tenth of what it was"] = metrics(
    row("gap.measures", "gap", **dict.fromkeys(("value", "low", "high"), lambda number: number / 10)), False
)
PAGES["the engines' agreement rewritten, digest made anew"] = metrics(
    row("agreement", "windows_needed", verdict="same"), True
)


@edit("every verdict ACCEPT", PAGES)
def _accepted(folder: Path) -> None:
    path = folder / "verdict.json"
    content = json.loads(path.read_text())
    for cell in content["cells"]:
        cell["verdict"] = "ACCEPT"
    path.write_text(json.dumps(content))


@edit("a precondition said to hold", PAGES)
def _publishable(folder: Path) -> None:
    path = folder / "verdict.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"publishable": not content["publishable"]}))
