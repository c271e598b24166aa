"""The harness run: on snapshots that are really read, with attempts that are honest or broken in one way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kvlab.core.errors import ParamsError, SnapshotRefused, UserError
from kvlab.core.model import resolve
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.snapshot import read
from kvlab.kvstore.snapshot.reasons import Code, refusal
from kvlab.kvstore.snapshot.write import SnapshotSource, save
from kvlab_pipeline.studies.restore.harness import (
    ARMS,
    CONSUME,
    DAMAGED,
    FOREIGN,
    OFF,
    Doubt,
    PagedAttempt,
    VariantRun,
    conduct,
    flipped,
)
from kvstore.snapshot import making
from refusals import refused

pytestmark = pytest.mark.full  # a page that FINDINGS.md does not need

PROMPT = [*making.tokens(24), 1, 2, 3]
ANSWER = (8, 9)


@pytest.fixture
def own(tmp_path) -> Path:
    return making.written(tmp_path / "own").path


@pytest.fixture
def foreign(tmp_path) -> Path:
    payloads = (making.chunk(number) for number in range(2))
    return save(tmp_path / "foreign", SnapshotSource(making.identity(), payloads, making.ledger(2), [5] * 8)).path


@dataclass
class Reader:
    """Reads snapshots as a restore does, and makes the answer up; every call is noted."""

    calls: list[tuple[str, str | None]] = field(default_factory=list)

    def __call__(self, mode: str, snapshot: Path | None) -> VariantRun:
        self.calls.append((mode, snapshot and snapshot.name))
        cold = VariantRun(ANSWER, consumed=False, prefix_len=0, prefill_ms=30.0)
        if mode == "recompute" or snapshot is None:
            return cold
        try:
            prefix = self.read(snapshot)
        except SnapshotRefused as error:
            if mode == "consume":
                raise
            return replace(cold, codes=error.codes)
        return VariantRun(ANSWER, True, prefix, 3.0, 1.0, agrees=True if mode == "verify" else None)

    def read(self, snapshot: Path) -> int:
        with read.open(snapshot) as opened:
            prefix = opened.usable_prefix(PROMPT)
            if not prefix:
                raise refusal(Code.PREFIX, "it shares nothing")
            opened.load()
            return prefix

    def setting(self) -> dict[str, str]:
        return {"model_hash": "5eed"}

    def reach(self, snapshot: read.Snapshot, shared: int) -> int:
        return shared


def test_an_honest_reader_passes_and_the_arms_take_turns(own, foreign):
    reader = Reader()
    found = conduct(reader, own, foreign, PROMPT)
    assert (found.verdict.outcome, found.verdict.reasons, found.verdict.speedup) == ("pass", (), 10.0)
    modes = [mode for mode, _ in reader.calls[:9]]
    assert modes == [
        *("recompute", "consume", "verify"),
        *("consume", "verify", "recompute"),
        *("verify", "recompute", "consume"),
    ]
    assert reader.calls[9:] == [("auto", "own"), ("auto", "foreign")]
    assert {name: len(trials) for name, trials in found.arms.items()} == dict.fromkeys(ARMS, 3)
    assert found.controls[DAMAGED].codes == ("chunk_checksum",)
    assert found.controls[FOREIGN].codes == ("prefix",) and found.expected_prefix == 24


def test_no_more_is_expected_than_leaves_a_token_to_compute(own, foreign):
    found = conduct(Leaving(), own, foreign, PROMPT[:24])
    assert (found.verdict.outcome, found.expected_prefix) == ("pass", 20)
    with refused(UserError, "user.nothing-to-compute"):
        conduct(Reader(), own, foreign, PROMPT[:4])


class Leaving(Reader):
    """Restores all chunks but the last one."""

    def read(self, snapshot):
        return super().read(snapshot) - 4


class Drifting(Reader):
    """Runs with another number of threads from some run on."""

    def setting(self):
        return {"threads": str(1 + (len(self.calls) > 4))}


class Disabled(Reader):
    def __call__(self, mode, snapshot):
        return super().__call__("recompute", None)


class Refusing(Reader):
    def read(self, snapshot):
        raise refusal(Code.MODEL, "of another model")


class Trusting(Reader):
    """Takes whatever lies there, as one without checksums would."""

    def read(self, snapshot):
        with read.open(snapshot) as opened:
            return opened.length


class Dropout(Reader):
    def __call__(self, mode, snapshot):
        trial = super().__call__(mode, snapshot)
        return replace(trial, tokens=(len(self.calls), 9)) if mode == "consume" else trial


class Shifted(Reader):
    def __call__(self, mode, snapshot):
        trial = super().__call__(mode, snapshot)
        return replace(trial, tokens=(8, 7)) if trial.consumed else trial


class Clockless(Reader):
    def __call__(self, mode, snapshot):
        return replace(super().__call__(mode, snapshot), prefill_ms=None)


class Warm(Reader):
    """An arm without a snapshot that finds one all the same."""

    kept: Path | None = None

    def __call__(self, mode, snapshot):
        self.kept = self.kept or snapshot
        return super().__call__("auto" if mode == "recompute" else mode, snapshot or self.kept)


@pytest.mark.parametrize(
    ("broken", "outcome", "doubt"),
    [
        (Disabled, "fail", Doubt.NOT_RESTORED),
        (Refusing, "fail", Doubt.NOT_RESTORED),
        (Trusting, "fail", Doubt.CONTROL_RESTORED),
        (Dropout, "fail", Doubt.NOT_REPEATABLE),
        (Shifted, "fail", Doubt.TOKENS_DIFFER),
        (Clockless, "inconclusive", Doubt.MISSING),
        (Warm, "inconclusive", Doubt.OFF_NOT_COLD),
        (Drifting, "inconclusive", Doubt.SETTINGS_DIFFER),
    ],
)
def test_a_broken_reader_never_passes(own, foreign, broken, outcome, doubt):
    found = conduct(broken(), own, foreign, PROMPT)
    assert found.verdict.outcome == outcome and found.verdict.speedup is None
    assert doubt in {reason.code for reason in found.verdict.reasons}


def test_why_nothing_was_restored_is_said(own, foreign):
    found = conduct(Refusing(), own, foreign, PROMPT)
    assert any("restored nothing in 3 trials: model" in reason.message for reason in found.verdict.reasons)
    assert found.arms[CONSUME][0].tokens is None and found.arms[OFF][0].tokens == ANSWER


def test_a_control_that_is_none_is_refused_beforehand(own, foreign):
    with refused(UserError, "user.no-control", own):
        conduct(Reader(), own, own, PROMPT)
    with refused(UserError, "user.no-shared-chunk", foreign):
        conduct(Reader(), foreign, foreign, PROMPT)
    with refused(ParamsError, None, "repeats is 2"):
        conduct(Reader(), own, foreign, PROMPT, repeats=2)


def test_the_damage_is_one_bit_of_the_payload(own, tmp_path):
    bad = flipped(own, tmp_path / "bad")
    before, after = own.read_bytes(), bad.read_bytes()
    other = [at for at, (one, two) in enumerate(zip(before, after, strict=True)) if one != two]
    with read.open(bad) as opened:
        assert len(other) == 1 and opened.header.payload_at <= other[0] < opened.header.digest_at
    assert (before[other[0]] ^ after[other[0]]).bit_count() == 1


MODEL_PROMPT = tuple(7 * n % 320 for n in range(70))


@pytest.fixture(scope="module")
def model(tiny_params):
    return PagedModel.load(resolve(tiny_params.model))


def saved(model: PagedModel, config: PagerConfig, folder: Path) -> tuple[Path, Path]:
    """Snapshots of what the prompt begins with, and of another."""
    for name, tokens in (("own", MODEL_PROMPT[:64]), ("foreign", MODEL_PROMPT[1:17])):
        run = PagedRun(model, config)
        run.extend(tokens)
        run.save(folder / name)
    return folder / "own", folder / "foreign"


def test_a_prompt_that_ends_with_its_snapshot_and_a_small_pool_can_pass(model, tmp_path):
    config = PagerConfig(pool_tokens=96, chunk_tokens=8, tail_chunks=1)
    pair = saved(model, config, tmp_path)
    found = conduct(PagedAttempt(model, MODEL_PROMPT[:64], config, decode=2), *pair, MODEL_PROMPT[:64])
    assert (found.verdict.reasons, found.expected_prefix) == ((), 56)
    small = PagerConfig(pool_tokens=32, chunk_tokens=8, tail_chunks=1)  # reached by what was made in a larger one
    found = conduct(PagedAttempt(model, MODEL_PROMPT, small, decode=2), *pair, MODEL_PROMPT)
    assert (found.verdict.reasons, found.expected_prefix) == ((), 32)


def test_a_model_passes(model, tmp_path):
    prompt = MODEL_PROMPT
    config = PagerConfig(pool_tokens=96, chunk_tokens=8, tail_chunks=1)
    saved(model, config, tmp_path)
    attempt = PagedAttempt(model, prompt, config, decode=5)
    found = conduct(attempt, tmp_path / "own", tmp_path / "foreign", prompt)
    assert found.verdict.reasons == () and found.verdict.outcome == "pass" and found.verdict.speedup > 0
    assert {trial.prefix_len for trial in found.arms[CONSUME]} == {64}
    ran = found.arms[OFF][0].setting
    assert ran["model_hash"] == model.info.model_hash and {"threads", "attention", "policy"} <= set(ran)
    with refused(ParamsError, None, "decode is 0"):
        replace(attempt, decode=0)
