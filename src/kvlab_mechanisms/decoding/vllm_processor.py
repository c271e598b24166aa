"""The sampler inside vLLM, as a logits processor of its v1 engine: the same draws as in transformers.

    LLM(model, logits_processors=["kvlab_mechanisms.decoding.vllm_processor:SamplerProcessor"])
    SamplingParams(temperature=1.0, extra_args={"kvlab_sampling": {"temperature": 0.8, "top_k": 50, "seed": 7}})

Requests without ``kvlab_sampling`` are left alone. The others' tokens are drawn here, in the order of vLLM's filters,
and handed on as the only token that can be sampled; vLLM's own temperature and filters then change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from kvlab.core.errors import ParamsError, suggestion
from kvlab_mechanisms.decoding.law import Sampling
from kvlab_mechanisms.decoding.sampler import sample

EXTRA_ARG = "kvlab_sampling"


@dataclass(frozen=True)
class SampledRequest:
    """How a request samples, and its tokens; vLLM appends to `written`."""

    own: Sampling
    prompt: list[int]
    written: list[int]


def sampling_of(params: SamplingParams) -> Sampling | None:
    """What a request asks for; `ParamsError` for a setting that there is not."""
    said = (params.extra_args or {}).get(EXTRA_ARG)
    if said is None:
        return None
    known = Sampling.__dataclass_fields__
    wrong = [
        f"{EXTRA_ARG} has {name!r}, which is no setting{suggestion(name, known)}" for name in said if name not in known
    ]
    if wrong:
        raise ParamsError(*wrong)
    return Sampling(**said)


class SamplerProcessor(LogitsProcessor):
    """See the module; vLLM makes it."""

    def __init__(self, vllm_config, device: torch.device, is_pin_memory: bool):
        self.requests: dict[int, SampledRequest] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse wrong settings where the request is made; vLLM asks for a ValueError."""
        try:
            sampling_of(sampling_params)
        except ParamsError as error:
            raise ValueError("; ".join(error.lines)) from None

    def is_argmax_invariant(self) -> bool:
        """No: what is drawn need not be the likeliest token."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of the batch: those removed, then those added, then those moved."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.requests.pop(row, None)
        for row, params, prompt, written in batch_update.added:
            self.requests.pop(row, None)
            if (own := sampling_of(params)) is not None:
                self.requests[row] = SampledRequest(own, prompt or [], written)
        for a, b, direction in batch_update.moved:
            first, second = self.requests.pop(a, None), self.requests.pop(b, None)
            moved = {b: first, a: second if direction == MoveDirectionality.SWAP else None}
            self.requests |= {row: request for row, request in moved.items() if request is not None}

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [rows, vocabulary]; rows that ask for it hold 0 at their token and minus infinity elsewhere."""
        if not self.requests:
            return logits
        rows = sorted(self.requests)
        mine = [self.requests[row] for row in rows]
        seen = [torch.tensor([*one.prompt, *one.written], dtype=torch.int64) for one in mine]
        steps = [len(one.written) for one in mine]
        tokens = sample(logits[rows], [one.own for one in mine], steps, seen, "vllm").to(logits.device)
        logits[rows] = -torch.inf
        logits[rows, tokens] = 0.0
        return logits
