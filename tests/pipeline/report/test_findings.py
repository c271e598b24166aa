"""The report over made-up metrics: what it prints, what it withholds, and what it refuses."""

from __future__ import annotations

import ast
import copy
import re
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest

from kvlab.core.errors import Fault, NonFinite
from kvlab.core.params import Params
from kvlab.output import format as fmt
from kvlab.stats import kl_scale
from kvlab_pipeline.rendering import templates
from kvlab_pipeline.report import claims, contexts, figures, findings, front
from kvlab_pipeline.studies.ladder import chapter as ladder
from pipeline.report.example_metrics import build, verdict
from pipeline.report.reading import estimates_in, tables_of
from pipeline.report.shipped import shipped
from refusals import refused

ROOT = Path(__file__).parents[3]
# A digit inside a name (float32, md.j2) is part of the name; everything else that begins with one is a numeral.
NUMERAL = re.compile(r"(?<![A-Za-z_\d.])\d[\d.]*(?:e-?\d+)?")
PART = re.compile(r"(?<![A-Za-z_\d.])[-+]?\d+(?:\.\d+)?(?:e-?\d+)?")


def some_params(seed: int = 0) -> Params:
    changes = {
        name: round((0.3 + seed) / number / 37, 5)
        for number, name in enumerate(("accept_ppl", "accept_top1", "marginal_ppl", "marginal_top1"), start=1)
    }
    return shipped({"verdict": changes})


def render(folder: Path, metrics: dict, judged: dict | None = None, seed: int = 0) -> str:
    out = folder / "FINDINGS.md"
    findings.write(some_params(seed), metrics, judged or verdict(metrics, seed), out)
    return out.read_text()


# ---------------------------------------------------------------------------------- no typed numerals


TEMPLATES = [path for folder in templates.TEMPLATES for path in sorted(folder.glob("*.md.j2"))]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_no_numeral_is_typed_into_a_template(path):
    prose = re.sub(r"{{.*?}}|{#.*?#}", "", path.read_text(), flags=re.S)
    prose = prose.replace(".md.j2", "")
    assert not NUMERAL.findall(prose)


WORDED = [
    ROOT / "src/kvlab_pipeline" / f"{name}.py"
    for name in (
        *(f"report/{name}" for name in ("findings", "front", "contexts", "claims", "comparison", "readme", "models")),
        *("report/certified", "rendering/parts"),
    )
]
WORDED += sorted(ROOT.glob("src/kvlab_pipeline/studies/*/chapter.py"))


@pytest.mark.parametrize("path", WORDED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_no_numeral_is_typed_into_the_code_s_words(path):
    tree = ast.parse(path.read_text())
    typed = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    documented = {ast.get_docstring(n, clean=False) for n in ast.walk(tree) if hasattr(n, "body") and docstring(n)}
    assert not [text for text in typed if text not in documented and NUMERAL.search(text)]


def docstring(node) -> str | None:
    kinds = (ast.Module, ast.FunctionDef, ast.ClassDef)
    return ast.get_docstring(node, clean=False) if isinstance(node, kinds) else None


def uncounted(text: str) -> str:
    """Without the table that counts sentences, as the metrics of every seed make equally many, and definitions."""
    kept = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(COUNTED))
    for defined in DEFINED:
        kept = kept.replace(defined, "")
    return kept


COUNTED = tuple(f"| {study} |" for study in contexts.questions().values())
# The scale of a KL, the power at which numbers of windows are told, and the lengths at which bits of whole caches are.
DEFINED = (
    kl_scale.legend(),
    *(step.like for step in kl_scale.STEPS),
    fmt.POST_HOC,
    *(f" at {ladder.length(tokens)}" for tokens in ladder.TOLD),
)


@pytest.mark.full
@pytest.mark.parametrize("engines", [("hf", "vllm"), ("hf",)])
def test_no_numeral_survives_other_metrics(tmp_path, engines):
    """Render many made-up results in which every number differs: no numeral may be in all of them."""
    seen = []
    for seed in range(24):
        metrics = build(seed, engines, unresolved=("protocol",) if seed % 2 else ())
        seen.append(set(NUMERAL.findall(uncounted(render(tmp_path, metrics, seed=seed)))))
    assert min(map(len, seen)) > 100
    assert set.intersection(*seen) == set()


