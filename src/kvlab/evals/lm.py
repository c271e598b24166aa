"""A model as lm-evaluation-harness asks it: requests as text in, answers out, from either engine.

The harness's own classes for transformers and vLLM are not used. Their log-likelihoods come from one forward pass over
context and continuation, in which transformers passes no cache at all and some of vLLM's caches are written but not
read: a codec would be measured as free of loss. Here everything goes through a `Side`, which has no other way than
through the cache. Both engines get the same tokens, cut in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text

from kvlab.core.errors import CapabilityError, ParamsError
from kvlab.evals.backend import Kind, ScoreRequest, Side, WriteRequest
from kvlab.evals.canary import Guard

MOST_WRITTEN = 256  # tokens of an answer whose task names no number, as in the harness
NEUTRAL = {"do_sample", "temperature", "top_p", "top_k", "min_p"}  # without meaning once the answer is greedy


class CachedLM(TemplateLM):
    """One side of a comparison.

    Parameters
    ----------
    side : Side
    tokenizer : transformers.PreTrainedTokenizerBase
        The model's.
    limit : int
        Most tokens of a request with its answer; what is longer loses its beginning.
    least : int
        Tokens that the longest request must have: a result must not be said of longer contexts than there were.
    guard : Guard, optional
        Of a variant: asked before the first request of each kind.

    Attributes
    ----------
    longest : int
        Tokens of the longest request with its answer.
    cut : int
        Requests that lost their beginning.
    written, seconds : int, float
        Tokens written, and how long that took.
    failure : Exception or None
        What the side raised, so that it can be told from what a task raises.
    """

    def __init__(self, side: Side, tokenizer, limit: int, least: int = 0, guard: Guard | None = None):
        super().__init__()
        self.side, self.tokenizer, self.limit, self.least, self.guard = side, tokenizer, limit, least, guard
        self.longest = self.cut = self.written = 0
        self.seconds = 0.0
        self.failure: Exception | None = None

    @property
    def eot_token_id(self) -> int:
        """What ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands for an empty context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def max_length(self) -> int:
        """Most tokens of a request with its answer."""
        return self.limit

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_kwargs) -> list[int]:
        """Tokens of a text; special ones as the tokenizer adds them, unless the text begins with one already."""
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode([self.prefix_token_id])):
            add_special_tokens = False
        extra = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **extra)

    def _loglikelihood_tokens(self, requests: Sequence[tuple], **_kwargs) -> list[tuple[float, bool]]:
        """Log-likelihoods of (texts, context tokens, continuation tokens)."""
        wanted = [ScoreRequest(*self._fitted(context, continuation)) for _, context, continuation in requests]
        for request in wanted:
            self.longest = max(self.longest, len(request.context) + len(request.continuation))
        self._guarded("score", [request.context + request.continuation for request in wanted])
        with self._kept():
            scored = self.side.score(wanted)
        return [(sum(found.logprobs), found.greedy) for found in scored]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Refused: a text without context is scored in one pass, past the cache."""
        raise CapabilityError(
            f"task {requests[0].task_name!r} scores whole texts in one pass (loglikelihood_rolling), which reads"
            " nothing of what is done to a cache; allowed: generate_until, multiple_choice, loglikelihood. The"
            " likelihood of text after a coded context is what kv_fidelity measures",
            code="capability.reads-nothing",
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers."""
        wanted = [self._wanted(request) for request in requests]
        self._guarded("write", [request.context for request in wanted])
        begun = perf_counter()
        with self._kept():
            found = self.side.write(wanted)
        self.seconds += perf_counter() - begun
        for request, written in zip(wanted, found, strict=True):
            self.written += len(written.logprobs)
            self.longest = max(self.longest, len(request.context) + len(written.logprobs))
        return [
            postprocess_generated_text(written.text, request.stops, None)
            for request, written in zip(wanted, found, strict=True)
        ]

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failure = error
            raise

    def _guarded(self, kind: Kind, texts: list[list[int]]) -> None:
        """Ask the guard, on the longest text: it shows most."""
        if not texts:
            return
        longest = max(texts, key=len)
        if len(longest) < self.least:
            raise ParamsError(
                f"the longest request has {len(longest)} tokens; the context that is named would claim more than was"
                f" measured, leave --context-tokens out or give at most {2 * len(longest)}",
                code="params.short-requests",
            )
        if self.guard:
            with self._kept():
                self.guard.check(kind, longest)

    def _fitted(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Both, the context without its beginning where they are too long; vLLM wants room for a token of its own."""
        room = self.limit - 1 - len(continuation)
        if room < 1:
            raise ParamsError(
                f"an answer of {len(continuation)} tokens does not fit into {self.limit}", code="params.long-answer"
            )
        self.cut += len(context) > room
        return context[-room:], continuation

    def _wanted(self, request: Instance) -> WriteRequest:
        text, given = request.args
        options = normalize_gen_kwargs(given, MOST_WRITTEN)
        refuse_sampling(request.task_name, options)
        stops = handle_stop_sequences(options["until"], eos=self.tokenizer.decode([self.eot_token_id]))
        tokens = options["max_gen_toks"]
        room = self.limit - tokens
        if room < 2:
            raise ParamsError(
                f"task {request.task_name!r} asks for answers of up to {tokens} tokens, and requests may have"
                f" {self.limit} with their answer",
                code="params.long-answer",
            )
        ids = self.tok_encode(text)
        self.cut += len(ids) > room
        return WriteRequest(ids[-room:], tokens, [stop for stop in stops if stop])


def refuse_sampling(task: str | None, options: dict) -> None:
    """`CapabilityError` for a task whose answers are not greedy: chance would be counted as damage."""
    if options.get("do_sample") and options.get("temperature", 0.0) != 0.0:
        raise CapabilityError(
            f"task {task!r} samples its answers (temperature {options['temperature']:g}); compared are greedy answers,"
            " name a task without sampling",
            code="capability.sampling",
        )
    if unknown := sorted(set(options) - NEUTRAL - {"until", "max_gen_toks"}):
        raise CapabilityError(
            f"task {task!r} asks for {', '.join(unknown)} in its generation_kwargs; compared are greedy answers, whose"
            " only options are until and max_gen_toks",
            code="capability.generation-option",
        )
