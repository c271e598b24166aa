"""What the half beside vLLM's scheduler decides, request by request, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvlab.codecs.fp8 import Fp8Stream
from kvlab.core.recipe import Recipe
from kvlab.kvstore.snapshot.numerics import COMPUTED, DECODED, PREFILL
from kvlab.kvstore.snapshot.payload import CodedChunks
from kvlab.kvstore.snapshot.reasons import Code, SnapshotReason
from kvlab.kvstore.snapshot.write import save
from kvlab.kvstore.vllm.miss_reasons import MissReason
from kvlab.kvstore.vllm.settings import ConnectorSettings
from kvlab.kvstore.vllm.snapshot_index import SnapshotIndex
from kvstore.snapshot import making

SIZE = making.GEOMETRY.chunk_tokens
PROMPT = making.tokens(2 * SIZE + 1)
BROKEN = SnapshotReason(Code.CHUNK_CHECKSUM, "damaged")
BUSY = SnapshotReason(MissReason.STORAGE, "too many open files")


@pytest.fixture(scope="module")
def vllm() -> SimpleNamespace:
    """Imported late, and after what must be set before vLLM is imported."""
    import kvlab.engines.vllm.process  # noqa: F401
    from kvlab.kvstore.vllm import context, jobs, scheduler

    return SimpleNamespace(**vars(context) | vars(jobs) | vars(scheduler))


@pytest.fixture
def planner(vllm, tmp_path):
    settings = ConnectorSettings(str(tmp_path), SIZE, save="answer")
    return vllm.Planner(vllm.EngineContext(settings, making.identity(), 2 * SIZE, {}))


def request(name: str = "a", tokens=PROMPT, **changes) -> SimpleNamespace:
    plain = {"cache_salt": None, "kv_transfer_params": None, "lora_request": None, "mm_features": [],
             "prompt_embeds": None, "skip_reading_prefix_cache": False, "num_computed_tokens": 0}  # fmt: skip
    count = {"num_tokens": len(tokens), "num_prompt_tokens": len(tokens)}
    return SimpleNamespace(request_id=name, all_token_ids=tokens, prompt_token_ids=tokens, **plain | count | changes)


def step(planner, *requests):
    """After this step the prompts have been computed."""
    state = SimpleNamespace(get_block_ids=lambda name: ([1, 2],))
    scheduled = {one.request_id: one.num_prompt_tokens for one in requests}
    return planner.planned(SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state))


def put(folder, count: int = 2, **made):
    return making.written(folder / f"{count}", count, made=made).path


def begun(planner, one: SimpleNamespace, local: int = 0) -> int:
    found = planner.matched(one, local)
    planner.allocated(one, [1, 2], found)
    return found


def ended(planner, one: SimpleNamespace, status: str, vllm):
    """After an answer of a chunk and a half."""
    one.status = getattr(vllm.RequestStatus, status)
    one.all_token_ids = making.tokens(4 * SIZE)
    one.num_tokens, one.num_computed_tokens = 4 * SIZE, 4 * SIZE - 1
    return planner.finished(one, [1, 2])


@pytest.mark.parametrize("status", ["FINISHED_STOPPED", "FINISHED_ABORTED"])
def test_an_answer_is_saved_however_it_ends_and_is_marked(planner, vllm, status):
    one = request()
    begun(planner, one)
    (first,) = step(planner, one).saves
    assert first.computed == PREFILL and len(first.tokens) == 2 * SIZE
    assert ended(planner, one, status, vllm)[0]
    (late,) = step(planner).saves
    assert late.last and late.computed == DECODED and len(late.tokens) == 3 * SIZE


def test_an_answer_that_ends_in_an_error_is_not_saved(planner, vllm):
    one = request()
    begun(planner, one)
    assert not ended(planner, one, "FINISHED_ERROR", vllm)[0] and step(planner).saves == []


def test_equal_prompts_of_a_step_are_saved_once_and_all_of_them_say_so(planner, vllm):
    requests = [request(str(number)) for number in range(8)]
    for one in requests:
        begun(planner, one)
    (only,) = step(planner, *requests).saves
    planner.learned(vllm.Outcomes(saves={only.request: vllm.JobOutcome(only.path, 2 * SIZE, 1, 1.0)}))
    said = [ended(planner, one, "FINISHED_ERROR", vllm)[1]["kvlab"] for one in requests]
    assert {one["saved"] for one in said} == {only.path.name}


def test_equal_prompts_whose_save_has_to_wait_are_planned_again(planner, vllm):
    requests = [request(str(number)) for number in range(2)]
    for one in requests:
        begun(planner, one)
    (only,) = step(planner, *requests).saves
    waiting = vllm.JobOutcome.failed(only.path, (SnapshotReason(MissReason.LOAD_FAILED, "once more"),))
    planner.learned(vllm.Outcomes(saves={only.request: waiting}))
    assert len(step(planner, requests[1]).saves) == 1


@pytest.mark.parametrize(("reason", "again"), [(BUSY, 2 * SIZE), (BROKEN, 0)])
def test_damage_spoils_a_file_and_a_busy_disk_does_not(planner, vllm, tmp_path, reason, again):
    path = put(tmp_path)
    one = request()
    assert begun(planner, one) == 2 * SIZE
    planner.learned(vllm.Outcomes(loads={one.request_id: vllm.JobOutcome.failed(path, (reason,))}))
    assert planner.matched(request("b"), 0) == again
    saves = step(planner, one).saves
    assert bool(saves) == (again == 0)  # a good file is not written anew


def test_a_waiting_request_looks_again_only_when_the_folder_has_changed(planner, tmp_path, monkeypatch):
    looks, plain = [], SnapshotIndex.find
    monkeypatch.setattr(SnapshotIndex, "find", lambda *given: looks.append(1) or plain(*given))
    put(tmp_path, 1)
    one = request()
    assert [planner.matched(one, 0) for _ in range(3)] == 3 * [SIZE] and len(looks) == 1
    put(tmp_path, 2)
    assert [planner.matched(one, 0) for _ in range(3)] == 3 * [2 * SIZE] and len(looks) == 2
    planner.index.spoil(tmp_path / "2", [BROKEN])
    assert planner.matched(one, 0) == SIZE and len(looks) == 3


def test_what_failed_is_said_though_the_request_is_begun_again(planner, vllm):
    one = request()
    begun(planner, one)
    (only,) = step(planner, one).saves
    planner.learned(vllm.Outcomes(saves={one.request_id: vllm.JobOutcome.failed(only.path, (BUSY,))}))
    planner.matched(one, 0)  # preempted
    reasons = ended(planner, one, "FINISHED_ERROR", vllm)[1]["kvlab"]["reasons"]
    assert [code for code, _ in reasons] == ["no_snapshot", "storage"]


@pytest.mark.parametrize(
    ("made", "local", "computed"),
    [({}, 0, PREFILL), ({COMPUTED: PREFILL}, 0, PREFILL), ({COMPUTED: DECODED}, 0, DECODED), ({}, SIZE, DECODED)],
)
def test_what_goes_on_from_decoded_tokens_is_marked_too(planner, tmp_path, made, local, computed):
    put(tmp_path, **made)
    one = request(tokens=making.tokens(3 * SIZE + 1))
    begun(planner, one, local)
    (only,) = step(planner, one).saves
    assert only.computed == computed


class TestLossy:
    """What began with lossy K and V is answered, and never saved."""

    @pytest.fixture
    def planner(self, vllm, tmp_path):
        coder = CodedChunks(making.GEOMETRY, Recipe(k=Fp8Stream(), v=Fp8Stream()), placement="post_rope")
        settings = ConnectorSettings(str(tmp_path), SIZE, save="answer", recipe="fp8.json", unproven=True)
        return vllm.Planner(vllm.EngineContext(settings, making.identity().coded(coder.codec), 2 * SIZE, {}, coder))

    @pytest.fixture
    def path(self, planner, tmp_path):
        source = making.source(2 * SIZE, make=making.gaussian)
        return save(tmp_path / "lossy", source, coder=planner.context.coder).path

    def codes(self, planner, one, vllm) -> list[str]:
        return [code for code, _ in ended(planner, one, "FINISHED_STOPPED", vllm)[1]["kvlab"]["reasons"]]

    def test_nothing_is_saved_after_a_load(self, planner, path, vllm):
        one = request()
        assert begun(planner, one) == 2 * SIZE
        planner.learned(vllm.Outcomes(loads={one.request_id: vllm.JobOutcome(path, 2 * SIZE, 1, 1.0)}))
        one.num_prompt_tokens = one.num_tokens = 4 * SIZE
        one.all_token_ids = making.tokens(4 * SIZE)
        assert step(planner, one).saves == []
        assert self.codes(planner, one, vllm) == ["lossy"] and step(planner).saves == []

    def test_what_could_not_be_loaded_is_computed_and_saved(self, planner, path, vllm):
        one = request()
        begun(planner, one)
        assert step(planner, one).saves == []
        planner.learned(vllm.Outcomes(loads={one.request_id: vllm.JobOutcome.failed(path, (BROKEN,))}))
        assert len(step(planner, one).saves) == 1

    def test_what_vllm_s_own_cache_hands_on_is_not_saved_either(self, planner, path, vllm):
        one, two, three = request(), request("b", PROMPT[::-1]), request("c", making.tokens(5 * SIZE))
        begun(planner, two, SIZE)
        assert len(step(planner, two).saves) == 1  # nothing lossy yet
        begun(planner, one)
        begun(planner, three, 2 * SIZE)
        assert step(planner, three).saves == []
        assert self.codes(planner, three, vllm) == ["prefix_cached", "lossy", "lossy"]

    def test_without_being_asked_for_a_lossy_snapshot_is_refused(self, vllm, path, tmp_path, planner):
        settings = ConnectorSettings(str(tmp_path), SIZE, recipe="fp8.json")
        strict = vllm.Planner(
            vllm.EngineContext(settings, planner.context.identity, 2 * SIZE, {}, planner.context.coder)
        )
        one = request()
        assert begun(strict, one) == 0
        assert self.codes(strict, one, vllm) == ["unproven"]
