"""The command line: bad input is one line and exit code 2, and nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml

import embedded
import tiny
from command_line import groups
from kvlab.cli import main as cli
from kvlab.core.paramfile import overlay
from kvlab_pipeline.studies.settings import Settings, by_model, read_params
from refusals import refused_line


@pytest.fixture
def in_root(root, tmp_path, monkeypatch):
    """A folder with the repository's models and presets, and the parameters of the embedded model."""
    for name in ("models", "workflow"):
        (tmp_path / name).symlink_to(root / name)
    (tmp_path / "params.yaml").write_text(embedded.text())
    monkeypatch.chdir(tmp_path)


def test_help_teaches_the_order_of_the_steps(line):
    code, out, _ = line("step", "--help")
    assert code == 0
    steps = ["corpus", "capture", "sigma", "codebooks", "baseline", "measure", "metrics", "verdict", "report"]
    places = [out.index(f"\n  {step} ") for step in steps]
    assert places == sorted(places)


@pytest.mark.parametrize(("words", "verbs"), list(groups(cli.verbs())), ids=lambda value: "-".join(value) or "kvlab")
def test_every_verb_of_an_overview_exists_and_none_is_missing(words, verbs, line):
    _, out, _ = line(*words, "--help")
    listed = [row.split()[0] for row in out.splitlines() if re.match(r"  \w", row)]
    assert sorted(listed) == sorted(verbs)


@pytest.mark.full
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["step", "capt"], "capture"),
        (["gate", "ingest", "--mechanism-n"], "--mechanism-notes"),
        (["measure", "model", "--protocol", ""], "snapshot in_forward"),
    ],
)
def test_bash_completes_verbs_flags_and_their_values(typed, offered, line, root, tmp_path):
    code, script, err = line("completion", "bash")
    assert code == 0, err
    (tmp_path / "kvlab").write_text(f'#!/bin/sh\nexec {sys.executable} -m kvlab "$@"\n')
    (tmp_path / "kvlab").chmod(0o755)
    words = " ".join(f"'{word}'" for word in ["kvlab", *typed])
    asked = f'COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _kvlab_completion kvlab; echo "${{COMPREPLY[@]}}"\n'
    (tmp_path / "script.bash").write_text(script + "\n" + asked)
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(root / "src")}
    answer = subprocess.run(["bash", tmp_path / "script.bash"], capture_output=True, text=True, env=os.environ | paths)
    assert answer.stdout.strip() == offered, answer.stderr


@pytest.mark.full
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_that_asks_kvlab(shell, root, line):
    _, script, _ = line("completion", shell)
    assert "_KVLAB_COMPLETE=complete_" + shell in script
    asked = {"_KVLAB_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": "kvlab snap", "PYTHONPATH": "src"}
    asked |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    answer = subprocess.run(
        [sys.executable, "-m", "kvlab"], cwd=root, capture_output=True, text=True, env=os.environ | asked
    )
    assert "snapshot" in answer.stdout and "step" not in answer.stdout, answer.stderr


def test_the_first_help_fits_a_screen(line):
    _, out, _ = line("--help")
    lines = out.splitlines()
    checkout = {name for verbs in cli.of_the_checkout() for name in verbs} - {"step"}  # not in an installed kvlab
    shown = [row for row in lines if not row.startswith(tuple(f"  {name} " for name in checkout))]
    assert len(lines) > len(shown) <= 25 and max(map(len, lines)) <= 100


def test_params_prints_what_it_checked_and_the_recipe_ids(in_root, line, base_params):
    code, out, _ = line("params")
    assert code == 0
    assert by_model(yaml.safe_load(out)) == {"reference": Settings.complete(base_params)}
    assert "# recipes" in out and "hf-bfloat16-0" in out


def test_params_says_which_default_cells_are_left_out(in_root, line):
    _, out, _ = line("params")
    assert "left out" not in out
    code, out, _ = line("params", "--set", "cells.twin.stream=k")
    assert code == 0 and "#   k-only" in out.splitlines()[out.splitlines().index("# jobs") - 1]


def test_params_as_json_can_be_given_back(in_root, line, base_params):
    _, out, _ = line("params", "--json", "--set", "bits=4")
    assert read_params(out).bits == 4
    assert json.loads(out)["windows"] == base_params["windows"]


def test_a_number_may_be_written_as_yaml_1_2_writes_it(in_root, line):
    _, out, _ = line("params", "--json", "--set", "calibration.ridge=2e-3")
    assert json.loads(out)["calibration"]["ridge"] == 2e-3


def test_a_leaf_of_an_entry_is_set_and_its_neighbours_stay(in_root, line, base_params):
    _, out, _ = line("params", "--json", "--set", "cells.published-decoder.codec.variance_ratio=0.9")
    before = base_params["cells"]["published-decoder"]["codec"]
    assert json.loads(out)["cells"]["published-decoder"]["codec"] == before | {"variance_ratio": 0.9}


