"""A folder of results with planted effects: every job, baseline run, codebook and sigma sidecar.

The mean of every planted quantity is exact in every table (tokens are scaled to it), so a test can
compare a point value with what was planted, and an interval with what the tokens scatter.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import polars as pl

from kvlab.calibration.needs import coded_by, pieces
from kvlab.codecs.block import BlockStream
from kvlab.codecs.block.studied import coded_layers
from kvlab.core.params import Params
from kvlab.core.recipe import ENGINES, IDENTITY, Cell, Engine, digest
from kvlab.core.records import (
    TOKENS,
    BaselineRecord,
    CellRecord,
    Coding,
    JobRecord,
    file_hash,
    fingerprint,
    read_json,
    write_job,
    write_json,
    write_table,
)
from kvlab.core.testimony import Proof, Testimony
from kvlab_pipeline.jobs import plan
from kvlab_pipeline.studies.baseline.truth import peer_of, trial_windows
from kvlab_pipeline.studies.chapter import Sources
from kvlab_pipeline.studies.mitigations.plan import ChoiceRecord, LayerChoice, Step, search_id
from pipeline.report.planted_facts import write_facts
from pipeline.report.planted_identity import provenance
from pipeline.report.planted_residual import write_residuals
from pipeline.report.shipped import shipped

VOCABULARY = 512
SMALL = {
    "windows": {"context": 64, "eval": 17, "test": 12, "calib": 2},
    "cells": {name: None for name in ("k2v2", "k4v2", "k2v4", "k3v4", "k4v4")},
    "baseline": {"windows": 12},
    "layers": {"windows": 12, "dtype": "float32", "protocols": ["in_forward"]},
    "noise": {"windows": 12, "groups": ["all"]},
    "mitigations": {"windows": 12, "protocols": ["snapshot"]},
    "ladder": {
        "texts": ["test"],
        "windows": 12,
        "codecs": ["klt", "hadamard", "fp8"],
        "bits": [2, 4],
        "conditioned": [],
        "fewer": 12,
    },
    "stats": {"resamples": 600},
}


@dataclass(frozen=True)
class Effects:
    """What is planted. KL in nats per token.

    `engine`, `protocol` and `variance_ratio` are added to `base` when the factor is at its high
    level; `pairs` holds what two high factors add together, keyed by a tuple of their names.
    """

    base: float = 0.010
    default_recipe: float = 0.002
    engine: float = 0.002
    protocol: float = 0.004
    variance_ratio: float = 0.060
    pairs: dict[tuple[str, str], float] = field(default_factory=lambda: {("engine", "protocol"): 0.001})
    stream_share: dict[str, float] = field(default_factory=lambda: {"kv": 1.0, "k": 0.65, "v": 0.35})
    floor: dict[str, float] = field(default_factory=lambda: {"hf": 1e-4, "vllm": 5e-5})
    identity_fp32: float = 1e-9
    cross_identity: float = 3e-8
    cross_codec: float = 1e-5
    cross_peer: float = 1.2e-3
    rounding: float = 2e-4
    codec_disagreement: float = 0.001
    float32_jitter: float = 0.01
    nll_per_kl: float = 0.8
    flip_rate: float = 0.25
    layer_kl: tuple[float, ...] = (0.012, 0.004, 0.003, 0.002, 0.0015, 0.0)
    additivity: float = 1.3
    noise_coefficient: dict[str, float] = field(default_factory=lambda: {"k": 0.5, "v": 0.3, "kv": 0.8})
    noise_saturation: float = 2.0
    window_spread: float = 0.3
    jitter: float = 0.1
    canary: float = 0.05
    seed: int = 0


@dataclass(frozen=True)
class Paths:
    """Where `write_results` put things, in the order `metrics.build` takes them."""

    baseline: list[Path]
    jobs: list[Path]
    codebooks: list[Path]
    sigmas: list[Path]
    residual: list[Path]
    choice: Path | None
    ladder: Path | None = None

    @property
    def sources(self) -> Sources:
        return Sources(**{field.name: getattr(self, field.name) for field in fields(self)})


CHOICE = LayerChoice(greedy=(0, 1), extended=(0, 1, 5), hot=(1, 2), klt_boundary=(), klt_hot=(1,))


def small_params(**changes) -> Params:
    """The embedded model's parameters, shrunk, with `changes` (nested dicts) laid over it."""
    return shipped(SMALL, changes)


