"""A params.yaml that means harm, or was mistyped: one line, exit code 2, at once; nothing is taken silently."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvlab.cli.main import main
from kvlab.core.errors import ParamsError
from kvlab.core.limits import MOST_DEPTH, MOST_ENTRIES, MOST_VALUES, shown, unfit
from kvlab.core.paramfile import assignment, overlay, read_yaml
from kvlab.core.strictyaml import MOST_BYTES, Unreadable, from_json, from_yaml, read_text
from kvlab_pipeline.studies.settings import by_model, read_params
from refusals import refused

MODELS = "models: [{path: models/reference}]\n"
EIGHT = ",".join(["*{0}"] * 8)
BOMB = "a: &a [x, y]\n" + "".join(
    f"{new}: &{new} [{EIGHT.format(old)}]\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)

REFUSED = {
    "an alias bomb": (BOMB, "line 3: *a stands for what is said elsewhere"),
    "a list in itself": ("codec: &a [*a]", "line 2: *a stands for"),
    "one alias": ("windows: {test: &n 8, other: *n}", "line 2: *n stands for what is said elsewhere"),
    "ten thousand bits": (
        f"ladder: {{bits: {list(range(10_000))}}}",
        "'ladder.bits' has 10000 entries; allowed: at most",
    ),
    "a hundred thousand": (f"ladder: {{bits: [{','.join(['2'] * 100_000)}]}}", f"more than {MOST_VALUES} values"),
    "as many cells": (f"cells: {{{', '.join(f'c{i}: {{}}' for i in range(3000))}}}", "'cells' has 3000 entries"),
    "infinity": ("calibration: {ridge: .inf}", "parameter 'calibration.ridge' is inf; allowed: a finite number"),
    "as a number": ("calibration: {ridge: 1e309}", "parameter 'calibration.ridge' is inf"),
    "in a list": ("noise: {sigmas: [0.1, -.inf]}", "parameter 'noise.sigmas.1' is -inf"),
    "no number": ("calibration: {ridge: .nan}", "parameter 'calibration.ridge' is nan"),
    "a key twice": ("bits: 3\nbits: 4", "line 3: key 'bits' is given twice"),
    "a key twice inside": ("windows:\n  test: 8\n  test: 9", "line 4: key 'test' is given twice"),
    "true bits": ("bits: true", "parameter 'bits' is true; allowed: a whole number"),
    "a false seed": ("windows: {seed: false}", "parameter 'windows.seed' is false; allowed: a whole number"),
    "true ridge": ("calibration: {ridge: true}", "parameter 'calibration.ridge' is true; allowed: a number"),
    "true in a list": ("ladder: {bits: [true, 4]}", "parameter 'ladder.bits.0' is true"),
    "true of a cell": ("cells: {mine: {bits: true}}", "parameter 'cells.mine.bits' is true"),
    "true of its codec": ("cells: {mine: {codec: {block_size: true}}}", "'cells.mine.codec.block_size' is true"),
    "true by another word": ("codec: {whiten: yes}", "'codec.whiten' is 'yes'; allowed: true or false"),
    "a number for true": ("codec: {whiten: 1}", "'codec.whiten' is 1; allowed: true or false"),
    "a number in quotes": ("bits: '3'", "'bits' is '3'; allowed: a whole number"),
    "a part of a window": ("windows: {test: 8.0}", "'windows.test' is 8.0; allowed: a whole number"),
    "a number for a text": ("report: {title: 3}", "'report.title' is 3; allowed: a text"),
    "a text for a list": ("engines: hf", "'engines' is 'hf'; allowed: a list"),
    "a list for a section": ("windows: [8]", "'windows' is [8]; allowed: a mapping"),
    "nothing for a number": ("windows: {test: }", "'windows.test' is null; allowed: a whole number"),
    "a date for a text": ("report: {title: 2024-01-01}", "'report.title' is 2024-01-01, a date; allowed:"),
    "15 or 17": ("windows: {seed: 017}", "line 2: 017 begins with 0; allowed:"),
    "half an hour": ("windows: {seed: 0:30}", "'windows.seed' is '0:30'; allowed: a whole number"),
    "a name of a cell": ("cells: {a b: {}}", "'cells.a b' is 'a b'; allowed: a text of pattern"),
    "an engine twice": ("engines: [hf, hf]", "parameter 'engines' names 'hf' twice; allowed: each once"),
    "bits twice": ("ladder: {bits: [2, 4, 2]}", "parameter 'ladder.bits' names 2 twice"),
    "pairs twice": ("mitigations: {uniform: [[4, 4], [4, 4]]}", "parameter 'mitigations.uniform' names [4, 4] twice"),
    "brackets": ("codec: " + "[" * 50_000, "line 2: deeper than 32 levels"),
    "braces": ("codec: " + "{a: " * 50_000, "line 2: deeper than 32 levels"),
    "a long text": (f"report: {{title: {'x' * 100_000}}}", "'report.title' is a text of 100000 characters"),
    "a large file": ("#" * MOST_BYTES, f"is too large; allowed: at most {MOST_BYTES} bytes"),
    "a large number": (f"windows: {{seed: {10**30}}}", "'windows.seed' is a number of 100 bits"),
    "a number without end": (f"windows: {{seed: 0x{'f' * 9000}}}", "'windows.seed' is a number of 36000 bits"),
    "digits without end": (f"windows: {{seed: {'9' * 9000}}}", "is not YAML: Exceeds the limit"),
    "a number for a name": ("1: 2", "has the key 1; allowed: a parameter's name"),
    "what was a truth for a name": ("on: 2", "unknown parameter 'on'; allowed: "),
    "a truth for a name": ("true: 2", "line 2: key True is no text"),
    "nothing for a name": ("null: 2", "line 2: key None is no text"),
    "a list for a name": ("[a]: 2", "line 2: a key is no text"),
    "a long name": ("k" * 900 + ": 2", "unknown parameter 'kkk"),
    "a set": ("engines: !!set {hf, vllm}", "line 2: 'tag:yaml.org,2002:set' is no kind of value here"),
    "a call": ("codec: !!python/object/apply:os.system [ls]", "is no kind of value here"),
    "a merge": ("codec: {<<: {whiten: true}}", "is no kind of value here"),
    "a brace in a text": ("corpus: {source: 'texts/{y}.txt'}", "corpus.source: 'texts/{y}.txt' holds '{'; allowed"),
    "one in the other": ("corpus: {other: 'a}'}", "corpus.other: 'a}' holds '}'; allowed: a path without braces"),
    "a line break": ('corpus: {source: "a\\nb"}', r"corpus.source: 'a\nb' holds '\n'"),
    "half a character": ('report: {title: "\\ud800"}', "'report.title' is '\\ud800', which no file in UTF-8 can hold"),
    "half a name": ('report: {"\\ud800": 1}', "'report' has the key '\\ud800'; allowed: a parameter's name"),
    "a NUL": ('corpus: {source: "a\\0b"}', r"corpus.source: 'a\x00b' holds '\x00'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_one_line_and_costs_no_second(case, root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(root)
    said, words = REFUSED[case]
    (tmp_path / "params.yaml").write_text(f"{MODELS}{said}\n")
    began = time.process_time()
    with pytest.raises(SystemExit) as left:
        main(["params", "--params", str(tmp_path / "params.yaml")])
    took, told = time.process_time() - began, capsys.readouterr()
    assert (left.value.code, told.err.count("\n"), told.out) == (2, 1, "")
    assert words in told.err and len(told.err) < 1000, told.err
    assert took < 20  # seconds of this process, whatever else runs: what expands itself would take hours


def test_several_mistakes_are_a_line_each(root, monkeypatch):
    monkeypatch.chdir(root)
    said = "bits: true\nwindows: {tset: 8, calib: '4'}\ncells: {mine: {bits: 9}, yours: {layers: [true]}}\nzzz: 1"
    with pytest.raises(ParamsError) as caught:
        by_model(from_yaml(MODELS + said, "it"))
    told = (
        "parameter 'bits' is true; allowed: a whole number",
        "parameter 'cells.mine.bits' is 9; allowed: less than or equal to 8",
        "parameter 'cells.yours.layers.0' is true; allowed: a whole number",
        "parameter 'windows.calib' is '4'; allowed: a whole number",
        "unknown parameter 'windows.tset'; did you mean 'windows.test'?",
        "unknown parameter 'zzz'; allowed: baseline, bits, ",
    )
    lines = sorted(caught.value.lines)
    assert [line[: len(words)] for line, words in zip(lines, told, strict=True)] == list(told)


@pytest.mark.parametrize("path", ["m/{y}", "a\nb", "a\0b"])
def test_a_model_lies_where_the_workflow_can_name_it(path):
    with refused(ParamsError, None, "models.0.path", repr(path), "a path without braces"):
        by_model({"models": [{"path": path, "slug": "x"}]})


def test_true_for_the_number_of_gpus():
    with refused(ParamsError, None, "'models.0.tensor_parallel' is true", "a whole number"):
        by_model({"models": [{"path": "models/reference", "tensor_parallel": True}]})


@pytest.mark.parametrize(
    ("path", "words"),
    [("x" * 4000, ("x" * 90, os.strerror(errno.ENAMETOOLONG))), ("no id/at all", ("hub id",)), ("a--b/c", ("hub id",))],
)
def test_a_path_that_no_system_knows(path, words):
    with refused(ParamsError, None, *words):
        by_model({"models": [{"path": path, "slug": "x", "revision": "main"}]})


def test_what_snakemake_has_read_is_held_to_the_same(root, monkeypatch):
    """It reads params.yaml by itself, aliases and all."""
    monkeypatch.chdir(root)
    bomb: list = ["x"]
    for _ in range(40):
        bomb = [bomb] * 8
    circle: dict = {}
    circle["codec"] = circle
    for data, words in (({"codec": bomb}, f"{MOST_DEPTH} levels"), (circle, f"{MOST_DEPTH} levels")):
        with refused(ParamsError, None, words):
            by_model({"models": [{"path": "models/reference"}]} | data)


@pytest.mark.parametrize(
    ("text", "code", "data"),
    [
        ('{"bits": 99', "params.unreadable.syntax", ("--params", "JSON")),
        ('{"bits": NaN}', "params.unreadable.not-finite", ("--params", "NaN")),
        ('{"bits": 1e999}', "params.unreadable.not-finite", ("--params", "1e999")),
        ('{"bits": 3, "bits": 4}', "params.unreadable.twice", ("--params", "'bits'")),
        ('{"report": {"title": "\\ud800"}}', None, ("'report.title'", "UTF-8")),
        ('{"bits": true}', None, ("'bits' is true", "a whole number")),
        ('{"codec": ' + "[" * 100_000, "params.unreadable.syntax", ("--params", "JSON")),
        ('{"engines": ["hf", "hf"]}', None, ("'engines'", "'hf'", "each once")),
    ],
)
def test_the_json_of_a_rule_is_held_to_the_same(text, code, data):
    with refused(ParamsError, code, *data) as caught:
        read_params(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "code", "data"),
    [
        ("bits=*a", "params.unreadable.alias", ("--set 'bits=*a'", "line 1", ": *a ")),
        ("codec={whiten: true, whiten: false}", "params.unreadable.twice", ("'whiten'",)),
        (".".join("a" * 100) + "=1", None, ("100 levels", f"at most {MOST_DEPTH}")),
    ],
)
def test_a_change_is_held_to_the_same(change, code, data):
    with refused(ParamsError, code, *data):
        assignment(change)


def test_a_device_and_a_folder_are_no_params(tmp_path):
    with refused(Unreadable, "params.unreadable.too-large", "/dev/zero"):
        read_yaml("/dev/zero")
    with refused(ParamsError, None, tmp_path, os.strerror(errno.EISDIR)):
        read_yaml(tmp_path)


FILES = ("params.yaml", "dvc.yaml", "workflow/presets/*.yaml", "src/kvlab/gate/registry/*.yaml")


@pytest.mark.parametrize(
    "path", [path for name in FILES for path in sorted(Path(__file__).parents[2].glob(name))], ids=str
)
def test_the_repository_s_files_are_the_same_to_readers_of_yaml_1_1_and_1_2(path):
    """Snakemake reads by the former, DVC and `kvlab` by the latter; ``repr`` tells 1 from 1.0 and from true."""
    assert repr(from_yaml(read_text(path), str(path))) == repr(yaml.safe_load(path.read_text()))


def test_a_number_that_snakemake_reads_as_a_text_is_a_number(root, monkeypatch):
    monkeypatch.chdir(root)
    said = MODELS + "calibration: {ridge: 1e-3}\nnoise: {sigmas: [1e-2, 0.1]}"
    theirs = yaml.safe_load(said)
    assert theirs["calibration"] == {"ridge": "1e-3"}
    assert by_model(theirs) == by_model(from_yaml(said, "it"))


@pytest.mark.parametrize(
    "text", ["-_", "._", "0x_", "!!bool maybe", "!!int ''", "!!timestamp x", "2024-13-45", "a: [", "\0"]
)
def test_what_only_looks_like_a_value_is_no_yaml(text):
    with refused(Unreadable, "params.unreadable.syntax", "it "):
        from_yaml(text, "it")


@given(st.text("ab01-_.:,[]{}&*!|>'\"?#%@ \n\t~e"))
def test_any_text_is_a_value_or_refused_in_one_line(text):
    for read in (from_yaml, from_json):
        try:
            read(text, "it")
        except Unreadable as error:
            assert "\n" not in str(error)


def test_what_the_repository_holds_is_fit(root, monkeypatch):
    monkeypatch.chdir(root)
    base = read_yaml(root / "params.yaml")
    for path in (root / "workflow" / "presets").glob("*.yaml"):
        assert unfit(overlay(base, {k: v for k, v in read_yaml(path).items() if k != "over"})) == []
    assert isinstance(read_yaml(root / "dvc.yaml"), dict)


def test_ordinary_values_are_read_as_before():
    assert from_yaml("a: [1, 2.5, 1e-3, x, null, true, 2024-01-01, '3']\n0: {b: -1}", "it")["a"][:6] == [
        *(1, 2.5, 0.001, "x", None, True),
    ]
    assert from_json(json.dumps({"a": [1, None, "x"]}), "it") == {"a": [1, None, "x"]}
    assert unfit({"layers": {"left_layers": list(range(200))}, "uniform": [[4, 4], [8, 8]]}) == []
    assert unfit({"a": list(range(MOST_ENTRIES + 1))}) == ["parameter 'a' has 65 entries; allowed: at most 64"]
    assert shown("x" * 500).endswith("...") and len(shown("x" * 500)) == 103
