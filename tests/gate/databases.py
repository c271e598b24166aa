"""Databases to upgrade and rows to keep; other processes that hold, fill or abandon them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from kvlab.gate.catalogue import Row, checked_row
from kvlab.gate.check import WORDS, Claim, Finding, GateReport
from kvlab.gate.evidence.quality import Judgement
from kvlab.gate.replay import Replay, ReplayedScore
from kvlab.gate.store.ingest import ingest as put
from kvlab.gate.store.ingest import prepared
from kvlab.gate.store.migrations import published_columns

SRC = Path(__file__).parents[2] / "src"

# A part of the published study's columns before it had mechanisms, and what nobody expects.
PUBLISHED = {
    "id": "INTEGER PRIMARY KEY",
    "run_id": "TEXT",
    "timestamp": "TEXT",
    "gpu_type": "TEXT",
    "model": "TEXT",
    "engine": "TEXT",
    "context_band": "TEXT",
    "ttft_p50_ms": "REAL",
    "throughput_tok_s": "REAL",
    "gpu_mem_peak_gb": "REAL",
    "preemption_count": "INTEGER",
    "status": "TEXT",
    "raw_result_json": "TEXT",
}
STRANGE = {"site note": "", 'x"; DROP TABLE benchmark_runs; --': "BLOB"}


def published(path, rows=10_000, mechanism_columns=0, strange=True):
    """A database of the published study, with as many of the later columns as asked for."""
    later = dict(published_columns()[:mechanism_columns])
    shape = PUBLISHED | (STRANGE if strange else {}) | later
    declared = ", ".join(f"{name(column)} {kind}" for column, kind in shape.items())
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"CREATE TABLE benchmark_runs ({declared})")
        marks = ", ".join("?" * len(shape))
        connection.executemany(
            f"INSERT INTO benchmark_runs VALUES ({marks})",
            ([cell(i, column, kind) for column, kind in shape.items()] for i in range(1, rows + 1)),
        )
    return path


def name(column):
    return '"' + column.replace('"', '""') + '"'


def cell(i, column, kind):
    """Mostly what the column is for; now and then what an old database really holds."""
    known = {"id": i, "status": "failed" if i % 10 == 0 else "success", "mechanism": "baseline"}
    if column in known:
        return known[column]
    if i % 97 == 0:
        return (None, "n/a", "", b"\x00\xff", float("inf"), -(2**63), "Ω\n'--")[i // 97 % 7]
    return {"REAL": i + 0.1, "INTEGER": i}.get(kind, f"{column} {i % 5}")


def checksum(path, table="benchmark_runs", columns=None):
    """Of every stored value with its type, in order, and how many rows there are."""
    with closing(sqlite3.connect(path)) as connection:
        columns = columns or [column for (_, column, *_) in connection.execute(f"PRAGMA table_info({table})")]
        told = ", ".join(f"typeof({name(column)}), quote({name(column)})" for column in columns)
        found = connection.execute(f"SELECT {told} FROM {table} ORDER BY rowid").fetchall()
    return columns, len(found), hashlib.sha256(repr(found).encode()).hexdigest()


def dump(path):
    """Everything that is in a database, and its version."""
    with closing(sqlite3.connect(path)) as connection:
        version = connection.execute("PRAGMA user_version").fetchone()
        shapes = connection.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()
        tables = [table for table, sql in shapes if sql and sql.startswith("CREATE TABLE")]
        return version, shapes, {table: checksum(path, table) for table in tables}


def row(i, evidence=(), embedded=None, **values):
    base = {"row_id": f"r{i}", "model": f"model-{i % 3}", "mechanism": "baseline", "throughput_tok_s": i}
    return Row(checked_row(base | values), tuple(evidence), embedded, f"row {i}")


SCORE = ReplayedScore(quality_eval_id="kv_fidelity", metric="kl", item=7, of="variant", claimed=0.25, found=0.25)
SAME = Replay(scores=(SCORE,), code="c0de", at="2026-01-01T00:00:00+00:00")
"""What measuring again says of a row that is what it says."""


def confirmed(rows):
    """Measures again by saying so: for tests of what is told, not of how it is found."""
    return [SAME] * len(rows)


def claim(i, earned="supported", status="completed", loss=0.25, run=None, reasons=(), replay=SAME):
    """What the gate says of `row(i)`."""
    finding = Finding(criterion="x", hard=False, ceiling="gated", counts=True, reasons=tuple(reasons))
    return Claim(
        source=f"row {i}",
        row={"row_id": f"r{i}", "run": run},
        claimed="supported",
        earned=earned,
        status=status,
        word="pass",
        badge="",
        findings=(finding,) if reasons else (),
        judgements=() if loss is None else (judgement("kl", loss),),
        replay=replay,
    )


def report(*claims, registry="r1", current=None):
    """The gate's, with these claims."""
    counts = dict.fromkeys(WORDS, 0)
    judged = {"strict": False, "verdict": "pass", "exit_code": 0, "counts": counts}
    return GateReport(registry=registry, current=current, claims=claims, **judged)


def ingest(store, rows, run=None, claims=(), replace=False, **basis):
    """Rows and claims into a store; `basis` is what they were judged against, as `report` takes it."""
    return put(store, prepared(rows, report(*claims, **basis), run), replace)


def judgement(key, loss, high=None, margin=1.0):
    return Judgement(
        key=key,
        word="open",
        margin=margin,
        loss=loss,
        low=loss,
        high=loss if high is None else high,
        room=None,
        needed_n=None,
    )


# -------------------------------------------------------------------------------- other processes


def start(program, *arguments):
    """A Python process beside this one."""
    environment = os.environ | {"PYTHONPATH": f"{SRC}{os.pathsep}{SRC.parent / 'tests'}"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


HOLD = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA locking_mode = EXCLUSIVE")
connection.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held(path):
    """Another process holds an exclusive lock."""
    with start(HOLD, path) as other:
        assert other.stdout.readline() == "held\n"
        try:
            yield
        finally:
            other.communicate("")