def write_results(
    folder: Path | str, params: Params, effects: Effects | None = None, documents: tuple[int, ...] | None = None
) -> Paths:
    """Write everything that `kvlab step metrics` reads into `folder`; `documents` are those of the test windows."""
    told = {"test": documents} if documents else {}
    folder, effects = Path(folder), effects or Effects()
    text = Text(params, effects)
    jobs = []
    for study in plan.studies(params):
        for name, cells in plan.jobs(params, study, CHOICE).items():
            path = folder / "results" / study / f"{name}.json"
            tokens = pl.concat(
                [
                    text.rows(cell.cell_id, planted_kl(params, effects, cell), cell.windows, jitter_of(effects, cell))
                    for cell in cells
                ]
            )
            record = JobRecord(
                provenance=provenance(),
                context=params.windows.context,
                eval=params.windows.eval,
                cells=tuple(cell_record(params, effects, cell) for cell in cells),
                documents=told,
                witnessed=witnessed(cells, tokens),
            )
            write_job(path, record, tokens)
            jobs.append(path)
    return Paths(
        baseline=write_baseline(folder, params, effects, text, told),
        jobs=jobs,
        codebooks=[
            write_codebooks(folder, params, origin)
            for origin in dict.fromkeys(o for study in plan.studies(params) for o in plan.origins(params, study))
        ],
        sigmas=[write_sigma(folder, params, engine) for engine in params.engines],
        residual=write_residuals(folder / "results" / "residual", params),
        choice=write_choice(folder, params) if plan.CHOSEN in plan.studies(params) else None,
        ladder=write_facts(folder, params, provenance()) if plan.LADDER in plan.studies(params) else None,
    )


def jitter_of(effects: Effects, cell: Cell) -> float:
    """How far tokens of a cell scatter beside those of another: little between the factorial's float32 engines."""
    return effects.float32_jitter if (cell.study, cell.dtype) == ("factors", "float32") else effects.jitter


def planted_kl(params: Params, effects: Effects, cell: Cell) -> float:
    """Mean KL planted in one cell."""
    if cell.recipe == IDENTITY:
        floor = effects.identity_fp32 if cell.dtype == "float32" else effects.floor[cell.engine]
        return floor if cell.layers else floor / 2
    if cell.study == "noise":
        return noise_kl(params, effects, cell)
    if cell.study == "ladder":
        return ladder_kl(effects, cell)
    if cell.study == "layers":
        return layers_kl(params, effects, cell)
    return effects.stream_share[cell.stream] * codec_kl(params, effects, cell)


def noise_kl(params: Params, effects: Effects, cell: Cell) -> float:
    """Mean KL planted in a cell of the noise study: quadratic in the size, then saturated."""
    kind = cell.recipe.k.codec
    sigma = cell.recipe.k.sigma if kind == "noise" else {"cast": 1.5e-3, "block": 0.06, "isotropic": 0.03}[kind]
    quadratic = effects.noise_coefficient[cell.stream] * sigma**2
    return effects.noise_saturation * -np.expm1(-quadratic / effects.noise_saturation)


def layers_kl(params: Params, effects: Effects, cell: Cell) -> float:
    """Mean KL planted in a cell of the layer study: the layers' own, and more when several are coded."""
    shares = np.resize(effects.layer_kl, params.model.n_layers)[list(cell.layers)]
    together = 1.0 if len(cell.layers) == 1 else effects.additivity
    return float(effects.stream_share[cell.stream] * together * shares.sum()) + effects.identity_fp32


def ladder_kl(effects: Effects, cell: Cell) -> float:
    """Mean KL planted in a rung: each bit costs a quarter, `klt` half of the others, `fp8` as of 6 bits."""
    coded = cell.recipe.k
    half = 0.5 if coded.codec == "klt" else 1.0
    worse = 1.0 + (not getattr(coded, "escape", True)) + 2 * (getattr(coded, "tables", "fitted") == "gaussian")
    worse += 4 * (getattr(coded, "transform", "klt") == "none") + (cell.span == "window")
    return worse * half * effects.base * 4.0 ** (3 - getattr(coded, "bits", 6))


