"""The whole way: a folder in, a report and tables out."""

import json
import os
import re
import shutil
from pathlib import Path

import polars as pl
import pytest

from kvlab.cli.main import main
from kvlab.core.errors import MissingResult, StorageError, UserError
from kvlab_pipeline.report.schema import VERSION
from pipeline.report.example_metrics import build
from refusals import refused
from tests.validation.published import making
from validation.published import main as main_module
from validation.published.main import published
from validation.published.rows import WINDOWS

pytestmark = pytest.mark.full

FILES = ["REPORT.md", "cells.csv", "checks.csv", "differences.csv", "rows.parquet"]


def report(folder: Path, out: Path, **more) -> str:
    published(folder, out, **more)
    return (out / "REPORT.md").read_text()


def tables(text: str) -> list[list[str]]:
    """Lines of every Markdown table."""
    return [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", text + "\n", flags=re.MULTILINE)]


def columns(line: str) -> int:
    return len(re.findall(r"(?<!\\)\|", line))


def test_every_family_reaches_the_report(every, tmp_path):
    found = published(every, tmp_path)
    text = (tmp_path / "REPORT.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert found["checked"] == found["agree"] > 300
    for heading in ("Engines without a codec", "Noise", "Single layers", "Codec error", "Grid", "Sigma_q", "Channels"):
        assert f"### {heading}" in text
    assert "`other.json`" in text and "notes.txt" in text
    assert "**Mismatch:** `variance_ratio`" in text


def test_tables_are_whole(every, tmp_path):
    found = tables(report(every, tmp_path))
    assert len(found) > 12
    assert all(len({columns(line) for line in lines}) == 1 for lines in found)


def test_rows_are_in_the_schema_one_window_each(every, tmp_path):
    published(every, tmp_path)
    rows = pl.read_parquet(tmp_path / "rows.parquet")
    assert rows.schema == WINDOWS and not rows.is_duplicated().any()
    assert rows.select("file", "cell", "window").is_unique().all()
    assert ((rows["nll_alt"] - rows["nll_ref"] - rows["delta_nll"]).abs() < 1e-12).all()
    cells = pl.read_csv(tmp_path / "cells.csv")
    assert cells.height == rows.select("file", "cell").unique().height


def test_the_same_folder_gives_the_same_bytes(every, tmp_path):
    moved = tmp_path / "elsewhere" / "copy"
    shutil.copytree(every, moved)
    for folder, out in ((every, tmp_path / "a"), (moved, tmp_path / "b")):
        published(folder, out)
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in FILES)
    assert str(tmp_path) not in (tmp_path / "b" / "REPORT.md").read_text()


def test_a_report_written_into_the_folder_does_not_read_itself(tmp_path):
    making.write(tmp_path, "a.json", making.vllm())
    first, second = (report(tmp_path, tmp_path / "out") for _ in range(2))
    assert first == second


def test_a_wrong_mean_is_listed_with_both_numbers(tmp_path):
    data = making.vllm()
    planted = data["mean_ppl_delta_rel"] = data["mean_ppl_delta_rel"] + 0.01
    making.write(tmp_path, "a.json", data)
    text = report(tmp_path, tmp_path / "out")
    line = next(line for line in text.splitlines() if repr(planted) in line)
    assert "`mean_ppl_delta_rel`" in line and line.endswith("| no |")
    assert "the others are listed below" in text


def test_equal_recipes_are_not_called_a_mismatch(tmp_path):
    making.write(tmp_path, "a.json", making.vllm())
    making.write(tmp_path, "b.json", making.hf(variance_ratio=0.95))
    text = report(tmp_path, tmp_path / "out")
    assert "Mismatch" not in text and "not made with the same recipe" not in text


def test_published_means_are_printed_to_their_digits(tmp_path):
    data = making.vllm()
    making.write(tmp_path, "a.json", data)
    assert f"| {100 * data['mean_ppl_delta_rel']:+.2f} |" in report(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["a|b", "x | y\n| z", "<script>", "[click](http://x)", "`tick`", "**bold**", "\x1b[31m"]
)
def test_names_cannot_break_out_of_a_table(tmp_path, name):
    making.write(tmp_path, "a.json", making.vllm(model_name=name, q_calib=f"{name}.safetensors", pca_method=name))
    making.write(tmp_path, "b.json", making.hf(pca_method=f"{name}2"))
    text = report(tmp_path, tmp_path / "out")
    assert all(len({columns(line) for line in lines}) == 1 for lines in tables(text))
    assert not {"<script>", "](http", "\x1b"} & {part for part in ("<script>", "](http", "\x1b") if part in text}


def test_a_file_name_cannot_break_out_either(tmp_path):
    making.write(tmp_path, "we`ird|name.json", making.vllm())
    assert all(len({columns(line) for line in lines}) == 1 for lines in tables(report(tmp_path, tmp_path / "out")))


@pytest.mark.parametrize("make", [making.grid, making.sigma, making.single_layers, making.codec_error, making.hf])
def test_a_folder_with_a_single_file_works(tmp_path, make):
    making.write(tmp_path, "a.json", make())
    assert "## What cannot be concluded" in report(tmp_path, tmp_path / "out")


def test_a_folder_without_a_file_of_the_study_is_refused_in_one_line(tmp_path, capsys):
    making.write(tmp_path / "in", "a.json", {"x": 1})
    with pytest.raises(SystemExit) as stop:
        main(["published", str(tmp_path / "in"), "--out", str(tmp_path / "out")])
    said = capsys.readouterr()
    assert (stop.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "no result file of the published study" in said.err and "a.json" in said.err
    assert not (tmp_path / "out").exists()


def test_what_was_read_is_said_in_one_line(tmp_path, capsys):
    making.write(tmp_path / "in", "a.json", making.vllm())
    main(["published", str(tmp_path / "in"), "--out", str(tmp_path / "out")])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{tmp_path / 'out' / 'REPORT.md'}: 1 file of the study read")


def test_a_file_of_no_family_is_listed_beside_the_others(tmp_path):
    making.write(tmp_path, "a.json", {"x": 1})
    making.write(tmp_path, "b.json", making.single_layers())
    text = report(tmp_path, tmp_path / "out")
    assert "`a.json`" in text and "No codec cell was read" in text


def test_few_windows_are_called_few(tmp_path):
    making.write(tmp_path, "a.json", making.vllm(n=4))
    assert "does not cover what it says" in report(tmp_path, tmp_path / "out")
    making.write(tmp_path, "a.json", making.vllm(n=8))
    assert "does not cover what it says" not in report(tmp_path, tmp_path / "out")


def test_nothing_is_written_when_a_file_is_broken(tmp_path):
    making.write(tmp_path, "a.json", making.vllm())
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(StorageError):
        published(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_empty_folder_is_named(tmp_path):
    with refused(UserError, "user.no-published-files", tmp_path):
        published(tmp_path, tmp_path / "out")


# ------------------------------------------------------------------------------ this project's answer


def agreeing() -> dict:
    metrics = build(3)
    metrics["agreement"]["state"] = "equivalent"
    return metrics


def test_without_metrics_it_says_so(tmp_path):
    making.write(tmp_path, "a.json", making.vllm())
    assert "Not given." in report(tmp_path, tmp_path / "out")


@pytest.fixture
def own(every, tmp_path, monkeypatch):
    """The section of a report that this project's metrics were given to."""

    def told(metrics: dict) -> str:
        monkeypatch.setattr(main_module, "load", lambda path: metrics)
        text = report(every, tmp_path / "out", metrics=tmp_path / "metrics.json")
        return text.partition("## This project's own answer")[2]

    return told


def test_own_shares_stand_beside_the_published_numbers(own):
    metrics = agreeing()
    text = own(metrics)
    for part in metrics["gap"]["measures"]["kl"]["parts"]:
        assert f"`{part['factor']}`" in text
    assert "sum = gap" in text and "this project" in text


def test_own_answer_is_withheld_when_the_engines_disagree(own):
    metrics = agreeing() | {"agreement_why": ["they drift"]}
    metrics["agreement"]["state"] = "differ"
    text = own(metrics)
    assert "Withheld: they drift." in text and "sum = gap" not in text


def test_metrics_without_a_gap_are_no_error(own):
    assert "hold no decomposition" in own({"gap": None, "agreement": None})


@pytest.mark.parametrize("metrics", [[], {}, {"schema_version": VERSION}, {"schema_version": VERSION - 1}])
def test_metrics_of_another_shape_are_one_line(tmp_path, metrics):
    making.write(tmp_path, "a.json", making.vllm())
    path = tmp_path / "metrics.txt"
    path.write_text(json.dumps(metrics))
    with pytest.raises(MissingResult) as caught:
        published(tmp_path, tmp_path / "out", path)
    assert "metrics" in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------ the real files, if at hand

REAL = os.environ.get("KVLAB_PUBLISHED")  # a folder of the study's own files


@pytest.mark.skipif(not REAL, reason="KVLAB_PUBLISHED names no folder of published files")
def test_the_studys_own_files_give_their_headlines(tmp_path):
    found = published(Path(REAL), tmp_path)
    text = (tmp_path / "REPORT.md").read_text()
    assert found["checked"] == found["agree"] > 1000
    for headline in ("+7.82", "+35.33", "+22.55", "+11.10", "-11.44", "+152.78", "+54.28", "+68.97", "-3.93", "+33.50"):
        assert f"| {headline} |" in text
    assert "4.9 [3.5, 6.2]" in text  # v14_Q10_K
    assert "**Mismatch:** `variance_ratio` (1 against 0.95" in text
    assert "+28 [-9, +64]" in text and "about 15 to 16 of 128" in text
