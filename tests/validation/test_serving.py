"""Serving from coded pages as it is measured: planted faults of a server are found, and the page says the numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvlab.cache.files.calibration import read_header
from kvlab.core.errors import CapabilityError, MixedIdentity, NonFinite
from refusals import refused
from validation.serving import arm as arm_module
from validation.serving import of_run, page, quality, soak, study
from validation.serving.quality import relative_difference
from validation.serving.soak import SoakRequest, compare, requests

TEXT = list(range(3000))


def test_requests_share_beginnings_and_some_are_cancelled():
    found = requests(TEXT, 200, seed=3)
    assert found == requests(TEXT, 200, seed=3) != requests(TEXT, 200, seed=4)
    assert all(1 <= len(one.ids) <= soak.LONGEST and 1 <= one.most <= soak.MOST for one in found)
    assert 10 < sum(one.cancelled is not None for one in found) < 50
    begins = [one.ids[:32] for one in found if len(one.ids) >= 32]
    assert len(begins) - len(set(begins)) > 20


class Server:
    """As `soak.SteppedEngine`: what each request is told alone, and how far its first token leads."""

    preemptions, shared = 2, 64

    def __init__(self, answers, lead=1.0, leaks=0):
        self.answers, self.lead, self.leaks = answers, lead, leaks

    def alone(self, asked):
        ids = self.answers[asked.name]
        places = [{0: SimpleNamespace(logprob=-0.5), 1: SimpleNamespace(logprob=-0.5 - self.lead)} for _ in ids]
        return SimpleNamespace(token_ids=ids, logprobs=places)

    def leaked(self):
        return self.leaks


def compared(together, **kwargs):
    asked = [SoakRequest(name, (1, 2), 3, None) for name in "abc"]
    answers = {name: SimpleNamespace(token_ids=ids) for name, ids in together.items()}
    return compare(Server({"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]}, **kwargs), asked, answers)


def test_an_answer_that_others_changed_is_found():
    found = compared({"a": [1, 2, 3], "b": [4, 0, 6]})
    assert (found.equal, found.tied, found.cancelled) == (1, 0, 1)
    assert found.different == ["request b (2 tokens): token 1 is 0, alone 5, which leads by 1.0e+00 nats"]


def test_a_tie_is_counted_apart_and_so_is_a_leak():
    found = compared({"a": [1, 2, 3], "b": [4, 0, 6], "c": [7, 8, 9]}, lead=soak.TIE / 2, leaks=3)
    assert (found.equal, found.tied, found.different) == (2, 1, [])
    assert found.leaked > 0 and (found.preemptions, found.shared) == (2, 64)


def test_a_difference_of_losses_is_relative_and_has_an_interval():
    found = relative_difference([0.1, 0.2, 0.3, 0.4], [0.11, 0.22, 0.33, 0.44], [0, 1, 2, 3])
    assert found.value == pytest.approx(0.1) and found.low == pytest.approx(0.1) == pytest.approx(found.high)


def test_windows_of_one_document_are_no_more_than_it_is():
    """Each window twice, of the same document: twice the windows, and the interval of the documents."""
    loss, other = [0.1, 0.2, 0.3, 0.5], [0.12, 0.18, 0.33, 0.52]
    once, twice = (relative_difference(loss * times, other * times, [0, 1, 2, 3] * times) for times in (1, 2))
    assert (twice.value, twice.low, twice.high) == pytest.approx((once.value, once.low, once.high))
    assert (twice.n_documents, twice.n_windows) == (4, 8)


def test_windows_are_taken_in_turn():
    assert quality.in_turn([2, 0, 1, 3]) == [(0, 0), (2, 0), (3, 0), (0, 1), (3, 1), (3, 2)]


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """A comparison that measures nothing: pages lose a hundredth more, window by window."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "own.kv").write_bytes(b"recipe")
    asked = []

    def cut(model, first, count):
        asked.append((first, count))
        return list(range(first, first + count)), [[number] for number in range(first, first + count)]

    def measured(model, recipe, texts, dtype):
        loss = [0.1 + 0.01 * ids[0] for ids in texts]
        return {"in_forward": loss, "pages": [1.01 * x for x in loss], "perturbed": [0.0], "apart": loss}

    monkeypatch.setattr(quality, "cut", cut)
    monkeypatch.setattr(quality, "measured", measured)
    return asked


def test_windows_of_several_calls_are_those_of_one(stand_in, tmp_path):
    once = quality.compared(tmp_path, tmp_path / "own.kv", 6)
    for count in (2, 4):
        added = quality.compared(tmp_path, tmp_path / "own.kv", count, tmp_path / "kept.json")
    assert stand_in == [(0, 6), (0, 2), (2, 4)]
    assert added | {"perturbed": []} == once | {"perturbed": []}
    assert (added["state"], added["windows"]) == ("equivalent", 6)


def test_windows_of_another_recipe_are_not_added_to(stand_in, tmp_path):
    quality.compared(tmp_path, tmp_path / "own.kv", 2, tmp_path / "kept.json")
    (tmp_path / "own.kv").write_bytes(b"another")
    with refused(MixedIdentity, None, "recipe"):
        quality.compared(tmp_path, tmp_path / "own.kv", 2, tmp_path / "kept.json")


def arm(tokens: int, slower: float, kl: float | None = None) -> dict:
    return {
        "tokens": tokens,
        "kl": kl,
        "batches": [{"batch": size, "prefill": 0.5, "step": 0.01 * size * slower} for size in (1, 8)],
        "small_tokens": tokens // 10,
        "returning": {"seconds": 2.0 / slower, "cached": 0.25},
        "crowd": {"seconds": 4.0 * slower, "preemptions": 3},
    }


