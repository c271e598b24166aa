"""How much memory to reserve for the KV cache of a model whose experts move in and out of the GPU.

A pool that is smaller than the context costs quality or time. It is worth that only where it frees the room
that keeps all experts on the GPU ("hot"); where they fit beside the full cache anyway, the pool is redundant.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvlab.core.counts import counted

AT_LEAST_ONE = ("kv_bytes_per_tok", "max_ctx", "gpu_total", "core")


@dataclass(frozen=True)
class Demand:
    """What has to share the GPU's memory.

    Parameters
    ----------
    kv_bytes_per_tok : int
        K and V of one token, bytes, from 1.
    max_ctx : int
        Tokens that the context may reach, from 1.
    pool : int
        Tokens of the resident pool; 0 for none.
    gpu_total, core : int
        Bytes of the GPU, and of the weights that always lie there, from 1.
    experts_total : int
        Bytes of all experts together; 0 for a model without.
    warm, safety, draft : int
        Bytes of the buffers that experts are warmed in, of the margin, and of the draft model.

    Raises
    ------
    ParamsError
        When one of these is not a whole number, or too small.
    """

    kv_bytes_per_tok: int
    max_ctx: int
    pool: int
    gpu_total: int
    core: int
    experts_total: int
    warm: int = 0
    safety: int = 0
    draft: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            counted(field.name, getattr(self, field.name), least=int(field.name in AT_LEAST_ONE))

    @property
    def fixed(self) -> int:
        """Bytes that are neither KV nor experts."""
        return self.core + self.warm + self.safety + self.draft

    def spare(self, ctx: int) -> int:
        """Bytes beside a KV cache of `ctx` tokens; negative when that does not fit."""
        return self.gpu_total - self.fixed - self.kv_bytes_per_tok * ctx


@dataclass(frozen=True)
class Reservation:
    """What to reserve, and why.

    Attributes
    ----------
    kv_total, kv_ctx : int
        Bytes, and the tokens they hold.
    all_hot_full_kv : bool
        Whether all experts fit beside the KV cache of the whole context.
    pool_reduced, pool_redundant : bool
        Whether the pool is what is reserved; whether one was asked for that frees nothing.
    left_over : int
        Bytes for experts beside the reservation, never below 0.
    fits : bool
        Whether the reservation itself fits beside what is fixed.
    hot_ctx : int
        The longest context that leaves all experts hot without a pool, tokens; 0 when there is none.
    """

    kv_total: int
    kv_ctx: int
    all_hot_full_kv: bool
    pool_reduced: bool
    pool_redundant: bool
    left_over: int
    fits: bool
    hot_ctx: int


def reserve(demand: Demand) -> Reservation:
    """Reserve the whole context, unless a smaller pool is given and the experts do not all fit beside it.

    Parameters
    ----------
    demand : Demand

    Returns
    -------
    Reservation
    """
    all_hot = demand.spare(demand.max_ctx) >= demand.experts_total
    reduced = 0 < demand.pool < demand.max_ctx and not all_hot
    ctx = demand.pool if reduced else demand.max_ctx
    spare = demand.spare(ctx)
    return Reservation(
        kv_total=demand.kv_bytes_per_tok * ctx,
        kv_ctx=ctx,
        all_hot_full_kv=all_hot,
        pool_reduced=reduced,
        pool_redundant=demand.pool > 0 and not reduced,
        left_over=max(0, spare),
        fits=spare >= 0,
        hot_ctx=max(0, (demand.spare(0) - demand.experts_total) // demand.kv_bytes_per_tok),
    )


def disables_pool(found: Reservation, *, active: bool, force: bool = False, cold_experts: int | None = None) -> bool:
    """Whether a pool that was asked for should be left off, because nothing is gained by it.

    Parameters
    ----------
    found : Reservation
        Of the whole demand.
    active : bool
        Whether a pool was asked for at all.
    force : bool
        Keep it regardless.
    cold_experts : int or None
        Experts that a split between GPU and CPU left cold, which knows better than the plan; None without one.

    Raises
    ------
    ParamsError
        When `cold_experts` is not a whole number from 0.
    """
    if not active or force:
        return False
    if cold_experts is not None:
        return counted("cold_experts", cold_experts) == 0
    return found.all_hot_full_kv
