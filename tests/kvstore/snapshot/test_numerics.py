"""What two manifests say of the last bits of their numbers, and what is said of one after the other."""

from __future__ import annotations

import pytest

from kvlab.kvstore.snapshot.numerics import differing, mixed

HERE = {
    "engine": "transformers",
    "attention": "sdpa",
    "device": "cpu AVX2",
    "threads": "2",
    "order": "logical",
    "torch": "2.13",
    "transformers": "5.19",
    "vllm": "0.32",
    "numpy": "2.4",
}


def test_what_does_not_touch_a_number_is_not_compared():
    assert differing(HERE, HERE) == () and mixed(HERE, HERE) == HERE
    other = HERE | {"vllm": "0.33", "numpy": "2.5", "scored_at": "80", "computed": "prefill"}
    assert differing(other, HERE) == ()
    assert differing({name: HERE[name] for name in HERE if name != "order"}, HERE) == ()


@pytest.mark.parametrize("name", ["engine", "attention", "device", "threads", "order", "torch", "transformers"])
def test_what_may_touch_one(name):
    assert differing(HERE | {name: "another"}, HERE) == (name,)
    assert mixed(HERE | {name: "another"}, HERE) == HERE | {name: f"another, then {HERE[name]}"}


def test_decoded_tokens_and_what_is_not_said():
    assert differing(HERE | {"computed": "prefill, decode"}, HERE) == ("computed",)
    silent = {name: HERE[name] for name in HERE if name != "threads"}
    assert differing(silent, HERE) == differing(HERE, silent) == ("threads",)
    assert mixed(silent, HERE)["threads"] == "unknown, then 2"


def test_the_version_is_that_of_the_engine_that_runs():
    ours = HERE | {"engine": "vllm"}
    assert differing(ours | {"transformers": "6"}, ours) == () and differing(ours | {"vllm": "1"}, ours) == ("vllm",)
    after = mixed(HERE, ours)
    assert differing(HERE | {"vllm": "1"}, after) == ("engine", "vllm")


def test_it_does_not_grow_with_every_turn():
    vllm, turn = HERE | {"engine": "vllm"}, HERE
    for _ in range(5):
        turn = mixed(mixed(turn, vllm), HERE)
    assert turn["engine"] == "vllm, then transformers"
    assert mixed(HERE, mixed(HERE, vllm))["engine"] == "transformers, then vllm"
