"""What a measurement costs, and how that grows: results/cost/COST.md and cost.csv.

    python validation/pipeline/cost.py

On each engine one job of the ladder is measured at two sizes of windows, cells and layers, and at a third,
small one that separates what a job costs anyway. Models of other depths are the reference model, cut short or
its layers twice over.
The commands are the rule's own, as Snakemake prints them, run one after the other in scratch folders.
A second table adds up the benchmarks of the default run that was made here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "workflow" / "scripts")]

import outcome  # noqa: E402
import polars as pl  # noqa: E402
import workspace  # noqa: E402
import yaml  # noqa: E402

from kvlab.core.machine import machine  # noqa: E402
from kvlab.core.paramfile import overlay, read_yaml  # noqa: E402
from kvlab.core.records import write_text  # noqa: E402
from kvlab.output.format import DASH, fixed, number, plain, table  # noqa: E402

STUDY = "ladder"
RULE = f"{STUDY}_jobs"
ENGINES = ("hf", "vllm")
REFERENCE = "models/reference"
LAYERS = "model.layers."  # what the names of its layers' weights begin with
# small, n, 2n: cost is measured at n and 2n, and the small size tells what a job costs at size 0.
SIZES = {"windows": (2, 8, 16), "cells": (2, 4, 8), "layers": (2, 6, 12)}
BASE = {"windows": 8, "cells": 4, "layers": 6}
BITS = (1, 8, 2, 7, 3, 6, 4, 5)  # of the cells, first ones first: the same mean for every even number of cells
WORDED = ("gap", "report")  # stages that measure nothing
LIMITS = {"seconds": 12 * 60, "MiB": 6 * 1024}  # of the default run, on two cores
TAIL = 1500  # characters of a failed job's log that are printed


@dataclass(frozen=True)
class Point:
    """One job: where, and how large."""

    engine: str
    windows: int
    cells: int
    layers: int


@dataclass(frozen=True)
class Cost:
    """What a job took: seconds on the clock, seconds of all cores, and MiB of its largest process."""

    wall: float
    cpu: float
    largest: float


def points():
    """Every size of every factor, the others as in `BASE`; each once, those of one model together."""
    sizes = {tuple((BASE | {factor: size}).items()) for factor, three in SIZES.items() for size in three}
    found = [Point(engine, **dict(size)) for engine in ENGINES for size in sizes]
    return sorted(found, key=lambda point: (point.layers, point.engine, point.cells, point.windows))


def resize(source, target, layers):
    """Write the model of `source` with another number of layers: its first ones, or all of them over again."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    own = config["num_hidden_layers"]
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][layer % own] for layer in range(layers)]
    config["num_hidden_layers"] = layers
    (target / "config.json").write_text(json.dumps(config, indent=2))
    weights = load_file(target / "model.safetensors")
    resized = {name: weight for name, weight in weights.items() if not name.startswith(LAYERS)}
    for layer in range(layers):
        prefix = f"{LAYERS}{layer % own}."
        resized |= {
            f"{LAYERS}{layer}.{name.removeprefix(prefix)}": weight.clone()
            for name, weight in weights.items()
            if name.startswith(prefix)
        }
    save_file(resized, target / "model.safetensors", metadata={"format": "pt"})


def parameters(point, model):
    """The parameters of the root with one job's worth of ladder: `cells` rungs of klt, on one text."""
    changes = {
        "models": [{"path": str(model)}],
        "corpus": {"source": "src/**/*.py", "other": None},
        "windows": {"calib": 4},
        "codec": {"boundary_layers": [0], "whiten_skip_layers": [0]},
        "ladder": {
            "engine": point.engine,
            "codecs": ["klt"],
            "bits": list(BITS[: point.cells]),
            "conditioned": [],
            "texts": ["test"],
            "windows": point.windows,
        },
        "jobs": {"threads": 1},
    }
    base = read_yaml(ROOT / "params.yaml")
    if "cells" in base:
        base["cells"] = {}  # they may name layers that a smaller model does not have
    return yaml.safe_dump(overlay(base, changes), sort_keys=False)


def calibrate(place):
    """Make all that the study reads, and nothing of the study."""
    run = outcome.snakemake(place, STUDY, "--omit-from", RULE)
    if run.returncode:
        sys.exit(f"error: the calibration for the cost runs failed:\n{run.stdout[-TAIL:]}")


def command(place):
    """(shell command, table that it writes) of the one job that the study still needs."""
    plan = outcome.snakemake(place, "-n", "-p", STUDY)
    commands = re.findall(r"^Shell command: (?!None$)(.*)$", plan.stdout, re.M)
    jobs = [job for job in outcome.planned_jobs(place, STUDY) if job.rule == RULE]
    tables = [path for job in jobs for path in job.outputs if path.endswith(".parquet")]
    if len(commands) != 1 or len(tables) != 1:
        sys.exit(f"error: {len(commands)} jobs, {len(tables)} tables where one was to be measured:\n{plan.stdout}")
    return commands[0], place / tables[0]


