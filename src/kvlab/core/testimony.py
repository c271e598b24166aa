"""What vouches for a measured cell: the engine that ran, and how far a second computation is from it, step by step."""

from __future__ import annotations

from typing import Any

from pydantic import model_serializer

from kvlab.core.codec_settings import Frozen, without

LEAST = 0.98
"""Of the bits per value that a codec was asked for: what it stores at least, as allocations meet them on average."""


class Proof(Frozen):
    """What only one engine has, as found in the running one.

    Parameters
    ----------
    library, version : str
        That the model's class is from.
    model, attention : str
        The classes of the model and of what computes its attention, with their modules.
    cache_blocks : int or None
        Of the engine's own paged cache; None of an engine without one.
    """

    library: str
    version: str
    model: str
    attention: str
    cache_blocks: int | None


class Pool(Frozen):
    """An engine's own paged cache by its own count, all layers together.

    Parameters
    ----------
    block_tokens : int
        Tokens of a block.
    block_bytes, block_values : int
        What a block takes, and the elements of K and V that it stands for.
    cache_blocks : int
        How many blocks the engine made.
    cache_memory_bytes : int
        Of the memory that it was given.
    exact_bytes, exact_requests : int
        What the tokens of a request that are read exact take beside the blocks, and for how many requests they were
        taken from the memory; said where there are any.
    """

    block_tokens: int
    block_bytes: int
    block_values: int
    cache_blocks: int
    cache_memory_bytes: int
    exact_bytes: int = 0
    exact_requests: int = 0

    @model_serializer(mode="wrap")
    def _said(self, whole) -> dict[str, Any]:
        return without(whole(self), {"exact_bytes": 0, "exact_requests": 0})

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit."""
        return self.cache_blocks * self.block_tokens


class Served(Frozen):
    """What a running engine says that its cache is coded by; `calibration` as a row names it, None without one."""

    recipe_id: str
    calibration: str | None


class Testimony(Frozen):
    """One cell that was computed a second time, by other code, and agreed.

    Parameters
    ----------
    cell_id : str
    window : int
    reference_kl, alternative_kl : float
        Nats per token from the witness's logits to the chain's, without the codec and with it.
    tensor_error, read_error : float
        Largest relative error of a head's K or V: as it came to the codec, and as attention read it.
    effects, expected_effects : int
        Layers times streams where attention read what the codec answered, and where it should have.
    nbytes : int
        Of the files that the codecs wrote for the witness.
    engine : Proof
        Of the engine that ran.
    kl : float
        Mean KL of the cell on this window, nats per token, as written and as the witness has it.
    """

    cell_id: str
    window: int
    reference_kl: float
    alternative_kl: float
    tensor_error: float
    read_error: float
    effects: int
    expected_effects: int
    nbytes: int
    engine: Proof
    kl: float
