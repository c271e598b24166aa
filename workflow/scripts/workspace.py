"""Make .runs/NAME, a folder where the same code runs with the parameters of a preset, and print its path.

    python workflow/scripts/workspace.py quick

Everything is a link but params.yaml: the root's, with workflow/presets/NAME.yaml put over it. A preset's
results therefore never meet those of the root or of another preset.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

import yaml  # noqa: E402

from kvlab.core.errors import ParamsError  # noqa: E402
from kvlab.core.paramfile import preset, read_yaml  # noqa: E402
from kvlab_pipeline.studies.settings import by_model  # noqa: E402

# What a workspace has of its own, and what only the root can do.
OWN = {"params.yaml", "calib", "results", "dvc.yaml", "dvc.lock"}


def preset_params(name):
    """The parameters of the root with the preset put over them, as the text of a params.yaml."""
    merged = preset(name, read_yaml(Path("params.yaml")))
    by_model(merged)
    head = f"# Written from params.yaml and workflow/presets/{name}.yaml; edit those.\n"
    return head + yaml.safe_dump(merged, sort_keys=False)


def make(workspace, params_text):
    """Link the root into `workspace` and write its params.yaml."""
    workspace.mkdir(parents=True, exist_ok=True)
    for entry in sorted(Path.cwd().iterdir()):
        link = workspace / entry.name
        if not entry.name.startswith(".") and entry.name not in OWN and not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(entry, workspace))
    (workspace / "params.yaml").write_text(params_text)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("name", help="a file of workflow/presets, without .yaml")
    arguments.add_argument("--at", type=Path, help="where, if not .runs/NAME")
    given = arguments.parse_args()
    workspace = (given.at or ROOT / ".runs" / given.name).absolute()
    os.chdir(ROOT)
    try:
        make(workspace, preset_params(given.name))
    except ParamsError as problem:
        print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(problem.exit_code) from None
    print(os.path.relpath(workspace) if workspace.is_relative_to(ROOT) else workspace)


if __name__ == "__main__":
    main()