def codec_kl(params: Params, effects: Effects, cell: Cell) -> float:
    """Mean KL planted in a codec cell of both streams."""
    if cell.recipe.k.codec == "klt":
        return effects.default_recipe
    if cell.recipe.k.codec != "block":  # K weighs more than V, and each bit less costs four times as much
        return sum(effects.stream_share[s] * effects.base * 4.0 ** (3 - getattr(cell.recipe, s).bits) for s in "kv")
    high = {
        "engine": cell.engine == "vllm" and cell.dtype != "float32",
        "protocol": cell.protocol == "in_forward",
        "variance_ratio": cell.recipe.k.variance_ratio == params.gap.variance_ratios[1],
    }
    kl = effects.base * 2.0 ** (params.bits - cell.recipe.k.bits)
    kl += sum(getattr(effects, name) for name, is_high in high.items() if is_high)
    kl += sum(value for pair, value in effects.pairs.items() if all(high[name] for name in pair))
    if cell.engine == "vllm" and cell.dtype == "float32":
        kl *= 1 + effects.codec_disagreement
    return kl


class Text:
    """The scored tokens: the same windows, labels and references in every cell."""

    def __init__(self, params: Params, effects: Effects):
        rng = np.random.default_rng(effects.seed)
        self.effects, self.windows = effects, params.windows.test
        self.positions = np.arange(params.windows.context + 1, params.windows.length)
        shape = (self.windows, self.positions.size)
        window = np.exp(effects.window_spread * rng.standard_normal((self.windows, 1)))
        self.weight = window * rng.gamma(2.0, 0.5, shape)
        self.normal = rng.standard_normal(shape)
        self.uniform = rng.random(shape)
        self.p_max = rng.uniform(0.02, 0.99, shape)
        self.top1 = rng.integers(0, VOCABULARY, shape)
        right = rng.random(shape) < self.p_max
        self.label = np.where(right, self.top1, (self.top1 + 1) % VOCABULARY)
        self.nll = -np.log(self.p_max) + np.where(right, 0, 0.1 + rng.exponential(2.0, shape))

    def rows(self, cell_id: str, mean_kl: float, windows: int, jitter: float | None = None) -> pl.DataFrame:
        """Rows of one cell whose mean KL is exactly `mean_kl` and mean delta NLL `nll_per_kl` times it."""
        rng = np.random.default_rng(int(digest({"cell": cell_id, "seed": self.effects.seed})[:8], 16))
        jitter = self.effects.jitter if jitter is None else jitter
        kl = self.weight[:windows] * np.exp(jitter * rng.standard_normal((windows, self.positions.size)))
        kl *= mean_kl / kl.mean()
        scatter = np.sqrt(2 * kl) * self.normal[:windows]
        delta = self.effects.nll_per_kl * kl + scatter - scatter.mean()
        flipped = self.uniform[:windows] < self.effects.flip_rate * np.sqrt(kl)
        goal = np.where(self.normal[:windows] > 0.5, self.label[:windows], (self.top1[:windows] + 2) % VOCABULARY)
        goal = np.where(goal == self.top1[:windows], (self.top1[:windows] + 2) % VOCABULARY, goal)
        top1_alt = np.where(flipped, goal, self.top1[:windows])
        window, position = np.meshgrid(np.arange(windows), self.positions, indexing="ij")
        columns = {
            "window": window,
            "position": position,
            "label": self.label[:windows],
            "nll_ref": self.nll[:windows],
            "nll_alt": self.nll[:windows] + delta,
            "kl": kl,
            "top1_ref": self.top1[:windows],
            "top1_alt": top1_alt,
            "p_ref_max": self.p_max[:windows],
        }
        named = {name: values.ravel() for name, values in columns.items()} | {"cell_id": [cell_id] * window.size}
        return pl.DataFrame([pl.Series(name, named[name], dtype) for name, dtype in TOKENS.items()])


def cell_record(params: Params, effects: Effects, cell: Cell) -> CellRecord:
    """The record of one cell whose codec fired as often as it should."""
    coded = cell.recipe != IDENTITY
    fires = len(cell.layers) * cell.windows * len(cell.stream)
    streams = list(cell.stream) if coded and isinstance(cell.recipe.k, BlockStream) else []
    packed = coded and (cell.recipe.k.codec in ("block", "klt") or cell.study == "ladder")
    ratio = cell.recipe.k.variance_ratio if streams else 1.0
    return CellRecord(
        cell_id=cell.cell_id,
        recipe_id=cell.recipe_id,
        cell=cell,
        coding=Coding(
            fires=fires,
            expected_fires=fires,
            values=1000 * params.model.n_layers * cell.windows,
            coded_bytes=cell.windows * coded_bytes(cell) if packed else 0,
            raw_bytes=cell.windows * (params.model.n_layers - (len(cell.layers) if packed else 0)) * 2000,
            d_eff={stream: {int(32 * ratio) - 1: 10, int(32 * ratio): 30} for stream in streams},
            outlier_rate={stream: 0.045 if stream == "k" else 0.0 for stream in streams},
            whitened_error={stream: 0.03 for stream in streams},
        ),
        canary_kl=effects.canary if cell.layers else None,
        floor_kl=1e-10 if cell.layers else None,
        fitted=fitted(cell),
    )


