"""A prompt answered from a snapshot where one may be used, and from nothing where not.

A warm run is the cold run from a later point on. It has the same logits, bit for bit, where the snapshot is without
loss and was made by the same numerics: engine, attention, device, number of threads, packages. What would make it a run
of something else is refused: a snapshot of another model, a damaged one, one that was computed over a smaller pool. One
of other numerics, or a lossy one with evidence, is used all the same; the report says so, and nothing of that run is
saved as a cold run's. A snapshot that turns out damaged while it is read leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from kvlab.codecs.stream.seal import Key
from kvlab.core.errors import SnapshotRefused, UnknownName
from kvlab.kvstore.hf.comparison import RunComparison, compare
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.hf.warm import PendingRun, RestoreRequest, files
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.residency import Policy
from kvlab.kvstore.snapshot.payload import ChunkCoder
from kvlab.kvstore.snapshot.reasons import SnapshotReason

MODES = ("auto", "consume", "recompute", "verify")


@dataclass(frozen=True)
class RestoreReport:
    """What was done. Under ``verify`` the times and counts are the cold run's, `load_ms` and what is of the snapshot
    the warm run's.

    Attributes
    ----------
    mode : str
    consumed : bool
        Whether a snapshot was restored.
    prefix_len : int
        Tokens that came from it.
    tokens_prefilled : int
        Tokens that were computed.
    load_ms : float or None
        Finding, reading and checking the snapshot and filling the pool, milliseconds; None without one.
    prefill_ms : float
        Computing the other tokens, milliseconds.
    bytes_read : int or None
        Of the snapshot.
    page_outs, page_ins : int
        Chunks that left the pool and came back, since it was filled.
    from_keys, from_seed, missing : int or None
        See `scorer.Rebuilt`; None for a policy that keeps no keys, or without a snapshot.
    reasons : tuple of SnapshotReason
        Why no snapshot was restored; empty when one was, or when none was to be.
    comparison : RunComparison or None
        Of the cold run with the warm one, under ``verify``.
    snapshot : Path or None
        The one that was restored.
    lossless : bool or None
        Whether its payload gave back the very bits.
    other_numerics : tuple of str
        In what its manifest and this run differ of what `snapshot.numerics` names: K and V are the same numbers
        then, but perhaps not the same bits, and the run's `exact` is 0.
    """

    mode: str
    consumed: bool
    prefix_len: int
    tokens_prefilled: int
    load_ms: float | None
    prefill_ms: float | None
    bytes_read: int | None
    page_outs: int
    page_ins: int
    from_keys: int | None = None
    from_seed: int | None = None
    missing: int | None = None
    reasons: tuple[SnapshotReason, ...] = ()
    comparison: RunComparison | None = None
    snapshot: Path | None = None
    lossless: bool | None = None
    other_numerics: tuple[str, ...] = ()


@dataclass(frozen=True)
class Restored:
    """A run after the whole prompt, its logits there, float32 [vocab], and what was done for them."""

    run: PagedRun
    logits: Tensor
    report: RestoreReport


def restore(
    model: PagedModel,
    tokens: Sequence[int],
    snapshots: Path | Sequence[Path] | None,
    config: PagerConfig,
    policy: Policy | str = "lru",
    *,
    mode: str = "auto",
    coder: ChunkCoder | None = None,
    unproven: bool = False,
    salt: str = "",
    every: int = 64,
    seed: int = 0,
    decode: int = 16,
    key: Key | None = None,
) -> Restored:
    """Bring a model to the end of a prompt. At least one token is computed, so that there are logits.

    Parameters
    ----------
    model : PagedModel
    tokens : sequence of int
        The prompt's ids, at least one.
    snapshots : path, sequence of paths or None
        Files, or one folder of files. The one with the longest usable prefix is restored, or else the next; of equal
        ones first those without loss, then those of the same numerics.
    config, policy, salt, every, seed
        See `PagedRun`; a policy that is given as an object is copied.
    mode : {"auto", "consume", "recompute", "verify"}
        Restore what can be, and compute the whole prompt where nothing can; refuse instead; never look at a snapshot;
        do both, compare them, and give the cold run.
    coder : ChunkCoder, optional
        For coded payloads whose recipe reads a calibration, see `payload.coder_for`.
    unproven : bool
        Take lossy payloads that name no evidence of what they cost.
    decode : int
        Tokens that ``verify`` decodes of both, from 1.
    key : Key, optional
        Restore nothing that is not signed with it.

    Raises
    ------
    UnknownName
        For another mode.
    SnapshotRefused
        Under ``consume``, when no snapshot can be restored.
    StorageError
        When the folder cannot be listed.
    UserError
        When the tokens are none, not the model's, or too many.
    """
    if mode not in MODES:
        raise UnknownName("restore mode", mode, MODES)
    job = RestoreRequest(model, tuple(tokens), config, policy, coder, unproven, salt, every, seed, key)
    job.check()
    warm, reasons = (None, ()) if mode == "recompute" else job.warm(files(snapshots))
    if warm is None and mode == "consume":
        raise SnapshotRefused(reasons, "every snapshot")
    if warm is not None and mode != "verify":
        return _finished(job, warm, mode)
    cold = _finished(job, PendingRun(job.fresh()), mode)
    if warm is None:
        return replace(cold, report=replace(cold.report, reasons=reasons))
    return _compared(cold, _finished(job, warm, mode), decode)


def _finished(job: RestoreRequest, standing: PendingRun, mode: str) -> Restored:
    """The run after the whole prompt."""
    run, rebuilt, prefix = standing.run, standing.rebuilt, len(standing.run.tokens)
    began = job.now()
    logits = run.extend(job.tokens[prefix:])
    prefill_ms, stats = job.now() - began, run.pager.stats
    report = RestoreReport(
        mode=mode,
        consumed=standing.snapshot is not None,
        prefix_len=prefix,
        tokens_prefilled=len(job.tokens) - prefix,
        load_ms=standing.load_ms,
        prefill_ms=prefill_ms,
        bytes_read=standing.bytes_read,
        page_outs=stats.page_outs,
        page_ins=stats.page_ins,
        from_keys=rebuilt.from_keys if rebuilt else None,
        from_seed=rebuilt.from_seed if rebuilt else None,
        missing=rebuilt.missing if rebuilt else None,
        snapshot=standing.snapshot,
        lossless=standing.lossless,
        other_numerics=standing.other_numerics,
    )
    return Restored(run, logits, report)


def _compared(cold: Restored, warm: Restored, decode: int) -> Restored:
    """The cold run, with what the warm one says of it."""
    theirs = warm.report
    report = replace(
        theirs,
        comparison=compare(cold.run.fork(), warm.run, decode),
        tokens_prefilled=cold.report.tokens_prefilled,
        prefill_ms=cold.report.prefill_ms,
        page_outs=cold.report.page_outs,
        page_ins=cold.report.page_ins,
    )
    return replace(cold, report=report)
