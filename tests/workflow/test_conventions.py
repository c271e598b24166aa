"""What stands beside the code: captions, the catalog's file, the citation, the pages and their links."""

from __future__ import annotations

import copy
import datetime
import importlib.util
import re
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest
import yaml
from docutils.core import publish_parts
from docutils.utils import SystemMessage

import kvlab
from kvlab.cli.main import verbs
from kvlab.core.paramfile import read_yaml
from kvlab_pipeline.jobs import plan
from kvlab_pipeline.studies.settings import by_model

ROOT = Path(__file__).resolve().parents[2]
CAPTIONS = ROOT / "workflow" / "report"
WRITTEN = [page for place in ("docs", "docs/results", "config") for page in sorted((ROOT / place).glob("*.md"))]
PAGES = [ROOT / "README.md", *WRITTEN]
INDEX = ROOT / "docs/README.md"
MADE = ("results/",)  # what the pipeline makes may be linked before it is there


@pytest.fixture(scope="module")
def rules(inspected) -> dict:
    """The outputs that `report()` marks, with caption and category, and the rules that want a conda environment."""
    return inspected("rules")


@pytest.fixture(scope="module")
def document() -> dict:
    """params.yaml, as a person writes it."""
    return read_yaml(ROOT / "params.yaml")


# ------------------------------------------------------------------------------------------ captions


def rendered(caption: str, config: dict) -> str:
    """A caption as Snakemake's report shows it; an unknown name or broken markup is an error here."""
    template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(caption)
    text = template.render(snakemake=SimpleNamespace(config=config), categories={}, files={})
    strict = {"report_level": 1, "halt_level": 2, "warning_stream": False}
    return publish_parts(text, writer="html", settings_overrides=strict)["body"]


@pytest.mark.full
def test_every_caption_is_used_and_every_used_one_is_there(rules):
    snakefile = (ROOT / "Snakefile").read_text()
    used = {caption for caption, _ in rules["reported"].values()}
    used |= {Path(path).name for path in re.findall(r'^report: "(.+)"', snakefile, re.M)}
    assert used == {path.name for path in CAPTIONS.iterdir()}


@pytest.mark.full
def test_what_a_person_reads_is_in_the_report_of_snakemake(rules):
    reported = rules["reported"]
    assert {"results/gap/FINDINGS.md", "results/gap/report.html"} <= reported.keys()
    categories = {"Findings", "Figures", "Numbers", "Verdict", "KV store", "Mechanisms"}
    assert {category for _, category in reported.values()} == categories


@pytest.mark.parametrize("path", sorted(CAPTIONS.iterdir()), ids=lambda path: path.name)
def test_a_caption_renders_into_sentences_without_numerals(path, document):
    caption = path.read_text()
    assert max(map(len, caption.splitlines())) <= 120
    assert not re.search(r"\b\d", re.sub(r"{[{%].*?[%}]}", "", caption))
    for models in (document["models"], [{"path": "some/model"}, {"path": "an/other"}]):
        html = rendered(caption, document | {"models": models})
        words = re.sub(r"<[^>]+>", "", html).split()
        assert len(words) > 15 and words[-1].endswith(".")


def test_the_report_names_every_model(document):
    html = rendered((CAPTIONS / "workflow.rst").read_text(), document | {"models": [{"path": "a/b"}, {"path": "c/d"}]})
    assert "Models" in html and re.findall(r"<tt[^>]*>([^<]+)</tt>", html)[:3] == ["a/b", "c/d", "docstrings"]


@pytest.mark.parametrize("caption", ["Of {{ snakemake.config['modle'] }}.", "Text with ``an open literal."])
def test_a_broken_caption_is_found(caption, document):
    with pytest.raises((jinja2.UndefinedError, SystemMessage)):
        rendered(caption, document)


# ------------------------------------------------------------------------------------------- catalog


