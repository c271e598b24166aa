"""Archives in vLLM: a prefill is saved by one engine, and another process or transformers answers from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvlab.cache.files.calibration import load_calibration
from kvlab.cli import main as cli
from kvlab.codecs.recipes import named_recipe
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.restore import restore
from kvlab.kvstore.snapshot import read
from kvlab.kvstore.snapshot.archive import ArchiveChunks
from kvlab.stats.divergences import token_record
from kvstore.vllm.conftest import CHUNK, whole
from kvstore.vllm.served import Engine

pytestmark = [pytest.mark.nightly, pytest.mark.engine]
STEPS, BITS = 8, 1.2
AGREE = 1e-6  # nats a token: what engines in float32 may differ by


@pytest.fixture(scope="module")
def archive_file(reference, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("archive") / "archive.kv"
    given = (
        "--model",
        reference,
        "--codec",
        "archive",
        "--bits",
        BITS,
        "--context",
        128,
        "--windows",
        12,
        "--out",
        out,
    )
    cli.main(["calibrate", *map(str, given)])
    return out


@pytest.fixture(scope="module")
def shared(archive_file) -> dict:
    return {"chunk_tokens": CHUNK, "across_engines": True, "recipe": str(archive_file), "unproven": True}


@pytest.fixture(scope="module")
def producer(nursery, reference, shared, tmp_path_factory):
    """Prefills and saves."""
    folder = tmp_path_factory.mktemp("handed over") / "snapshots"
    one = Engine(nursery, reference, folder, shared | {"restore": False}, enable_prefix_caching=False)
    yield one
    one.close()


@pytest.fixture(scope="module")
def consumer(nursery, reference, shared, producer):
    """Another process, of other blocks and with vLLM's own cache, that answers from what it finds."""
    one = Engine(
        nursery, reference, producer.folder, shared, block_size=64, enable_prefix_caching=True, max_logprobs=-1
    )
    yield one
    one.close()


@pytest.fixture(scope="module")
def handed(producer, prompts) -> list[str]:
    """Names of the archives of some prompts, saved by the first engine."""
    answer = producer.generate(*prompts[:4])
    assert answer["counts"]["saves"] == 4 and answer["counts"]["failed"] == {}
    return [said["saved"] for said in answer["said"]]


@pytest.fixture(scope="module")
def model(info) -> PagedModel:
    return PagedModel.load(info)


@pytest.fixture(scope="module")
def coder(archive_file, info, model) -> ArchiveChunks:
    archive = load_calibration(archive_file, info).archive
    return ArchiveChunks(model.geometry(CHUNK), named_recipe("archive", bits=BITS), archive, model.turns(1024))


def warm(model, coder, prompt, path):
    """A run of transformers after the prompt, begun from an archive."""
    config = PagerConfig(pool_tokens=1024, chunk_tokens=CHUNK)
    return restore(model, prompt, path, config, mode="consume", coder=coder, unproven=True)


def test_what_one_engine_saved_another_process_answers_from_as_transformers_does(
    producer, consumer, handed, prompts, model, coder, info
):
    warm_apart, cold_apart = [], []
    for prompt, name in zip(prompts, handed, strict=False):
        answer = consumer.generate(prompt, n=STEPS, vocabulary=True)
        (said,), logits = answer["said"], torch.tensor(answer["vocabulary"][0])
        assert said["snapshot"] == name and said["restored"] == whole(prompt) and said["saved"] is None
        assert answer["counts"]["tokens_loaded"] == whole(prompt) and answer["counts"]["failed"] == {}
        ours = warm(model, coder, prompt, producer.folder / name)
        assert ours.report.prefix_len == whole(prompt)
        tokens = ours.run.fork().decode(STEPS).tokens
        assert tuple(answer["tokens"][0]) == tokens
        found = torch.cat([ours.logits[None], ours.run.score(list(tokens))[:-1]])
        cold = PagedRun(model, PagerConfig(pool_tokens=1024, chunk_tokens=CHUNK))
        whole_run = torch.cat([cold.extend(prompt)[None], cold.score(list(tokens))[:-1]])
        for kept, rows in ((warm_apart, found), (cold_apart, whole_run)):
            kept.append(float(token_record(rows, logits, torch.tensor(tokens))["kl"].max()))
        with read.open(producer.folder / name) as snapshot:
            values = snapshot.length * info.values_per_token
            assert 8 * snapshot.header.payload_bytes / values == pytest.approx(BITS, rel=0.01)
            assert snapshot.verify(coder) == []
    assert max(warm_apart) < AGREE < max(cold_apart)  # and it is not the cold run that is heard
    print(f"KL at most {max(warm_apart):.2e} from transformers' restore, {max(cold_apart):.2e} from a cold run")


