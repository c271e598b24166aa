"""`--key`: what is signed is read with the same key, and everything else is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlab.cli import snapshot as snapshot_verbs
from kvstore.snapshot.forging import flip
from refusals import refused_line


@pytest.fixture
def keys(tmp_path) -> dict[str, Path]:
    found = {}
    for name, secret in {"right": b"r" * 32, "wrong": b"w" * 32, "short": b"s" * 31}.items():
        found[name] = tmp_path / f"{name}.key"
        found[name].write_bytes(secret)
    return found


def test_a_coded_cache_is_signed_and_decoded_with_the_key_alone(line, keys, tiny_params, tiny_calibration, tmp_path):
    from kvlab.cache.files.recipe import write_recipe_file
    from kvlab.codecs.fp8 import Fp8Stream
    from kvlab.core.recipe import Recipe

    recipe = write_recipe_file(tmp_path / "recipe.json", Recipe(k=Fp8Stream(), v=Fp8Stream()))
    given = ("--params", json.dumps(tiny_params.model_dump(mode="json")))
    encode = ("encode", *given, "--recipe", recipe, "--capture", tiny_calibration["capture"], "--out")
    signed, plain, out = tmp_path / "signed.kvls", tmp_path / "plain.kvls", tmp_path / "out.safetensors"
    code, said, err = line(*encode, signed, "--key", keys["right"])
    assert (code, err) == (0, "") and ", signed" in said
    assert ", not signed" in line(*encode, plain)[1]

    def decode(stream: Path, *key) -> tuple[int, str, str]:
        out.unlink(missing_ok=True)
        return line("decode", *given, "--recipe", recipe, "--stream", stream, "--out", out, *key)

    for key in ((), ("--key", keys["right"])):
        assert decode(signed, *key) == (0, "", "") and out.exists()
        assert line("inspect", "--stream", signed, *key)[0] == 0
    for stream, key, words in (
        (signed, "wrong", "signed.kvls: it is signed with another key"),
        (plain, "right", "plain.kvls: it is not signed"),
        (signed, "short", "short.key is no key: it holds 31 bytes"),
    ):
        refused_line(decode(stream, "--key", keys[key]), words)
        refused_line(line("inspect", "--stream", stream, "--key", keys[key]), words)
        assert not out.exists()
    flip(signed, -40)  # of the signature
    refused_line(decode(signed, "--key", keys["right"]), "signed.kvls: ")
    refused_line(line(*encode, tmp_path / "x.kvls", "--key", keys["short"]), "`openssl rand -out NAME 32` makes one")
    refused_line(line(*encode, tmp_path / "x.kvls", "--key", tmp_path / "none"), "cannot read", "no such file")
    assert not (tmp_path / "x.kvls").exists()


def test_a_snapshot_is_signed_verified_and_restored_with_the_key_alone(line, keys, tiny_model, tmp_path, monkeypatch):
    import functools

    monkeypatch.setattr(snapshot_verbs, "_model", functools.cache(snapshot_verbs._model))
    (tmp_path / "ids.json").write_text(json.dumps([7 * n % 320 for n in range(40)]))
    prompt = ("--model", tiny_model, "--tokens", tmp_path / "ids.json")
    signed, plain = tmp_path / "signed", tmp_path / "plain"
    for path, key in ((signed, ("--key", keys["right"])), (plain, ())):
        assert line("snapshot", "save", path, *prompt, "--chunk-tokens", 16, *key)[0] == 0
    assert "signature   there is one" in line("snapshot", "inspect", signed)[1]
    assert "signature   none" in line("snapshot", "inspect", plain)[1]

    def verify(path: Path, *key) -> tuple[int, str]:
        return line("snapshot", "verify", path, *key)[:2]

    def restore(path: Path, key: str, *flags):
        return line("snapshot", "restore", path, *prompt, "--decode", 0, "--key", keys[key], *flags)

    assert verify(signed, "--key", keys["right"]) == verify(signed) == (0, f"{signed}: whole\n")
    assert "restored 32 of 40 tokens" in restore(signed, "right")[1]
    for path, key, told in (
        (signed, "wrong", "the snapshot is signed with another key [signature]"),
        (plain, "right", "the snapshot is not signed [unsigned]"),
    ):
        assert verify(path, "--key", keys[key]) == (1, f"{path}: {told}\n")
        code, out, _ = restore(path, key)
        assert code == 0 and out.startswith(f"restored nothing of 40 tokens\nbecause {path.name}: {told}\n")
        refused_line(restore(path, key, "--mode", "consume"), told)
    code, out, _ = restore(tmp_path, "right")  # a folder: of those in it, the signed one alone is used
    assert code == 0 and f"tokens of {signed} in" in out
    refused_line(restore(signed, "short"), "short.key is no key")
    refused_line(line("snapshot", "save", tmp_path / "x", *prompt, "--key", keys["short"]), "short.key is no key")
    assert not (tmp_path / "x").exists()
    flip(signed, 200)
    code, out = verify(signed, "--key", keys["right"])
    assert code == 1 and "[manifest_checksum]" in out
