"""`kvlab params`: what params.yaml says, checked. Heavy imports happen inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvlab.cli.flags import switch, word
from kvlab.cli.given import DEFAULT_PARAMS, ParamsText, Slug
from kvlab.core.paramfile import assignment, overlay, preset, read_yaml
from kvlab_pipeline.studies.settings import Settings, by_model, left_out, one_of, resolved


def params_verb(
    params: ParamsText = DEFAULT_PARAMS,
    model: Slug = None,
    named: Annotated[str | None, word("overlay workflow/presets/NAME.yaml", "--preset", metavar="NAME")] = None,
    changes: Annotated[list[str], word("change one leaf; may be repeated", "--set", metavar="KEY=VALUE")] = (),
    only_yaml: Annotated[bool, switch("nothing but YAML", "--yaml")] = False,
    as_json: Annotated[bool, switch("canonical JSON", "--json")] = False,
) -> None:
    """Check params.yaml and print it resolved, with the recipe ids.

    With --model or as JSON, of one model.
    """
    import yaml

    from kvlab.core.recipe import canonical
    from kvlab_pipeline.jobs import plan

    data = read_yaml(Path(params))
    data = preset(named, data) if named else data
    for change in changes:
        data = overlay(data, assignment(change))
    models = by_model(data)
    for one in models.values():
        plan.check(one)
    shown = [one_of(models, model)] if model or as_json else list(models.values())
    if as_json:
        print(canonical(shown[0]))
        return
    print(yaml.safe_dump(resolved(data), sort_keys=False).rstrip())
    if not only_yaml:
        for one in shown:
            _print_recipes(one, left_out(one, data))


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
