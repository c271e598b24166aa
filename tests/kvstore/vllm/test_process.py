"""A new process with other settings: vLLM's prefix cache, large blocks, prompts cut over several steps."""

from __future__ import annotations

import shutil

import pytest

from kvstore.vllm.conftest import CHUNK, whole
from kvstore.vllm.served import Engine

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
BLOCK = 64


@pytest.fixture(scope="module")
def answers(engine, prompts):
    """What the first process answers, cold, and the snapshots that it leaves."""
    engine.empty()
    return engine.generate(*prompts, n=64)


@pytest.fixture(scope="module")
def second(engine, answers, nursery, reference, tmp_path_factory):
    """Another process over a copy of the first one's snapshots."""
    folder = tmp_path_factory.mktemp("second") / "snapshots"
    shutil.copytree(engine.folder, folder)
    one = Engine(
        nursery, reference, folder, {"chunk_tokens": CHUNK, "across_engines": True}, block_size=BLOCK,
        enable_prefix_caching=True, max_num_batched_tokens=96, max_num_seqs=4,
    )  # fmt: skip
    yield one
    one.close()


@pytest.fixture(autouse=True)
def nothing_cached(second):
    assert second.ask("forget")["reset"]


def damage(path) -> None:
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)


def test_a_new_process_answers_as_the_first_did(second, answers, prompts):
    warm = second.generate(*prompts, n=64)
    assert warm["tokens"] == answers["tokens"]
    assert warm["counts"]["tokens_loaded"] == sum(map(whole, prompts)) and warm["counts"]["loads"] == 20
    assert warm["counts"]["saves"] == 0 and warm["counts"]["failed"] == {}


def test_what_its_own_cache_holds_is_not_loaded_again(second, answers, prompts):
    prompt = prompts[19]
    second.cold(prompt[:130])
    warm = second.generate(prompt, n=64)
    assert warm["tokens"] == answers["tokens"][19:]
    assert warm["counts"]["tokens_loaded"] == whole(prompt) - 2 * BLOCK and warm["cached"] == [whole(prompt)]
    again = second.generate(prompt[: 3 * BLOCK + 5])
    assert again["counts"]["loads"] == 0 and again["cached"] == [3 * BLOCK]
    assert [code for code, _ in again["said"][0]["reasons"]] == ["prefix_cached"]


def test_what_was_restored_is_in_its_own_cache(second, prompts):
    second.generate(prompts[18])
    again = second.cold(prompts[18])
    assert again["counts"]["loads"] == 0 and again["cached"] == [whole(prompts[18]) // BLOCK * BLOCK]


def test_a_prompt_over_several_steps_is_saved_once_and_whole(second, answers, prompts):
    shutil.rmtree(second.folder)
    cold = second.generate(prompts[17], n=64)
    assert cold["tokens"] == answers["tokens"][17:18]
    assert (cold["counts"]["saves"], cold["counts"]["tokens_saved"]) == (1, len(prompts[17]) // CHUNK * CHUNK)
    assert second.ask("forget")["reset"]
    warm = second.generate(prompts[17], n=64)
    assert warm["tokens"] == answers["tokens"][17:18] and warm["counts"]["tokens_loaded"] == whole(prompts[17])


def test_damage_that_two_requests_share_reaches_neither(second, answers, prompts):
    """The second finds the first one's blocks in vLLM's cache before their load has failed."""
    shutil.rmtree(second.folder, ignore_errors=True)
    prompt = prompts[5][:90]
    cold = second.generate(prompt, n=24)
    assert second.ask("forget")["reset"]
    (path,) = second.files()
    good = path.read_bytes()
    damage(path)
    again = second.generate(prompt, prompt, n=24)
    assert again["tokens"] == 2 * cold["tokens"]
    assert again["counts"]["failed"]["chunk_checksum"] >= 1 and again["counts"]["tokens_loaded"] == 0
    assert path.read_bytes() == good


def test_damage_under_a_prompt_of_several_steps(second, answers, prompts):
    shutil.rmtree(second.folder, ignore_errors=True)
    second.generate(prompts[16][:200])
    assert second.ask("forget")["reset"]
    (path,) = second.files()
    damage(path)
    again = second.generate(prompts[16], n=64)
    assert again["tokens"] == answers["tokens"][16:17] and again["counts"]["failed"] == {"chunk_checksum": 1}
    assert second.ask("forget")["reset"]
    warm = second.generate(prompts[16], n=64)
    assert warm["tokens"] == answers["tokens"][16:17] and warm["counts"]["tokens_loaded"] == whole(prompts[16])
