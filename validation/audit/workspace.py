"""A small study that is whole: what faults are planted into."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from kvlab.calibration.load import FittedFiles
from kvlab.core.params import Params
from kvlab.core.records import read_json, write_json
from kvlab_pipeline.studies.chapter import Sources
from kvlab_pipeline.studies.settings import Settings
from validation.audit.plant import HF, VLLM

SMALL = {
    "model": {"path": "models/reference", "n_layers": 6},
    "windows": {"context": 96, "eval": 32, "test": 3, "calib": 4, "other": 2},
    "corpus": {"other": None},
    "studies": [],
    "calibration": {"engines": ["hf"]},
    "codec": {"block_size": 96, "boundary_layers": [0]},
    "gap": {"origins": ["hf"], "dtypes": ["float32"], "dtype": "float32"},
    "baseline": {"dtypes": ["float32"], "hf_attention": ["eager"]},
    "stats": {"resamples": 200},
}
BASELINES = ("baseline/hf-float32-eager", "baseline/vllm-float32-default")


@dataclass(frozen=True)
class Workspace:
    """Where the study's files lie.

    Parameters
    ----------
    folder : Path
    """

    folder: Path

    @property
    def params(self) -> Params:
        """The study's."""
        return Settings.complete(SMALL)

    @property
    def windows(self) -> Path:
        """The cut corpus."""
        return self.folder / "windows.safetensors"

    @property
    def fitted(self) -> dict[str, FittedFiles]:
        """The calibration."""
        calib = self.folder / "calib"
        rotated = calib / "hf-post_rope.safetensors"
        return {"hf": FittedFiles(calib / "hf.safetensors", calib / "codebooks.json", None, rotated)}

    @property
    def results(self) -> Path:
        """Where each study has its folder."""
        return self.folder / "results"

    def prepare(self) -> None:
        """Calibrate, measure and judge everything once, undisturbed."""
        from kvlab.calibration.capture import capture
        from kvlab.calibration.sigma import fit_sigma
        from kvlab.text.corpus import build
        from kvlab_pipeline.jobs.codebooks import fit_codebooks
        from kvlab_pipeline.studies.measuring import measure_jobs
        from kvlab_pipeline.studies.residual.measure import residual

        params, calib = self.params, self.folder / "calib"
        build(params, self.windows)
        capture(params, "hf", self.windows, self.folder / "capture.safetensors")
        fit_sigma(params, self.folder / "capture.safetensors", calib / "hf.safetensors")
        tables = (calib / "hf.safetensors", calib / "hf-post_rope.safetensors", calib / "codebooks.json")
        fit_codebooks(params, self.folder / "capture.safetensors", *tables)
        residual(params, self.folder / "capture.safetensors", self.fitted["hf"], self.results / "residual.parquet")
        measure_jobs(params, [*BASELINES, HF, VLLM], self.windows, self.fitted, self.results)
        self.judge(self.results)
        self.publish(self.results)

    def copy(self, target: Path) -> Path:
        """The results once more, to be spoilt."""
        shutil.copytree(self.results, target)
        return target

    def judge(self, results: Path) -> None:
        """Turn tables into ``metrics.json`` and ``verdict.json``; refuses what a report's readers refuse."""
        from kvlab_pipeline.report.metrics import build
        from kvlab_pipeline.report.schema import filed, load
        from kvlab_pipeline.report.verdict import judge

        calib, params = self.folder / "calib", self.params
        sources = Sources(
            baseline=[self._file(results, name) for name in BASELINES],
            jobs=[self._file(results, name) for name in (HF, VLLM)],
            codebooks=[calib / "codebooks.json"],
            sigmas=[calib / "hf.json"],
            residual=[results / "residual.json"],
            choice=None,
        )
        write_json(results / "metrics.json", filed(build(params, sources)))
        write_json(results / "verdict.json", judge(params, load(results / "metrics.json")))

    def publish(self, results: Path) -> None:
        """Write FINDINGS.md, as `kvlab step report` does."""
        from kvlab_pipeline.report import findings
        from kvlab_pipeline.report.schema import load
        from kvlab_pipeline.report.verdict import refuse_other_verdict

        metrics, verdict = load(results / "metrics.json"), read_json(results / "verdict.json")
        refuse_other_verdict(self.params, metrics, verdict)
        findings.write(self.params, metrics, verdict, results / "page" / "FINDINGS.md")

    def _file(self, results: Path, job: str) -> Path:
        study, _, name = job.partition("/")
        return results / study / self.params.model.slug / f"{name}.json"