TWINS = ("--set", "cells.k-only.stream=k", "--set", "cells.twin.stream=k")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["parmas"], ["'parmas'", "'params'"]),
        (["params", "--set", "bits=0"], ["'bits'", "0", "1"]),
        (["params", "--set", "codec.block_siz=8"], ["codec.block_siz'", "did you mean 'codec.block_size'"]),
        (["params", "--set", "bits"], ["KEY=VALUE"]),
        (["params", "--set", "windows.test=[8"], ["'windows.test=[8'", "not YAML"]),
        (["params", "--set", "report.title=2026-13-45"], ["not YAML", "month"]),
        (["params", "--set", "cells=3"], ["'cells' is 3"]),
        (["params", "--set", "cells.k-only=3"], ["cells.k-only is 3", "a mapping", "or null"]),
        (["params", "--set", "cells.klt.rung=klr"], ["'klr' is no rung", "did you mean 'klt'"]),
        (["params", *TWINS], ["cells.k-only", "cells.twin", "same cell", "`twin: null`"]),
        (["params", "--yaml", *TWINS], ["same cell"]),
        (["params", "--set", "baseline.dtypes=[bfloat16]"], ["baseline.dtypes is bfloat16", "must contain 'float32'"]),
        (["params", "--preset", "quik"], ["'quik'", "'quick'"]),
        (["params", "--params", "nowhere.yaml"], ["nowhere.yaml", "does not exist"]),
        (["params", "--prest", "quick"], ["kvlab params:", "'--prest'", "'--preset'"]),
        (["params", "--pre", "quick"], ["'--pre' is not known"]),
        (["calibrate", "models/reference", "--out", "a.kv"], ["--model models/reference"]),
        (["inspect", "params.yaml"], ["--stream params.yaml"]),
        (["step", "measure", "--out", "x"], ["--study"]),
        (["step", "measure", "--stuyd", "x"], ["kvlab step measure:", "'--stuyd'", "'--study'"]),
        (["step", "mesure"], ["kvlab step:", "'mesure'", "'measure'"]),
        (["--hlep"], ["'--hlep'", "'--help'"]),
    ],
)
def test_bad_words_are_one_line(in_root, line, arguments, words):
    refused_line(line(*arguments), *words)


def measure(params: Settings, folder, windows, calibration, line, /, **changed):
    """`kvlab step measure` with some arguments changed; returns what `run` returns."""
    given = {
        "--params": json.dumps(params.model_dump(mode="json")),
        "--study": "factors",
        "--job": "hf-float32-0",
        "--windows": windows,
        "--sigma": calibration["sigma"],
        "--codebooks": calibration["codebooks"],
        "--out": folder / "out" / "hf-float32-0.parquet",
    } | {f"--{name}": value for name, value in changed.items()}
    return line("step", "measure", *(word for pair in given.items() for word in pair))


@pytest.mark.full
def test_a_job_leaves_a_table_and_its_record(tiny_params, tiny_windows, tiny_calibration, tmp_path, line):
    code, _, err = measure(tiny_params, tmp_path, tiny_windows, tiny_calibration, line)
    assert code == 0, err
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"hf-float32-0.json", "hf-float32-0.parquet"}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"job": "hf-float32-7"}, ["'hf-float32-7'", "'hf-float32-0'"]),
        ({"study": "cell"}, ["'cell'", "'cells'"]),
        ({"windows": "nowhere.safetensors"}, ["nowhere.safetensors", "kvlab step corpus"]),
        ({"sigma": "nowhere.safetensors"}, ["nowhere.safetensors", "kvlab step sigma"]),
        ({"params": '{"bits": 3}'}, ["is read here but not named"]),
    ],
)
def test_a_job_that_cannot_run_leaves_nothing(
    tiny_params, tiny_windows, tiny_calibration, tmp_path, line, changed, words
):
    code, _, err = measure(tiny_params, tmp_path, tiny_windows, tiny_calibration, line, **changed)
    assert (code, err.strip().count("\n")) == (2, 0), err
    assert all(word in err for word in words), err
    assert not (tmp_path / "out").exists()


def test_calibration_of_another_model_stops_the_job(tiny_params, tiny_windows, tiny_calibration, tmp_path, line):
    sidecar = tiny_calibration["sigma"].with_suffix(".json")
    facts = json.loads(sidecar.read_text())
    (tmp_path / "hf.json").write_text(json.dumps(facts | {"model_hash": "another"}))
    (tmp_path / "hf.safetensors").write_bytes(tiny_calibration["sigma"].read_bytes())
    code, _, err = measure(
        tiny_params, tmp_path, tiny_windows, tiny_calibration, line, sigma=tmp_path / "hf.safetensors"
    )
    assert code == 2 and "fitted on model another" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", ["weights", "folder", "architecture"])
