"""vLLM as an engine: one prompt through its live model, in this process or in this one and its followers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from kvlab.core.engines import AUTO
from kvlab.core.errors import CapabilityError
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import PAGES_VARIABLE, RECIPE_VARIABLE, Placement
from kvlab.core.testimony import Pool, Proof
from kvlab.engines.base import ContextCache, Engine, Reading, Storage, Tap, refuse_unknown_placement
from kvlab.engines.vllm.process import Loaded, WholeTap, executor
from kvlab.engines.vllm.ranks import Followers


class VLLMEngine(Engine):
    """vLLM's own model, attention kernel and paged cache; one prompt per call, eager mode."""

    name = "vllm"
    attention = "default"

    def __init__(self, info: ModelInfo, dtype: str, attention: str, max_tokens: int, cache_dtype: str = AUTO):
        super().__init__(info, dtype)
        for variable in (RECIPE_VARIABLE, PAGES_VARIABLE):
            if os.environ.get(variable):
                raise CapabilityError(
                    f"{variable} is set, so vLLM would code every pass once more; unset it",
                    code="capability.coded-twice",
                )
        self._loaded, self._followers = None, None
        if info.tensor_parallel == 1:
            self._loaded = Loaded(info, dtype, max_tokens, cache_dtype)
            return
        refuse_missing_gpus(info)
        self._followers = Followers(info, dtype, max_tokens, cache_dtype)
        with self._closed_on_failure():
            self._loaded = Loaded(info, dtype, max_tokens, cache_dtype, executor(0, self._followers.meeting))
            self._followers.forget_memory()

    @property
    def device(self) -> str:
        """The device in words."""
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"

    @property
    def model(self) -> torch.nn.Module:
        """vLLM's live model; of a split one, this process's part."""
        return self._loaded.model

    @property
    def storage(self) -> Storage:
        """vLLM's paged cache, as its tensors say."""
        return self._loaded.storage()

    @property
    def proof(self) -> Proof:
        """See `Engine.proof`."""
        return self._loaded.proof()

    @property
    def pool(self) -> Pool:
        """See `Engine.pool`; of a split model, of this process."""
        return self._loaded.pool()

    def score(
        self, ids: Sequence[int], first: int, tap: Tap | None = None, placement: Placement = "pre_rope"
    ) -> torch.Tensor:
        """See `Engine.score`."""
        refuse_unknown_placement(placement)
        if self._followers is None:
            return self._words(self._loaded.logits(ids, first, tap, placement))
        with self._closed_on_failure():
            self._followers.join(ids, first, tap is not None, placement)
            return self._words(self._loaded.logits(ids, first, WholeTap(tap) if tap else None, placement))

    def score_over(self, ids: Sequence[int], cache: ContextCache, placement: Placement = "pre_rope") -> torch.Tensor:
        """See `Engine.score_over`: vLLM is brought the context by a KV connector; a split model computes it."""
        refuse_unknown_placement(placement)
        if self._followers is not None:
            return super().score_over(ids, cache, placement)
        return self._words(self._loaded.logits_over(ids, cache, placement))

    def reading(self) -> AbstractContextManager[Reading | None]:
        """See `Engine.reading`; a split model has its heads in several processes and is not looked into."""
        return super().reading() if self._followers is not None else self._loaded.reading()

    def _words(self, logits: torch.Tensor) -> torch.Tensor:
        """Without what vLLM pads the vocabulary with."""
        return logits[:, : self.info.vocab_size]

    @contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """No follower is left in the middle of a pass that rank 0 has given up."""
        try:
            yield
        except BaseException:  # an interrupt too: whatever it is goes on, after this
            self._followers.close(patience=0)
            raise

    def close(self) -> None:
        """Shut the engine core down."""
        if self._followers:
            self._followers.close()
        if self._loaded:
            self._loaded.close()


def refuse_missing_gpus(info: ModelInfo) -> None:
    """`CapabilityError` where a split model would find fewer GPUs than parts."""
    there = torch.cuda.device_count()
    if torch.cuda.is_available() and there < info.tensor_parallel:
        raise CapabilityError(
            f"tensor_parallel of model {info.slug!r} is {info.tensor_parallel}, but {there} GPU"
            f"{'s are' if there > 1 else ' is'} here; set it to {there} at most, or ask the cluster for more",
            code="capability.split",
        )
