"""What each verb does with what it was given. Heavy imports happen inside the verbs."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvlab.errors import UserError
from kvlab.paramfile import assignment, overlay, preset, read_yaml
from kvlab.params import Params
from kvlab.per_model import by_model, one_of, read_params, resolved


def _params(args: argparse.Namespace) -> Params:
    """What `--params` and `--model` name."""
    return read_params(args.params, args.model)


def params_verb(args: argparse.Namespace) -> None:
    """Check params.yaml and print it resolved, with the recipe ids; with `--model` or as JSON, of one model."""
    import yaml

    from kvlab.experiments import plan
    from kvlab.recipe import canonical

    data = read_yaml(Path(args.params))
    data = preset(args.preset, data) if args.preset else data
    for change in args.set or ():
        data = overlay(data, assignment(change))
    models = by_model(data)
    for params in models.values():
        plan.check(params)
    if args.json:
        print(canonical(one_of(models, args.model)))
        return
    print(yaml.safe_dump(resolved(data), sort_keys=False).rstrip())
    if not args.yaml:
        for params in [one_of(models, args.model)] if args.model else models.values():
            _print_recipes(params)


def _print_recipes(params: Params) -> None:
    from kvlab.experiments.plan import CHOSEN, LADDER, STUDIES, baseline_runs, job_names, jobs

    planned = [study for study in (*STUDIES, LADDER) if study != CHOSEN]
    print(f"\n# recipes of {params.model.slug}")
    recipes = {}
    for cell in (cell for study in planned for job in jobs(params, study).values() for cell in job):
        recipes.setdefault(cell.recipe_id, set()).add(f"{cell.study}: {cell.label}")
    for recipe_id, users in recipes.items():
        print(f"#   {recipe_id}  {', '.join(sorted(users))}")
    print("# jobs")
    for study in (*STUDIES, LADDER):
        print(f"#   {study}: {', '.join(job_names(params, study))}")
    print(f"#   baseline: {', '.join(baseline_runs(params))}")


def reference_verb(args: argparse.Namespace) -> None:
    """Train the embedded reference model and write it."""
    from kvlab.reference import main_train

    main_train(args.out, tokens=args.tokens, max_minutes=args.max_minutes, resume=args.resume, go_on=args.go_on)


def corpus_verb(args: argparse.Namespace) -> None:
    """Cut the corpus into windows."""
    from kvlab.corpus import build

    build(_params(args), args.out)


def needles_verb(args: argparse.Namespace) -> None:
    """Plant the facts that retrieval is measured on."""
    from kvlab.needles import build

    build(_params(args), args.out)


def capture_verb(args: argparse.Namespace) -> None:
    """Capture Q, K and V of the calibration windows."""
    from kvlab.calibration.capture import capture

    capture(_params(args), args.engine, args.windows, args.out)


def sigma_verb(args: argparse.Namespace) -> None:
    """Fit Sigma_q."""
    from kvlab.calibration.sigma import fit_sigma

    fit_sigma(_params(args), args.capture, args.out)


def codebooks_verb(args: argparse.Namespace) -> None:
    """Fit the Lloyd-Max tables."""
    from kvlab.calibration.codebooks import fit_codebooks

    fit_codebooks(_params(args), args.study, args.capture, args.sigma, args.rotated, args.out)


def components_verb(args: argparse.Namespace) -> None:
    """Fit the components of K and V."""
    from kvlab.calibration.components import fit_components

    fit_components(_params(args), args.capture, args.sigma, args.out)


def _fitted(args: argparse.Namespace):
    from kvlab.calibration.load import Fitted

    codebooks, components = args.codebooks, getattr(args, "components", None)
    if args.sigma is None and (codebooks or components):
        raise UserError("--codebooks and --components belong to a Sigma_q; name it with --sigma")
    return Fitted(args.sigma, codebooks, components) if args.sigma else None


def _by_origin(args: argparse.Namespace) -> dict:
    from kvlab.calibration.load import by_origin

    given = [getattr(args, name) or [] for name in ("sigma", "codebooks", "components", "rotated")]
    if any(given) and not given[0]:
        raise UserError("--codebooks, --components and --rotated belong to a Sigma_q; name it with --sigma")
    return by_origin(*given)


def baseline_verb(args: argparse.Namespace) -> None:
    """Measure one run of the engine baseline."""
    from kvlab.experiments.baseline import baseline

    baseline(_params(args), args.run, args.windows, _fitted(args), args.out)


def choose_verb(args: argparse.Namespace) -> None:
    """Choose on the calibration split which layers the mitigations favour."""
    from kvlab.experiments.choose import choose

    choose(_params(args), args.windows, _by_origin(args), args.out)


def measure_verb(args: argparse.Namespace) -> None:
    """Measure one job of cells."""
    from kvlab.experiments.measure import measure

    choice = _choice(args)
    measure(_params(args), args.study, args.job, args.windows, _by_origin(args), args.out, choice)


def mechanisms_verb(args: argparse.Namespace) -> None:
    """Measure what the gate judges: every codec, and every dtype of an engine's own cache, on one engine."""
    from kvlab.experiments.mechanisms import mechanisms

    mechanisms(_params(args), args.engine, args.windows, args.needles, _by_origin(args), args.code, args.out)


