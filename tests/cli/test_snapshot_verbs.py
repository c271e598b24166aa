"""`kvlab snapshot`: what each verb says, how it ends, and that bad input is one line."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from command_line import examples, flags_of
from kvlab.cli import snapshot as snapshot_verbs
from kvlab.cli import snapshot_inputs as inputs
from kvlab.kvstore.snapshot import read
from kvlab.kvstore.snapshot.format import PUBLISHED_MAGIC
from kvlab.kvstore.snapshot.reasons import Code
from kvlab.kvstore.snapshot.v1 import HEADER
from kvstore.snapshot import making
from kvstore.snapshot.forging import Parts
from refusals import refused_line

CHUNK = 16
PROMPT = [7 * n % 320 for n in range(70)]  # four whole chunks and a part


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def planted(tmp_path) -> Path:
    making.written(tmp_path / "a")
    return tmp_path / "a"


def changed(path: Path, out: str, at: int, by: int = 1) -> Path:
    """A copy with one byte changed."""
    data = bytearray(path.read_bytes())
    data[at] ^= by
    (path.parent / out).write_bytes(data)
    return path.parent / out


def payload_at(path: Path) -> int:
    with read.open(path) as snapshot:
        return snapshot.header.payload_at


# ------------------------------------------------------------------------------------ inspect


def test_inspect_says_whose_it_is_in_lines_and_in_json(run, planted):
    code, out, _ = run("inspect", planted)
    assert code == 0 and "24 in 6 chunks of 4" in out and "stored as it is" in out and "0123456789abcdef" in out
    code, out, _ = run("inspect", planted, "--json")
    said = json.loads(out)
    with read.open(planted) as snapshot:
        assert (said["digest"], said["signed"]) == (snapshot.digest, False) and said["bytes"] == planted.stat().st_size
        assert [one["digest"] for one in said["chunks"]] == [record.digest.hex() for record in snapshot.records]
        assert [one["score"] for one in said["chunks"]] == [entry.score for entry in snapshot.ledger.entries]
    assert said["manifest"]["identity"]["rope"] == {"rope_theta": 10000.0, "rope_type": "default"}


def test_inspect_names_the_published_layout_and_what_it_cannot_say(run, tmp_path):
    file = tmp_path / "published"
    file.write_bytes(HEADER.pack(PUBLISHED_MAGIC, 8, 64, 2, 512, 512, 2048, 1, 1) + bytes(8 * 2048 + 8 * 8))
    code, out, _ = run("inspect", file)
    assert code == 0 and "KVFLASH1" in out and "8 of 64 tokens" in out and "K float16" in out and "no checksum" in out
    said = json.loads(run("inspect", file, "--json")[1])
    assert (said["format"], said["chunks"], said["due_bytes"]) == ("KVFLASH1", 8, file.stat().st_size)
    file.write_bytes(PUBLISHED_MAGIC + b"short")
    refused_line(run("inspect", file), "v1_header_short")


def test_inspect_refuses_what_is_damaged_in_front_of_the_payload(run, planted, tmp_path):
    refused_line(run("inspect", changed(planted, "bad", payload_at(planted) - 1)), "tokens_checksum")
    refused_line(run("inspect", tmp_path / "none"), "cannot read")
    refused_line(run("inspect", tmp_path), "cannot read")


# ------------------------------------------------------------------------------------- verify


def test_verify_names_every_damage(run, planted):
    assert run("verify", planted)[:2] == (0, f"{planted}: whole\n")
    with read.open(planted) as snapshot:
        first, third = (snapshot._places[number] for number in (0, 2))
    twice = changed(changed(planted, "once", first), "twice", third)
    code, out, _ = run("verify", twice)
    assert code == 1 and "chunk 0" in out and "chunk 2" in out and "chunk 1" not in out
    code, out, _ = run("verify", planted, twice, "--json")
    said = json.loads(out)
    assert code == 1 and said[str(planted)] == {"whole": True, "reasons": []}
    assert [one["code"] for one in said[str(twice)]["reasons"]] == ["chunk_checksum", "chunk_checksum"]


def test_verify_names_all_damaged_sections_in_front_of_the_payload(run, planted):
    with read.open(planted) as snapshot:
        starts = [span.start for span in snapshot.header.spans]
    bad = planted
    for number, at in enumerate(starts):
        bad = changed(bad, f"bad{number}", at)
    code, out, _ = run("verify", bad)
    assert code == 1 and all(f"[{name}_checksum]" in out for name in ("manifest", "index", "tokens"))


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"", 1), (b"hello, world", 2), (PUBLISHED_MAGIC + bytes(100), 2)],
    ids=["empty", "a stranger", "no checksums"],
)
def test_verify_tells_damage_from_what_cannot_be_judged(run, tmp_path, data, code):
    (tmp_path / "file").write_bytes(data)
    found, out, _ = run("verify", tmp_path / "file")
    assert found == code and out.startswith(f"{tmp_path / 'file'}: ")


def test_verify_of_a_file_of_another_version_or_of_none(run, planted, tmp_path):
    newer = Parts.of(planted.read_bytes()).counting(version=4).sealed()
    (tmp_path / "newer").write_bytes(newer)
    assert run("verify", tmp_path / "newer")[0] == 2
    code, out, _ = run("verify", tmp_path / "none")
    assert code == 2 and "cannot read" in out and "[unreadable]" in out


def test_verify_looks_at_every_file_whatever_is_wrong_with_one(run, planted, tmp_path):
    bad = changed(planted, "bad", payload_at(planted))
    code, out, _ = run("verify", bad, tmp_path / "none", planted)
    assert code == 1 and "[chunk_checksum]" in out and "[unreadable]" in out and f"{planted}: whole" in out


def test_verify_with_a_model_tells_that_a_snapshot_is_of_another(run, planted, saved, tiny_model):
    code, out, _ = run("verify", planted, saved, "--model", tiny_model)
    assert code == 1 and f"{saved}: whole" in out and all(f"[{name}]" in out for name in ("model", "layout"))


def test_verify_without_the_calibration_judges_the_bytes_and_goes_on(run, saved, tiny_model, monkeypatch):
    from kvlab.codecs.fp8 import Fp8Stream
    from kvlab.core.errors import CapabilityError
    from kvlab.core.recipe import Recipe

    recipe = Recipe(k=Fp8Stream(), v=Fp8Stream())
    codec = {"recipe_id": recipe.recipe_id, "recipe": recipe.model_dump(mode="json"), "layers": [0]}
    codec |= {"placement": "pre_rope", "calibration_hash": "f" * 16}
    parts = Parts.of(saved.read_bytes()).saying(identity__codec=codec).digested()
    (saved.parent / "coded").write_bytes(parts.sealed())

    def missing(*_):
        raise CapabilityError("no such rotary embedding")

    monkeypatch.setattr(snapshot_verbs, "_decoder", missing)
    code, out, _ = run("verify", saved.parent / "coded", saved, "--model", tiny_model)
    assert code == 2 and "[calibration]" in out and "no such rotary embedding" in out and f"{saved}: whole" in out


# --------------------------------------------------------------------------------------- diff


def test_diff_of_equal_snapshots_ignores_what_wrote_them(run, planted, tmp_path):
    making.written(tmp_path / "b", made={"engine": "another"})
    code, out, _ = run("diff", planted, tmp_path / "b")
    assert code == 0 and out.startswith("the same\n") and "note: made with engine None and another" in out


def test_diff_counts_bits_chunk_by_chunk(run, planted, tmp_path):
    parts = Parts.of(planted.read_bytes())
    size = making.GEOMETRY.chunk_bytes
    payload = bytearray(parts.payload)
    payload[2 * size] ^= 0b1011
    forged = replace(parts, payload=bytes(payload)).digested()
    (tmp_path / "b").write_bytes(forged.sealed())
    code, out, _ = run("diff", planted, tmp_path / "b")
    assert code == 1 and f"chunk 2: 3 of {8 * size} bits" in out and "1 of 6 compared chunks differ" in out
    said = json.loads(run("diff", planted, tmp_path / "b", "--json")[1])
    assert said["chunks"] == [{"number": 2, "bits": 3, "of_bits": 8 * size}] and not said["same"]


def test_diff_names_other_identities_and_how_far_the_tokens_go(run, planted, tmp_path):
    from kvlab.kvstore.snapshot.write import SnapshotSource, save

    theirs = making.tokens(24)
    theirs[10] = 4000
    payloads = (making.chunk(number) for number in range(6))
    other = SnapshotSource(making.identity(salt="t", rope={"rope_theta": 5.0}), payloads, making.ledger(6), theirs)
    save(tmp_path / "b", other)
    code, out, _ = run("diff", planted, tmp_path / "b")
    assert code == 1 and "tokens: 10 shared of 24 and 24" in out and "[salt]" in out and "[rope]" in out
    assert "0 of 2 compared chunks differ" in out
    damaged = changed(planted, "c", payload_at(planted))
    refused_line(run("diff", planted, damaged), "chunk_checksum")


def test_diff_sees_a_shorter_context_and_another_ledger(run, planted, tmp_path):
    making.written(tmp_path / "b", chunks=4)
    code, out, _ = run("diff", planted, tmp_path / "b")
    assert code == 1 and "tokens: 16 shared of 24 and 16" in out and "0 of 4 compared" in out
    parts = Parts.of(planted.read_bytes()).indexed(1, last_use=3)
    (tmp_path / "c").write_bytes(parts.sealed())
    code, out, _ = run("diff", planted, tmp_path / "c")
    assert code == 1 and "ledger: differs on chunks 1" in out


# ---------------------------------------------------------------------------- save and restore


@pytest.fixture
def ids(tmp_path) -> Path:
    (tmp_path / "ids.json").write_text(json.dumps(PROMPT))
    return tmp_path / "ids.json"


@pytest.fixture
def saved(run, tiny_model, ids, tmp_path) -> Path:
    code, out, err = run("save", tmp_path / "s", "--model", tiny_model, "--tokens", ids, "--chunk-tokens", CHUNK)
    assert code == 0, err
    assert f"64 of {len(PROMPT)} tokens in 4 chunks" in out
    return tmp_path / "s"


@pytest.fixture
def restored(run, tiny_model, ids):
    """The report of `restore`, as JSON."""

    def one(*arguments, code: int = 0) -> dict:
        answer = run("restore", *arguments, "--model", tiny_model, "--tokens", ids, "--decode", 5, "--json")
        assert answer[0] == code, answer
        return json.loads(answer[1])

    return one


def test_what_is_saved_is_restored_with_the_same_bits(saved, restored):
    warm, cold = restored(saved), restored("--mode", "recompute", "--chunk-tokens", CHUNK)
    assert (warm["consumed"], warm["prefix_len"], warm["tokens_prefilled"]) == (True, 64, 6)
    assert (cold["consumed"], cold["prefix_len"], cold["tokens_prefilled"], cold["load_ms"]) == (False, 0, 70, None)
    assert len(warm["tokens"]) == 5
    for same in ("tokens", "text", "logits_sha256", "resident"):
        assert warm[same] == cold[same]


def test_verify_mode_compares_both_and_says_so(run, saved, restored, tiny_model, ids):
    said = restored(saved, "--mode", "verify")
    assert said["comparison"]["tokens_equal"] and said["comparison"]["max_abs_dlogit"] == 0
    code, out, _ = run("restore", saved, "--model", tiny_model, "--tokens", ids, "--mode", "verify", "--decode", 3)
    assert code == 0 and "restored 64 of 70 tokens" in out
    assert "cold and warm, compared at 3 tokens: the same tokens, the same logits" in out
    said = restored("--mode", "verify", "--chunk-tokens", CHUNK, code=2)  # nothing to compare is not equal
    assert said["comparison"] is None and said["reasons"][0]["code"] == "no_snapshot"


def test_auto_goes_cold_and_says_why_where_consume_refuses(run, saved, restored, tiny_model, ids):
    bad = changed(saved, "bad", payload_at(saved))
    said = restored(bad)
    assert not said["consumed"] and [one["code"] for one in said["reasons"]] == ["chunk_checksum"]
    assert said["tokens"] == restored(saved)["tokens"]
    refused_line(run("restore", bad, "--model", tiny_model, "--tokens", ids, "--mode", "consume"), "chunk_checksum")
    said = restored(saved, "--dtype", "bfloat16")
    assert not said["consumed"] and [one["code"] for one in said["reasons"]] == ["dtype"]
    said = restored(saved, "--salt", "tenant")
    assert not said["consumed"] and [one["code"] for one in said["reasons"]] == ["salt"]
    code, out, _ = run("restore", bad, "--model", tiny_model, "--tokens", ids, "--decode", 0)
    assert code == 0 and "restored nothing of 70 tokens\nbecause bad: " in out and "answer" not in out


def test_a_folder_of_snapshots_is_searched_for_the_longest(run, saved, restored, tiny_model, ids, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "long").write_bytes(saved.read_bytes())
    flags = ("--model", tiny_model, "--tokens", ids, "--chunk-tokens", CHUNK)
    assert run("save", folder / "short", *flags, "--upto", 40)[0] == 0
    (folder / ".being-written").write_bytes(b"")
    said = restored(folder)
    assert said["prefix_len"] == 64 and said["snapshot"].endswith("long")
    (folder / "long").write_bytes(b"no longer")
    assert restored(folder)["prefix_len"] == 32


def test_settings_are_those_of_the_snapshot_that_serves_the_prompt(run, saved, restored, tiny_model, ids, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    making.written(folder / "a")  # of another model, chunks of 4
    flags = ("--model", tiny_model, "--tokens", ids, "--chunk-tokens", 8)
    assert run("save", folder / "c", *flags, "--salt", "tenant")[0] == 0
    assert run("save", folder / "d", *flags, "--upto", 32, "--dtype", "bfloat16")[0] == 0
    half = Parts.of((folder / "d").read_bytes()).saying(identity__geometry__dtype="float16")  # nothing runs in it here
    (folder / "b").write_bytes(half.sealed())
    assert restored(folder)["snapshot"].endswith("d")
    (folder / "e").write_bytes(saved.read_bytes())
    said = restored(folder)
    assert (said["consumed"], said["prefix_len"]) == (True, 64) and said["snapshot"].endswith("e")
    assert restored(folder, "--dtype", "bfloat16")["prefix_len"] == 32


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, 0),
        ({"max_abs_dlogit": 1e-6}, 1),
        ({"max_abs_dlogit": float("nan")}, 1),
        ({"residency_equal": False}, 1),
        ({"tokens_equal": False, "first_divergence": 1}, 1),
    ],
)
def test_verify_mode_exits_by_every_bit_that_is_promised(change, code):
    from kvlab.cli.snapshot import verified
    from kvlab.kvstore.hf.comparison import RunComparison
    from kvlab.kvstore.restore import RestoreReport

    same = RunComparison(True, 0.0, None, None, True, 4)
    took = {"load_ms": 1.0, "prefill_ms": 1.0, "bytes_read": 1, "page_outs": 0, "page_ins": 0}
    report = RestoreReport("verify", True, 8, 1, **took, comparison=replace(same, **change), lossless=True)
    assert verified(report) == code
    tokens = int(not report.comparison.tokens_equal)
    assert verified(replace(report, lossless=False)) == verified(replace(report, other_numerics=("threads",))) == tokens
    assert verified(replace(report, comparison=None)) == 2


def test_a_small_pool_evicts_and_stays_the_cold_run(run, tiny_model, tmp_path):
    (tmp_path / "long.json").write_text(json.dumps([11 * n % 320 for n in range(200)]))
    flags = ("--model", tiny_model, "--tokens", tmp_path / "long.json")
    pool = ("--pool-tokens", 64, "--policy", "qk", "--chunk-tokens", 8)
    code, out, err = run("save", tmp_path / "p", *flags, *pool, "--upto", 192)
    assert code == 0 and "192 of 200 tokens in 24 chunks" in out, err
    code, out, _ = run("restore", tmp_path / "p", *flags, *pool, "--mode", "verify", "--decode", 5, "--json")
    said = json.loads(out)
    assert code == 0 and said["comparison"]["tokens_equal"] and said["comparison"]["residency_equal"]
    assert (said["prefix_len"], said["from_keys"], said["missing"]) == (192, 24, 0)
    assert len(said["resident"]) == 8 and said["page_outs"] > 0
    out = run("restore", tmp_path / "p", *flags, *pool)[1]
    assert "scored chunks: 24 from keys, 0 from the ledger, 0 missing" in out


def test_a_text_is_tokenised_by_the_model(run, tiny_model, tmp_path):
    (tmp_path / "text").write_text("kalo miren tusha vopel dri an " * 20, encoding="utf-8")
    flags = ("--model", tiny_model, "--text", tmp_path / "text")
    assert run("save", tmp_path / "s", *flags, "--chunk-tokens", CHUNK)[0] == 0
    code, out, _ = run("restore", tmp_path / "s", *flags, "--json", "--decode", 2)
    assert code == 0 and json.loads(out)["consumed"] and isinstance(json.loads(out)["text"], str)


@pytest.fixture
def recipe(tmp_path) -> Path:
    from kvlab.cache.files.recipe import write_recipe_file
    from kvlab.codecs.fp8 import Fp8Stream
    from kvlab.core.recipe import Recipe

    return write_recipe_file(tmp_path / "fp8.json", Recipe(k=Fp8Stream(), v=Fp8Stream()))


def test_a_lossy_payload_needs_its_evidence_or_whoever_asks_for_it(run, restored, tiny_model, ids, tmp_path, recipe):
    flags = ("--model", tiny_model, "--tokens", ids, "--chunk-tokens", CHUNK, "--recipe", recipe)
    assert run("save", tmp_path / "lossy", *flags)[0] == 0
    out = run("inspect", tmp_path / "lossy")[1]
    assert "lossy: recipe" in out and "K fp8, V fp8, pre_rope" in out and "evidence    none" in out
    assert run("verify", tmp_path / "lossy", "--model", tiny_model)[:2] == (0, f"{tmp_path / 'lossy'}: whole\n")
    assert [one["code"] for one in restored(tmp_path / "lossy")["reasons"]] == ["unproven"]
    said = restored(tmp_path / "lossy", "--unproven")
    assert said["consumed"] and said["lossless"] is False
    out = run("restore", tmp_path / "lossy", "--model", tiny_model, "--tokens", ids, "--unproven")[1]
    assert "the payload is lossy" in out
    proof = evidence(tmp_path / "proof", tiny_model, recipe)
    assert run("save", tmp_path / "proven", *flags, "--evidence", proof)[0] == 0
    assert restored(tmp_path / "proven")["consumed"]
    with read.open(tmp_path / "proven") as snapshot:
        assert list(snapshot.manifest.evidence) == [json.loads(proof.read_text())["evidence_id"]]
    assert run("diff", tmp_path / "lossy", tmp_path / "proven")[0] == 0  # evidence is a note


def evidence(out: Path, model: Path, recipe: Path, **other) -> Path:
    """Evidence of a recipe on a model, or of others."""
    from kvlab.cache.files.recipe import read_recipe_file
    from kvlab.gate.catalogue.rows import EVIDENCE
    from kvlab.gate.evidence import build
    from validation.gate.passing_case import valid_case

    found = valid_case()["rows"]["fp8"][EVIDENCE][0]
    ours = {"recipe_id": read_recipe_file(recipe).recipe.recipe_id, "model_hash": inputs.info_of(model).model_hash}
    fields = {name: value for name, value in found.items() if name != "evidence_id"}
    made = build(**fields | {"identity": found["identity"] | ours | other})
    out.write_text(made.model_dump_json())
    return out


def test_verify_with_another_recipe_says_that_it_could_not_decode(run, tiny_model, ids, tmp_path, recipe):
    from kvlab.cache.files.recipe import write_recipe_file
    from kvlab.codecs.fp8 import Fp8Stream
    from kvlab.core.codec_settings import IdentityStream
    from kvlab.core.recipe import Recipe

    flags = ("--model", tiny_model, "--tokens", ids, "--chunk-tokens", CHUNK, "--recipe", recipe)
    assert run("save", tmp_path / "coded", *flags)[0] == 0
    other = write_recipe_file(tmp_path / "k.json", Recipe(k=Fp8Stream(), v=IdentityStream()))
    verify = ("verify", tmp_path / "coded", "--model", tiny_model, "--recipe")
    assert run(*verify, recipe)[:2] == (0, f"{tmp_path / 'coded'}: whole\n")
    code, out, _ = run(*verify, other)
    assert code == 2 and "[codec]" in out and "checksum" not in out
    bad = changed(tmp_path / "coded", "bad", payload_at(tmp_path / "coded"))
    code, out, _ = run("verify", bad, "--model", tiny_model, "--recipe", other)
    assert code == 1 and "[codec]" in out and "[chunk_checksum]" in out


def test_evidence_of_something_else_is_not_stored(run, tiny_model, ids, tmp_path, recipe):
    flags = ("--model", tiny_model, "--tokens", ids, "--chunk-tokens", CHUNK)
    coded = (*flags, "--recipe", recipe)
    good = evidence(tmp_path / "good", tiny_model, recipe)
    (tmp_path / "edited").write_text(good.read_text().replace('"context_tokens":4096', '"context_tokens":128'))
    cases = {
        "on model weights": evidence(tmp_path / "model", tiny_model, recipe, model_hash="weights"),
        "evidence of recipe int": evidence(tmp_path / "recipe", tiny_model, recipe, recipe_id="int"),
        "is not the evidence that was written": tmp_path / "edited",
        "cannot read": tmp_path / "none",
        "no evidence": ids,
    }
    for words, file in cases.items():
        refused_line(run("save", tmp_path / "x", *coded, "--evidence", good, file), words)
    refused_line(run("save", tmp_path / "x", *flags, "--evidence", good), "stored as they are without --recipe")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), ["give the prompt once"]),
        (("--tokens", "{ids}", "--text", "{ids}"), ["give the prompt once"]),
        (("--tokens", "{folder}/none"), ["cannot read"]),
        (("--tokens", "{folder}/words"), ["no JSON list of token ids"]),
        (("--tokens", "{folder}/beyond"), ["token 320", "0 to 319"]),
        (("--text", "{folder}/bytes"), ["no UTF-8 text"]),
        (("--text", "{folder}/empty"), ["holds no text"]),
        (("--tokens", "{ids}", "--upto", "3"), ["do not fill one chunk"]),
        (("--tokens", "{ids}", "--upto", "71"), ["71"]),
        (("--tokens", "{ids}", "--chunk-tokens", "0"), ["chunk_tokens is 0"]),
        (("--tokens", "{ids}", "--pool-tokens", "64"), ["need"]),
        (("--tokens", "{ids}", "--policy", "best"), ["'best' is not known"]),
        (("--tokens", "{ids}", "--dtype", "int8"), ["'int8' is not known"]),
        (("--tokens", "{ids}", "--recipe", "{folder}/none"), ["cannot read"]),
    ],
)
def test_bad_input_of_save_is_one_line_and_nothing_is_written(run, tiny_model, ids, tmp_path, flags, words):
    (tmp_path / "words").write_text('["a"]')
    (tmp_path / "beyond").write_text("[1, 320]")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "empty").write_bytes(b"")
    chosen = [flag.format(ids=ids, folder=tmp_path) for flag in flags]
    refused_line(run("save", tmp_path / "s", "--model", tiny_model, *chosen), *words)
    assert not (tmp_path / "s").exists()


def test_bad_input_of_restore_is_one_line(run, saved, tiny_model, ids, tmp_path):
    refused_line(run("restore", saved, "--model", tmp_path, "--tokens", ids), "no config.json")
    refused_line(
        run("restore", saved, "--model", tiny_model, "--tokens", ids, "--mode", "maybe"), "'maybe' is not known"
    )
    refused_line(run("restore", saved, "--model", tiny_model, "--tokens", ids, "--decode", "-1"), "--decode")
    refused_line(run("restore", saved, "--model", tiny_model, "--text", tmp_path / "nothere"), "cannot read", "nothere")
    refused_line(
        run("restore", saved, "--model", tiny_model, "--tokens", tmp_path / "nothere"), "cannot read", "nothere"
    )
    refused_line(run("restore", "--model", tiny_model, "--tokens", ids, "--mode", "consume"), "no snapshot")
    refused_line(run("verify"), "FILE")
    refused_line(run("diff", saved), "FILE")


def test_names_that_the_flags_know_are_those_of_the_library():
    from kvlab.kvstore.paging.residency import MAKERS
    from kvlab.kvstore.restore import MODES

    known = (snapshot_verbs.POLICIES, snapshot_verbs.MODES)
    assert known == (tuple(MAKERS), MODES)
    assert set(snapshot_verbs.UNJUDGED) <= set(Code)


# ------------------------------------------------------------------------------ the documentation


def masked(text: str) -> str:
    """Without what is another in every run, or with every version: digests, sizes, times, and the model's words."""
    return re.sub(r"\b[0-9a-f]{64}\b|\d+ bytes|[\d.]+ ms|(?m:^answer: .*$)", "…", text)


ELSEWHERE = re.compile("import LLM|kvstore.lmcache")  # blocks of docs that tests/kvstore runs: in vLLM, in LMCache


@pytest.mark.full
def test_the_example_of_the_documentation_runs_as_it_stands_there(run, root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(root / "models")
    ran, names = 0, {}

    def python(body: str) -> None:
        if not ELSEWHERE.search(body):
            exec(body, names)

    for words, code, shown in examples(root / "docs/snapshots.md", python):
        found, out, err = run(*shlex.split(words, comments=True)[2:])
        assert (words[:15], found, err, masked(out)) == ("kvlab snapshot ", code, "", masked(shown)), words
        ran += 1
    assert ran >= 6 and names["found"].verdict.outcome == "pass" and names["done"].report.prefix_len == 64


def test_the_documentation_names_every_verb_and_only_flags_that_there_are(root):
    text = (root / "docs/snapshots.md").read_text()
    assert set(re.findall(r"kvlab snapshot (\w+)", text)) == {*snapshot_verbs.SNAPSHOT}
    declared = {flag for verb in snapshot_verbs.SNAPSHOT.values() for flag in flags_of(verb)}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) - declared == {"--kv-transfer-config"}  # vLLM's own
