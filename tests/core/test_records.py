"""Files: whole or absent, finite or refused."""

from __future__ import annotations

import errno
import os

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.codecs.noise import NoiseStream
from kvlab.core import records
from kvlab.core.errors import NonFinite, StorageError
from kvlab.core.recipe import IDENTITY, Cell, Recipe, canonical, digest
from refusals import refused


def tokens(kl: float = 0.1) -> pl.DataFrame:
    row = {"cell_id": "a", "window": 0, "position": 513, "nll_ref": 1.0, "nll_alt": 1.1, "kl": kl}
    row |= {"top1_ref": 3, "top1_alt": 3, "p_ref_max": 0.5}
    return pl.DataFrame([row], schema=records.TOKENS)


def test_a_failed_write_leaves_the_old_file_and_no_scratch(tmp_path):
    path = tmp_path / "a.json"
    records.write_text(path, "old")
    with pytest.raises(RuntimeError), records.atomic(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_clear_line(tmp_path):
    with (
        refused(StorageError, "storage.disk-full", tmp_path / "a.json"),
        records.atomic(tmp_path / "a.json") as temporary,
    ):
        temporary.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_the_same_line_from_every_library(tmp_path):
    from safetensors import SafetensorError

    with refused(StorageError, "storage.disk-full"), records.atomic(tmp_path / "a.safetensors"):
        raise SafetensorError("I/O error: No space left on device (os error 28)")


def test_an_old_record_does_not_outlive_its_data(tmp_path, monkeypatch):
    (tmp_path / "job.json").write_text("{}")
    monkeypatch.setattr(records, "write_table", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        records.write_job(tmp_path / "job.parquet", None, tokens())
    assert not (tmp_path / "job.json").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_a_number_that_is_none_is_refused(tmp_path, value):
    records.write_table(tmp_path / "t.parquet", tokens(value))
    with refused(NonFinite, None, "'kl'"):
        records.read_tokens(tmp_path / "t.parquet")


def test_json_refuses_nan(tmp_path):
    with pytest.raises(NonFinite):
        records.write_json(tmp_path / "a.json", {"kl": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_other_columns_are_refused(tmp_path):
    records.write_table(tmp_path / "t.parquet", tokens().rename({"kl": "KL"}))
    with refused(StorageError, "storage.columns"):
        records.read_tokens(tmp_path / "t.parquet")


def test_tables_come_back_as_they_were(tmp_path):
    records.write_table(tmp_path / "t.parquet", tokens())
    assert records.read_tokens(tmp_path / "t.parquet").equals(tokens())


@given(st.dictionaries(st.text(min_size=1), st.integers() | st.booleans() | st.text(), min_size=1))
def test_the_digest_ignores_order_and_nothing_else(data):
    turned = dict(reversed(list(data.items())))
    assert canonical(turned) == canonical(data)
    key = next(iter(data))
    assert digest(data | {key: [data[key]]}) != digest(data)


def test_the_label_is_not_part_of_a_cells_identity():
    shared = {"study": "cells", "engine": "hf", "dtype": "float32", "protocol": "snapshot", "stream": "kv"}
    shared["origin"] = "hf"
    shared |= {"layers": (0, 1), "windows": 2, "recipe": IDENTITY}
    cell = Cell(label="a", **shared)
    assert cell.cell_id == Cell(label="b", **shared).cell_id
    others = [{"engine": "vllm"}, {"dtype": "bfloat16"}, {"protocol": "in_forward"}, {"stream": "k"}, {"layers": (0,)}]
    others += [{"recipe": Recipe(k=NoiseStream(sigma=0.1, seed=0), v=IDENTITY.v)}, {"windows": 3}]
    assert len({cell.cell_id} | {Cell(label="a", **(shared | o)).cell_id for o in others}) == len(others) + 1


def test_what_a_killed_writer_left_is_swept_and_a_live_one_s_is_not(tmp_path):
    target = tmp_path / "a.json"
    dead, alive = 2**22 + 1, os.getppid()  # above any process id that Linux gives out
    left, working = (tmp_path / f".a.json.{pid}.tmp" for pid in (dead, alive))
    for folder in (left, working):
        folder.mkdir()
        (folder / "half").write_text("{")
    records.write_json(target, {"whole": 1})
    assert records.read_json(target) == {"whole": 1}
    assert not left.exists() and (working / "half").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == [working.name, "a.json"]