def test_the_catalog_file_has_the_form_that_the_catalog_reads():
    (usage,) = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text()).values()
    assert usage.keys() == {"mandatory-flags", "software-stack-deployment", "report"}
    assert usage["mandatory-flags"]["desc"] and isinstance(usage["mandatory-flags"]["flags"], list)
    deployment = usage["software-stack-deployment"]
    assert deployment.keys() == {"conda", "apptainer", "apptainer+conda"}
    assert {type(claim) for claim in (*deployment.values(), usage["report"])} == {bool}


@pytest.mark.full
def test_the_catalog_file_claims_what_holds(rules):
    usage = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text())["usage"]
    assert usage["mandatory-flags"]["flags"] == []
    assert "cores" in yaml.safe_load((ROOT / "profiles/default/config.yaml").read_text())
    assert re.search(r"^setup:", (ROOT / "Makefile").read_text(), re.M)
    assert usage["report"] is bool(rules["reported"])
    deployment = usage["software-stack-deployment"]
    assert deployment["conda"] is deployment["apptainer+conda"] is bool(rules["conda"])


def test_the_catalog_finds_what_it_looks_for():
    readme = (ROOT / "README.md").read_text().lower()
    assert "snakemake" in readme and "workflow" in readme
    assert (ROOT / "config/README.md").stat().st_size > 1000
    assert (ROOT / "workflow/schemas/config.schema.json").exists()
    assert list((ROOT / "workflow/rules").glob("*.smk"))
    assert (ROOT / "workflow/Snakefile").exists()


# ------------------------------------------------------------------------------------------ citation

CFF_KEYS = {
    *("cff-version", "message", "title", "authors", "abstract", "type", "version", "date-released", "license"),
    *("keywords", "doi", "identifiers", "url", "repository", "repository-code", "repository-artifact", "commit"),
    *("contact", "license-url", "preferred-citation", "references"),
}


def citation() -> dict:
    return yaml.safe_load((ROOT / "CITATION.cff").read_text())


def problems(given: dict) -> list[str]:
    """What is wrong with a citation by the Citation File Format 1.2.0, as far as this file uses it."""
    wrong = sorted(given.keys() - CFF_KEYS)
    wrong += [key for key in ("title", "message", "version", "license") if not _is_text(given.get(key))]
    wrong += ["abstract"] if "abstract" in given and not _is_text(given["abstract"]) else []
    wrong += ["cff-version"] if given.get("cff-version") != "1.2.0" else []
    wrong += ["type"] if given.get("type", "software") not in ("software", "dataset") else []
    wrong += ["date-released"] if type(given.get("date-released")) is not datetime.date else []
    authors, keywords = given.get("authors"), given.get("keywords", ["none"])
    if not (authors and isinstance(authors, list) and all(map(_is_author, authors))):
        wrong.append("authors")
    if not (keywords and all(map(_is_text, keywords)) and len(set(keywords)) == len(keywords)):
        wrong.append("keywords")
    return wrong


def _is_text(value) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _is_author(value) -> bool:
    """A person or an entity: an entity has a name, a person at least one of theirs."""
    names = {"name", "family-names", "given-names", "alias"}
    return isinstance(value, dict) and any(_is_text(value.get(name)) for name in names)


def test_the_citation_is_valid_and_of_this_version():
    assert problems(citation()) == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation()["version"] == project["version"]
    assert citation()["license"] == "Apache-2.0" and "Apache License" in (ROOT / "LICENSE").read_text()[:200]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("title", None),
        ("authors", []),
        ("authors", [{"affiliation": "somewhere"}]),
        ("date-released", "20.11.2026"),
        ("version", 0.1),
        ("cff-version", "1.1.0"),
        ("type", "pipeline"),
        ("keywords", ["one", "one"]),
        ("licence", "Apache-2.0"),
    ],
)
def test_an_invalid_citation_is_found(key, value):
    assert problems(copy.deepcopy(citation()) | {key: value}) == [key]


