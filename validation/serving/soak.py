"""Requests of random lengths with shared beginnings, cancelled and preempted, each held against the same one alone.

Greedy and in float32, an answer must not depend on who else was served, on where its prompt was cut, on what prefix
caching took over or on a preemption. Run where the variable names a recipe (``KVLAB_PAGES``) or without one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlab.cache.files.recipe import read_recipe_file
from kvlab.cache.pages.exact import kept_exact
from kvlab.core.errors import CodecNotActive, UserError
from kvlab.core.recipe import PAGES_VARIABLE

SETTINGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "enable_prefix_caching": True,
    "disable_log_stats": True,
}
BLOCKS = 24  # of vLLM's cache, few enough that requests are preempted
LONGEST = 160  # tokens of a prompt
MOST = 32  # tokens of an answer
TIE = 1e-4  # nats between the two first tokens, below which rounding may choose


@dataclass(frozen=True)
class SoakRequest:
    """A request: its prompt, the tokens to generate, and after how many steps it is cancelled, None for never."""

    name: str
    ids: tuple[int, ...]
    most: int
    cancelled: int | None


@dataclass
class SoakResult:
    """What a run of requests showed.

    Parameters
    ----------
    equal, tied, cancelled : int
        Answers that are those of the same request alone; those that leave them at a tie of two tokens; requests that
        were cancelled, which have no answer.
    different : list of str
        Answers that are others, in words.
    preemptions, shared : int
        How often a request was preempted; tokens that prefix caching took over.
    leaked : int
        Blocks that are not free when no request is left.
    """

    equal: int = 0
    tied: int = 0
    cancelled: int = 0
    different: list[str] = field(default_factory=list)
    preemptions: int = 0
    shared: int = 0
    leaked: int = 0


def requests(text: Sequence[int], count: int, seed: int = 0) -> list[SoakRequest]:
    """Requests cut from a text's tokens; many begin alike, one in eight is cancelled."""
    chance = random.Random(seed)

    def cut(length: int) -> list[int]:
        start = chance.randrange(len(text) - length)
        return list(text[start : start + length])

    stems = [cut(LONGEST) for _ in range(6)]
    found = []
    for number in range(count):
        length = chance.randint(1, LONGEST)
        shared = chance.randint(0, length) if chance.random() < 0.7 else 0
        ids = chance.choice(stems)[:shared] + cut(length - shared)
        cancelled = chance.randint(1, 20) if chance.random() < 0.125 else None
        found.append(SoakRequest(f"{number}", tuple(ids), chance.randint(1, MOST), cancelled))
    return found


class SteppedEngine:
    """A vLLM engine in this process, stepped by hand."""

    def __init__(self, llm: Any):
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.preemptions = self.shared = 0
        preempt = self.scheduler._preempt_request

        def counted(*given, **named):
            self.preemptions += 1
            return preempt(*given, **named)

        self.scheduler._preempt_request = counted

    def add(self, asked: SoakRequest, logprobs: int | None = None) -> None:
        """Put a request into the engine's queue."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=asked.most, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        self.engine.add_request(asked.name, {"prompt_token_ids": list(asked.ids)}, sampling)

    def step(self) -> dict[str, Any]:
        """One step of the engine; the answers that are finished with it."""
        finished = {output.request_id: output for output in self.engine.step() if output.finished}
        self.shared += sum(output.num_cached_tokens or 0 for output in finished.values())
        return finished

    def alone(self, asked: SoakRequest) -> Any:
        """The answer to one request, with nothing cached and no one beside it."""
        if not self.engine.reset_prefix_cache():
            raise CodecNotActive(
                "the prefix cache could not be emptied: pages of a request that has gone are still held"
            )
        self.add(asked, logprobs=2)
        while not (finished := self.step()):
            pass
        return finished[asked.name].outputs[0]

    def leaked(self) -> int:
        """Blocks that are not free; vLLM keeps one for itself."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


def together(served: SteppedEngine, asked: list[SoakRequest], seed: int = 0) -> dict[str, Any]:
    """The answers to requests that come at random times and are cancelled when they say so."""
    chance, waiting, since, answers = random.Random(seed), list(reversed(asked)), {}, {}
    while waiting or since:
        for _ in range(chance.randint(0, 3) if waiting and len(since) < 24 else 0):
            if waiting:
                one = waiting.pop()
                served.add(one)
                since[one.name] = (one, 0)
        if not since:
            continue
        finished = served.step()
        for name, output in finished.items():
            answers[name] = output.outputs[0]
            del since[name]
        for name, (one, steps) in list(since.items()):
            since[name] = (one, steps + 1)
            if one.cancelled is not None and steps + 1 >= one.cancelled:
                served.engine.abort_request([name])
                del since[name]
    return answers


def compare(served: SteppedEngine, asked: list[SoakRequest], answers: dict[str, Any]) -> SoakResult:
    """Each answer held against that of the request alone."""
    found = SoakResult(preemptions=served.preemptions, shared=served.shared, leaked=served.leaked())
    for one in asked:
        if one.name not in answers:
            found.cancelled += 1
            continue
        due, got = served.alone(one), list(answers[one.name].token_ids)
        want = list(due.token_ids)
        if got == want:
            found.equal += 1
            continue
        at = next(place for place, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1])
        first, second = sorted((entry.logprob for entry in due.logprobs[at].values()), reverse=True)[:2]
        if first - second < TIE:
            found.tied += 1
        else:
            found.different.append(
                f"request {one.name} ({len(one.ids)} tokens): token {at} is {got[at]}, alone {want[at]}, which leads by"
                f" {first - second:.1e} nats"
            )
    found.leaked += served.leaked()
    return found


def main_soak(model: Path, recipe: Path | None, text: Path, count: int, seed: int = 0) -> SoakResult:
    """Start vLLM in this process, with coded pages where there is a recipe, and soak it with requests cut from a text.

    A request reads coded what it took from the prefix cache, and exact tokens where it computed them itself. So where
    the recipe keeps tokens exact, an answer may depend on what was taken over, and prefix caching is off.

    Raises
    ------
    UserError
        The text is shorter than a few requests.
    """
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    alike = True
    if recipe is not None:
        os.environ[PAGES_VARIABLE] = str(recipe.absolute())
        alike = not any(kept_exact(read_recipe_file(recipe).recipe, str(recipe)))
    from transformers import AutoTokenizer
    from vllm import LLM

    tokens = AutoTokenizer.from_pretrained(model)(text.read_text())["input_ids"]
    if len(tokens) < 8 * LONGEST:
        raise UserError(f"{text} has {len(tokens)} tokens; requests are cut from at least {8 * LONGEST}")
    settings = SETTINGS | {"enable_prefix_caching": alike}
    llm = LLM(str(model), num_gpu_blocks_override=BLOCKS, max_model_len=256, **settings)
    return soak(llm, tokens, count, seed)


def soak(llm: Any, text: Sequence[int], count: int, seed: int = 0) -> SoakResult:
    """Serve `count` random requests, and each of them alone."""
    served, asked = SteppedEngine(llm), requests(text, count, seed)
    answers = together(served, asked, seed)
    if served.leaked():
        return SoakResult(leaked=served.leaked())
    return compare(served, asked, answers)
