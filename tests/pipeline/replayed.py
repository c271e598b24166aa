"""A workspace as the pipeline leaves one, of the tiny model: texts, calibration, records, rows to measure again."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import yaml

import tiny
from kvlab.calibration.asked import write_asked
from kvlab.calibration.capture import capture
from kvlab.calibration.components import fit_components
from kvlab.calibration.sigma import fit_sigma
from kvlab.gate import registry
from kvlab.gate.catalogue.rows import read_rows
from kvlab.gate.check import check
from kvlab.gate.registry.reading import SHIPPED
from kvlab.gate.rules import Context
from kvlab.text import corpus, needles, ruler
from kvlab_pipeline.gate_page import measured_rows
from kvlab_pipeline.replay import Workspace
from kvlab_pipeline.studies.mechanisms.measure import mechanisms
from kvlab_pipeline.studies.mechanisms.plan import BASELINE

SLUG = "tiny"
EVAL = 8  # scored tokens of a window: a row of the Cache takes a step for each


class Made(NamedTuple):
    """A workspace of a tiny model, and what its rows are judged against: margins that a random model meets."""

    params: object
    root: Path
    context: Context

    @property
    def record(self):
        return self.record_of(self.params.engines[0])

    @property
    def rows(self):
        return self.root / "rows.json"

    def record_of(self, engine):
        return self.root / "results/mechanisms" / SLUG / engine

    def written(self, root=None):
        """Rows of the records as they are now."""
        calib, records = (root or self.root) / "calib", list(map(self.record_of, self.params.engines))
        texts = calib / "corpus" / SLUG / "windows.json", calib / "needles" / SLUG / "needles.json"
        measured_rows.write(records, *texts, "c0de", "supported", self.rows, self.root / "now.json")
        return read_rows(self.rows)

    def replayer(self, items=1):
        return Workspace({SLUG: self.params}, items, self.root)

    def claims(self, rows, items=1, replayer=..., only=()):
        """Claims by `row_id`; where some labels are named, of these and of what they are held against alone."""
        replayer = self.replayer(items) if replayer is ... else replayer
        if only:
            wanted = {self.of(label) for label in (*only, BASELINE)}
            rows = [row for row in rows if row.values["row_id"].split("/", 2)[2] in wanted]
        report = check(rows, self.context, replayer=replayer)
        return {claim.row["row_id"].split("/", 2)[2]: claim for claim in report.claims}

    def of(self, label):
        return label.replace(" ", "-")


def lenient(out: Path) -> Path:
    """The shipped evals with margins and bands that a random model of short contexts meets."""
    wide = yaml.safe_load((SHIPPED / "evals.yaml").read_text())
    for one in wide["evals"]:
        if one["harness"] == "kvlab":
            one["band"] = [1, 32768]
            for metric in one["metrics"]:
                metric.update(margin=500.0)
                metric.pop("floor", None)
    out.write_text(yaml.safe_dump(wide))
    return out


def workspace(root: Path, params, engines: tuple[str, ...], test: int, evals: Path, **asked) -> Made:
    """Everything down to the rows; calibrated on hf."""
    text = tiny.write_text(root / "text.txt", count=700)
    changed = {
        "model": params.model.model_copy(update={"slug": SLUG}),
        "engines": engines,
        "corpus": params.corpus.model_copy(update={"source": str(text)}),
        "windows": params.windows.model_copy(update={"test": test, "eval": EVAL}),
        "mechanisms": params.mechanisms.model_copy(update=asked),
    }
    params, calib = params.model_copy(update=changed), root / "calib"
    windows, found = calib / "corpus" / SLUG / "windows.safetensors", calib / "needles" / SLUG / "needles.parquet"
    corpus.build(params, windows)
    needles.build(params, found)
    ruler.build(params, found.with_name("ruler.parquet"))
    paths = {name: calib / name / SLUG / "hf.safetensors" for name in ("capture", "sigma", "components")}
    write_asked([], calib / "asked.json")
    capture(params, "hf", windows, paths["capture"], calib / "asked.json")
    fit_sigma(params, paths["capture"], paths["sigma"])
    fit_components(params, paths["capture"], paths["sigma"], paths["components"])
    made = Made(params, root, Context(registry.load(None, evals)))
    fitted = made.replayer()._fitted(params)
    for engine in engines:
        mechanisms(params, engine, windows, found, fitted, "c0de", made.record_of(engine))
    made.written()
    return made
