"""KL out of a ladder's folder that is whole, and every way in which it may not be."""

import json
import shutil

import numpy as np
import polars as pl
import pytest

from kvlab.core.errors import CodecNotActive, KvlabError, StaleResult, StorageError
from kvlab.core.model import resolve
from kvlab.core.records import TOKENS, CellRecord, Coding, JobRecord, Provenance, read_job, write_job
from kvlab.text import corpus
from kvlab_pipeline.jobs import plan
from kvlab_pipeline.studies.ladder.plan import rungs
from refusals import refused
from validation.bench import divergence, run, sources
from validation.bench.rivals import EncodedTensor, Library, LibraryCodec
from validation.bench.subjects import BenchCodec, Roster, alone

pytestmark = pytest.mark.full

MODEL, CORPUS = "5" * 16, "c" * 16


def rows(cell, params, kl):
    """A cell's token rows; `kl` by window."""
    positions = np.arange(params.windows.context + 1, params.windows.length)
    window = np.repeat(np.arange(cell.windows), positions.size)
    columns = {name: np.zeros(window.size) for name in TOKENS if name != "cell_id"}
    columns |= {"window": window, "position": np.tile(positions, cell.windows), "kl": np.asarray(kl)[window]}
    return pl.DataFrame(columns).with_columns(cell_id=pl.lit(cell.cell_id)).select(list(TOKENS)).cast(dict(TOKENS))


def record(cell):
    fires = 2 * len(cell.layers) * cell.windows
    coding = Coding(
        fires=fires, expected_fires=fires, values=800, coded_bytes=200, raw_bytes=10, d_eff={}, outlier_rate={},
        whitened_error={},
    )  # fmt: skip
    return CellRecord(cell_id=cell.cell_id, recipe_id=cell.recipe_id, cell=cell, coding=coding, canary_kl=0.05)


def origin(**changes):
    values = {
        "model": "m",
        "model_hash": MODEL,
        "corpus_hash": CORPUS,
        "calibration": {"hf": "a" * 16},
        "versions": {"kvlab": "1"},
    }
    return Provenance(**values | {"device": "cpu"} | changes)


def write_ladder(folder, params, provenance, documents=None):
    """What `snakemake ladder` leaves; the KL of cell i at window w is 0.01 (i + 1) (w + 1)."""
    number = 0
    for job, cells in plan.jobs(params, plan.LADDER).items():
        tables = []
        for cell in cells:
            number += 1
            tables.append(rows(cell, params, 0.01 * number * np.arange(1, cell.windows + 1)))
        shape = {"context": params.windows.context, "eval": params.windows.eval}
        told = {"documents": documents or {}}
        made = JobRecord(provenance=provenance, cells=tuple(map(record, cells)), **shape, **told)
        write_job(folder / f"{job}.json", made, pl.concat(tables))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_params):
    return write_ladder(tmp_path_factory.mktemp("ladder"), tiny_params, origin())


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "ladder")


def read(params, folder, model_hash=MODEL, corpus_hash=CORPUS, windows=3):
    return divergence.of_ladder(params, folder, model_hash, corpus_hash, windows)


def rewrite(path, **changes):
    made, tokens = read_job(path)
    write_job(path, made.model_copy(update=changes), tokens)


def test_kl_and_bits_of_every_cell_by_window(whole, tiny_params):
    found = read(tiny_params, whole)
    assert set(found) == {label for label, _ in rungs(tiny_params)}
    first, label = found[rungs(tiny_params)[0][0]], rungs(tiny_params)[0][0]
    assert first["test"]["windows"] == pytest.approx([0.01, 0.02, 0.03]) and first["test"]["bits"] == 2.1
    cells = [cell for cells in plan.jobs(tiny_params, plan.LADDER).values() for cell in cells]
    place = next(i for i, cell in enumerate(cells, 1) if cell.text == "other" and cell.label == label)
    assert first["other"]["windows"] == pytest.approx([0.01 * place * w for w in (1, 2, 3)])
    fewer = read(tiny_params, whole, windows=2)
    assert fewer[label]["test"]["windows"] == first["test"]["windows"][:2]


def test_a_folder_that_is_missing_or_not_whole_names_the_command(folder, tiny_params):
    with refused(StorageError, "storage.no-ladder", folder / "none", "snakemake ladder"):
        read(tiny_params, folder / "none")
    (folder / "hf-float32-0.json").unlink()
    with refused(StorageError, "storage.missing-jobs", "hf-float32-0 ", "snakemake ladder"):
        read(tiny_params, folder)


def test_a_job_that_is_not_planned_is_refused(folder, tiny_params):
    shutil.copy(folder / "hf-float32-0.json", folder / "hf-float32-99.json")
    with refused(StaleResult, "stale.unplanned-job", "hf-float32-99", "snakemake ladder"):
        read(tiny_params, folder)


def test_cells_of_other_parameters_are_refused(folder, tiny_params):
    ladder = tiny_params.ladder.model_copy(update={"bits": (2, 3)})
    with pytest.raises(StaleResult):
        read(tiny_params.model_copy(update={"ladder": ladder}), folder)