def test_a_broken_model_is_one_line(tiny_params, tiny_windows, tiny_model, tmp_path, line, where):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    if where == "weights":  # the last norm: every logit of the model becomes NaN
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"][0] = float("nan")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    elif where == "architecture":
        tiny.edit(folder / "config.json", architectures=["GPT2LMHeadModel"])
    changed = overlay(
        tiny_params.model_dump(mode="json"),
        {"model": {"path": str(folder if where != "folder" else tmp_path / "modle")}},
    )
    windows = tmp_path / "windows.safetensors"
    corpus_run = line("step", "corpus", "--params", json.dumps(changed), "--out", windows)
    capture = ("step", "capture", "--engine", "hf", "--windows", windows, "--out", tmp_path / "out" / "c.safetensors")
    code, _, err = line(*capture, "--params", json.dumps(changed)) if corpus_run[0] == 0 else corpus_run
    words = {"weights": "'model.norm.weight'", "folder": "did you mean", "architecture": "'GPT2LMHeadModel'"}
    last = err.strip().splitlines()[-1]
    assert code == 2 and words[where] in last and last.startswith("kvlab "), err
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_a_full_disk_loses_the_job_and_nothing_else(
    tiny_params, tiny_windows, tiny_calibration, tmp_path, line, monkeypatch
):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kvlab.core.records.os.replace", full)
    code, _, err = measure(tiny_params, tmp_path, tiny_windows, tiny_calibration, line)
    assert code == 2 and "the disk is full" in err
    assert list((tmp_path / "out").iterdir()) == []


def test_a_fault_is_exit_code_one(tiny_params, tiny_windows, tiny_calibration, tmp_path, line, monkeypatch):
    monkeypatch.setattr("kvlab.measure.scoring.CANARY_MIN", 1e9)
    code, _, err = measure(tiny_params, tmp_path, tiny_windows, tiny_calibration, line)
    assert code == 1 and "does not reach the attention" in err
    assert not (tmp_path / "out").exists()


def test_the_module_can_be_run(root):
    answer = subprocess.run(
        [sys.executable, "-m", "kvlab", "params", "--set", "engines=[hg]"],
        cwd=root,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": "src"},
    )
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1 and "did you mean 'hf'" in answer.stderr


# -- coded caches and the bench


@pytest.fixture
def coded(tiny_params, tiny_calibration, tmp_path, line):
    """Runs a verb on the tiny model; arguments that are not given are files that are right."""
    files = {name: tiny_calibration[name] for name in ("sigma", "codebooks", "components")}
    right = {
        "recipe": files | {"out": tmp_path / "recipe.json"},
        "encode": {
            "recipe": tmp_path / "recipe.json",
            "capture": tiny_calibration["capture"],
            "out": tmp_path / "c.kvls",
        },
        "inspect": {"stream": tmp_path / "c.kvls"},
        "decode": {
            "recipe": tmp_path / "recipe.json",
            "stream": tmp_path / "c.kvls",
            "out": tmp_path / "c.safetensors",
        },
        "bench": {"out": tmp_path / "bench"},
    }

    def verb(name: str, **changed):
        given = {"params": json.dumps(tiny_params.model_dump(mode="json"))} | right[name] | changed
        words = [word for key, value in given.items() if value is not None for word in (f"--{key}", value)]
        return line(name, *words)

    return verb


@pytest.mark.parametrize("codec", [None, "hadamard", "studied"])
def test_a_captured_window_goes_to_a_stream_and_back(coded, tiny_calibration, tmp_path, codec):
    from safetensors.torch import load_file

    for verb in ("recipe", "encode", "inspect", "decode"):
        code, out, err = coded(verb, **({"codec": codec} if verb == "recipe" else {}))
        assert (code, err) == (0, ""), err
        if verb == "encode":
            written = out
        if verb == "inspect":
            assert out == written
    assert f"{(tmp_path / 'c.kvls').stat().st_size} bytes" in written
    recipe_id = json.loads((tmp_path / "recipe.json").read_text())["recipe"]["k"]["codec"]
    assert recipe_id == {None: "klt", "hadamard": "hadamard", "studied": "block"}[codec]
    decoded, captured = load_file(tmp_path / "c.safetensors"), load_file(tiny_calibration["capture"])
    assert len(decoded) == 6
    for name, x in decoded.items():
        wanted = captured[name][0, :, :64].float()
        error = (x.float() - wanted).square().sum() / wanted.square().sum()
        boundary = codec == "studied" and name.startswith("layer_0_")
        assert error == 0 if boundary else 0 < error < 0.25, name


