"""Case: effects planted in the pipeline's own jobs, found again in the result files that these jobs write.

The jobs of the study `factors` run as the pipeline runs them (`studies.measuring`), on every engine and in every
dtype. Under them lie a codec and engines that know nothing of labels (`shim`): each pass is off by what is planted
where it really stands. The files are read by `studies.gather` and divided by `studies.factors.numbers`, which
know labels alone. The truth is arithmetic: a corner's mean is a sum of planted parts and one planted interaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from kvlab.calibration.load import FittedFiles
from kvlab.codecs.shared import whitening
from kvlab.codecs.shared.quantizer import gaussian_table
from kvlab.codecs.stream.published import SigmaQ, write_sigma
from kvlab.core.model import ModelInfo, resolve
from kvlab.core.params import Params
from kvlab.core.recipe import CODECS, digest
from kvlab.core.records import file_hash, write_json
from kvlab.engines import registry
from kvlab.measure import witnessing
from kvlab.stats.bootstrap import Bootstrap, Estimate
from kvlab.text import corpus
from kvlab.text.corpus import TokenWindows
from kvlab_pipeline.jobs import plan
from kvlab_pipeline.studies.factors.numbers import factorial, factors_entry, gap_entry, gap_levels
from kvlab_pipeline.studies.gather import read_cells, whole
from kvlab_pipeline.studies.measured import Results
from kvlab_pipeline.studies.measuring import measure_jobs
from kvlab_pipeline.studies.settings import Settings
from validation.planted.claims import ROUNDING, Case, Claim, up_to
from validation.planted.coverage import Distribution, FactorLaw
from validation.planted.ground import CONTEXT, EVAL, MEASURED
from validation.planted.page import NAMES
from validation.planted.shim import ORIGINS, Facts, Planted, PlantedShift, unexamined

CASE = "the factorial, through the result files"
UNIT = "nats per token"
FURTHEST = "the row that is furthest off"
BASE = 2e-3  # KL of the corner with every factor low
PARTS = {"engine": 1e-3, "protocol": 1.5e-3, "dtype": 8e-4, "variance_ratio": 2e-3, "origin": 6e-4}
PAIR, TOGETHER = ("protocol", "variance_ratio"), 1e-3  # what two factors do beyond the sum of their parts
LEVELS = {
    "engine": ("hf", "vllm"),
    "protocol": ("snapshot", "in_forward"),
    "dtype": ("float32", "bfloat16"),
    "variance_ratio": (1.0, 0.95),
    "origin": ("hf", "vllm"),
}
SCATTER = Distribution("factorial", "nothing that was measured", FactorLaw("gamma", 40.0), FactorLaw("lognormal", 0.6))
SEED = 21
STUDY = "factors"
SHARES = "all files -> `factors_entry` (gap, shares, interactions)"
PUBLISHED = "all files -> `gap_entry` (the published corners)"
ABOUT = (
    "The jobs of the study `factors` run as the pipeline runs them, with a codec in the block codec's place that marks"
    " what it codes, and engines whose marked passes come back with one logit of every row raised until KL has the"
    " row's planted value. What is planted follows the facts: the running model's class and the dtype of its weights,"
    " the pass on which the marks arrive, the ratio that the codec was built for, the calibration whose numbers it was"
    " given. The files are then read and divided by labels alone. Every corner scatters by itself, so that"
    " its values are independent of the other corners'."
)


@dataclass(frozen=True)
class Files:
    """What the jobs wrote.

    Parameters
    ----------
    params : Settings
        By which they were planned.
    paths : list of Path
        JSON of each job.
    planted : Planted
        What the engines planted.
    """

    params: Settings
    paths: list[Path]
    planted: Planted


def planted_mean(corner: dict) -> float:
    """KL that a corner scatters around."""
    high = [name for name, levels in LEVELS.items() if corner[name] != levels[0]]
    return BASE + sum(PARTS[name] for name in high) + (TOGETHER if set(PAIR) <= set(high) else 0.0)


# ------------------------------------------------------------------------------------------ the jobs


def write_files(params: Params, windows: TokenWindows, folder: Path, dtypes: Sequence[str] = LEVELS["dtype"]) -> Files:
    """Run every job of the factorial and write its files; one engine runs at a time.

    Parameters
    ----------
    params : Params
        Model, engines, statistics and jobs are theirs, the factorial's settings the defaults.
    windows : TokenWindows
        Cut to the beginnings of the first ones.
    folder : Path
        For the files, and what the jobs read.
    dtypes : sequence of str
        Levels of the factor `dtype`.
    """
    info = resolve(params.model)
    windows = beginnings(windows)
    settings = settings_of(params, windows, dtypes)
    corpus.save(windows, folder / "windows.safetensors")
    fitted = {o: write_calibration(settings, info, windows, o, folder) for o in settings.calibration.engines}
    planted = Planted({tuple(ids): i for i, ids in enumerate(windows.test.tolist())}, draw(windows))
    written = []
    with in_place(planted):
        for job in plan.jobs(settings, STUDY):
            written += measure_jobs(settings, [f"{STUDY}/{job}"], folder / "windows.safetensors", fitted, folder)
    return Files(settings, [path.with_suffix(".json") for path in written], planted)


def beginnings(windows: TokenWindows) -> TokenWindows:
    """The beginnings of the first windows, as windows of their own."""
    context, evaluated = min(CONTEXT, windows.context), min(EVAL, windows.eval)
    cut = {name: getattr(windows, name)[:MEASURED, : context + evaluated].copy() for name in ("calib", "test")}
    return TokenWindows(**cut, context=context, corpus_hash=corpus.windows_hash(cut, context),
                        model_hash=windows.model_hash)  # fmt: skip


def settings_of(params: Params, windows: TokenWindows, dtypes: Sequence[str]) -> Settings:
    """The factorial alone on these windows."""
    given = params.model_dump(mode="json", include={"model", "engines", "stats", "jobs"})
    lengths = {"context": windows.context, "eval": windows.eval, "test": len(windows.test)}
    own = {"windows": lengths, "corpus": {"other": None}, "studies": [], "gap": {"dtypes": list(dtypes)}}
    return Settings.complete(given | own)


def write_calibration(
    params: Settings, info: ModelInfo, windows: TokenWindows, origin: str, folder: Path
) -> FittedFiles:
    """A calibration whose every number says whose it is: unit matrices and Gaussian tables times the origin's scale."""
    scale = {name: factor for factor, name in ORIGINS.items()}[origin]
    unit = torch.eye(info.head_dim, dtype=torch.float64).expand(info.n_kv_heads, -1, -1)
    moments = dict.fromkeys(range(info.n_layers), scale**2 * unit)
    whose = {"model_hash": info.model_hash, "corpus_hash": windows.corpus_hash}
    whiteners = {layer: whitening.fit(moment, 0.0) for layer, moment in moments.items()}
    sidecar = whose | {"calibration_source": origin, "num_layers": info.n_layers}
    sigma, codebooks = folder / "calib" / f"{origin}.safetensors", folder / "calib" / f"{origin}-codebooks.json"
    write_sigma(sigma, SigmaQ(moments, whiteners, sidecar), whose | {"engine": origin})
    tables = [
        {
            "stream": stream,
            "placement": placement,
            "stream_recipe_id": digest(recipe),
            "centroids": (scale * gaussian_table(recipe.bits)).tolist(),
        }
        for stream, placement, recipe in plan.fittings(params, origin)
    ]
    write_json(codebooks, whose | {"origin": origin, "sigma_hash": file_hash(sigma), "tables": tables})
    return FittedFiles(sigma, codebooks)