def test_a_job_that_lacks_a_cell_is_refused(folder, tiny_params):
    made, tokens = read_job(folder / "hf-float32-0")
    kept = made.cells[:-1]
    left = tokens.filter(pl.col("cell_id").is_in([cell.cell_id for cell in kept]))
    write_job(folder / "hf-float32-0.json", made.model_copy(update={"cells": kept}), left)
    with refused(StaleResult, "stale.missing-cells", folder / "hf-float32-0", "snakemake ladder"):
        read(tiny_params, folder)


@pytest.mark.parametrize("field", ["model_hash", "corpus_hash"])
def test_a_ladder_of_another_origin_is_refused(folder, tiny_params, field):
    rewrite(folder / "hf-float32-0.json", provenance=origin(**{field: "other"}))
    with refused(StaleResult, "stale.other-origin", f"{field} other"):
        divergence.of_ladder(tiny_params, folder, MODEL, CORPUS, 2)


def test_another_model_or_other_windows_are_refused(whole, tiny_params):
    with refused(StaleResult, "stale.other-origin", "model_hash", "snakemake ladder"):
        read(tiny_params, whole, model_hash="6" * 16)
    with refused(StaleResult, "stale.other-origin", "corpus_hash", "snakemake ladder"):
        read(tiny_params, whole, corpus_hash="d" * 16)
    assert read(tiny_params, whole, corpus_hash=None)


def test_a_codec_that_did_not_fire_is_refused(folder, tiny_params):
    path = folder / "hf-float32-0.json"
    data = json.loads(path.read_text())
    data["cells"][0]["coding"]["fires"] -= 1
    path.write_text(json.dumps(data))
    with pytest.raises(CodecNotActive):
        read(tiny_params, folder)


@pytest.mark.parametrize("damage", ["{", '{"cells": 3}'])
def test_a_damaged_record_is_refused_in_one_line(folder, tiny_params, damage):
    (folder / "hf-float32-0.json").write_text(damage)
    with pytest.raises(KvlabError) as raised:
        read(tiny_params, folder)
    assert len(str(raised.value).splitlines()) == 1


def halved(bits, head_dim):
    def encode(x):
        return EncodedTensor(x.float() / 2, x.numel() * bits / 8)

    return LibraryCodec(encode, lambda stored: stored.held, float(bits))


def exact(bits, head_dim):
    return LibraryCodec(lambda x: EncodedTensor(x.float(), 2 * x.numel()), lambda stored: stored.held, 16.0)


def test_rivals_are_scored_on_the_first_windows_of_each_text(tiny_params, tiny_windows, monkeypatch, hf_engine):
    monkeypatch.setattr(divergence, "start", lambda *_, **__: hf_engine)
    info = resolve(tiny_params.model)
    tokens = corpus.load(tiny_windows, info.model_hash)
    who = [BenchCodec(f"{make.__name__} 4", 4, library=Library("none", "math", make)) for make in (halved, exact)]
    found = divergence.of_rivals(tiny_params, info, who, tokens, 2)
    for text in ("test", "other"):
        assert found["halved 4"][text]["bits"] == 4.0 and found["exact 4"][text]["bits"] == 16.0
        assert len(found["halved 4"][text]["windows"]) == 2
        assert min(found["halved 4"][text]["windows"]) > 10 * max(found["exact 4"][text]["windows"]) >= 0
    assert divergence.of_rivals(tiny_params, info, [], tokens, 2) == {}


def test_a_bench_with_every_input_of_the_model(
    tiny_params, tiny_windows, tiny_calibration, tmp_path, monkeypatch, hf_engine
):
    monkeypatch.setattr(divergence, "start", lambda *_, **__: hf_engine)
    info = resolve(tiny_params.model)
    tokens = corpus.load(tiny_windows, info.model_hash)
    known = origin(model_hash=info.model_hash, corpus_hash=tokens.corpus_hash)
    inputs = run.Inputs(
        capture=tiny_calibration["capture"],
        windows=tiny_windows,
        ladder=write_ladder(tmp_path / "ladder", tiny_params, known, tokens.documents),
    )
    own = [
        BenchCodec(label, 2, alone(recipe)) for label, recipe in rungs(tiny_params) if label in ("klt 2", "hadamard 2")
    ]
    rival = BenchCodec("halved 4", 4, library=Library("none", "math", halved))
    monkeypatch.setattr(run, "roster", lambda params: Roster((*own, rival), {}))
    monkeypatch.setattr(sources, "planted", lambda planted=sources.planted: planted(heads=1, tokens=128, head_dim=16))
    data = run.bench(tiny_params, tmp_path / "out", inputs, run.Effort(rounds=1, threads=(1,), windows=2))
    assert {len(found["windows"]) for by_text in data["kl"].values() for found in by_text.values()} == {2}
    assert json.loads((tmp_path / "out" / "bench.json").read_text())["kl"].keys() == data["kl"].keys()
    text = (tmp_path / "out" / "BENCH.md").read_text()
    assert "turned by every lag" in text and "over the same 2 windows" in text
    assert "- On other text the KL of `klt 2`" in text
