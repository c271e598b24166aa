"""The site: these pages, README, config/ and the published ones, and two that are made of the code; see `make docs`.

The source is the root of the checkout, so that links lead where they lead in a repository's browser.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
os.environ |= {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}

project = "kvlab"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/README"
include_patterns = ["*.md", "docs/*.md", "docs/*/*.md", "docs/results/**/*.md", "config/*.md", "results/*/*.md"]
exclude_patterns = [".*", "build", "calib", "models", "profiles", "src", "tests", "validation", "workflow"]
html_theme, html_title = "furo", "kvlab"
myst_heading_anchors = 4
default_role = "code"  # as docstrings mean a name in single backticks
autodoc_typehints = "description"
autodoc_member_order = "bysource"
suppress_warnings = ["myst.header"]  # published pages begin sections of their own

MADE = ROOT / "docs" / "_made"
MORE = (
    "kvlab.cache.files.recipe:write_recipe_file",
    "kvlab.cache.vllm_plugin:status",
    "kvlab.calibration.calibrate:calibrate",
    "kvlab.codecs.testing:conformance",
    "kvlab.kvstore.paging.config:PagerConfig",
    "kvlab.kvstore.hf.model:PagedModel",
    "kvlab.kvstore.hf.run:PagedRun",
    "kvlab.kvstore.restore:restore",
    "kvlab.kvstore.vllm.settings:transfer_config",
    "kvlab.attention.hf:registered",
    "kvlab.attention.hf:attending",
    "kvlab.core.errors:KvlabError",
)
"""What the pages use of the Python interface beside the names of `kvlab` itself."""


def commands() -> str:
    """Every verb with its help, as the parser prints it."""
    from kvlab.cli.main import main, verbs

    found = ["# All commands\n\nMade of the parser: what `kvlab VERB --help` prints.\n"]
    for path in paths(verbs()):
        said = io.StringIO()
        with redirect_stdout(said), suppress(SystemExit):
            main([*path, "--help"])
        found.append(f"## kvlab {' '.join(path)}\n\n```text\n{said.getvalue().rstrip()}\n```\n")
    return "\n".join(found)


def paths(known, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The words of every verb, those of groups too."""
    found = []
    for name, verb in known.items():
        found += paths(verb, (*before, name)) if hasattr(verb, "items") else [(*before, name)]
    return found


def interface() -> str:
    """The public names with their docstrings."""
    import kvlab

    places = [*((f"kvlab.{name}", place) for name, place in kvlab.PUBLIC.items())]
    places += [(place.replace(":", "."), place) for place in MORE]
    found = ["# The Python interface\n\nMade of the docstrings.\n"]
    for name, place in sorted(places, key=lambda one: (one[0].count("."), one[0].lower())):
        target = place.replace(":", ".")
        kind = "autofunction" if target.rpartition(".")[2][0].islower() else "autoclass"
        members = "   :members:\n" if kind == "autoclass" else ""
        found.append(f"## {name}\n\n```{{eval-rst}}\n.. {kind}:: {target}\n{members}```\n")
    return "\n".join(found)


def make(app) -> None:
    """Write the pages that are made of the code."""
    MADE.mkdir(exist_ok=True)
    (MADE / "commands.md").write_text(commands())
    (MADE / "interface.md").write_text(interface())


def entrance(app, error) -> None:
    """A page at the top of the site that leads to the first one."""
    if not error:
        (Path(app.outdir) / "index.html").write_text('<meta http-equiv="refresh" content="0; url=docs/README.html">\n')


def setup(app) -> None:
    """Sphinx calls this."""
    app.connect("builder-inited", make)
    app.connect("build-finished", entrance)