def draw(windows: TokenWindows) -> dict[Facts, np.ndarray]:
    """KL of every row of every corner; a corner's mean is planted, its windows and rows scatter by themselves."""
    source, rows = np.random.default_rng(SEED), len(windows.labels)
    corners = [dict(zip(LEVELS, choice, strict=True)) for choice in product(*LEVELS.values())]
    return {
        Facts(**corner): planted_mean(corner) * SCATTER.draw(source, len(windows.test), 1, rows)[0]
        for corner in corners
    }


@contextmanager
def in_place(planted: Planted) -> Iterator[None]:
    """Inside the block the block codec marks, every engine that is started plants, and no witness objects to that."""
    start = registry.start

    def started(*given, **named) -> PlantedShift:
        return PlantedShift(start(*given, **named), planted)

    marking = {"block": replace(CODECS["block"], codec="validation.planted.shim:MarkingCodec")}
    silent = patch.object(witnessing, "testify", unexamined)
    with patch.dict(CODECS, marking), patch.object(registry, "start", started), silent:
        yield


# ----------------------------------------------------------------------------------------- the claims


def read_files(params: Settings, paths: Sequence[Path]) -> Results:
    """The files as a report reads them; a report reads the engine baseline beside them."""
    return whole(params, read_cells(params, paths), {}, {})


