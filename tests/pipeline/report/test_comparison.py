"""Several models beside one another, on planted metrics."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import polars as pl
import pytest

from kvlab.cli.main import main
from kvlab.core.errors import MixedIdentity
from kvlab.core.records import read_json, write_json
from kvlab.output import format as fmt
from kvlab_pipeline.report import comparison, findings
from kvlab_pipeline.report.across import families, verdict
from kvlab_pipeline.report.claims import resolved
from kvlab_pipeline.report.digest import with_digest
from kvlab_pipeline.report.metrics import build as build_metrics
from kvlab_pipeline.report.schema import VERSION, filed
from kvlab_pipeline.report.summary import summary
from kvlab_pipeline.report.verdict import judge
from kvlab_pipeline.studies.factors.numbers import from_windows
from pipeline.report.synthetic import Effects, small_params, write_results
from refusals import refused, refused_line

pytestmark = pytest.mark.full

MORE = 0.02  # KL that the further model's `variance_ratio` costs beyond the first model's


@pytest.fixture(scope="module")
def params():
    return small_params(studies=["cells"], stats={"resamples": 400})


@pytest.fixture(scope="module")
def small(params, tmp_path_factory):
    return measured(params, Effects(), tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def large(params, tmp_path_factory):
    effects = Effects(variance_ratio=Effects.variance_ratio + MORE)
    return named(measured(params, effects, tmp_path_factory.mktemp("large")), "large")


def measured(params, effects, folder) -> dict:
    """What `kvlab step metrics` would have written."""
    return build_metrics(params, write_results(folder, params, effects).sources)


def named(metrics: dict, slug: str, **identity) -> dict:
    """The same metrics as of another model."""
    return metrics | {"identity": metrics["identity"] | {"slug": slug} | identity}


def retokenized(metrics: dict, slug: str = "large") -> dict:
    """The same metrics as of a model with another tokenizer."""
    return named(metrics, slug, corpus_hash="d" * 16)


def differences(compared: dict) -> dict[str, dict]:
    return {row["quantity"]: row["difference"] for row in compared["rows"] if row["difference"]}


def covers(given: dict, truth: float) -> bool:
    return given["low"] <= truth <= given["high"]


# ------------------------------------------------------------------------------------- what comes out


def test_metrics_name_their_model_and_its_windows(small, params):
    assert (small["identity"]["slug"], small["identity"]["model"]) == ("reference", "models/reference")
    columns = from_windows(small["gap"]["windows"])
    assert len(columns) == 8 and {len(one.windows) for one in columns} == {params.windows.test}
    means = [one.sums.sum() / one.counts.sum() for one in columns]
    kl = small["gap"]["measures"]["kl"]
    assert means == pytest.approx([corner["value"]["value"] for corner in kl["corners"]])
    assert means[0] == pytest.approx(kl["low"]["value"]) and means[-1] == pytest.approx(kl["high"]["value"])


@pytest.mark.parametrize("other", [named, retokenized], ids=["same tokens", "other tokens"])
def test_equal_models_differ_in_nothing(small, other):
    compared = comparison.build([small, other(small, "again")])
    assert len(compared["claims"]) == 6
    assert not any(map(resolved, compared["claims"]))
    assert all(given["value"] == pytest.approx(0, abs=1e-15) for given in differences(compared).values())


@pytest.mark.parametrize("other", [named, retokenized], ids=["same tokens", "other tokens"])
def test_a_planted_difference_is_found(small, large, other):
    found = differences(comparison.build([small, other(large, "large")]))
    for name in ("kl.gap", "kl.high", "kl.share.variance_ratio"):
        assert covers(found[name], MORE) and found[name]["low"] > 0, name
    for name in ("kl.low", "kl.share.engine", "kl.share.protocol"):
        assert covers(found[name], 0), name


def test_models_on_the_same_tokens_are_paired(small, large):
    paired, apart = (differences(comparison.build([small, one])) for one in (large, retokenized(large)))
    assert {given["method"] for name, given in apart.items() if name.startswith("kl")} == {"mover"}
    assert "mover" not in {given.get("method") for given in paired.values()}
    for name in ("kl.gap", "kl.high", "kl.share.variance_ratio"):
        assert paired[name]["value"] == pytest.approx(apart[name]["value"])
        assert fmt.half_width(paired[name]) < 0.5 * fmt.half_width(apart[name])


def test_windows_of_another_grid_are_not_paired(small, large):
    other = copy.deepcopy(large)
    for row in other["gap"]["windows"]:
        row["key"] = "0" * 64
    assert differences(comparison.build([small, other]))["kl.gap"]["method"] == "mover"


def test_the_csv_holds_the_metrics_own_numbers(small, large, tmp_path):
    comparison.write_table(tmp_path / "comparison.csv", comparison.build([small, large]))
    table = pl.read_csv(tmp_path / "comparison.csv")
    assert len(table) == 2 * 8 and table["model"].unique(maintain_order=True).to_list() == ["reference", "large"]
    found = {(row["model"], row["quantity"]): row for row in table.iter_rows(named=True)}
    for slug, metrics in (("reference", small), ("large", large)):
        kl = metrics["gap"]["measures"]["kl"]
        wanted = {f"kl.{name}": kl[name] for name in ("low", "high", "gap")}
        wanted |= {f"kl.share.{part['factor']}": part["share"] for part in kl["parts"]}
        for name, estimate in wanted.items():
            row = found[slug, name]
            assert {key: row[key] for key in ("value", "low", "high", "n_windows", "n_tokens")} == {
                key: estimate[key] for key in ("value", "low", "high", "n_windows", "n_tokens")
            }
            assert row["clear_of_zero"] is (not covers(estimate, 0))
        for end in ("low", "high"):
            assert found[slug, f"bits_per_value.{end}"]["value"] == corner_bits(metrics, end)
            assert found[slug, f"bits_per_value.{end}"]["low"] is None
    assert all(row["difference"] is None for (slug, _), row in found.items() if slug == "reference")
    assert found["large", "kl.gap"]["against"] == "reference"
    assert found["large", "kl.gap"]["difference_clear_of_zero"] is True


def corner_bits(metrics: dict, end: str) -> float:
    corner = metrics["gap"][end]
    keys = ("engine", "protocol", "variance_ratio", "dtype", "origin")
    cells = [cell for cell in metrics["cells"] if cell["study"] == "factors" and cell["role"] == "codec"]
    (found,) = [cell for cell in cells if all(cell[key] == corner[key] for key in keys)]
    return found["bits_per_value"]


def test_bits_that_differ_are_counted_and_told(small, large):
    other = copy.deepcopy(large)
    for cell in other["cells"]:
        cell["bits_per_value"] *= 1.5
    compared = comparison.build([small, other])
    bits = corner_bits(small, "low")
    assert differences(compared)["bits_per_value.low"] == {"value": pytest.approx(bits / 2), "low": None, "high": None}
    told = [claim["subject"] for claim in compared["claims"] if claim["compared"][0][0]["bits_per_value"] > bits]
    assert len(told) == 6


# --------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("place", "value", "named_field"),
    [
        (("settings", "bits"), 4, "bits"),
        (("settings", "corpus", "source"), "other.txt", "corpus.source"),
        (("settings", "windows", "context"), 65, "windows.context"),
        (("settings", "gap", "dtype"), "float32", "gap.dtype"),
        (("settings", "calibration", "ridge"), 0.5, "calibration.ridge"),
        (("settings", "stats", "seed"), 9, "stats.seed"),
        (("identity", "versions", "kvlab"), "0.0.1", "versions.kvlab"),
        (("identity", "device"), "cuda", "device"),
    ],
)
def test_models_under_other_conditions_are_not_compared(small, large, place, value, named_field):
    other = copy.deepcopy(large)
    *path, leaf = place
    holder = other
    for key in path:
        holder = holder[key]
    holder[leaf] = value
    with pytest.raises(MixedIdentity) as caught:
        comparison.build([small, other])
    assert list(caught.value.fields) == [named_field]
    assert any(f"{value} (large)" == shown for shown in caught.value.fields[named_field])


@pytest.mark.parametrize(
    ("boundary", "allowed"), [([0, 11], True), ([0, 5], True), ([0, 10], False), ([0], False), ([1, 11], False)]
)
def test_layers_may_be_counted_from_either_end(small, large, boundary, allowed):
    """The first model leaves layers 0 and 5 of 6 uncoded; the other has 12."""
    other = copy.deepcopy(large)
    other["settings"]["n_layers"] = 12
    other["settings"]["codec"]["boundary_layers"] = boundary
    if allowed:
        assert comparison.build([small, other])["claims"]
    else:
        with refused(MixedIdentity, None, "boundary_layers"):
            comparison.build([small, other])


def test_which_studies_a_model_brings_beside_the_gap_does_not_matter(small, large):
    other = copy.deepcopy(large)
    other["settings"]["studies"] = []
    assert comparison.build([small, other]) == comparison.build([small, large])


def test_layers_of_models_of_one_depth_are_equal_or_not(small, large):
    other = copy.deepcopy(large)
    other["settings"]["codec"]["boundary_layers"] = [0, 4]
    with refused(MixedIdentity, None, "boundary_layers"):
        comparison.build([small, other])


def test_a_model_whose_engines_disagree_is_withheld(small, large, params, tmp_path):
    other = copy.deepcopy(large)
    other["agreement"] |= {"state": "differ"}
    other["agreement_why"] = ["the identity cells differ"]
    compared = comparison.build([small, other])
    assert not compared["claims"]
    shown = [row for row in compared["rows"] if row["model"] == "large" and row["estimate"]]
    assert {row["quantity"] for row in shown} == {"bits_per_value.low", "bits_per_value.high"}
    text, html = render(params, small, compared, tmp_path)
    section = across(text)
    assert "**Withheld** for `large`: no number that compares engines is printed, because the identity" in section
    assert fmt.estimate(large["gap"]["measures"]["kl"]["gap"]) not in text
    assert "What each further model changes" not in html
    with_nothing = across(render(params, named(other, "large"), comparison.build([other, small]), tmp_path)[0])
    assert "**Withheld:**" in with_nothing and "|" not in with_nothing


# ------------------------------------------------------------------------------------------ the pages


def render(params, metrics: dict, compared: dict | None, folder: Path) -> tuple[str, str]:
    out, html = folder / "FINDINGS.md", folder / "report.html"
    findings.write(params, metrics, judge(params, metrics), out, html, compared)
    return out.read_text(), html.read_text()


def test_models_of_one_tokenizer_count_as_one_family():
    three = [{"identity": {"corpus_hash": one}} for one in "aab"]
    assert families(three) == 2
    assert verdict(["raises"] * 3, 2) == "holds on all 3: raises KL; 3 models of 2 families are too few to say more"
    assert verdict(["raises"] * 3, 3) == verdict(["raises"] * 3) == "holds on all 3: raises KL"
    assert verdict(["open"] * 2, 1).endswith("2 models of 1 family are too few to say more")


def across(text: str) -> str:
    return re.search(r"^## Across models\n(.*?)(?=^## )", text, re.S | re.M)[1]


@pytest.fixture(scope="module")
def compared(small, large):
    return comparison.build([small, large])


def test_one_model_has_the_page_it_had(small, params, tmp_path):
    alone = comparison.build([small])
    assert alone["claims"] == [] and {row["model"] for row in alone["rows"]} == {"reference"}
    plain = render(params, small, None, tmp_path / "without")
    assert render(params, small, alone, tmp_path / "with") == plain
    assert "Across models" not in plain[0] and plain[0].startswith(f"# {params.report.title}\n\n## What to use\n")
    assert "| slug | reference |" in plain[0]


def test_the_leading_page_sets_all_models_beside_one_another(small, large, compared, params, tmp_path):
    text, html = render(params, small, compared, tmp_path)
    assert text.startswith(f"# {params.report.title}: reference\n")
    section = across(text)
    for metrics in (small, large):
        kl = metrics["gap"]["measures"]["kl"]
        for given in (kl["low"], kl["high"], kl["gap"], *(part["share"] for part in kl["parts"])):
            assert fmt.estimate(given) in section and fmt.estimate(given) in html
    sentences = [line for line in section.splitlines() if line.startswith("- From `reference` to `large`")]
    assert len(sentences) == 6
    gap = next(line for line in sentences if "the gap between the published corners" in line)
    assert f"rises by {fmt.estimate(differences(compared)['kl.gap'])} nats per token (12 windows, 192 tokens;" in gap
    assert re.search(r"cells `\w+`, `\w+` of `large` together against cells `\w+`, `\w+` of `reference` together", gap)
    assert sum("not resolved" in line for line in sentences) == 3
    assert "paired window by window" in section and "**Units.**" not in section
    words = re.sub(r"<[^>]+>", "", html)
    assert all(re.sub(r"^- |`", "", line) in words for line in sentences)


def test_other_tokens_are_said_to_be_other_units(small, large, params, tmp_path):
    section = across(render(params, small, comparison.build([small, retokenized(large)]), tmp_path)[0])
    assert "**Units.** `large` cuts the text into other tokens than `reference`." in section
    assert "MOVER" in section and "paired window by window" not in section


def test_what_is_not_told_from_zero_says_so_in_the_table(small, large, params, tmp_path):
    unclear = copy.deepcopy(large)
    parts = unclear["gap"]["measures"]["kl"]["parts"]
    share = next(part["share"] for part in parts if part["factor"] == "engine")
    share["low"] = -share["value"]
    section = across(render(params, small, comparison.build([small, unclear]), tmp_path)[0])
    (line,) = [line for line in section.splitlines() if line.startswith("| share of `engine`")]
    first, other = line.split(" | ")[1:]
    assert "not resolved" in other and "not resolved" not in first and "% of the gap" in first


def test_pages_link_one_another(small, large, compared, params, tmp_path):
    folder = tmp_path / "models" / "large"
    text, html = render(params, small, compared, tmp_path)
    further, further_html = render(params, large, compared, folder)
    for source, here, name in ((text, tmp_path, "FINDINGS.md"), (further, folder, "FINDINGS.md")):
        links = re.findall(rf"\]\(([^)#]*{name})\)", source)
        assert links and all((here / link).is_file() for link in links)
    for source, here in ((html, tmp_path), (further_html, folder)):
        links = [link for link in re.findall(r'href="([^"#]+)"', source) if not link.startswith("data:")]
        assert links and all((here / link).is_file() and link.endswith("report.html") for link in links)
    assert "Across models" not in further and further.startswith(f"# {params.report.title}: large\n")


# -------------------------------------------------------------------------------------- the command line


def files(folder: Path, **metrics: dict) -> list[str]:
    for name, content in metrics.items():
        made = isinstance(content, dict) and "gap" in content  # metrics, as they would have been written
        write_json(folder / f"{name}.json", filed(content) if made else content)
    return [str(folder / f"{name}.json") for name in metrics]


def test_compare_writes_three_files_and_reads_no_parameters(small, large, compared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = files(tmp_path, a=small, b=large)
    main(["step", "compare", "--metrics", *given, "--out", "o/c.csv", "--json", "o/c.json", "--summary", "o/s.json"])
    assert read_json("o/c.json") == with_digest(json.loads(json.dumps(compared)))
    assert read_json("o/s.json") == {"reference": summary(small), "large": summary(large)}
    assert len(pl.read_csv("o/c.csv")) == 16


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda small, large: {"a": small, "b": small}, "'reference' twice"),
        (lambda small, large: {"a": small, "b": ["no metrics"]}, "b.json has no schema_version, this kvlab reads"),
        (
            lambda small, large: {"a": filed(small) | {"schema_version": 7}},
            "a.json is of schema_version 7, this kvlab reads",
        ),
        (
            lambda small, large: {"a": {k: v for k, v in filed(small).items() if k != "settings"}},
            f"a.json is no metrics of version {VERSION}: settings: Field required",
        ),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(small, large, tmp_path, line, spoil, words):
    given = files(tmp_path, **spoil(small, large))
    refused_line(line("step", "compare", "--metrics", *given, "--out", tmp_path / "o" / "c.csv"), words)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [({"no": "comparison"}, "is none; allowed"), (None, "this page is of model 'other', and the comparison of")],
)
def test_a_report_refuses_a_comparison_of_others(small, compared, params, tmp_path, line, given, words):
    spoilt = with_digest(given or compared)
    metrics, verdict, other = files(tmp_path, m=named(small, "other"), v=judge(params, small), c=spoilt)
    given = ("--metrics", metrics, "--verdict", verdict, "--comparison", other, "--out", tmp_path / "o" / "FINDINGS.md")
    refused_line(line("step", "report", "--params", params.model_dump_json(), *given), words)
    assert not (tmp_path / "o").exists()