@pytest.mark.full
def test_the_search_for_survivors_finds_a_typed_numeral(tmp_path, monkeypatch):
    (tmp_path / "limits.md.j2").write_text("It costs 27.5 points.\n")
    monkeypatch.setattr(templates, "TEMPLATES", (tmp_path, *templates.TEMPLATES))
    seen = [set(NUMERAL.findall(uncounted(render(tmp_path, build(seed), seed=seed)))) for seed in range(24)]
    assert set.intersection(*seen) == {"27.5"}


# ------------------------------------------------------------------------------------ decomposition


@pytest.mark.parametrize("seed", range(5))
def test_printed_shares_add_up_to_the_printed_gap(tmp_path, seed):
    for table in tables_of(render(tmp_path, build(seed), seed=seed)):
        if table[0][0] != "factor":
            continue
        *parts, total = [PART.findall(row[1])[0] for row in table[2:]]
        decimals = {len(number.partition(".")[2]) for number in (*parts, total)}
        assert len(decimals) == 1
        slack = (len(parts) + 1) / 2 * 10.0 ** -decimals.pop()
        assert abs(sum(map(float, parts)) - float(total)) <= slack * 1.0001


def test_shares_that_do_not_add_up_are_refused(tmp_path):
    metrics = build()
    metrics["gap"]["measures"]["kl"]["parts"][0]["share"]["value"] *= 1.001
    with refused(Fault, "fault.shares"):
        render(tmp_path, metrics)
    assert not list(tmp_path.iterdir())


def test_not_resolved_is_said_exactly_where_an_interval_contains_zero(tmp_path):
    text = render(tmp_path, build(unresolved=("protocol",)))
    found = set()
    for table in tables_of(text):
        if table[0][-1] != "reading" or table[0][0] not in ("factor", "factors"):
            continue
        for row in table[2:]:
            low, high = (float(x) for x in re.search(r"\[(.*?), (.*?)\]", row[1]).groups())
            assert (low <= 0 <= high) == ("not resolved" in row[-1]), row
            found.add("not resolved" in row[-1])
    assert found == {True, False}


def test_windows_needed_grow_with_the_square_of_the_interval():
    wide = {"value": 1.0, "low": -1.0, "high": 3.0, "n_windows": 32}
    even = 32 * 2**2 + 1
    assert fmt.windows_for_sign(wide) == pytest.approx(even * 2.0425, abs=2)  # for a power of 80 %, at 95 %
    assert fmt.windows_for_sign(wide | {"value": 0.0}) is None


def test_a_gap_that_is_not_told_from_zero_is_not_divided_by(tmp_path):
    metrics = build()
    for measure in (*metrics["gap"]["measures"].values(), *metrics["factors"]["measures"].values()):
        for part in measure["parts"]:
            part["share"] |= {"value": 0.0, "low": -1e-5, "high": 1e-5}
        measure["gap"] |= {"value": 0.0, "low": -1e-5, "high": 1e-5}
        measure["high"] = copy.deepcopy(measure["low"])
    text = render(tmp_path, metrics)
    shares = [table for table in tables_of(text) if table[0][0] == "factor"]
    assert shares and all(row[2] in (fmt.DASH, "all") for table in shares for row in table[2:])
    assert "no effect" in text
    assert "nan" not in text and "inf" not in re.sub("in_forward|inf[eo]", "", text)


# ------------------------------------------------------------------------ withheld and absent parts


def test_nothing_that_compares_engines_is_printed_when_they_disagree(tmp_path):
    metrics = build()
    metrics["agreement"] |= {"state": "differ"}
    metrics["agreement_why"] = ["the identity cells differ"]
    text = render(tmp_path, metrics, verdict(metrics, allowed=False))
    assert text.count("the identity cells differ") >= 4
    hidden = [metrics["gap"], metrics["agreement"], metrics["sigma_drift"]]
    hidden += [row for row in metrics["baseline"] if row["engine"] == "vllm"]
    for given in estimates_in(hidden):
        assert fmt.estimate(given) not in text
        assert fmt.estimate(given, 100, 1) not in text
    assert "gap_shapley" not in text
    assert pl.read_csv(tmp_path / "figures/gap_shapley.csv").to_dicts() == [{"not_drawn": findings.WITHHELD}]
    assert pl.read_csv(tmp_path / "figures/baseline.csv")["engine"].unique().to_list() == ["hf"]
    assert "may not be quoted" in text


def test_the_gate_alone_can_withhold(tmp_path):
    metrics = build()
    text = render(tmp_path, metrics, verdict(metrics, allowed=False))
    assert "**Withheld.** What separates the two settings" in text.split("## What the gap decomposes into")[0]
    assert "fp32 agreement: checked" in text


