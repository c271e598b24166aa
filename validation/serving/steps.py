"""What a step of vLLM takes, and a whole trace of requests on it: ``python -m validation.serving.steps TASK.json``.

Prints ``ANSWER`` and JSON. The engine is stepped by hand, in this process, on a clock that is the seconds which the
process had of processors: requests arrive on that clock, so a machine that does other work beside does not crowd the
run. For each step it says what was in it, as `kvlab_mechanisms.serving.predictor.step_features` wants it; for each
request when it came, when its first token was there, and when its last.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from validation.serving.arm import QUIET, sampling, start


class Stepped:
    """An engine that says what each of its steps held.

    Parameters
    ----------
    llm : vllm.LLM
        In this process.
    """

    def __init__(self, llm: Any):
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.held, self.preemptions = {}, 0
        schedule, preempt = self.scheduler.schedule, self.scheduler._preempt_request

        def scheduled(*given, **named):
            found = schedule(*given, **named)
            self.held = self.contents(found.num_scheduled_tokens)
            return found

        def preempted(*given, **named):
            self.preemptions += 1
            return preempt(*given, **named)

        self.scheduler.schedule, self.scheduler._preempt_request = scheduled, preempted

    def contents(self, tokens: dict[str, int]) -> dict[str, float]:
        """Prompt tokens of a step and the pairs that they attend to; sequences that decode and the tokens they read."""
        held = {"prefill": 0, "pairs": 0.0, "decodes": 0, "read": 0}
        for name, count in tokens.items():
            request = self.scheduler.requests[name]
            before = request.num_computed_tokens - count
            if before >= request.num_prompt_tokens and count == 1:
                held["decodes"] += 1
                held["read"] += before + 1
            else:
                held["prefill"] += count
                held["pairs"] += count * (before + (count + 1) / 2)
        return held

    def run(self, requests: list[dict], limit: float) -> dict[str, Any]:
        """Serve requests as they come on the processor's clock, for at most so many seconds of it."""
        waiting, clock, steps, met = sorted(requests, key=lambda one: one["t"]), 0.0, [], {}
        at = 0
        while (at < len(waiting) or self.engine.has_unfinished_requests()) and clock < limit:
            if not self.engine.has_unfinished_requests() and waiting[at]["t"] > clock:
                clock = waiting[at]["t"]
            before = time.process_time()
            while at < len(waiting) and waiting[at]["t"] <= clock:
                ask = waiting[at]
                self.engine.add_request(str(at), {"prompt_token_ids": ask["ids"]}, sampling(ask["output"]))
                met[str(at)] = {"t": ask["t"], "prompt": len(ask["ids"]), "output": ask["output"]}
                at += 1
            outputs = self.engine.step()
            seconds = time.process_time() - before
            clock += seconds
            steps.append({"seconds": seconds, **self.held})
            for output in outputs:
                one = met[output.request_id]
                if output.outputs[0].token_ids:
                    one.setdefault("first", clock)
                if output.finished:
                    one["last"] = clock
        if left := [name for name, one in met.items() if "last" not in one]:
            self.engine.abort_request(left)
        return {"steps": steps, "requests": list(met.values()), "clock": clock, "preemptions": self.preemptions}


def main() -> None:
    """See the module."""
    os.environ.update(QUIET)
    task = json.loads(Path(sys.argv[1]).read_text())
    llm = start(task)
    cache = llm.llm_engine.vllm_config.cache_config
    stepped = Stepped(llm)
    stepped.run(task["warm"], task["limit"])
    answer: dict[str, Any] = {"tokens": cache.num_gpu_blocks * cache.block_size, "block": cache.block_size}
    for name, load in task["loads"].items():
        stepped.preemptions = 0
        answer[name] = stepped.run(load, task["limit"])
    print("ANSWER", json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
