"""vLLM as an engine: one prompt through its live model, in this process or in this one and its followers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvlab.base.errors import CapabilityError, CodecNotActive
from kvlab.base.model import ModelInfo
from kvlab.base.recipe import RECIPE_VARIABLE, Placement
from kvlab.engines.base import ContextCache, Engine, Storage, Tap, context_of, refuse_unknown_placement
from kvlab.engines.capability import AUTO
from kvlab.engines.vllm_process import Loaded, WholeTap, executor
from kvlab.engines.vllm_ranks import Followers


class VLLMEngine(Engine):
    """vLLM's own model, attention kernel and paged cache; one prompt per call, eager mode."""

    name = "vllm"
    attention = "default"

    def __init__(self, info: ModelInfo, dtype: str, attention: str, max_tokens: int, cache_dtype: str = AUTO):
        super().__init__(info, dtype)
        if os.environ.get(RECIPE_VARIABLE):
            raise CapabilityError(f"{RECIPE_VARIABLE} is set, so vLLM would code every pass once more; unset it")
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

    def score(
        self, ids: Sequence[int], first: int, tap: Tap | None = None, placement: Placement = "pre_rope"
    ) -> torch.Tensor:
        """See `Engine.score`."""
        refuse_unknown_placement(placement)
        if self._followers is None:
            return self._logits(ids, tap, placement)[first:]
        with self._closed_on_failure():
            self._followers.join(ids, tap is not None, placement)
            return self._logits(ids, WholeTap(tap) if tap else None, placement)[first:]

    def score_over(self, ids: Sequence[int], cache: ContextCache, placement: Placement = "pre_rope") -> torch.Tensor:
        """See `Engine.score_over`: vLLM is brought the context by a KV connector; a split model computes it."""
        refuse_unknown_placement(placement)
        if self._followers is not None:
            return super().score_over(ids, cache, placement)
        with _LogitsOf(self.model, rows=len(ids) - 1 - context_of(cache)) as logits:
            self._loaded.forward_over(ids, cache, placement)
        return logits.taken()[:, : self.info.vocab_size]

    def _logits(self, ids: Sequence[int], tap: Tap | None, placement: Placement) -> torch.Tensor:
        with _LogitsOf(self.model, rows=len(ids) - 1) as logits:
            self._loaded.forward(ids, tap, placement)
        return logits.taken()[:, : self.info.vocab_size]

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
            f"{'s are' if there > 1 else ' is'} here; set it to {there} at most, or ask the cluster for more"
        )


class _LogitsOf:
    """Keeps the full-vocabulary prompt logits that the model computes inside a `with` block.

    vLLM calls ``compute_logits`` once for the prompt (one row per predicted prompt token) and once
    for the token it samples (one row); the prompt's call is known by its number of rows.
    """

    def __init__(self, model: torch.nn.Module, rows: int):
        self._model, self._rows, self._logits = model, rows, None

    def __enter__(self) -> _LogitsOf:
        compute = self._model.compute_logits

        def keep(*args, **kwargs):
            logits = compute(*args, **kwargs)
            if logits.shape[0] == self._rows:
                self._logits = logits.clone()
            return logits

        self._model.compute_logits = keep
        return self

    def __exit__(self, *_exception) -> None:
        del self._model.compute_logits  # the instance attribute; the class's method shows again

    def taken(self) -> torch.Tensor:
        """The logits; `CodecNotActive` when vLLM never computed them in one piece."""
        if self._logits is None:
            raise CodecNotActive(
                f"vLLM did not compute the {self._rows} prompt logits in one piece; nothing was measured"
            )
        return self._logits
