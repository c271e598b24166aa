"""LOAD.md of planted steps: fitted, simulated and written, without an engine."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from kvlab.core.errors import CapabilityError
from kvlab.output import format as fmt
from kvlab_mechanisms.serving.measured import arm_of
from kvlab_mechanisms.serving.paced import ClientTimes
from kvlab_mechanisms.serving.worker import Costs
from refusals import refused
from validation.serving import load, load_page, served

pytestmark = pytest.mark.full


def planted(token_bytes: float, slower: float) -> dict:
    chance, steps = np.random.default_rng(0), []
    for _ in range(60):
        prefill, decodes = int(chance.integers(0, 300)), int(chance.integers(0, 20))
        one = {"prefill": prefill, "pairs": prefill * 80.0, "decodes": decodes, "read": decodes * 90}
        one["seconds"] = 0.02 + 1e-3 * prefill + slower * (2e-3 * decodes + 1e-5 * one["read"])
        steps.append(one)
    return {"fit": {"steps": steps}, "tokens": int(load.MEMORY // token_bytes), "block": 16}


def server() -> dict:
    """What a server that takes exactly what is predicted shows of 43 requests."""
    arm = arm_of(planted(23040, 1.0)["fit"]["steps"], load.MEMORY, load.MEMORY // 23040, 16)
    trace = load.azure_like(1.0, requests=43)
    due = served.simulated(trace, arm)
    denied = np.isnan(due.ttft) | (np.arange(43) < 3)
    first, last = (np.where(denied, np.nan, trace.t + one) for one in (due.ttft, due.latency))
    seen = ClientTimes(trace.t, first, last, trace.output, denied, ())
    return served.compared(trace, seen, due, arm)


def test_a_server_that_takes_what_is_predicted_is_as_simulated():
    found = server()
    assert found["denied"] == [4, 1] and found["requests"] == 39
    for name in ("ttft_p50", "tpot_p50"):
        assert found[name][0] == pytest.approx(found[name][1], rel=0.2)


def test_steps_of_a_server_are_seen_by_its_client(monkeypatch):
    """A server of known costs, whose tokens come when they should: the fit finds the costs again."""
    costs, clock = Costs(0.02, 1e-3, 0.0, 2e-3, 1e-5), [0.0]

    async def asked(_client, _address, prompt, output):
        clock[0] += costs.step + costs.prefill * len(prompt)
        yield
        for place in range(1, output):
            clock[0] += costs.step + costs.decode + costs.read * (len(prompt) + place)
            yield

    monkeypatch.setattr(served, "asked", asked)
    monkeypatch.setattr(served, "monotonic", lambda: clock[0])
    monkeypatch.setattr(served, "GROUPS", (1,))
    monkeypatch.setattr(served, "JOINED", ())
    arm = arm_of(asyncio.run(served.steps("")), 1 << 28, (1 << 28) // 100, 16)
    assert arm.costs.prefill == pytest.approx(costs.prefill, rel=0.02)
    assert arm.costs.step + arm.costs.decode == pytest.approx(costs.step + costs.decode, rel=0.02)


def test_the_step_in_which_a_prompt_is_read_beside_others_is_the_gap_that_ends_with_its_token(monkeypatch):
    """Three sequences decode every 50 ms, and a prompt takes 80 ms more of all of them, once."""
    clock, waiting = [0.0], []

    async def engine() -> None:
        while waiting:
            joins = [one for one in waiting if one["left"] == 1 and one["prompt"] == 40]
            clock[0] += 0.05 + 0.08 * len(joins)
            for one in waiting:
                one["left"] -= 1
                one["token"].set()
            waiting[:] = [one for one in waiting if one["left"]]
            for _ in range(20):
                await asyncio.sleep(0)

    async def asked(_client, _address, prompt, output):
        one = {"prompt": len(prompt), "left": output, "token": asyncio.Event()}
        waiting.append(one)
        for _ in range(output):
            await one["token"].wait()
            one["token"].clear()
            yield

    async def run() -> list[dict]:
        found = asyncio.create_task(served.joined(None, "", [1] * 40, [[1] * 9] * 3))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine()
        return await found

    monkeypatch.setattr(served, "asked", asked)
    monkeypatch.setattr(served, "monotonic", lambda: clock[0])
    (row,) = asyncio.run(run())
    assert row["seconds"] == pytest.approx(0.13) and (row["prefill"], row["decodes"]) == (40, 3)
    assert 3 * 9 < row["read"] < 3 * (9 + 10)


def test_the_page_is_written_from_planted_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "WORKERS", (1, 3))
    monkeypatch.setattr(load, "RATES", (0.5, 2.0))
    monkeypatch.setattr(load, "REQUESTS", 60)
    found = {"bf16": planted(23040, 1.0), "klt4": planted(5824, 3.0)}
    found["bf16"]["held"] = held = {"steps": found["bf16"]["fit"]["steps"], "preemptions": 0}
    held["requests"] = [
        {"t": 2.0 * i, "prompt": 50, "output": 5, "first": 2.0 * i + 0.07, "last": 2.0 * i + 0.2} for i in range(20)
    ]
    load.assemble(tmp_path / "tiny", found, [server()], tmp_path)
    page = (tmp_path / "LOAD.md").read_text()
    assert "`klt4`" in page and "| bf16 | 8 |" in page and "off by" in page
    arms = json.loads((tmp_path / "steps.json").read_text())["arms"]
    assert arms["klt4"]["token_bytes"] == pytest.approx(5824, rel=1e-3)
    data = json.loads((tmp_path / "load.json").read_text())
    for row in data["single"]["bf16"]:
        assert row["arrived"] == load.azure_like(row["rate"]).rate != row["rate"]
        assert f"| bf16 | {row['memory'] >> 20} | {row['capacity']} | {fmt.number(row['arrived'])} |" in page
    assert "| denied | 4 | 1 |" in page and "43 requests at" in page and "vllm serve" in page
    (one,) = data["held"].values()
    assert one["tokens_per_s"][1] > 0
    assert load_page.missed(one | {"ttft_p50": [1.0, 2.0]}).startswith("missed: TTFT, median")


def test_an_engine_that_ends_without_an_answer_is_a_refusal():
    assert load.answer('x\nANSWER {"a": 1}\n') == {"a": 1}
    assert load.answer("nothing") is None
    with refused(CapabilityError, None, "klt4", "ValueError: no"):
        load.refuse("klt4", "trace\nValueError: no\n")