def test_a_withheld_figure_of_an_earlier_run_is_overwritten(tmp_path):
    metrics = build()
    render(tmp_path, metrics)
    drawn = {path: path.read_bytes() for path in (tmp_path / "figures").glob("gap_shapley.*")}
    render(tmp_path, metrics, verdict(metrics, allowed=False))
    assert len(drawn) == 2 and all(path.read_bytes() != content for path, content in drawn.items())


def test_one_engine_still_gets_a_report(tmp_path):
    text = render(tmp_path, build(engines=("hf",)))
    assert "Withheld" not in text and "withheld" not in text
    assert text.split("\n\n")[1].startswith("## What to use") and "\n- Going from low to high between " in text
    assert "vllm" not in text
    assert (tmp_path / "figures/gap_shapley.svg").exists()


PARTS = (
    *("floor", "baseline", "baseline_peers", "agreement", "gap", "factors", "cells", "layers", "additivity"),
    *("noise", "noise_slope", "closure", "structure", "residual", "mitigations", "sigma"),
    *("ladder", "ladder_answers", "ladder_ablation", "ladder_state", "ladder_gain", "ladder_further"),
)


@pytest.mark.parametrize("absent", [None, [], "left out"])
@pytest.mark.parametrize("engines", [("hf", "vllm"), ("hf",)])
def test_every_part_may_be_absent(tmp_path, absent, engines):
    metrics = build(engines=engines)
    judged = verdict(metrics)
    for name in (*PARTS, "codebooks"):
        if absent == "left out":
            del metrics[name]
        else:
            metrics[name] = absent
    text = render(tmp_path, metrics, judged)
    assert text.count("did not measure") >= 4
    assert "![" not in text
    for name in figures.FIGURES:  # a rule that declares them finds all of them
        assert (tmp_path / f"figures/{name}.svg").is_file()
        assert pl.read_csv(tmp_path / f"figures/{name}.csv").columns == ["not_drawn"]


@pytest.mark.parametrize("name", PARTS)
def test_any_single_part_may_be_absent(tmp_path, name):
    metrics = build(engines=("hf",))
    metrics[name] = None
    assert render(tmp_path, metrics).startswith("# ")


def test_null_numbers_are_dashes(tmp_path):
    metrics = build()
    metrics["cells"][2]["kl_net"] = None
    metrics["layers"][0]["q_value"] = None
    metrics["additivity"][0]["ratio"] = None
    metrics["noise_slope"][0] |= {"slope": None, "range": None}
    assert "None" not in render(tmp_path, metrics)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_by_its_place(tmp_path, bad):
    metrics = build()
    metrics["cells"][3]["kl"]["low"] = bad
    with refused(NonFinite, None, "metrics.cells[3].kl.low"):
        render(tmp_path, metrics)
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------- form of the report


@pytest.mark.parametrize("engines", [("hf", "vllm"), ("hf",)])
def test_tables_are_well_formed(tmp_path, engines):
    text = render(tmp_path, build(engines=engines))
    found = tables_of(text)
    assert len(found) > 15
    for table in found:
        assert all(len(row) == len(table[0]) for row in table)
        assert all(re.fullmatch("-{3}:?", mark) for mark in table[1]) and len(table) > 2
    for before, line in pairwise(["", *text.splitlines()]):
        # a table, a heading or a picture must not run into the paragraph above it
        assert not line.startswith(("#", "![")) or before == ""
        assert not (line.startswith("|") and before and not before.startswith("|"))


def test_figures_are_linked_and_there(tmp_path):
    text = render(tmp_path, build())
    links = re.findall(r"!\[.+?\]\((.+?)\)", text)
    assert sorted(links) == sorted(f"figures/{name}.svg" for name in figures.FIGURES)
    assert all((tmp_path / link).is_file() for link in links)


def test_a_rerun_is_byte_for_byte_the_same(tmp_path):
    for folder in (tmp_path / "a", tmp_path / "b"):
        metrics = build()
        findings.write(some_params(), metrics, verdict(metrics), folder / "FINDINGS.md", folder / "report.html")
    names = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert len(names) == 2 + 2 * len(figures.FIGURES)
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)


def opening(text: str) -> str:
    """What is in sight before the first section."""
    return text.split("\n## Which codec at how many bits\n")[0]


