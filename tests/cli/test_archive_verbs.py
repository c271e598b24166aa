"""`kvlab encode`, `inspect` and `decode` of a codec of whole caches, from its calibration to its tensors."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from kvlab.cli import main as cli

TEXT = "a cache that is kept " * 4


@pytest.fixture
def verb(tiny_params, archive_file, tmp_path, line):
    """Runs a verb; flags that are not given are right, and None leaves one out."""
    (tmp_path / "text.txt").write_text(TEXT)
    params = json.dumps(tiny_params.model_dump(mode="json"))
    right = {
        "encode": {"recipe": archive_file, "text": tmp_path / "text.txt", "out": tmp_path / "text.kva"},
        "inspect": {"stream": tmp_path / "text.kva"},
        "decode": {
            "recipe": archive_file,
            "stream": tmp_path / "text.kva",
            "out": tmp_path / "text.safetensors",
        },
    }

    def run(name: str, **changed) -> tuple[int, str, str]:
        given = {"params": params} | right[name] | changed
        words = [word for key, value in given.items() if value is not None for word in (f"--{key}", value)]
        return line(name, *words)

    return run


def test_the_cache_of_a_text_goes_to_an_archive_and_back(verb, tmp_path):
    code, out, err = verb("encode")
    assert code == 0, err
    assert "quality" in out and f"{(tmp_path / 'text.kva').stat().st_size} bytes" in out
    assert verb("inspect")[1] == out
    assert verb("decode")[0] == 0
    decoded = load_file(tmp_path / "text.safetensors")
    assert len(decoded) == 6 and len({x.shape for x in decoded.values()}) == 1
    verb("encode", bits=9.5)
    verb("decode", out=tmp_path / "finer.safetensors")
    finer = load_file(tmp_path / "finer.safetensors")
    apart = [float((finer[name] - x).square().sum() / x.square().sum()) for name, x in decoded.items()]
    assert 0 < max(apart) < 0.05


@pytest.mark.parametrize("bits", [7, 9])
def test_other_bits_than_the_recipe_s_can_be_asked_for(verb, bits):
    _, out, _ = verb("encode", bits=bits)
    assert float(out.split(" bits per value")[0].split()[-1]) == pytest.approx(bits, rel=0.01)


@pytest.mark.parametrize(
    ("name", "changed", "told"),
    [
        ("encode", {"text": None}, "name what is to be coded: --text FILE, or --capture FILE of the pipeline"),
        (
            "encode",
            {"capture": "README.md"},
            "name what is to be coded: --text FILE, or --capture FILE of the pipeline",
        ),
        ("encode", {"capture": "README.md", "text": None, "bits": 4}, "--bits goes with --text"),
        ("encode", {"bits": 0.01}, "cannot be met within 1 %"),
        ("decode", {"stream": "README.md"}, "this is no coded cache: it begins with b'# kv', not b'KVLS' or b'KVLA'"),
        ("inspect", {"stream": "LICENSE"}, "this is no coded cache"),
    ],
)
def test_what_cannot_be_is_one_line(verb, root, tmp_path, monkeypatch, name, changed, told):
    monkeypatch.chdir(root)
    code, _, err = verb(name, **changed)
    assert code == 2 and told in err.splitlines()[-1]
    assert not (tmp_path / "text.kva").exists() and not (tmp_path / "text.safetensors").exists()


def test_a_calibration_of_another_codec_is_refused(verb, tiny_model, tmp_path):
    cli.main(
        ["calibrate", "--model", str(tiny_model), "--codec", "int", "--bits", "4", "--out", str(tmp_path / "i.kv")]
    )
    assert verb("encode")[0] == 0
    code, _, err = verb("decode", recipe=tmp_path / "i.kv")
    assert code == 2 and "i.kv is not of `archive`" in err and "kvlab calibrate --codec archive --out archive.kv" in err
    code, _, err = verb("encode", recipe=tmp_path / "i.kv", bits=3, out=tmp_path / "x.kvls")
    assert code == 2 and "those of codec 'int' are its recipe's" in err and not (tmp_path / "x.kvls").exists()


def test_a_damaged_archive_is_refused(verb, tmp_path):
    verb("encode")
    data = bytearray((tmp_path / "text.kva").read_bytes())
    data[-200] ^= 1
    (tmp_path / "text.kva").write_bytes(bytes(data))
    for name in ("inspect", "decode"):
        code, _, err = verb(name)
        assert code == 2 and err.count("\n") == 1
    assert not (tmp_path / "text.safetensors").exists()
