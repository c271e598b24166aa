"""The command line: one verb per step of the pipeline. Heavy imports happen inside the verbs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from kvlab.errors import KvlabError, UserError, nearest
from kvlab.params import Params, overlay, preset, read_yaml

OVERVIEW = """\
kvlab measures what compressing an LLM's KV cache costs, on which engine, and why.

The pipeline, in order (snakemake runs it: `snakemake results/gap/FINDINGS.md`):

  corpus      text -> fixed token windows, calibration and test kept apart
  capture     pre-rotary Q, K, V of the calibration windows, from one engine
  sigma       Sigma_q and its Cholesky factor, per layer and KV head
  codebooks   Lloyd-Max tables on the variable that the quantiser really sees
  baseline    codec off: an engine, dtype and attention against the fp32 truth
  measure     a batch of cells on one engine: codec cells, single layers, noise
  metrics     tables -> estimates with intervals; refuses what may not be compared
  gate        estimates -> verdicts, and whether numbers may be published
  report      estimates and verdicts -> FINDINGS.md with its figures

Beside it:

  params      check params.yaml and print it resolved, with the recipe ids
  reference   train the embedded reference model again

Every verb reads `--params`: params.yaml, or a JSON object of just the top-level keys it may use.
Exit codes: 0 done, 2 the input is wrong (one line says how to mend it), 1 the run is wrong.
"""

EXAMPLES = """\
examples:
  kvlab params                              check params.yaml, print the recipe ids
  kvlab params --preset quick --yaml        a small run's parameters
  snakemake results/gap/FINDINGS.md         everything, in order, nothing twice