# -------------------------------------------------------------------------------------------- pages


def links(page: Path) -> set[str]:
    """Files that a page links, from the root; addresses and places on the same page are left out."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    targets = {target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target}
    return {str((page.parent / target).resolve().relative_to(ROOT)) for target in targets if target}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    dead = {target for target in links(page) if not target.startswith(MADE) and not (ROOT / target).exists()}
    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_linked_heading_is_there(page):
    for target, heading in re.findall(r"\]\(([^)\s#]*)#([^)\s]+)\)", page.read_text()):
        there = (page.parent / target) if target else page
        titles = re.findall(r"^#+ (.+)$", there.read_text(), re.M)
        assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_index_of_the_documentation_lists_every_page_once():
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md") if path != INDEX}
    rows = re.findall(r"^\| \[[^]]+\]\(([^)]+)\)", INDEX.read_text(), re.M)
    assert len(rows) == len(set(rows)) and pages == {f"docs/{row}" for row in rows}
    assert "docs/README.md" in links(ROOT / "README.md")


@pytest.fixture(scope="module")
def site():
    """docs/conf.py, which needs no Sphinx to be read."""
    spec = importlib.util.spec_from_file_location("conf", ROOT / "docs/conf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_has_every_page_of_the_documentation(site):
    listed = re.findall(r"^([\w./-]+)$", "".join(re.findall(r"```{toctree}\n(.*?)```", INDEX.read_text(), re.S)), re.M)
    pages = {path.stem for path in (ROOT / "docs").glob("*.md") if path != INDEX}
    assert pages <= set(listed) and {"_made/commands", "_made/interface", "../config/README"} <= set(listed)


def test_the_reference_names_every_verb_and_every_public_name(site):
    assert {("measure",), ("calibrate",), ("snapshot", "restore"), ("gate", "check")} <= set(site.paths(verbs()))
    made = site.interface()
    assert all(f"## kvlab.{name}\n" in made for name in kvlab.__all__)
    for place in site.MORE:
        module, _, name = place.partition(":")
        assert getattr(importlib.import_module(module), name).__doc__


# ------------------------------------------------------------------------------------- config/README.md


def typed(pattern: str) -> list[str]:
    """Commands in config/README.md, without their comments."""
    found = re.findall(rf"^{pattern}(.*)$", (ROOT / "config/README.md").read_text(), re.M)
    return [re.sub(r"\s+#.*", "", command) for command in found]


@pytest.mark.parametrize("arguments", typed("kvlab params"))
def test_the_checks_in_config_readme_work_as_typed(arguments, monkeypatch, line):
    monkeypatch.chdir(ROOT)
    code, out, err = line("params", *arguments.split())
    assert code == 0, err
    assert "models:" in out


@pytest.mark.parametrize("override", [word.strip().strip("'") for word in typed("dvc exp run -S")])
def test_the_overrides_in_config_readme_are_taken_by_dvc_and_by_kvlab(override, tmp_path, document):
    from dvc.utils.hydra import apply_overrides

    shutil.copy(ROOT / "params.yaml", tmp_path)
    apply_overrides(tmp_path / "params.yaml", [override])
    changed = read_yaml(tmp_path / "params.yaml")
    for params in by_model(changed).values():
        plan.check(params)
    assert changed != document


def test_the_examples_in_config_readme_are_valid(document):
    text = (ROOT / "config/README.md").read_text()
    (example,) = re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)
    changed = yaml.safe_load(example)
    changed["models"] = [document["models"][0] | {"slug": "mine"}]  # the example's is on the hub
    by_model(document | changed | {"codec": document["codec"] | changed["codec"]})
    assert changed.keys() <= document.keys()


def test_the_table_of_studies_in_config_readme_names_sections_that_exist(document):
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ", (ROOT / "config/README.md").read_text(), re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {"gap", "cells", "stats"} <= named <= document.keys()