def data(**arms) -> dict:
    return {
        "model": {"name": "m", "disclosure": "dequantised"},
        "machine": {"processor": "p", "cores": 2, "system": "s"},
        "versions": {"vllm": "0.32.0"},
        "load": 1.5,
        "dtype": "bfloat16",
        "threads": "1",
        "settings": dict.fromkeys(
            (
                *("context", "scored", "windows", "prompt", "steps", "small", "document", "documents", "answer"),
                *("crowd", "crowd_prompt", "crowd_tokens"),
            ),
            7,
        ),
        "arms": {"bf16": arm(1000, 1.0, 0.0)} | arms,
    }


def test_the_page_says_what_is_won_and_what_is_lost(tmp_path):
    page.write(data(klt2=arm(7900, 4.0, 0.0123), turboquant={"tokens": 1, "kl": 9.5}), tmp_path)
    said = (tmp_path / "CAPACITY.md").read_text()
    assert "`klt2` holds 7.9 times bf16's tokens; a step takes 4.0 to 4.0 times as long" in said
    assert "an answer is 4.0 times as fast" in said and "all are done 4.0 times as slow" in said
    assert "| klt2 | 7900 | 7.90 | 0.0123 |" in said and "dequantised" in said
    assert "`turboquant` starts, says nothing, and answers 9.50 nats per token from bf16: corrupt" in said


class Engine:
    """As vLLM's, of which two requests share a prefill step and a third one comes later; each step costs its number."""

    def __init__(self, clock):
        self.clock, self.steps, self.aborted = clock, 0, None

    def add_request(self, *given):
        pass

    def abort_request(self, names):
        self.aborted = names

    def step(self):
        self.steps += 1
        self.clock[0] += self.steps
        there = ["3-0", "3-1"] if self.steps < 3 else ["3-0", "3-1", "3-2"]
        return [SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[1])]) for name in there]


def test_a_prefill_ends_with_the_last_first_token_and_a_step_is_a_median(monkeypatch):
    clock = [0]
    monkeypatch.setattr(arm_module.time, "process_time", lambda: clock[0])
    monkeypatch.setattr(arm_module, "sampling", lambda tokens: None)
    engine = Engine(clock)
    found = arm_module.timed(engine, [[1], [2], [3]], steps=3)
    assert found == {"batch": 3, "prefill": 1 + 2 + 3, "step": 5} and len(engine.aborted) == 3


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"refused": "ValueError: no"}, "does not start: ValueError: no"),
        ({"tokens": 1, "kl": None}, "gives logits that are not finite"),
        ({"tokens": 1, "kl": 0.02}, "0.0200 nats per token from bf16"),
    ],
)
def test_what_became_of_vllms_own_dtypes_is_said(found, said):
    assert said in page.upstream("x", found)


@pytest.mark.parametrize("load", ["batches", "crowd"])
def test_a_cache_of_either_size_that_does_not_start_is_refused_with_the_engine_s_words(monkeypatch, tmp_path, load):
    monkeypatch.setattr(study, "made", lambda *given: {"small": 1})
    answer = {True: {"refused": "ValueError: no page is left"}, False: {"tokens": 1}}
    monkeypatch.setattr(study, "run", lambda arm, task, folder: answer[load in task["loads"]])
    with refused(CapabilityError, None, "bf16: ValueError: no page is left"):
        study.study(tmp_path, [], tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("ratio", "said"), [(2.0, "2.0 times as fast"), (0.25, "4.0 times as slow"), (1.04, "as fast"), (0.96, "as fast")]
)
def test_a_ratio_is_said_in_words(ratio, said):
    assert page.times(ratio) == said


def test_a_number_that_is_none_is_not_written(tmp_path):
    with pytest.raises(NonFinite):
        page.write(data(klt2=arm(7900, float("nan"), 0.01)), tmp_path)
    assert not (tmp_path / "CAPACITY.md").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("stage", ["capacity", "service"])
def test_a_stage_serves_the_codecs_of_the_gates_rows_as_people_serve_them(stage, tiny_params, tmp_path, monkeypatch):
    """`klt` after its rotary embedding; tokens are exact beside it, but where requests are too short for that."""
    asked = {"pages": ("klt",), "bits": (2, 4), "pages_sink": 2, "pages_recent": 16}
    served = []

    def study(model, recipes, out, *dtype):
        found = [(path.name, read_header(path).recipe) for path in recipes]
        served.extend((name, one.rotary, one.k.bits, one.k.sink, one.k.recent) for name, one in found)
        assert (str(model), out, *dtype) == (tiny_params.model.path, tmp_path, *dtype)

    monkeypatch.setattr(of_run, "study", study)
    monkeypatch.setattr(of_run, "loads", study)
    monkeypatch.setattr(of_run, "CONTEXT", 64)
    monkeypatch.setattr(of_run, "WINDOWS", 6)
    asked = tiny_params.model_copy(update={"mechanisms": tiny_params.mechanisms.model_copy(update=asked)})
    getattr(of_run, stage)(asked, tmp_path)
    ends = (2, 16) if stage == "capacity" else (0, 0)
    klt = [(f"klt{bits}.kv", "after", bits, *ends) for bits in (2, 4)]
    assert served == (klt if stage == "capacity" else [*klt, ("hadamard4.kv", "before", 4, *ends)])
