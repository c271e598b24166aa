"""LOAD.md of planted steps: fitted, simulated and written, without an engine."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvlab.base.errors import CapabilityError
from kvlab.pages import format as fmt
from validation.serving import load, load_page


def planted(token_bytes: float, slower: float) -> dict:
    chance, steps = np.random.default_rng(0), []
    for _ in range(60):
        prefill, decodes = int(chance.integers(0, 300)), int(chance.integers(0, 20))
        one = {"prefill": prefill, "pairs": prefill * 80.0, "decodes": decodes, "read": decodes * 90}
        one["seconds"] = 0.02 + 1e-3 * prefill + slower * (2e-3 * decodes + 1e-5 * one["read"])
        steps.append(one)
    return {"fit": {"steps": steps}, "tokens": int(load.MEMORY // token_bytes), "block": 16}


def test_the_page_is_written_from_planted_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "WORKERS", (1, 3))
    monkeypatch.setattr(load, "RATES", (0.5, 2.0))
    monkeypatch.setattr(load, "REQUESTS", 60)
    found = {"bf16": planted(23040, 1.0), "klt4": planted(5824, 3.0)}
    found["bf16"]["held"] = held = {"steps": found["bf16"]["fit"]["steps"], "preemptions": 0}
    held["requests"] = [
        {"t": 2.0 * i, "prompt": 50, "output": 5, "first": 2.0 * i + 0.07, "last": 2.0 * i + 0.2} for i in range(20)
    ]
    load.assemble(tmp_path / "tiny", found, tmp_path)
    page = (tmp_path / "LOAD.md").read_text()
    assert "`klt4`" in page and "| bf16 | 8 |" in page and "off by" in page
    arms = json.loads((tmp_path / "steps.json").read_text())["arms"]
    assert arms["klt4"]["token_bytes"] == pytest.approx(5824, rel=1e-3)
    data = json.loads((tmp_path / "load.json").read_text())
    for row in data["single"]["bf16"]:
        assert row["arrived"] == load.azure_like(row["rate"]).rate != row["rate"]
        assert f"| bf16 | {row['memory'] >> 20} | {row['capacity']} | {fmt.number(row['arrived'])} |" in page
    (one,) = data["held"].values()
    assert one["tokens_per_s"][1] > 0
    assert load_page.missed(one | {"ttft_p50": [1.0, 2.0]}).startswith("missed: TTFT, median")


def test_an_engine_that_ends_without_an_answer_is_a_refusal():
    assert load.answer('x\nANSWER {"a": 1}\n') == {"a": 1}
    assert load.answer("nothing") is None
    with pytest.raises(CapabilityError, match="klt4: ValueError: no"):
        load.refuse("klt4", "trace\nValueError: no\n")
