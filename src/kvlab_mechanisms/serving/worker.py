"""One worker: continuous batching with chunked prefill over paged memory, its steps counted and not walked.

A step takes one token of each sequence that decodes and prompt tokens up to the chunk, oldest request first, as vLLM's
scheduler does. While nothing but decoding goes on, the seconds of m steps are a polynomial in m, so all steps until
something changes (a sequence ends, pages run out, a request comes that can be let in) are one event. Pages of a prompt
are taken when it is let in, all at once. Where a step finds no page, whoever began to decode last is preempted; whoever
is still filling its cache never is, where vLLM's scheduler preempts whoever was let in last.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvlab.core.errors import UserError
from kvlab_mechanisms.serving.memory import Memory
from kvlab_mechanisms.serving.predictor import FittedTimes
from kvlab_mechanisms.serving.trace import NONE


@dataclass(frozen=True)
class Costs:
    """Seconds of a step: what each thing in it adds.

    Parameters
    ----------
    step, prefill, pair, decode, read : float
        Of the step itself, a prompt token, a pair of query and key in prefill, a sequence that decodes, and a token
        whose K and V are read for it.
    """

    step: float
    prefill: float
    pair: float
    decode: float
    read: float

    @classmethod
    def of(cls, fitted: FittedTimes, token_bytes: float) -> Costs:
        """Of a fit of `kvlab_mechanisms.serving.predictor.STEP`, for a cache of so many bytes a token."""
        step, prefill, pair, decode, byte = (float(one) for one in fitted.coefficients)
        return cls(step, prefill, pair, decode, byte * token_bytes)

    def prompt(self, tokens: int, chunk: int) -> float:
        """Seconds in which a prompt is read by a worker that does nothing else."""
        return self.step * -(-tokens // chunk) + self.prefill * tokens + self.pair * tokens * (tokens + 1) / 2

    def steps(self, count: int, decoding: int, read: int) -> float:
        """Seconds of so many steps of `decoding` sequences whose caches hold `read` tokens together."""
        grown = count * read + decoding * count * (count + 1) / 2
        return count * (self.step + self.decode * decoding) + self.read * grown

    def steps_within(self, seconds: float, decoding: int, read: int, most: int) -> int:
        """The fewest steps, at most `most`, that take so many seconds or longer."""
        if seconds <= 0:
            return 1
        a = self.read * decoding / 2
        b = self.step + self.decode * decoding + self.read * (read + decoding / 2)
        guess = seconds / b if a == 0 else 2 * seconds / (b + math.sqrt(b * b + 4 * a * seconds))
        count = max(1, min(most, math.ceil(guess - 1e-9)))
        while count < most and self.steps(count, decoding, read) < seconds:
            count += 1
        while count > 1 and self.steps(count - 1, decoding, read) >= seconds:
            count -= 1
        return count


@dataclass(frozen=True)
class WorkerShape:
    """How a worker serves.

    Parameters
    ----------
    memory_bytes : int
        For KV pages.
    token_bytes : float
        Of K and V of a token, all layers together, as the codec stores them.
    page, chunk, most : int
        Tokens of a page; prompt and new tokens of a step at most; sequences at once at most.
    prefixes : bool
        Whether beginnings that were computed are kept for others.
    """

    memory_bytes: int
    token_bytes: float
    page: int = 16
    chunk: int = 512
    most: int = 64
    prefixes: bool = True

    @property
    def pages(self) -> int:
        """Pages that the memory holds."""
        return int(self.memory_bytes // (self.token_bytes * self.page))


class Job:
    """A request on a worker; `made` tokens of its answer are there, `private` pages are its own."""

    __slots__ = ("at", "began", "cached", "left", "made", "output", "phase", "prefix", "private", "prompt", "read")
    __slots__ += ("shared", "swapped", "t", "tokens")

    def __init__(self, at: int, t: float, prompt: int, output: int, prefix: int, shared: int):
        self.at, self.t, self.prompt, self.output, self.prefix, self.shared = at, t, prompt, output, prefix, shared
        self.made = self.private = self.left = self.cached = self.began = self.tokens = self.phase = 0
        self.read = self.swapped = False  # it reads a kept beginning; its K and V lie in the host's memory


Order = Callable[[Job], float]
"""Whoever has the smallest is let in first."""


def first_come(job: Job) -> float:
    """The order of arrival."""
    return job.at


class Worker:
    """See the module.

    Parameters
    ----------
    costs : Costs
    shape : Shape
    order : Order
        Of the queue.
    swap : function, optional
        From tokens to the seconds of one way to the host's memory, or None where computing them again is quicker;
        without it everything is computed again.
    batch : function, optional
        From the length of the queue and the tokens that still fit to the sequences at once that are let in.
    """

    def __init__(
        self,
        costs: Costs,
        shape: WorkerShape,
        order: Order = first_come,
        swap: Callable[[int], float | None] | None = None,
        batch: Callable[[int, int], int] | None = None,
    ):
        if min(vars(costs).values()) < 0 or costs.step + costs.decode <= 0:
            raise UserError(f"a step of {costs.step:g} s; allowed: above 0, for time has to pass")
        self.costs, self.shape, self.order, self.swap, self.batch = costs, shape, order, swap, batch
        self.memory = Memory(shape.pages, shape.page)
        self.waiting: list[tuple[float, int, Job]] = []
        self.filling: deque[Job] = deque()
        self.running: dict[int, Job] = {}
        self._ends: list[tuple[int, int, Job]] = []
        self.read = 0  # tokens in the caches of those that decode
        self.began = self.until = 0.0
        self.count = 0  # steps under way
        self._prompts: list[tuple[Job, int]] = []
        self._debt = 0.0  # seconds of copies that the next step waits for
        self.preemptions = self.swaps = self.lost = 0
        self.moved = 0.0
        self.busy = 0.0
        self.peak = 0

    def fits(self, prompt: int, output: int) -> bool:
        """Whether a request can ever be served here."""
        return self.memory.pages_of(prompt + output) <= self.memory.pages

    def add(self, job: Job, now: float) -> float | None:
        """Take a request; when the next event is, if that changed."""
        heapq.heappush(self.waiting, (self.order(job), job.at, job))
        if not self.count:
            return self.plan(now)
        if self.count > 1 and not self._prompts and self._may_enter(self.waiting[0][2]):
            decoding = self.memory.decoding
            count = self.costs.steps_within(now - self.began, decoding, self.read, self.count)
            if count < self.count:
                before, self.count = self.until, count
                self.until = self.began + self.costs.steps(count, decoding, self.read)
                self.busy -= before - self.until
                return self.until
        return None

    def _may_enter(self, job: Job) -> bool:
        if len(self.running) + len(self.filling) >= self._most():
            return False
        kept = self.memory.lookup(job.prefix, job.shared) // self.shape.page if job.prefix != NONE else 0
        return self.memory.pages_of(job.prompt + job.made) - kept <= self.memory.available

    def _most(self) -> int:
        if self.batch is None:
            return self.shape.most
        room = self.memory.available * self.shape.page
        return max(1, min(self.shape.most, self.batch(len(self.waiting), room) + len(self.running)))

    # ------------------------------------------------------------------------------ what the next steps are

    def plan(self, now: float) -> float | None:
        """Begin the next steps; when they end, None where there is nothing to do."""
        preempted = False
        while self.running and not self.memory.steps_left(1):
            self._preempt(self.running[next(reversed(self.running))])
            preempted = True
        if not preempted or not (self.running or self.filling):
            self._let_in()
        self.peak = max(self.peak, len(self.running) + len(self.filling))
        decoding, self._prompts = self.memory.decoding, []
        if self.filling:
            self.count = 1
            seconds = self._chunk(decoding)
        elif self.running:
            self.count = self.memory.steps_left(self._next_end() - self.memory.step)
            seconds = self.costs.steps(self.count, decoding, self.read)
        else:
            self.count = 0
            return None
        self.began = now + self._debt
        self.until = self.began + seconds
        self.busy += seconds + self._debt
        self._debt = 0.0
        return self.until

    def _next_end(self) -> int:
        ends = self._ends
        while ends[0][2] is not self.running.get(ends[0][1]) or ends[0][2].began + ends[0][2].left != ends[0][0]:
            heapq.heappop(ends)
        return ends[0][0]

    def _let_in(self) -> None:
        most = self._most() if self.waiting else 0
        while self.waiting and len(self.running) + len(self.filling) < most:
            job = self.waiting[0][2]
            tokens, kept = job.prompt + job.made - (1 if job.swapped else 0), 0
            if job.prefix != NONE and self.shape.prefixes and not job.swapped:
                most_kept = (tokens - 1) // self.shape.page * self.shape.page
                kept = min(self.memory.lookup(job.prefix, job.shared), most_kept)
            pages = self._take(job, tokens, kept)
            if pages is None and kept and not (self.running or self.filling):
                kept, pages = 0, self._take(job, tokens, 0)  # nobody else reads the beginning, so it can make room
            if pages is None:
                return
            heapq.heappop(self.waiting)
            job.private, job.read, job.cached = pages, bool(kept), kept
            if job.swapped:
                self._bring_back(job, tokens)
            else:
                job.tokens, job.left = kept, tokens - kept
                self.filling.append(job)

    def _take(self, job: Job, tokens: int, kept: int) -> int | None:
        """Take a job's own pages, beside a beginning of `kept` tokens; how many, None where there are too few.

        Whoever reads a beginning keeps all of its pages from being dropped, also those past `kept`.
        """
        memory = self.memory
        if kept:
            memory.hold(job.prefix)
        pages = memory.pages_of(tokens) - kept // self.shape.page
        next_step = memory.needed(1) + (job.swapped and tokens % self.shape.page == 0)  # who comes back decodes at once
        if pages + next_step <= memory.available and memory.take(pages):
            return pages
        if kept:
            memory.release(job.prefix)
        return None

    def _chunk(self, decoding: int) -> float:
        """Seconds of one step with prompt tokens, which are noted."""
        room, prompts, pairs, total = max(1, self.shape.chunk - decoding), self._prompts, 0.0, 0
        for job in self.filling:
            count = min(room - total, job.left)
            if count <= 0:
                break
            prompts.append((job, count))
            pairs += count * (job.tokens + (count + 1) / 2)
            total += count
        own = self.costs
        return own.steps(1, decoding, self.read) + own.prefill * total + own.pair * pairs

    # ------------------------------------------------------------------------------ what the steps were

    def finish(self, now: float, first: list[float], last: list[float]) -> list[Job]:
        """The steps are done: note the time of first and last tokens by request; those that ended."""
        memory, ended = self.memory, []
        memory.advance(self.count)
        self.read += self.count * memory.decoding
        self.count = 0
        step, ends = memory.step, self._ends
        while ends and ends[0][0] <= step:
            until, at, job = heapq.heappop(ends)
            if self.running.get(at) is job and job.began + job.left == until:
                self._stop(job)
                job.made = job.output
                last[at] = now
                ended.append(job)
        for job, count in self._prompts:
            job.tokens += count
            job.left -= count
            if not job.left:
                self.filling.popleft()
                self._first_token(job, now, first, last, ended)
        return ended

    def _first_token(self, job: Job, now: float, first: list[float], last: list[float], ended: list[Job]) -> None:
        if job.prefix != NONE and self.shape.prefixes and not job.read:
            moved = self.memory.keep(job.prefix, job.shared)
            job.private -= moved
            job.read = moved > 0
            job.cached = moved * self.shape.page
        if not job.made:
            first[job.at] = now
        job.made += 1
        if job.made < job.output:
            self._decode(job, job.tokens)
            return
        self._give_back(job)
        last[job.at] = now
        ended.append(job)

    def _decode(self, job: Job, tokens: int) -> None:
        """Let a job decode from the next step on."""
        job.tokens, job.began, job.left = tokens, self.memory.step, job.output - job.made
        job.phase = self.memory.join(tokens)
        self.running[job.at] = job
        self.read += tokens
        heapq.heappush(self._ends, (job.began + job.left, job.at, job))

    def _stop(self, job: Job) -> int:
        """Take a job out of decoding and its pages from it; tokens that its cache held."""
        grown = self.memory.step - job.began
        tokens = job.tokens + grown
        job.private += self.memory.pages_of(tokens) - self.memory.pages_of(job.tokens)
        self.memory.leave(job.phase)
        del self.running[job.at]
        self.read -= tokens
        job.made += grown
        self._give_back(job)
        return tokens

    def _give_back(self, job: Job) -> None:
        self.memory.give(job.private)
        job.private = 0
        if job.read:
            self.memory.release(job.prefix)
            job.read = False

    def _preempt(self, job: Job) -> None:
        tokens = self._stop(job)
        self.preemptions += 1
        seconds = self.swap(tokens) if self.swap else None
        if seconds is None:
            self.lost += tokens
        else:
            self._debt += seconds
            self.swaps += 1
            self.moved += tokens * self.shape.token_bytes
            job.swapped = True
        heapq.heappush(self.waiting, (self.order(job), job.at, job))

    def _bring_back(self, job: Job, tokens: int) -> None:
        self._debt += self.swap(tokens) or 0.0
        self.moved += tokens * self.shape.token_bytes
        job.swapped = False
        self._decode(job, tokens)
