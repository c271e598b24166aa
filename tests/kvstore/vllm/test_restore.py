"""A restored request of vLLM is the cold one: token for token, proven by what the worker counted."""

from __future__ import annotations

import pytest
import torch

from kvlab.kvstore.paging.ledger import Ledger
from kvlab.kvstore.snapshot import read
from kvlab.kvstore.snapshot.identity import ContextIdentity
from kvlab.kvstore.snapshot.write import SnapshotSource, save
from kvstore.vllm.conftest import CHUNK, whole

pytestmark = [pytest.mark.nightly, pytest.mark.engine]


@pytest.fixture(autouse=True)
def empty_folder(engine):
    engine.empty()


def gap(ours: dict, theirs: dict) -> float:
    """Largest difference of two runs' logits."""
    return (torch.tensor(ours["logits"]) - torch.tensor(theirs["logits"])).abs().max().item()


def codes(answer: dict) -> list[str]:
    (said,) = answer["said"]
    return [code for code, _ in said["reasons"]]


def test_twenty_prompts_give_the_same_sixty_four_tokens(engine, prompts):
    cold = engine.generate(*prompts, n=64)
    assert cold["counts"]["loads"] == 0 and cold["counts"]["saves"] == 20
    assert all(said["restored"] == 0 and said["saved"] for said in cold["said"])
    warm = engine.generate(*prompts, n=64)
    assert warm["tokens"] == cold["tokens"]
    assert warm["counts"]["tokens_loaded"] == sum(map(whole, prompts)) and warm["counts"]["loads"] == 20
    assert warm["cached"] == [said["restored"] for said in warm["said"]] == [whole(p) for p in prompts]
    assert warm["counts"]["saves"] == 0 and warm["counts"]["failed"] == {}
    assert len({tuple(tokens) for tokens in cold["tokens"]}) > 15  # the answers are about their prompts
    assert gap(cold, warm) < 1e-4


def test_an_edited_history_reuses_what_it_shares(engine, prompts):
    first, other = prompts[3], prompts[4]
    engine.generate(first)
    edited = [*first[:100], *other[:60]]
    cold, warm = engine.cold(edited), engine.generate(edited)
    assert warm["tokens"] == cold["tokens"] and warm["said"][0]["restored"] == 96
    assert warm["counts"]["bytes_read"] > 0 and warm["counts"]["tokens_saved"] == 160