def witnessed(cells: list[Cell], tokens: pl.DataFrame) -> tuple[Testimony, ...]:
    """What a witness would say of the first cell of each family."""
    found = []
    for cell in {cell.family: cell for cell in reversed(cells) if cell.family}.values():
        kl = float(tokens.filter(pl.col("cell_id") == cell.cell_id, pl.col("window") == 0)["kl"].mean())
        found.append(vouched(kl, cell.cell_id, cell.engine, len(cell.layers) * len(cell.stream)))
    return tuple(found)


def vouched(kl: float, cell_id: str = "any", engine: Engine = "hf", effects: int = 60) -> Testimony:
    """That of a witness who saw this mean KL on window 0, and nothing amiss."""
    blocks = 28 if engine == "vllm" else None
    proof = Proof(
        library=ENGINES[engine].library, version="1", model="Model", attention="Attention", cache_blocks=blocks
    )
    numbers = dict.fromkeys(("reference_kl", "alternative_kl", "tensor_error", "read_error"), 1e-9)
    numbers |= {"window": 0, "effects": effects, "expected_effects": effects, "nbytes": 1000, "kl": kl}
    return Testimony(cell_id=cell_id, engine=proof, **numbers)


def fitted(cell: Cell) -> dict[str, str]:
    """Digests of what the cell's codecs would have read: of the tables of `write_codebooks`, and of made-up rest."""
    bits = {digest(s): s.bits for r in cell.recipes for s in map(coded_by, (r.k, r.v)) if isinstance(s, BlockStream)}
    return {
        name: fingerprint(np.array(centroids(bits[piece.place]), np.float32))
        if piece.kind == "table"
        else digest({"origin": cell.origin, "piece": name})
        for name, piece in pieces(cell).items()
    }


def centroids(bits: int) -> list[float]:
    """The planted table of so many bits."""
    return np.linspace(-2.0, 2.0, 2**bits).tolist()


def coded_bytes(cell: Cell) -> int:
    """Bytes of the coded layers, of 500 values a stream; the block codec stores as much again, about, as its codes."""
    each = {"block": 90.0, "klt": 500 / 8}.get(cell.recipe.k.codec, 570 / 8)
    recipes = [cell.stream_recipe(s, layer) for layer in cell.layers for s in cell.stream]
    return round(sum(each * getattr(recipe, "bits", 8) for recipe in recipes))


def write_baseline(
    folder: Path, params: Params, effects: Effects, text: Text, documents: dict | None = None
) -> list[Path]:
    """One file pair per baseline run; vLLM in float32 also carries the agreement cells, else its peer."""
    paths = []
    for run, (engine, dtype, attention) in plan.baseline_runs(params).items():
        plain = effects.floor[engine] * 10 if dtype == "bfloat16" else effects.identity_fp32
        planted = [("plain", None, 0.0 if run == "hf-float32-sdpa" else plain)]
        if engine == "vllm" and dtype == "float32":
            planted += [("identity", protocol, effects.cross_identity) for protocol in params.protocols]
            planted += [("kv", protocol, effects.cross_codec) for protocol in params.protocols]
            planted += [("jitter", protocol, effects.rounding) for protocol in params.protocols]
        against = peer_of(plan.baseline_runs(params), run)
        planted += [("peer", None, effects.cross_peer)] if against else []
        shared = {"run": run, "engine": engine, "dtype": dtype, "attention": attention}
        cells, tables = [], []
        for what, protocol, kl in planted:
            reference = against if what == "peer" else "truth"
            cell = {"what": what, "protocol": protocol, "reference": reference}
            cell["cell_id"] = digest(shared | cell)
            cells.append(cell)
            windows = trial_windows(params) if protocol else params.baseline.windows
            tables.append(text.rows(cell["cell_id"], kl, windows))
        path = folder / "results" / "baseline" / f"{run}.json"
        coded = any(cell["protocol"] for cell in cells)
        origin = provenance() if coded else provenance(calibration={})
        shared |= {"context": params.windows.context, "eval": params.windows.eval}
        whole = shared | {"provenance": origin.model_dump(), "cells": cells, "documents": documents or {}}
        write_job(path, BaselineRecord.model_validate(whole), pl.concat(tables))
        paths.append(path)
    return paths


