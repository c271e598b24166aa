"""Traces: what is written is read, what is published is read as it lies, and a line that is no request is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from kvlab_mechanisms.serving import trace
from kvlab_mechanisms.serving.arrivals import AZURE_CONV, made, scaled
from kvlab_mechanisms.serving.trace import TraceError, read_any

GOOD = {"t": 0, "prompt": 10, "output": 2}


def test_what_is_written_is_read(tmp_path):
    one = made(50, replace(AZURE_CONV, share=0.5, prefixes=4, prefix_tokens=64), seed=3)
    trace.write(one, tmp_path / "a.jsonl")
    again = read_any(tmp_path / "a.jsonl")
    for key in trace.KEYS:
        assert (getattr(again, key) == getattr(one, key)).all(), key


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"t": -1}, "t -1; allowed: seconds"),
        ({"t": 1e300}, "allowed: seconds"),
        ({"t": True}, "t True"),
        ({"prompt": 0}, "prompt 0; allowed: a whole number from 1"),
        ({"prompt": 1.5}, "prompt 1.5"),
        ({"output": "3"}, "output '3'"),
        ({"prefix": 4}, "a prefix has tokens"),
        ({"prefix": 4, "shared": 11}, "shared 11; allowed: a whole number from 0 to 10"),
        ({"promt": 3}, "did you mean 'prompt'"),
    ],
)
def test_a_line_that_is_no_request_is_refused(tmp_path, changed, said):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | changed) + "\n")
    with pytest.raises(TraceError, match="line 2") as error:
        trace.read(path)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no request"),
        ("[1]\n", "no object"),
        ("{\n", "not JSON"),
        ('{"t": NaN, "prompt": 1, "output": 1}', "t nan"),
        ('{"t": 0, "t": 1, "prompt": 1, "output": 1}', "a key twice"),
        ('{"t": 0, "prompt": 1}', "no 'output'"),
        ('{"t": 2, "prompt": 1, "output": 1}\n{"t": 1, "prompt": 1, "output": 1}', "request 2 comes at 1 s"),
        ("[" * 5000, "not JSON"),
        ("x" * 70000, "too long"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, text, said):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=said):
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
    with pytest.raises(TraceError, match="ContextTokens '-3'"):
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
    with pytest.raises(TraceError, match=r"line 1: timestamp .* allowed: milliseconds from 0"):
        read_any(path)


@pytest.mark.parametrize("rate", [1e-308, 5e-324, 1e-12])
def test_a_rate_that_stretches_time_beyond_what_is_taken_is_refused(rate):
    one = made(100, AZURE_CONV, 7)
    with pytest.raises(TraceError, match=r"the last request would come at .* allowed: at least") as error:
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