def test_a_conversation_grows_from_snapshot_to_snapshot(engine, prompts):
    history, loaded, saved = prompts[0][:90], [], []
    for turn in range(4):
        warm, cold = engine.generate(history, n=20), engine.cold(history, n=20)
        assert warm["tokens"] == cold["tokens"]
        loaded.append(warm["counts"]["tokens_loaded"])
        saved.append(len(history) // CHUNK * CHUNK)
        history = [*history, *warm["tokens"][0], *prompts[1][17 * turn : 17 * turn + 17]]
    assert loaded == [0, *saved[:-1]] and saved == [80, 112, 160, 192]


def test_a_prompt_that_ends_where_its_snapshot_does_computes_its_last_chunk(engine, prompts):
    exact = prompts[5][: 8 * CHUNK]
    cold, warm = engine.generate(exact), engine.generate(exact)
    assert cold["counts"]["tokens_saved"] == 8 * CHUNK and warm["counts"]["tokens_loaded"] == 7 * CHUNK
    assert warm["tokens"] == cold["tokens"]


def test_attention_reads_what_was_loaded(engine, prompts):
    """The control: heads exchanged, under the right name and the right checksums, change the answer."""
    prompt = prompts[6]
    cold = engine.generate(prompt)
    (path,) = engine.files()
    with read.open(path) as snapshot:
        chunks = [chunk.flip(2).contiguous() for chunk in snapshot.load()]
        source = SnapshotSource(snapshot.manifest.identity, chunks, snapshot.ledger, snapshot.tokens)
    save(path, source)
    warm = engine.generate(prompt)
    assert warm["counts"]["loads"] == 1 and warm["said"][0]["reasons"] == []
    assert gap(cold, warm) > 0.1


def test_a_snapshot_is_saved_again_as_the_same_bytes(engine, prompts):
    engine.generate(prompts[7])
    (path,) = engine.files()
    before = path.read_bytes()
    path.unlink()
    engine.generate(prompts[7])
    assert engine.files() == [path] and path.read_bytes() == before


def test_equal_prompts_at_once_are_saved_once(engine, prompts):
    cold = engine.generate(*8 * [prompts[7]])
    assert cold["counts"]["saves"] == 1 and {said["saved"] for said in cold["said"]} == {engine.files()[0].name}
    warm = engine.generate(*8 * [prompts[7]])
    assert warm["tokens"] == cold["tokens"] and warm["counts"]["loads"] == 8


def test_the_longest_of_several_is_taken_and_a_contained_prompt_is_not_saved_again(engine, prompts):
    long = prompts[8]
    engine.generate(long[:64])
    engine.generate(long)
    assert len(engine.files()) == 2
    warm = engine.generate(long[:150])
    assert warm["counts"]["tokens_loaded"] == 144 and warm["counts"]["saves"] == 0 and len(engine.files()) == 2


@pytest.mark.parametrize(
    ("wish", "code"),
    [
        ({"asks": {"restore": False}}, "unwanted"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"salt": "another tenant"}, "salt"),
    ],
)
def test_requests_that_are_not_restored_say_why(engine, prompts, wish, code):
    cold = engine.generate(prompts[9])
    again = engine.generate(prompts[9], **wish)
    assert codes(again) == [code] and again["counts"]["loads"] == 0 and again["cached"] == [0]
    assert again["tokens"] == cold["tokens"]


def test_a_salted_request_finds_its_own(engine, prompts):
    engine.generate(prompts[9], salt="one")
    assert engine.generate(prompts[9], salt="one")["said"][0]["restored"] == whole(prompts[9])
    assert codes(engine.generate(prompts[9], salt="two")) == ["salt"]
    assert codes(engine.generate(prompts[9])) == ["salt"] and len(engine.files()) == 3


def test_a_prompt_without_a_whole_chunk_is_neither_saved_nor_restored(engine, prompts):
    for _ in range(2):
        assert codes(engine.generate(prompts[0][:CHUNK])) == ["too_short"]
    assert len(engine.files()) == 1  # one whole chunk was saved, and one token more is needed to use it
    engine.empty()
    engine.generate(prompts[0][: CHUNK - 1])
    assert engine.files() == []


def test_a_request_that_ends_in_its_first_step_is_counted_by_the_worker(engine, prompts):
    engine.generate(prompts[2], n=1)
    warm = engine.generate(prompts[2], n=1)
    assert warm["said"][0]["restored"] is None  # it had ended when the worker was heard
    assert warm["counts"]["tokens_loaded"] == warm["cached"][0] == whole(prompts[2])


def test_what_the_manifest_says(engine, prompts):
    engine.generate(prompts[2])
    with read.open(engine.files()[0]) as snapshot:
        made, identity = snapshot.manifest.made, snapshot.manifest.identity
        assert snapshot.verify() == [] and snapshot.manifest.lossless
        assert isinstance(snapshot.ledger, Ledger) and len(snapshot.ledger.resident) == len(snapshot.records)
    assert made["engine"].endswith("vllm") and "cpu" in made["device"] and "vllm" in made
    assert made["computed"] == "prefill"
    assert made["block_tokens"] == "32" and made["across_engines"] == "yes" and "CPU_ATTN" in made["attention"]
    assert isinstance(identity, ContextIdentity) and identity.salt == "" and identity.geometry.chunk_tokens == CHUNK


def test_the_cache_cannot_be_reset_while_snapshots_serve_it(engine):
    assert engine.ask("forget", connector=True)["reset"] is False
