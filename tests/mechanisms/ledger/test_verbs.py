"""`kvlab ledger`: what a person types, and what it answers."""

from __future__ import annotations

import json
from functools import partial

import pytest

from kvlab_mechanisms.ledger import log
from kvlab_mechanisms.ledger.jobs import enter, entry_of

pytestmark = pytest.mark.full


@pytest.fixture
def run(line, tmp_path, monkeypatch):
    """Exit code, stdout and stderr of a verb, in a folder with a log of three jobs."""
    monkeypatch.chdir(tmp_path)
    for n in range(3):
        (tmp_path / f"made{n}").write_text(str(n))
    enter([entry_of(f"rule n={n}", [], [f"made{n}"], []) for n in range(3)])
    return partial(line, "ledger")


def test_a_log_from_its_first_checkpoint_to_a_proof(run, tmp_path):
    assert run("verify") == (0, "results/ledger/log.jsonl: 3 entries; there is no checkpoint yet\n", "")
    code, out, _ = run("checkpoint")
    assert code == 0 and "3 entries, 3 of them new, root" in out
    code, out, _ = run("verify", "--files")
    assert code == 0 and "of which 3 are those of the checkpoint\n3 of 3 files" in out
    assert run("prove", "made1", "--out", "proof.json")[0] == 0
    log.LOG.unlink()
    assert run("verify", "--proof", "proof.json") == (
        0,
        "entry of rule n=1 is in the log of 3 entries: it made made1\n",
        "",
    )
    said = json.loads((tmp_path / "proof.json").read_text())
    for change in ({"number": 0}, {"entry": said["entry"].replace("made1", "made9")}, {"path": []}):
        (tmp_path / "proof.json").write_text(json.dumps(said | change))
        code, _, err = run("verify", "--proof", "proof.json")
        assert code == 1 and "does not prove its entry to be in the log" in err
    for text in ("{}", json.dumps(said | {"path": ["x"]}), json.dumps(said | {"number": True})):
        (tmp_path / "proof.json").write_text(text)
        assert run("verify", "--proof", "proof.json")[0] == 2


def test_what_is_other_is_told_in_a_line(run, tmp_path):
    run("checkpoint")
    (tmp_path / "made2").write_text("by hand")
    code, out, _ = run("verify", "--files")
    assert code == 1 and out.endswith("2 of 3 files that are there are what their last job left\nmade2 is another\n")
    assert "made2 is not what entry 2 wrote" in run("prove", "made2", "--out", "proof.json")[2]
    whole = log.LOG.read_bytes()
    log.LOG.write_bytes(whole[:-5])
    code, out, err = run("verify")
    assert (code, out) == (1, "") and "has 2 entries, the checkpoint 3: its end was cut" in err
    log.LOG.write_bytes(whole + b'{"job"')
    code, out, _ = run("verify")
    assert code == 0 and "its last line was cut short after 6 bytes" in out
    assert run("checkpoint")[0] == 2
    log.LOG.write_bytes(whole.replace(b"made0", b"made7"))
    for verb in (("verify",), ("checkpoint",), ("prove", "made1", "--out", "proof.json")):
        code, _, err = run(*verb)
        assert code == 1 and "an entry was changed, moved, put in or taken out" in err
    assert not (tmp_path / "proof.json").exists()


def test_a_checkpoint_that_is_named_has_to_be_there(run):
    code, _, err = run("verify", "--checkpoint", "elsewhere.json")
    assert code == 2 and "cannot read elsewhere.json: no such file" in err
    code, _, err = run("verify", "--proof", "made0")
    assert code == 2 and "a proof is held against a checkpoint, and there is no results/ledger" in err
    assert run("checkpoint", "--checkpoint", "elsewhere.json")[0] == 0
    assert run("verify", "--checkpoint", "elsewhere.json")[0] == 0


def test_a_file_is_held_against_its_schema(run, tmp_path):
    (tmp_path / "params.yaml").write_text("models: []\nbits: many\n")
    code, out, err = run("check", "params.yaml")
    assert (
        (code, out) == (2, "") and "params.yaml: bits is 'many'" in err and "params.yaml: models is [], allowed" in err
    )
    code, _, err = run("check", "made1")
    assert code == 2 and "made1 has no contract" in err


def test_a_key_signs_the_checkpoint(run, tmp_path):
    (tmp_path / "key").write_bytes(b"k" * 32)
    (tmp_path / "other").write_bytes(b"l" * 32)
    assert run("verify", "--key", "key")[0] == 2
    assert run("checkpoint", "--key", "key")[0] == 0
    assert run("verify", "--key", "key")[0] == 0
    assert run("verify")[0] == 0
    code, _, err = run("verify", "--key", "other")
    assert code == 1 and "not signed with this key" in err


def test_a_signature_is_neither_lost_nor_given_to_what_another_key_signed(run, tmp_path):
    (tmp_path / "key").write_bytes(b"k" * 32)
    (tmp_path / "other").write_bytes(b"l" * 32)
    run("checkpoint", "--key", "key")
    signed = (tmp_path / log.FOLDER / "checkpoint.json").read_bytes()
    code, _, err = run("checkpoint")
    assert code == 2 and "is signed, and the next one would not be; give its --key" in err
    code, _, err = run("checkpoint", "--key", "other")
    assert code == 1 and "not signed with this key" in err
    assert (tmp_path / log.FOLDER / "checkpoint.json").read_bytes() == signed
    assert run("checkpoint", "--key", "key")[0] == 0


def test_a_proof_of_what_is_no_text_is_none(run, tmp_path):
    run("checkpoint")
    run("prove", "made1", "--out", "proof.json")
    forged = json.loads((tmp_path / "proof.json").read_text()) | {"entry": "\ud800"}
    (tmp_path / "proof.json").write_text(json.dumps(forged))
    code, _, err = run("verify", "--proof", "proof.json")
    assert code == 2 and "is no proof" in err and err.count("\n") == 1


def test_without_a_log_there_is_one_line(run):
    log.LOG.unlink()
    code, _, err = run("verify")
    assert code == 2 and "cannot read the ledger results/ledger/log.jsonl: No such file" in err