def timed(shell, place):
    """Run a command to its end and say what it took, its children's share included."""
    environment = outcome.surroundings(place) | {
        "PATH": f"{outcome.BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(place / "src"),
    }
    begin = time.monotonic()
    running = subprocess.Popen(["bash", "-c", shell], cwd=place, env=environment)
    _, status, used = os.wait4(running.pid, 0)
    wall = time.monotonic() - begin
    if status:
        log = place / shell.partition(" > ")[2].split()[0]
        sys.exit(f"error: a measured job failed: {shell}\n{log.read_text()[-TAIL:]}")
    return Cost(wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def check(point, out):
    """Refuse a job that measured something else than it was asked for."""
    tokens = pl.read_parquet(out)
    found = {"cells": tokens["cell_id"].n_unique(), "windows": tokens["window"].n_unique()}
    if found != {"cells": point.cells, "windows": point.windows}:
        sys.exit(f"error: {point} was asked for, {found} was measured")


def measure(folder):
    """The cost of every point; one workspace per model, calibrated once."""
    costs = {}
    for layers, group in groupby(points(), key=lambda point: point.layers):
        model, place = folder / f"model-{layers}", folder / f"layers-{layers}"
        resize(ROOT / REFERENCE, model, layers)
        for point in group:
            workspace.make(place, parameters(point, model))
            if not (place / "calib").exists():
                calibrate(place)
            shell, out = command(place)
            out.parent.mkdir(parents=True, exist_ok=True)
            (place / shell.partition(" > ")[2].split()[0]).parent.mkdir(parents=True, exist_ok=True)
            costs[point] = timed(shell, place)
            check(point, out)
            shutil.rmtree(place / "results" / STUDY)
            shutil.rmtree(place / outcome.STORE)  # the next point has cells of this one, and would not measure them
            print(f"{point}: {fixed(costs[point].wall, 1)} s, cores {fixed(costs[point].cpu, 1)} s", flush=True)
    return costs


def growth(sizes, costs):
    """(cost at size 0, cost per unit, ratio of the larger to the middle size net of size 0).

    `sizes` and `costs` are (small, n, 2n). The line through the two smaller sizes gives the cost at size 0;
    the ratio is 2 where the cost grows in a line.
    """
    small, middle, _ = sizes
    per_unit = (costs[1] - costs[0]) / (middle - small)
    fixed_part = costs[0] - small * per_unit
    return fixed_part, (costs[2] - costs[1]) / (sizes[2] - middle), (costs[2] - fixed_part) / (costs[1] - fixed_part)


def growth_table(costs):
    """A row for every engine and factor."""
    rows = []
    for engine in ENGINES:
        for factor, sizes in SIZES.items():
            three = [costs[Point(engine, **(BASE | {factor: size}))] for size in sizes]
            start, unit, ratio = growth(sizes, [cost.cpu for cost in three])
            _, _, clock = growth(sizes, [cost.wall for cost in three])
            row = [f"`{engine}`", factor, f"{sizes[1]} and {sizes[2]}", fixed(start, 1), number(unit)]
            rows.append([*row, fixed(ratio, 2), fixed(clock, 2)])
    linear = plain(SIZES["windows"][2] / SIZES["windows"][1])
    headers = ["engine", "factor", "sizes", "fixed part, s", "s per unit", f"ratio (a line: {linear})", "on the clock"]
    return table(headers, rows)


def points_table(costs):
    """A row for every job that was measured."""
    rows = []
    for point in sorted(costs, key=lambda point: (point.engine, point.windows, point.cells, point.layers)):
        cost = costs[point]
        sizes = map(str, (point.windows, point.cells, point.layers))
        rows.append([f"`{point.engine}`", *sizes, fixed(cost.wall, 1), fixed(cost.cpu, 1), fixed(cost.largest, 0)])
    headers = ["engine", "windows", "cells", "layers", "s on the clock", "s of the cores", "MiB, largest process"]
    return table(headers, rows)


def benchmarks(place):
    """(stage, seconds, MiB, when it ended) of each job of the report that has left a benchmark."""
    found = []
    for job in outcome.planned_jobs(place):
        path = place / job.benchmark
        if path.exists():
            names, values = (line.split("\t") for line in path.read_text().splitlines()[:2])
            entry = dict(zip(names, values, strict=True))
            stage = Path(job.benchmark).parts[2]  # results/benchmarks/STAGE/...
            found.append((stage, float(entry["s"]), float(entry["max_pss"]), path.stat().st_mtime))
    return found


def stage_rows(found):
    """A row for every stage, and one for all."""
    stages = {}
    for stage, seconds, memory, _ in found:
        stages.setdefault(stage, []).append((seconds, memory))
    stages["**all**"] = [(seconds, memory) for _, seconds, memory, _ in found]
    rows = []
    for name, jobs in stages.items():
        seconds, memory = zip(*jobs, strict=True)
        rows.append([name, str(len(jobs)), fixed(sum(seconds), 0), fixed(max(seconds), 0), fixed(max(memory), 0)])
    return rows


def on_the_clock(found):
    """Seconds from the first start to the last end; None when the jobs are not of one run.

    Jobs of one run leave no long pause: the span is no longer than all of them one after the other. Numbers and
    words are made after everything is measured, and again whenever a word changes: their own seconds are added.
    """
    measured = [job for job in found if job[0] not in WORDED]
    span = max(end for *_, end in measured) - min(end - seconds for _, seconds, _, end in measured)
    span += sum(seconds for stage, seconds, *_ in found if stage in WORDED)
    return span if span <= 1.1 * sum(seconds for _, seconds, *_ in found) else None


def at_once(found):
    """MiB of the jobs that ran at one time, at most; each counts with its own peak, whenever that was."""
    spans = [(end - seconds, end, memory) for _, seconds, memory, end in found]
    return max(sum(memory for begin, end, memory in spans if begin <= moment < end) for moment, *_ in spans)


def default_run(place):
    """The section on the default run."""
    found, planned = benchmarks(place), len(outcome.planned_jobs(place))
    if len(found) < planned:
        return (
            f"Not made here yet: {len(found)} of its {planned} jobs have left a benchmark. `make findings`, then this."
        )
    span, memory = on_the_clock(found), at_once(found)
    limits = [
        ["seconds from the first job to the last", DASH if span is None else fixed(span, 0), *against(span, "seconds")],
        ["MiB of the jobs that ran at one time", fixed(memory, 0), *against(memory, "MiB")],
    ]
    text = [table(["", "measured", "allowed", "within"], limits)]
    if span is None:
        text.append("The jobs that lie here were not made in one run, so no time on the clock can be given.")
    headers = ["stage", "jobs", "seconds, all", "seconds, longest", "MiB, largest job"]
    return "\n\n".join([*text, table(headers, stage_rows(found))])


def against(value, unit):
    """(what is allowed, whether a value is within it)."""
    return str(LIMITS[unit]), DASH if value is None else "yes" if value <= LIMITS[unit] else "NO"


def page(costs, place):
    """COST.md."""
    base = ", ".join(f"{size} {factor}" for factor, size in BASE.items())
    small = ", ".join(f"{sizes[0]} {factor}" for factor, sizes in SIZES.items())
    cut = read_yaml(ROOT / "params.yaml")["windows"]
    host = ", ".join(f"{key} {value}" for key, value in machine().items())
    length = f"{cut['context']} + {cut['eval']}"
    how = f"""One job of the ladder (`klt`, windows of {length} tokens, one thread) at two sizes of one factor,
while the others stay at {base}. A third, small size ({small}) gives the
fixed part: what a job costs at size zero, the start of the engine above all. Seconds are those of the cores, which
other work on the machine disturbs least; the ratio is the cost at the larger size over that at the smaller, both
without the fixed part."""
    return f"""# What a measurement costs

Written by `make cost`. {host}.

## How it grows

{how}

{growth_table(costs)}

## What was measured

{points_table(costs)}

## The default run

{default_run(place)}
"""


def csv(costs):
    """Every point with all digits."""
    rows = [vars(point) | {"wall_s": c.wall, "cpu_s": c.cpu, "largest_mb": c.largest} for point, c in costs.items()]
    return pl.DataFrame(rows).write_csv()


def read_csv(path):
    """What `csv` wrote."""
    rows = pl.read_csv(path).rows(named=True)
    return {
        Point(*(row[name] for name in ("engine", "windows", "cells", "layers"))): Cost(
            row["wall_s"], row["cpu_s"], row["largest_mb"]
        )
        for row in rows
    }


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path, default=Path("results/cost"), help="folder of COST.md and cost.csv")
    arguments.add_argument("--page", action="store_true", help="measure nothing: COST.md again, from cost.csv")
    given = arguments.parse_args()
    os.chdir(ROOT)
    if given.page:
        costs = read_csv(given.out / "cost.csv")
    else:
        with tempfile.TemporaryDirectory() as folder:
            costs = measure(Path(folder))
        write_text(given.out / "cost.csv", csv(costs))
    write_text(given.out / "COST.md", page(costs, ROOT))
    print(given.out / "COST.md")


if __name__ == "__main__":
    main()
