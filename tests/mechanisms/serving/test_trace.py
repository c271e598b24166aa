"""Traces: what is written is read, what is published is read as it lies, and a line that is no request is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from kvlab_mechanisms.serving import trace
from kvlab_mechanisms.serving.arrivals import AZURE_CONV, made, scaled
from kvlab_mechanisms.serving.trace import TraceError, read_any
from refusals import refused

pytestmark = pytest.mark.full

GOOD = {"t": 0, "prompt": 10, "output": 2}


def test_what_is_written_is_read(tmp_path):
    one = made(50, replace(AZURE_CONV, share=0.5, prefixes=4, prefix_tokens=64), seed=3)
    trace.write(one, tmp_path / "a.jsonl")
    again = read_any(tmp_path / "a.jsonl")
    for key in trace.KEYS:
        assert (getattr(again, key) == getattr(one, key)).all(), key


@pytest.mark.parametrize(
    ("changed", "code", "data"),
    [
        ({"t": -1}, "trace.time", ("t -1;", "seconds")),
        ({"t": 1e300}, "trace.time", ("t 1e+300;", "seconds")),
        ({"t": True}, "trace.time", ("t True",)),
        ({"prompt": 0}, "trace.number", ("prompt 0;", "from 1")),
        ({"prompt": 1.5}, "trace.number", ("prompt 1.5",)),
        ({"output": "3"}, "trace.number", ("output '3'",)),
        ({"prefix": 4}, "trace.prefix", ("prefix 4", "shared 0")),
        ({"prefix": 4, "shared": 11}, "trace.number", ("shared 11;", "from 0 to 10")),
        ({"promt": 3}, "trace.unknown-key", ("'promt'", "'prompt'")),
    ],
)
def test_a_line_that_is_no_request_is_refused(tmp_path, changed, code, data):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | changed) + "\n")
    with refused(TraceError, code, "line 2", *data):
        trace.read(path)


@pytest.mark.parametrize(
    ("text", "code", "data"),
    [
        ("", "trace.empty", ()),
        ("[1]\n", "trace.no-object", ("line 1", "'[1]'")),
        ("{\n", "trace.not-json", ("line 1", "'{'")),
        ('{"t": NaN, "prompt": 1, "output": 1}', "trace.time", ("t nan",)),
        ('{"t": 0, "t": 1, "prompt": 1, "output": 1}', "trace.key-twice", ("line 1",)),
        ('{"t": 0, "prompt": 1}', "trace.missing-key", ("'output'",)),
        (
            '{"t": 2, "prompt": 1, "output": 1}\n{"t": 1, "prompt": 1, "output": 1}',
            "trace.order",
            ("request 2 ", "1 s"),
        ),
        ("[" * 5000, "trace.not-json", ("line 1",)),
        ("x" * 70000, "trace.long-line", ("line 1",)),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, text, code, data):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with refused(TraceError, code, *data):
        read_any(path)


def test_azures_csv(tmp_path):
    path = tmp_path / "conv.csv"
    path.write_bytes(
        b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
        b"2023-11-16 18:15:50.9951690,396,0\r\n"
    )
    found = read_any(path)
    assert found.t == pytest.approx([0, 4.314579], abs=1e-6)
    assert (found.prompt.tolist(), found.output.tolist()) == ([374, 396], [44, 1])
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,-3,44\n")
    with refused(TraceError, "trace.number", "line 2", "ContextTokens '-3'"):
        read_any(path)


def test_mooncakes_json(tmp_path):
    path = tmp_path / "m.jsonl"
    rows = [(0, 1100, [0, 1, 2]), (0, 1030, [0, 1, 9]), (3052, 700, [0, 4]), (4000, 300, [77])]
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": t, "input_length": n, "output_length": 5, "hash_ids": h}) for t, n, h in rows
        )
    )
    found = read_any(path)
    assert found.t.tolist() == [0, 0, 3.052, 4]
    assert found.prefix.tolist() == [-1, 1, 0, -1]
    assert found.shared.tolist() == [0, 1024, 512, 0]


@pytest.mark.parametrize("late", ["1" + 400 * "0", "1e300", "NaN", "-1", "true", '"0"'])
def test_a_time_that_is_none_is_refused_in_milliseconds(tmp_path, late):
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"timestamp": {late}, "input_length": 1, "output_length": 1, "hash_ids": []}}\n')
    with refused(TraceError, "trace.time", "line 1", "timestamp", "milliseconds from 0"):
        read_any(path)


@pytest.mark.parametrize("rate", [1e-308, 5e-324, 1e-12])
def test_a_rate_that_stretches_time_beyond_what_is_taken_is_refused(rate):
    one = made(100, AZURE_CONV, 7)
    with refused(TraceError, "trace.rate", f"{rate:g}", "at least") as error:
        one.at_rate(rate)
    allowed = float(str(error.value).split("at least ")[1].split()[0])
    assert one.at_rate(allowed).t[-1] == pytest.approx(trace.MOST_SECONDS, rel=0.02)


def test_a_made_trace_has_the_statistics_that_were_asked_for():
    one = made(40000, AZURE_CONV, seed=1)
    gaps = np.diff(one.t)
    assert one.rate == pytest.approx(AZURE_CONV.rate, rel=0.03)
    assert (gaps.std() / gaps.mean()) ** -2 == pytest.approx(AZURE_CONV.shape, rel=0.05)
    assert np.log(one.prompt).mean() == pytest.approx(AZURE_CONV.prompt[0], abs=0.03)
    assert np.log(one.output).std() == pytest.approx(AZURE_CONV.output[1], rel=0.08)
    assert (made(100, AZURE_CONV, 7).t == made(100, AZURE_CONV, 7).t).all()
    assert np.median(made(5000, scaled(AZURE_CONV, 0.1)).prompt) == pytest.approx(76, rel=0.1)
    assert one.at_rate(2.0).rate == pytest.approx(2.0)
