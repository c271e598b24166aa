"""Which cells each study measures, and how they are packed into jobs. Torch-free.

The workflow reads the number of jobs from here, the CLI the cells of one job; both see the same list.
"""

from __future__ import annotations

from kvlab.errors import ParamsError, UnknownName
from kvlab.ladder import default_recipe, rungs
from kvlab.params import Params, coded_layers, studied_recipe
from kvlab.recipe import IDENTITY, Cell, NoiseStream, Recipe

STUDIES = ("cells", "layers", "noise")  # those of the report
LADDER = "ladder"


def cells_study(params: Params, engine: str) -> list[Cell]:
    """Identity, the studied recipe by protocol, stream and variance ratio, and the default recipe.

    The float32 cells carry the cross-engine agreement check; the cells in ``gap.dtype`` carry the
    numbers, with a rerun (no hook at all) as the engine's own noise floor. Beside them, on all layers,
    stands the recipe that the drop-ins run.
    """
    everything = tuple(range(params.model.n_layers))
    layers = coded_layers(params)
    studied = studied_recipe(params)

    def cell(label, dtype, protocol, stream, coded, recipe):
        return Cell(
            study="cells",
            label=label,
            engine=engine,
            dtype=dtype,
            protocol=protocol,
            stream=stream,
            layers=coded,
            windows=params.windows.test,
            recipe=recipe,
        )

    cells = []
    for protocol in params.protocols:
        cells.append(cell("identity", "float32", protocol, "kv", everything, IDENTITY))
        cells.append(cell("kv", "float32", protocol, "kv", layers, studied))
    dtype = params.gap.dtype
    cells.append(cell("rerun", dtype, "in_forward", "kv", (), IDENTITY))
    for protocol in params.protocols:
        cells.append(cell("identity", dtype, protocol, "kv", everything, IDENTITY))
        cells += [cell(stream, dtype, protocol, stream, layers, studied) for stream in params.gap.streams]
        for ratio in params.gap.variance_ratios:
            recipe = studied_recipe(params, ratio)
            if recipe != studied or "kv" not in params.gap.streams:
                cells.append(cell("kv", dtype, protocol, "kv", layers, recipe))
        cells.append(cell("klt", dtype, protocol, "kv", everything, default_recipe(params)))
    return unique(cells)


def layers_study(params: Params, engine: str) -> list[Cell]:
    """Add-one-in: the studied recipe on one layer at a time, and on all of them together."""
    everything = tuple(range(params.model.n_layers))
    choices = [(f"layer {i}", (i,)) for i in everything] + [("all layers", everything)]
    recipe = studied_recipe(params)
    cells = [
        Cell(
            study="layers",
            label=label,
            engine=engine,
            dtype=params.layers.dtype,
            protocol=protocol,
            stream="kv",
            layers=layers,
            windows=params.layers.windows,
            recipe=recipe,
        )
        for protocol in params.layers.protocols
        for label, layers in choices
    ]
    return unique(cells)


def noise_study(params: Params, engine: str) -> list[Cell]:
    """Gaussian noise of each sigma on each stream, on every layer, inside the one forward."""
    cells = []
    for stream in params.noise.streams:
        for sigma in params.noise.sigmas:
            noise = NoiseStream(sigma=sigma, seed=params.noise.seed)
            cells.append(
                Cell(
                    study="noise",
                    label=f"noise {stream} {sigma:g}",
                    engine=engine,
                    dtype=params.noise.dtype,
                    protocol="in_forward",
                    stream=stream,
                    layers=tuple(range(params.model.n_layers)),
                    windows=params.noise.windows,
                    recipe=Recipe(k=noise, v=noise),
                )
            )
    return unique(cells)


def ladder_study(params: Params, engine: str) -> list[Cell]:
    """Every rung of the ladder on every layer, over the coded clean cache, text by text.

    The snapshot protocol and float32, so that nothing but the codec's own error is measured.
    """
    return unique(
        [
            Cell(
                study="ladder",
                label=label,
                engine=engine,
                dtype="float32",
                protocol="snapshot",
                stream="kv",
                layers=tuple(range(params.model.n_layers)),
                windows=params.ladder.windows,
                text=text,
                recipe=recipe,
            )
            for text in params.ladder.texts
            for label, recipe in rungs(params)
        ]
    )


def unique(cells: list[Cell]) -> list[Cell]:
    """The cells without repetition, in their first order."""
    return list({cell.cell_id: cell for cell in cells}.values())


def study_cells(params: Params, study: str, engine: str) -> list[Cell]:
    """The cells of one study on one engine."""
    makers = {"cells": cells_study, "layers": layers_study, "noise": noise_study, LADDER: ladder_study}
    if study not in makers:
        raise UnknownName("study", study, makers)
    return makers[study](params, engine)


def jobs(params: Params, study: str) -> dict[str, list[Cell]]:
    """Job name -> its cells; a job has one engine, one dtype, and at most ``jobs.cells_per_job`` cells.

    Names read ``<engine>-<dtype>-<number>``, for example ``hf-bfloat16-0``.
    """
    packed = {}
    for engine in (params.ladder.engine,) if study == LADDER else params.engines:
        cells = study_cells(params, study, engine)
        for dtype in sorted({cell.dtype for cell in cells}):
            same = [cell for cell in cells if cell.dtype == dtype]
            size = params.jobs.cells_per_job
            for number, start in enumerate(range(0, len(same), size)):
                packed[f"{engine}-{dtype}-{number}"] = same[start : start + size]
    return packed


def job_cells(params: Params, study: str, job: str) -> list[Cell]:
    """The cells of one job; `UnknownName` lists the job names there are."""
    packed = jobs(params, study)
    if job not in packed:
        raise UnknownName(f"job of study {study!r}", job, packed)
    return packed[job]


def baseline_runs(params: Params) -> dict[str, tuple[str, str, str]]:
    """Run name -> (engine, dtype, attention) of the engine baseline.

    vLLM chooses its own attention kernel, so its attention reads ``default``.
    """
    runs = {}
    for engine in params.engines:
        attentions = params.baseline.hf_attention if engine == "hf" else ("default",)
        for dtype in params.baseline.dtypes:
            for attention in attentions:
                runs[f"{engine}-{dtype}-{attention}"] = (engine, dtype, attention)
    if "float32" not in params.baseline.dtypes:
        raise ParamsError("baseline.dtypes must contain 'float32': it carries the agreement of the engines")
    return runs
