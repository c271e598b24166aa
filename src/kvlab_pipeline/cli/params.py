"""`kvlab params`: what params.yaml says, checked. Heavy imports happen inside."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvlab.cli.flags import SETTINGS, Flag, word
from kvlab.core.paramfile import assignment, overlay, preset, read_yaml
from kvlab_pipeline.studies.settings import Settings, by_model, left_out, one_of, resolved


def params_verb(args: argparse.Namespace) -> None:
    """Check params.yaml and print it resolved, with the recipe ids; with `--model` or as JSON, of one model."""
    import yaml

    from kvlab.core.recipe import canonical
    from kvlab_pipeline.jobs import plan

    data = read_yaml(Path(args.params))
    data = preset(args.preset, data) if args.preset else data
    for change in args.set or ():
        data = overlay(data, assignment(change))
    models = by_model(data)
    for params in models.values():
        plan.check(params)
    shown = [one_of(models, args.model)] if args.model or args.json else list(models.values())
    if args.json:
        print(canonical(shown[0]))
        return
    print(yaml.safe_dump(resolved(data), sort_keys=False).rstrip())
    if not args.yaml:
        for params in shown:
            _print_recipes(params, left_out(params, data))


def _print_recipes(params: Settings, missing: list[str]) -> None:
    from kvlab_pipeline.jobs.plan import CHOSEN, baseline_runs, job_names, jobs, targets
    from kvlab_pipeline.studies.processes import units

    planned = [study for study in targets(params) if study != CHOSEN]
    print(f"\n# recipes of {params.model.slug}")
    recipes = {}
    for cell in (cell for study in planned for job in jobs(params, study).values() for cell in job):
        recipes.setdefault(cell.recipe_id, set()).add(f"{cell.study}: {cell.label}")
    for recipe_id, users in recipes.items():
        print(f"#   {recipe_id}  {', '.join(sorted(users))}")
    if missing:
        print("# default cells that are left out, as they are not possible here or the same cell as another")
        print(f"#   {', '.join(missing)}")
    print("# jobs")
    for study in targets(params):
        print(f"#   {study}: {', '.join(job_names(params, study))}")
    print(f"#   baseline: {', '.join(baseline_runs(params))}")
    print("# measured together")
    for name, contents in units(params).items():
        print(f"#   {name}: {', '.join(f'{study}/{job}' for study, jobs in contents.items() for job in jobs)}")


FLAGS: list[Flag] = [
    *SETTINGS,
    word("--preset", "overlay workflow/presets/NAME.yaml", metavar="NAME"),
    word("--set", "change one leaf; may be repeated", metavar="KEY=VALUE", action="append"),
    word("--yaml", "nothing but YAML", action="store_true"),
    word("--json", "canonical JSON", action="store_true"),
]