def test_what_follows_an_archive_is_not_saved_as_the_model_s_own(consumer, handed, prompts):
    for prompt in ([*prompts[0], *prompts[7][:60]], [*prompts[1][: 5 * CHUNK], *prompts[8][:90]]):
        before = consumer.files()
        (said,) = consumer.generate(prompt)["said"]
        assert said["saved"] is None and consumer.files() == before
        assert "lossy" in [code for code, _ in said["reasons"]]


def test_what_is_computed_from_its_first_token_is_saved_and_answered_from(consumer, prompts):
    prompt = prompts[9]
    cold = consumer.generate(prompt)
    assert cold["said"][0]["saved"] and cold["counts"]["saves"] == 1
    assert consumer.ask("forget")["reset"]
    again = consumer.generate(prompt)
    assert again["said"][0]["restored"] == whole(prompt)


def test_a_damaged_archive_is_computed_anew(consumer, producer, handed, prompts):
    path = producer.folder / handed[3]
    assert consumer.ask("forget")["reset"]  # else vLLM's own cache hands on what was restored before
    cold, good = consumer.cold(prompts[3], n=STEPS), path.read_bytes()
    assert consumer.ask("forget")["reset"]
    with read.open(path) as snapshot:
        at = snapshot._places[1] + 30
    path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    again = consumer.generate(prompts[3], n=STEPS)
    assert again["tokens"] == cold["tokens"] and again["counts"]["failed"] == {"chunk_checksum": 1}
    assert consumer.ask("forget")["reset"]


def test_transformers_hands_over_too(consumer, coder, model, prompts):
    prompt, config = prompts[12], PagerConfig(pool_tokens=1024, chunk_tokens=CHUNK)
    run = PagedRun(model, config)
    run.extend(prompt)
    path = run.save(consumer.folder / "from transformers", upto=whole(prompt), coder=coder).path
    answer = consumer.generate(prompt, n=STEPS)
    assert answer["said"][0]["snapshot"] == "from transformers" and answer["said"][0]["restored"] == whole(prompt)
    assert tuple(answer["tokens"][0]) == warm(model, coder, prompt, path).run.decode(STEPS).tokens


def test_an_engine_without_the_recipe_does_not_use_them(engine, producer, handed, prompts):
    engine.empty()
    engine.folder.mkdir(parents=True)
    (engine.folder / handed[0]).write_bytes((producer.folder / handed[0]).read_bytes())
    (said,) = engine.generate(prompts[0])["said"]
    assert said["restored"] == 0 and {"codec", "unproven"} == {code for code, _ in said["reasons"]}
    engine.empty()


def test_a_recipe_of_another_model_does_not_start(nursery, reference, tiny_model, tmp_path):
    out = tmp_path / "tiny.kv"
    given = ("--model", tiny_model, "--windows", 4, "--context", 64, "--out", out)
    cli.main(["calibrate", *map(str, given)])
    one = Engine(nursery, reference, tmp_path / "s", {"chunk_tokens": CHUNK, "recipe": str(out)})
    try:
        started = one.answer()
        assert started["error"] == "CalibrationMismatch" and "calibrate this model" in started["message"]
    finally:
        one.close()