def _choice(args: argparse.Namespace):
    from kvlab.experiments.plans.mitigations import current, read_choice

    return current(_params(args), read_choice(args.choice)) if args.choice else None


def residual_verb(args: argparse.Namespace) -> None:
    """Code one engine's own capture and keep the codec's error."""
    from kvlab.experiments.residual import residual

    residual(_params(args), args.capture, _fitted(args), args.out)


def published_verb(args: argparse.Namespace) -> None:
    """Read a published study's result files and analyse them again."""
    from kvlab.published.main import published

    published(args.folder, args.out, args.metrics)


def planted_verb(args: argparse.Namespace) -> None:
    """Plant values that are known, and see whether the pipeline finds them."""
    from kvlab.planted.run import planted

    planted(_params(args), args.windows, args.out)


def metrics_verb(args: argparse.Namespace) -> None:
    """Turn tables into estimates."""
    from kvlab.records import write_json
    from kvlab.report.metrics import Sources, build

    sources = Sources(args.baseline, args.jobs, args.codebooks, args.sigmas, args.residual, args.choice)
    write_json(args.out, build(_params(args), sources))


def compare_verb(args: argparse.Namespace) -> None:
    """Set models beside one another: what each pays, and what each further one pays beside the first."""
    from kvlab.records import write_json
    from kvlab.report import comparison
    from kvlab.report.summary import summary

    found = comparison.read(args.metrics)
    compared = comparison.build(found)
    headlines = {metrics["identity"]["slug"]: summary(metrics) for metrics in found}
    comparison.write_table(args.out, compared)
    if args.json:
        write_json(args.json, compared)
    if args.summary:
        write_json(args.summary, headlines)


def verdict_verb(args: argparse.Namespace) -> None:
    """Judge the estimates."""
    from kvlab.gate.verdict import judge
    from kvlab.records import read_json, write_json

    write_json(args.out, judge(_params(args), read_json(args.metrics)))


def report_verb(args: argparse.Namespace) -> None:
    """Write FINDINGS.md and its figures, or the README's headline."""
    from kvlab.records import read_json
    from kvlab.report import findings, readme

    metrics, verdict = read_json(args.metrics), read_json(args.verdict)
    if args.readme:
        readme.update(args.readme, metrics, verdict)
    if args.out:
        comparison = read_json(args.comparison) if args.comparison else None
        findings.write(_params(args), metrics, verdict, args.out, args.html, comparison, args.claims)


def recipe_verb(args: argparse.Namespace) -> None:
    """Write the recipe file that encode, decode and the drop-ins read: klt at the bits of params.yaml."""
    from kvlab.dropins.prepared import prepared, refuse_missing
    from kvlab.dropins.recipe_file import CalibrationFiles, RecipeFile, write_recipe_file
    from kvlab.ladder import STUDIED, default_recipe, labelled
    from kvlab.model import resolve
    from kvlab.params import coded_layers

    params = _params(args)
    recipe = labelled(args.codec, params) if args.codec else default_recipe(params)
    layers, files = None, None
    if args.codec == STUDIED and params.codec.boundary_layers:
        layers = coded_layers(params)
    if _fitted(args):
        files = CalibrationFiles(sigma=args.sigma, codebooks=args.codebooks, components=args.components)
        refuse_missing(files)
    # whatever the readers of the file would refuse is refused before it is written
    prepared(RecipeFile(recipe=recipe, layers=layers, calibration=files), resolve(params.model))
    write_recipe_file(args.out, recipe, layers, files)
    print(f"{args.out}: recipe {recipe.recipe_id}")


def encode_verb(args: argparse.Namespace) -> None:
    """Write the cache of one captured window as a coded stream."""
    from kvlab.streams import describe, encode

    reader = encode(_params(args), args.recipe, args.capture, args.window, args.out)
    print("\n".join(describe(reader)))


def decode_verb(args: argparse.Namespace) -> None:
    """Decode a coded stream into safetensors."""
    from kvlab.streams import decode

    decode(_params(args), args.recipe, args.stream, args.out)


def inspect_verb(args: argparse.Namespace) -> None:
    """Check a coded stream and say what is in it."""
    from kvlab.codec.cache_file import CacheReader
    from kvlab.streams import describe

    print("\n".join(describe(CacheReader(args.stream))))


def bench_verb(args: argparse.Namespace) -> None:
    """Measure every codec, and what else is installed, on speed, size, error and KL."""
    from kvlab.bench.run import Effort, Inputs, bench

    inputs = Inputs(args.capture, args.sigma, args.tensors, args.ladder, args.windows)
    bench(_params(args), args.out, inputs, Effort(rounds=args.rounds))