"""


def params_verb(args: argparse.Namespace) -> None:
    """Check params.yaml and print it resolved, with the recipe ids."""
    import yaml

    from kvlab.recipe import canonical

    data = read_yaml(Path(args.params))
    data = preset(args.preset, data) if args.preset else data
    for change in args.set or ():
        data = overlay(data, _nested(change))
    params = Params.complete(data)
    if args.json:
        print(canonical(params))
        return
    print(yaml.safe_dump(params.model_dump(mode="json"), sort_keys=False).rstrip())
    if not args.yaml:
        _print_recipes(params)


def _nested(change: str) -> dict:
    import yaml

    key, equals, value = change.partition("=")
    if not equals:
        raise UserError(f"--set {change!r} is not KEY=VALUE; for example --set windows.test=8")
    nested = yaml.safe_load(value)
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return nested


def _print_recipes(params: Params) -> None:
    from kvlab.experiments.plan import STUDIES, baseline_runs, jobs

    packed = {study: jobs(params, study) for study in STUDIES}
    print("\n# recipes")
    recipes = {}
    for cells in (cell for study in packed.values() for job in study.values() for cell in job):
        recipes.setdefault(cells.recipe_id, set()).add(f"{cells.study}: {cells.label}")
    for recipe_id, users in recipes.items():
        print(f"#   {recipe_id}  {', '.join(sorted(users))}")
    print("# jobs")
    for study, names in (packed | {"baseline": baseline_runs(params)}).items():
        print(f"#   {study}: {', '.join(names)}")


def reference_verb(args: argparse.Namespace) -> None:
    """Train the embedded reference model and write it."""
    from kvlab.reference import main_train

    main_train(args.out, tokens=args.tokens, max_minutes=args.max_minutes, resume=args.resume)


def corpus_verb(args: argparse.Namespace) -> None:
    """Cut the corpus into windows."""
    from kvlab.corpus import build

    build(Params.parse(args.params), args.out)


def capture_verb(args: argparse.Namespace) -> None:
    """Capture Q, K and V of the calibration windows."""
    from kvlab.calibration.capture import capture

    capture(Params.parse(args.params), args.engine, args.windows, args.out)


def sigma_verb(args: argparse.Namespace) -> None:
    """Fit Sigma_q."""
    from kvlab.calibration.sigma import fit_sigma

    fit_sigma(Params.parse(args.params), args.capture, args.out)


def codebooks_verb(args: argparse.Namespace) -> None:
    """Fit the Lloyd-Max tables."""
    from kvlab.calibration.codebooks import fit_codebooks

    fit_codebooks(Params.parse(args.params), args.capture, args.sigma, args.out)


def baseline_verb(args: argparse.Namespace) -> None:
    """Measure one run of the engine baseline."""
    from kvlab.experiments.baseline import baseline

    baseline(Params.parse(args.params), args.run, args.windows, args.sigma, args.codebooks, args.out)


def measure_verb(args: argparse.Namespace) -> None:
    """Measure one job of cells."""
    from kvlab.experiments.measure import measure

    params = Params.parse(args.params)
    measure(params, args.study, args.job, args.windows, args.sigma, args.codebooks, args.out)


def metrics_verb(args: argparse.Namespace) -> None:
    """Turn tables into estimates."""
    from kvlab.records import write_json
    from kvlab.report.metrics import build, summary

    metrics = build(Params.parse(args.params), args.baseline, args.jobs, args.codebooks, args.sigmas)
    write_json(args.out, metrics)
    if args.summary:
        write_json(args.summary, summary(metrics))


def gate_verb(args: argparse.Namespace) -> None:
    """Judge the estimates."""
    from kvlab.gate.verdict import judge
    from kvlab.records import read_json, write_json

    write_json(args.out, judge(Params.parse(args.params), read_json(args.metrics)))


def report_verb(args: argparse.Namespace) -> None:
    """Write FINDINGS.md and its figures, or the README's headline."""
    from kvlab.records import read_json
    from kvlab.report import findings, readme

    metrics, verdict = read_json(args.metrics), read_json(args.verdict)
    if args.readme:
        readme.update(args.readme, metrics, verdict)
    if args.out:
        findings.write(Params.parse(args.params), metrics, verdict, args.out)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = _Parser("kvlab", description=OVERVIEW, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = root.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)

    def verb(function: Callable, *flags: tuple) -> None:
        name = function.__name__.removesuffix("_verb")
        sub = verbs.add_parser(name, help=argparse.SUPPRESS, description=function.__doc__)
        sub.set_defaults(step=function)
        sub.add_argument("--params", default="params.yaml", metavar="FILE|JSON", help="default: params.yaml")
        for flag, options in flags:
            sub.add_argument(flag, **options)

    def path(flag: str, text: str, **options) -> tuple:
        return flag, {"type": Path, "metavar": "FILE", "help": text, "required": True} | options

    out = path("--out", "what is written (with companions of the same stem beside it)")
    windows = path("--windows", "windows.safetensors of `kvlab corpus`")
    capture = path("--capture", "what `kvlab capture` wrote")
    sigma = path("--sigma", "what `kvlab sigma` wrote")
    optional_sigma = path("--sigma", "what `kvlab sigma` wrote; needed by cells with a codec", required=False)
    optional_codebooks = path("--codebooks", "what `kvlab codebooks` wrote; likewise", required=False)
    many = {"nargs": "+"}

    verb(
        params_verb,
        ("--preset", {"metavar": "NAME", "help": "overlay workflow/presets/NAME.yaml"}),
        ("--set", {"metavar": "KEY=VALUE", "action": "append", "help": "change one leaf; may be repeated"}),
        ("--yaml", {"action": "store_true", "help": "nothing but YAML"}),
        ("--json", {"action": "store_true", "help": "canonical JSON"}),
    )
    verb(
        reference_verb,
        path("--out", "model folder, replaced when the run ends", default=Path("models/reference"), required=False),
        ("--tokens", {"type": int, "default": 9_000_000, "help": "training tokens; default: 9 000 000"}),
        ("--max-minutes", {"type": float, "help": "finish the schedule within this time"}),
        ("--resume", {"action": "store_true", "help": "continue a run that was killed"}),
    )
    verb(corpus_verb, out)
    verb(capture_verb, ("--engine", {"required": True, "help": "hf or vllm"}), windows, out)
    verb(sigma_verb, capture, out)
    verb(codebooks_verb, capture, sigma, out)
    run = ("--run", {"required": True, "help": "a name that `kvlab params` lists under baseline"})
    verb(baseline_verb, run, windows, optional_sigma, optional_codebooks, out)
    study = ("--study", {"required": True, "help": "cells, layers or noise"})
    job = ("--job", {"required": True, "help": "a name that `kvlab params` lists under the study"})
    verb(measure_verb, study, job, windows, optional_sigma, optional_codebooks, out)
    verb(
        metrics_verb,
        path("--baseline", "json records of the baseline runs", **many),
        path("--jobs", "json records of the jobs of cells", **many),
        path("--codebooks", "what `kvlab codebooks` wrote"),
        path("--sigmas", "json sidecars of `kvlab sigma`", **many),
        path("--summary", "also write a dozen headline scalars here", required=False),
        out,
    )
    metrics = path("--metrics", "what `kvlab metrics` wrote")
    verb(gate_verb, metrics, out)
    verb(
        report_verb,
        metrics,
        path("--verdict", "what `kvlab gate` wrote"),
        path("--out", "FINDINGS.md; figures go into figures/ beside it", required=False),
        path("--readme", "README whose headline block is brought up to date", required=False),
    )
    return root


class _Parser(argparse.ArgumentParser):
    """Argparse that answers in one line and names the nearest verb."""

    def error(self, message: str) -> None:
        given = message.split("'")[1] if "invalid choice" in message else ""
        verbs = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        if given and verbs:
            near = nearest(given, verbs[0])
            hint = f"did you mean {near!r}?" if near else f"allowed: {', '.join(verbs[0])}"
            message = f"verb {given!r} is not known; {hint}"
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: list[str] | None = None) -> None:
    """Run one verb; errors become one line on stderr and an exit code."""
    args = parser().parse_args(arguments)
    try:
        args.step(args)
    except KvlabError as error:
        _fail(f"kvlab {args.verb}: {error}", error.exit_code)
    except BrokenPipeError:  # `kvlab params | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        from kvlab.records import storage_error

        _fail(f"kvlab {args.verb}: {storage_error(Path(error.filename or getattr(args, 'out', '.')), error)}", 2)


def _fail(message: str, code: int) -> None:
    print(" ".join(message.split()), file=sys.stderr)
    sys.exit(code)