@pytest.mark.parametrize(("v_bits", "bits", "want"), [("2", "8", (8, 2)), ("2", None, (None, 2)), (None, "3", (3, 3))])
def test_either_flag_of_bits_counts_beside_the_others_parameter(coded, tiny_params, tmp_path, v_bits, bits, want):
    code, _, err = coded("recipe", codec="hadamard", **{"v-bits": v_bits, "bits": bits})
    assert (code, err) == (0, "")
    made = json.loads((tmp_path / "recipe.json").read_text())["recipe"]
    assert (made["k"]["bits"], made["v"]["bits"]) == (want[0] or tiny_params.bits, want[1])


def test_bits_that_a_codec_does_not_take_are_refused_and_write_nothing(coded, tmp_path):
    refused_line(coded("recipe", codec="hadamard", bits="2.5"), "'hadamard'", "2.5")
    assert not (tmp_path / "recipe.json").exists()


def _files(folder) -> list:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _other(folder, which: str):
    """Files that are none of those that a verb expects."""
    path = folder / f"other.{which}"
    if which == "binary":
        path.write_bytes(bytes(range(128, 256)))
    elif which == "object":
        path.write_text("{}")
    elif which == "list":
        path.write_text("[]")
    elif which == "tensors":
        from safetensors.torch import save_file
        from torch import zeros

        save_file({"layer_0_k": zeros(1)}, path)
        path.with_suffix(".json").write_text("{}")
    elif which == "folder":
        path.mkdir()
    return path


BAD = {
    "recipe without its calibration": ("recipe", dict.fromkeys(("sigma", "codebooks", "components")), "--components"),
    "recipe without components": ("recipe", {"components": None}, "--components"),
    "studied without codebooks": ("recipe", {"codec": "studied", "codebooks": None}, "--codebooks"),
    "recipe of no sigma": ("recipe", {"sigma": "nothing"}, "cannot read"),
    "recipe of a sigma that is none": ("recipe", {"sigma": "tensors"}, "kvlab step sigma"),
    "recipe of a folder": ("recipe", {"components": "folder"}, "kvlab step components"),
    "recipe of components that are none": ("recipe", {"components": "tensors"}, "kvlab step components"),
    "recipe of components that are text": ("recipe", {"components": "object"}, "kvlab step components"),
    "recipe of codebooks that are none": ("recipe", {"codebooks": "object"}, "kvlab step codebooks"),
    "recipe of codebooks that are a list": ("recipe", {"codebooks": "list"}, "kvlab step codebooks"),
    "recipe of codebooks that are no text": ("recipe", {"codebooks": "binary"}, "is not JSON"),
    "recipe of no codec": ("recipe", {"codec": "hadamrad"}, "did you mean 'hadamard'"),
    "recipe of no conditioning": ("recipe", {"codec": "int+white"}, "center+whiten, none"),
    "encode no recipe": ("encode", {"recipe": "nothing"}, "cannot read"),
    "encode a recipe that is no text": ("encode", {"recipe": "binary"}, "is not JSON"),
    "encode a recipe that is none": ("encode", {"recipe": "object"}, "is no recipe file"),
    "encode no capture": ("encode", {"capture": "nothing"}, "kvlab step capture"),
    "encode a capture that is none": ("encode", {"capture": "tensors"}, "kvlab step capture"),
    "encode a window that is none": ("encode", {"window": "99"}, "allowed: 0..5"),
    "inspect nothing": ("inspect", {"stream": "nothing"}, "cannot read"),
    "inspect a folder": ("inspect", {"stream": "folder"}, "cannot read"),
    "inspect what is no stream": ("inspect", {"stream": "binary"}, "this is no coded cache"),
    "decode nothing": ("decode", {"stream": "nothing"}, "cannot read"),
    "decode what is no stream": ("decode", {"stream": "object"}, "this is no coded cache"),
    "bench no capture": ("bench", {"capture": "nothing"}, "kvlab step capture"),
    "bench a capture that is none": ("bench", {"capture": "tensors"}, "kvlab step capture"),
    "bench no rounds": ("bench", {"rounds": "0"}, "at least one"),
    "bench half a round": ("bench", {"rounds": "0.5"}, "no whole number"),
    "bench no ladder": ("bench", {"ladder": "nothing"}, "nothing"),
    "bench no tensors": ("bench", {"tensors": "folder"}, "folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_nothing_is_left(coded, tmp_path, case):
    verb, changed, said = BAD[case]
    if verb in ("encode", "decode"):
        assert coded("recipe", codec="hadamard")[0] == 0
    kinds = ("nothing", "binary", "object", "list", "tensors", "folder")
    changed = {key: _other(tmp_path, value) if value in kinds else value for key, value in changed.items()}
    before = _files(tmp_path)
    err = refused_line(coded(verb, **changed), said)
    if verb in ("inspect", "decode") and "stream" in changed:
        assert str(changed["stream"]) in err, err
    assert _files(tmp_path) == before