def case(files: Files) -> Case:
    """Every row's KL, the corners' values, gap, shares and interactions."""
    return Case(CASE, ABOUT, claims(files.params, files.planted, read_files(files.params, files.paths)))


def claims(params: Settings, planted: Planted, results: Results) -> list[Claim]:
    """What the report's functions make of the files, beside what was planted."""
    entries = {SHARES: factors_entry, PUBLISHED: gap_entry}
    found = [worst_row(params, planted, results)]
    for path, entry in entries.items():

        @cache
        def made(boot: Bootstrap, entry=entry) -> dict:
            return entry(params, results, boot)

        some = made(Bootstrap(200, 0.95, 0))
        if path == SHARES:
            found += corner_claims(some, made)
        found += share_claims(path, some, made)
    return found


def worst_row(params: Settings, planted: Planted, results: Results) -> Claim:
    """The row whose KL is furthest off what was planted in the corner that its label names."""
    worst, rows = 0.0, 0
    _, corners, cells = factorial(params, results, gap_levels(params))
    for corner, cell in zip(corners, cells, strict=True):
        expected = planted.kl[Facts(**corner)]
        worst = max(worst, float(np.abs(cell.tokens["kl"].to_numpy() / expected.ravel() - 1).max()))
        rows += expected.size
    name = f"{len(cells)} corners: {FURTHEST}"
    return up_to(CASE, name, "relative", 0.0, worst, ROUNDING, len(results.cells[0].column("kl").windows), rows)


def corner_claims(some: dict, made: Callable[[Bootstrap], dict]) -> list[Claim]:
    """Each corner's value, on the way of its engine and dtype."""
    found = []
    for i, entry in enumerate(some["measures"]["kl"]["corners"]):
        corner = {name: entry[name] for name in LEVELS}
        name = ", ".join(f"{name} {value}" for name, value in corner.items())
        way = f"{NAMES[corner['engine']]}, {corner['dtype']} -> file -> `corner_cell`"
        pick = picked(made, lambda d, i=i: d["corners"][i]["value"])
        found.append(Claim(CASE, name, UNIT, planted_mean(corner), pick, path=way))
    return found


def share_claims(path: str, some: dict, made: Callable[[Bootstrap], dict]) -> list[Claim]:
    """Gap, each factor's share and each pair's interaction; the planted ones are sums of what was planted."""
    factors, measure = some["factors"], some["measures"]["kl"]
    both = set(PAIR) <= set(factors)
    prefix = "published corners: " if path == PUBLISHED else ""
    gap = planted_mean(some["high"]) - planted_mean(some["low"])
    found = [Claim(CASE, f"{prefix}gap", UNIT, gap, picked(made, lambda d: d["gap"]), path=path)]
    for i, name in enumerate(factors):
        share = PARTS[name] + (TOGETHER / 2 if both and name in PAIR else 0.0)
        pick = picked(made, lambda d, i=i: d["parts"][i]["share"])
        found.append(Claim(CASE, f"{prefix}share of `{name}`", UNIT, share, pick, path=path))
    for i, names in enumerate(combinations(factors, 2)):
        effect = TOGETHER if set(names) == set(PAIR) else 0.0
        pick = picked(made, lambda d, i=i: d["interactions"][i]["effect"])
        title = prefix + " with ".join(f"`{name}`" for name in names)
        found.append(Claim(CASE, title, UNIT, effect, pick, path=path))
    total = sum(part["share"]["value"] for part in measure["parts"]) - measure["gap"]["value"]
    return [*found, up_to(CASE, f"{prefix}sum of the shares less the gap", UNIT, 0.0, total, ROUNDING * gap)]


def picked(made: Callable[[Bootstrap], dict], pick: Callable[[dict], dict]) -> Callable[[Bootstrap], Estimate]:
    """One estimate of an entry's KL."""
    return lambda boot: Estimate(**pick(made(boot)["measures"]["kl"]))
