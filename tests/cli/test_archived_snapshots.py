"""`kvlab snapshot` with a recipe of `archive`: saved, verified, described, restored, and refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvlab.cli import main as cli
from kvlab.kvstore.snapshot import read

CHUNK, PROMPT = 16, [7 * n % 320 for n in range(70)]


@pytest.fixture(scope="module")
def ids(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("ids") / "ids.json"
    path.write_text(json.dumps(PROMPT))
    return path


@pytest.fixture(scope="module")
def flags(tiny_model, ids, archive_file):
    return ("--model", tiny_model, "--tokens", ids, "--recipe", archive_file)


@pytest.fixture(scope="module")
def saved(flags, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("snapshots") / "archived"
    cli.main(["snapshot", "save", str(out), *map(str, flags), "--chunk-tokens", str(CHUNK)])
    return out


def bits(path: Path) -> float:
    with read.open(path) as snapshot:
        own = snapshot.geometry
        values = snapshot.length * 2 * own.layers * own.kv_heads * own.head_dim
        return 8 * snapshot.header.payload_bytes / values


def test_it_is_saved_verified_described_and_restored(run, saved, flags, tiny_model):
    assert bits(saved) == pytest.approx(8, rel=0.01)
    assert run("verify", saved)[:2] == (0, f"{saved}: whole\n")
    assert run("verify", saved, "--model", tiny_model, "--recipe", flags[-1])[:2] == (0, f"{saved}: whole\n")
    code, out, _ = run("inspect", saved)
    assert code == 0 and "lossy: recipe" in out and "archive" in out and "64 in 4 chunks of 16" in out
    code, out, _ = run("restore", saved, *flags, "--unproven", "--mode", "verify", "--decode", 2)
    assert code in (0, 1) and "restored 64 of 70 tokens" in out and "lossy" in out


def test_it_is_not_restored_without_evidence_or_being_asked_for(run, saved, flags):
    code, out, _ = run("restore", saved, *flags)
    assert code == 0 and "restored nothing" in out and "[unproven]" in out


def test_what_decodes_alone_restores_and_does_not_save(run, saved, flags, tmp_path):
    decoder = flags[-1].with_name("decoder.kv")
    code, out, err = run("restore", saved, *flags[:-1], decoder, "--unproven", "--decode", 1)
    assert code == 0 and "restored 64 of 70 tokens" in out, err
    code, _, err = run("save", tmp_path / "s", *flags[:-1], decoder)
    assert code == 2 and "the calibration holds what decodes alone" in err and not (tmp_path / "s").exists()


@pytest.mark.parametrize("asked", [7, 9.5])
def test_other_bits_are_met_and_are_restored_with_the_same_file(run, flags, tmp_path, asked):
    code, _, err = run("save", tmp_path / "s", *flags, "--chunk-tokens", CHUNK, "--bits", asked)
    assert code == 0 and bits(tmp_path / "s") == pytest.approx(asked, rel=0.01), err
    assert "restored 64 of 70" in run("restore", tmp_path / "s", *flags, "--unproven", "--decode", 0)[1]


def test_what_cannot_be_is_one_line_and_leaves_no_file(run, flags, tiny_model, ids, tmp_path):
    cli.main(
        ["calibrate", "--model", str(tiny_model), "--codec", "int", "--bits", "4", "--out", str(tmp_path / "i.kv")]
    )
    for given, told in (
        ((*flags, "--bits", 0.01), "cannot be met within 1 %"),
        ((*flags[:-1], tmp_path / "i.kv", "--bits", 3), "those of codec 'int' are its recipe's"),
        ((*flags[:-2], "--bits", 3), "--bits goes with --recipe"),
    ):
        code, _, err = run("save", tmp_path / "s", *given, "--chunk-tokens", CHUNK)
        assert code == 2 and told in err.splitlines()[-1] and not (tmp_path / "s").exists()


def test_another_calibration_is_refused_by_name(run, saved, flags, tiny_model, tmp_path):
    text = tmp_path / "other.txt"
    text.write_text(" ".join(f"other {n * 7}" for n in range(2000)))
    other = tmp_path / "other.kv"
    given = {
        "model": tiny_model,
        "codec": "archive",
        "bits": 8,
        "context": 64,
        "windows": 8,
        "text": text,
        "out": other,
    }
    cli.main(["calibrate", *(str(word) for key, value in given.items() for word in (f"--{key}", value))])
    code, out, _ = run("restore", saved, *flags[:-1], other, "--unproven", "--decode", 0)
    assert code == 0 and "restored nothing" in out and "[calibration]" in out
    code, out, _ = run("verify", saved, "--model", tiny_model, "--recipe", other)
    assert code == 2 and "[calibration]" in out
    code, out, _ = run("restore", saved, *flags[:-2], "--unproven", "--decode", 0)
    assert "[calibration]" in out and "kvlab calibrate" in out


def test_another_model_s_is_refused(run, saved, flags, tmp_path_factory):
    from tiny import write_model

    other = write_model(tmp_path_factory.mktemp("other") / "model", seed=3)
    code, out, _ = run("verify", saved, "--model", other)
    assert code == 1 and "[model]" in out
    code, _, err = run("restore", saved, "--model", other, *flags[2:], "--unproven")
    assert code == 2 and re.search("was calibrated for model .*calibrate this model", err)


def test_a_damaged_one_is_named_and_computed_anew(run, saved, flags, tmp_path):
    data = bytearray(saved.read_bytes())
    with read.open(saved) as snapshot:
        data[snapshot._places[2] + 40] ^= 1
    (tmp_path / "bad").write_bytes(data)
    code, out, _ = run("verify", tmp_path / "bad")
    assert code == 1 and "chunk 2" in out and "[chunk_checksum]" in out
    code, out, _ = run("restore", tmp_path / "bad", *flags, "--unproven", "--decode", 0)
    assert code == 0 and "restored nothing" in out and "[chunk_checksum]" in out
