"""vLLM as it comes: its model in another process, bfloat16, its own salt, answers saved, and too few blocks."""

from __future__ import annotations

import time

import pytest
from tokenizers import Tokenizer

from kvlab.kvstore.snapshot import read
from kvlab.kvstore.snapshot.identity import identity_of
from kvstore.vllm.conftest import CHUNK, whole
from kvstore.vllm.served import Engine

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
BLOCKS = 30  # of 32 tokens: three of the prompts


@pytest.fixture(scope="module")
def own(nursery, reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own") / "snapshots"
    one = Engine(
        nursery, reference, folder, {"chunk_tokens": CHUNK, "save": "answer"}, processes=True, dtype="bfloat16",
        block_size=32, enable_prefix_caching=False, num_gpu_blocks_override=BLOCKS, disable_log_stats=False,
        max_model_len=512, skip_tokenizer_init=False,
    )  # fmt: skip
    yield one
    one.close()


def counter(engine: Engine, name: str) -> float:
    found = [value for key, value in engine.ask("measure").items() if key.endswith(name)]
    assert len(found) == 1, name
    return found[0]


def test_bfloat16_gives_the_same_tokens_though_requests_are_preempted(own, prompts):
    prompts = prompts[::2]
    cold = own.cold(*prompts, n=48)
    assert counter(own, "external_prefix_cache_hits") == 0 and counter(own, "num_preemptions") > 0
    first = own.generate(*prompts, n=48)  # those that are preempted go on from their own snapshots
    hits = counter(own, "external_prefix_cache_hits")
    warm = own.generate(*prompts, n=48)
    assert first["tokens"] == warm["tokens"] == cold["tokens"]
    assert all(said["restored"] >= whole(prompt) for said, prompt in zip(warm["said"], prompts, strict=True))
    assert counter(own, "external_prefix_cache_hits") - hits >= sum(map(whole, prompts))  # counted by vLLM itself


def test_an_answer_is_saved_with_its_prompt(own, prompts):
    own.empty()
    cold = own.generate(prompts[0], n=40)
    history = [*prompts[0], *cold["tokens"][0]]
    asked = len(prompts[0]) // CHUNK * CHUNK
    answered = (len(history) - 1) // CHUNK * CHUNK  # of the last token K and V were never computed
    assert asked < answered
    assert awaited(own, history, answered) == {asked: "prefill", answered: "prefill, decode"}
    goes_on = [*history, 5, 6, 7]
    warm = own.generate(goes_on)
    assert warm["said"][0]["restored"] == answered and warm["tokens"] == own.cold(goes_on)["tokens"]


def test_an_answer_that_ends_on_a_stop_string_is_saved_too(own, reference, prompts):
    own.empty()
    cold = own.cold(prompts[1], n=60)["tokens"][0]
    tokenizer = Tokenizer.from_file(str(reference / "tokenizer.json"))
    said, length = tokenizer.decode(cold), len(prompts[1])
    stop = next(said[at : at + 8] for at in range(len(said) // 2, len(said)) if said.find(said[at : at + 8]) == at)
    ended = own.generate(prompts[1], n=60, stop=[stop])
    answer = ended["tokens"][0]
    assert CHUNK < len(answer) < 60 and cold[: len(answer)] == answer and ended["said"] == [None]
    answered = (length + len(answer) - 1) // CHUNK * CHUNK
    assert answered in awaited(own, [*prompts[1], *answer], answered)


def awaited(engine: Engine, history: list[int], length: int) -> dict[int, str]:
    """How the snapshots of a history's beginning were computed, by length, when that of a length has come."""
    deadline = time.monotonic() + 60
    while length not in (found := computed(engine, history)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def computed(engine: Engine, history: list[int]) -> dict[int, str]:
    """Those of others may still be on their way."""
    found = {}
    for path in engine.files():
        if not path.name.startswith("."):
            with read.open(path) as snapshot:
                if list(snapshot.tokens) == history[: snapshot.length]:
                    found[snapshot.length] = snapshot.manifest.made["computed"]
    return found


def test_what_it_saves_is_its_own(own, info, prompts):
    own.empty()
    name = own.generate(prompts[1])["said"][0]["saved"]
    with read.open(own.folder / name) as snapshot:
        reasons = snapshot.check(identity_of(info, "bfloat16", CHUNK))
        assert [str(code) for code, _ in reasons] == ["salt"]
        assert snapshot.manifest.made["engine"] == "vllm" and snapshot.manifest.made["across_engines"] == "no"