def test_a_page_opens_with_one_page_and_folds_the_rest(tmp_path):
    text = render(tmp_path, build())
    titles = re.findall(r"^## (.+)$", opening(text), re.M)
    assert titles == [
        "What to use",
        "Which to use at up to so many bits, over a finished cache",
        "Is that much?",
        "What separates the published study's two settings here",
        "What is open",
    ]
    assert len(opening(text).splitlines()) < 70
    assert not re.search(r"`[0-9a-f]{12}`|\(`", opening(text))  # no hash and no tuple
    inside, outside, depth = [], [], 0
    for line in text.splitlines():
        depth += line.startswith("<details>") - (line == "</details>")
        (inside if depth or line == "</details>" else outside).append(line)
    assert depth == 0 and len(outside) < 150 < len(inside)
    assert not any(line.startswith("## ") for line in inside)  # a heading stays in sight, and links to it work


def test_what_is_open_is_counted(tmp_path):
    metrics = build(unresolved=("protocol",))
    (counted,) = [table for table in tables_of(opening(render(tmp_path, metrics))) if table[0][-2:-1] == ["open"]]
    told = claims.derived(metrics)
    assert sum(int(row[1]) for row in counted[2:]) == len(told)
    assert sum(int(row[2]) for row in counted[2:]) == sum(map(claims.resolved, told))
    assert all(
        int(row[1]) == int(row[2]) + int(row[3]) and (row[3] != "0" or row[4] == fmt.DASH) for row in counted[2:]
    )


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (1e-4, 9e-4, kl_scale.ROUNDING),
        (1.1e-3, 1.2e-3, "tiny"),
        (9e-4, 1.2e-3, f"{kl_scale.ROUNDING} to tiny"),
        (0.006, 0.02, "small to moderate"),
        (2.0, 3.0, "extreme"),
    ],
)
def test_a_kl_is_read_against_the_floor_and_then_on_the_one_scale(low, high, word):
    floor = {"what": "floor", "kl": {"value": 1e-3, "low": 1e-3, "high": 1e-3}, "top": None}
    row = {"what": "codec", "kl": {"value": (low + high) / 2, "low": low, "high": high}, "top": None}
    assert front.level(row, floor).partition(":")[0] == word and front.level(floor, floor) == "the floor"
    assert front.level(row, floor) == kl_scale.span_in_words(low, high, 1e-3)  # as `kvlab measure` says it
    assert kl_scale.ROUNDING not in front.level(row, None)


def test_the_floor_is_the_engine_in_bfloat16_or_else_the_rounding_of_k_and_v():
    metrics = build()
    assert front.rounding_floor(metrics)["kl"] == next(r for r in metrics["baseline"] if r["dtype"] == "bfloat16")["kl"]
    metrics["baseline"] = [row for row in metrics["baseline"] if row["dtype"] == "float32"]
    casts = [row for row in metrics["closure"] if (row["engine"], row["stream"]) == ("hf", "kv")]
    assert front.rounding_floor(metrics)["kl"] == casts[0]["measured"] and casts[0]["against"] == "cast"
    assert front.rounding_floor({}) is None


def test_every_study_states_its_basis(tmp_path):
    metrics = build()
    text = render(tmp_path, metrics)
    n = metrics["sizes"]["windows"]
    level = fmt.percent(metrics["sizes"]["confidence"])
    sections = text.split("\n## ")
    for name in ("What the gap", "The engines without", "Do the engines", "What the codec", "One layer", "Plain noise"):
        (section,) = [section for section in sections if section.startswith(name)]
        assert f"{n} windows" in section and f"{level} intervals" in section
        assert "scored tokens" in section and "smallest effect told from zero" in section


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (0.123456, 0.112, 0.135, "0.123 [0.112, 0.135]"),
        (12.3456, 8.0, 17.0, "12.3 [8.0, 17.0]"),
        (1234.5, 1000, 1500, "1234 [1000, 1500]"),
        (-0.0004, -0.04, 0.04, "0.000 [-0.040, 0.040]"),
        (3.21e-7, 2.9e-7, 3.52e-7, "3.21e-7 [2.90e-7, 3.52e-7]"),
        (0.0, 0.0, 0.0, "0"),
        (2.5e7, 2.4e7, 2.6e7, "2.50e7 [2.40e7, 2.60e7]"),
    ],
)
def test_digits_follow_the_interval(value, low, high, text):
    assert fmt.estimate({"value": value, "low": low, "high": high}) == text


def test_a_cell_cannot_break_its_table():
    table = fmt.table(["a", "b"], [["x | y\nz", "1"]])
    assert len(tables_of(table)[0][2]) == 2