def with_table(path: Path, table: pl.DataFrame) -> None:
    """Put another table in the place of a result's own, and its hash into the JSON, as a writer would."""
    write_table(path.with_suffix(".parquet"), table)
    record = read_json(path.with_suffix(".json"))
    write_json(path.with_suffix(".json"), record | {"table": file_hash(path.with_suffix(".parquet"))})


def write_codebooks(folder: Path, params: Params, origin: str) -> Path:
    """The codebooks' JSON of one origin."""
    tables = []
    for which, placement, recipe in plan.fittings(params, origin):
        table = {
            "name": f"{which.upper()}_{digest(recipe)}",
            "stream": which,
            "placement": placement,
            "bits": recipe.bits,
            "variance_ratio": recipe.variance_ratio,
            "layout": recipe.layout,
            "centroids": centroids(recipe.bits),
            "n_samples": 10000,
            "std": 1.02,
            "mse_gaussian": 0.04,
            "mse_fitted": 0.038,
            "file": f"{which.upper()}_{digest(recipe)}.f32",
            "stream_recipe_id": digest(recipe),
        }
        tables.append(table)
    path = folder / "calib" / "codebooks" / f"{origin}.json"
    made = provenance()
    head = {"origin": origin, "model_hash": made.model_hash, "corpus_hash": made.corpus_hash}
    head |= {"sigma_hash": made.calibration[origin], "layers": list(coded_layers(params))}
    write_json(path, head | {"tables": tables})
    return path


def write_choice(folder: Path, params: Params) -> Path:
    """A choice of layers with searches of one step."""
    record = ChoiceRecord(
        provenance=provenance(),
        engine=params.calibration.origin,
        dtype=params.gap.dtype,
        protocol="snapshot",
        windows=params.windows.calib,
        budget=params.mitigations.budget,
        search_id=search_id(params),
        choice=CHOICE,
        searches={
            name: (Step(layers=layers, kl=0.01, bits_per_value=7.0),) for name, layers in CHOICE.model_dump().items()
        },
    )
    path = folder / "results" / "mitigations" / "choice.json"
    write_json(path, record.model_dump(mode="json"))
    return path


def write_sigma(folder: Path, params: Params, engine: str) -> Path:
    """The sidecar of one engine's Sigma_q; vLLM's trace is 1 % larger everywhere, over all windows together."""
    diagnostics, tokens = [], params.windows.calib * params.windows.length
    windows = np.random.default_rng(0).lognormal(0, 0.3, params.windows.calib)
    drift = np.random.default_rng(1).normal(0, 0.002, params.windows.calib)
    drift = 1.01 + drift - (windows * drift).sum() / windows.sum() if engine == "vllm" else 1.0
    by_window = windows / windows.mean() * drift
    for layer in range(params.model.n_layers):
        for head in range(2):
            trace = (100.0 + 10 * layer + head) * (1.01 if engine == "vllm" else 1.0)
            entry = {"layer": layer, "kv_head": head, "sigma_trace": trace, "eig_min": 0.1, "eig_max": 50.0}
            entry |= {"condition": 500.0 + 100 * layer + head, "diag_mean": 2.0, "off_diag_max_abs": 6.0}
            entry |= {"whitening_gain_db": 6.0 + layer, "round_trip_error": 1e-6}
            entry["window_traces"] = ((100.0 + 10 * layer + head) * by_window).tolist()
            diagnostics.append(entry)
    path = folder / "calib" / "sigma" / f"{engine}.json"
    origin = provenance()
    head = {"calibration_source": engine, "ridge": params.calibration.ridge}
    head |= {"model_hash": origin.model_hash, "corpus_hash": origin.corpus_hash}
    head |= {"file_hash": origin.calibration[engine], "n_tokens_pooled": tokens}
    write_json(path, head | {"diagnostics": diagnostics})
    return path
