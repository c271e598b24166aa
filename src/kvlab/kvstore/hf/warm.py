"""Finding the snapshot with the longest prefix that may be used for a prompt, and a run that stands after it."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvlab.codecs.stream.seal import Key
from kvlab.core.counts import counted
from kvlab.core.errors import SnapshotRefused, StorageError, UserError
from kvlab.kvstore.hf.equality import expected, numerics_of, salts, same_as_cold
from kvlab.kvstore.hf.model import PagedModel, refuse_tokens
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.residency import Policy, build
from kvlab.kvstore.paging.scorer import Rebuilt
from kvlab.kvstore.snapshot import read
from kvlab.kvstore.snapshot.identity import CodecIdentity
from kvlab.kvstore.snapshot.numerics import differing
from kvlab.kvstore.snapshot.payload import ChunkCoder, coder_for
from kvlab.kvstore.snapshot.reasons import Code, SnapshotReason, refusal


def files(snapshots: Path | str | Sequence[Path] | None) -> list[Path]:
    """A folder's files in order of their names; hidden ones are still being written."""
    if snapshots is None:
        return []
    if not isinstance(snapshots, str | Path):
        return [Path(path) for path in snapshots]
    path = Path(snapshots)
    if not path.is_dir():
        return [path]
    try:
        return sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}", code="storage.cannot-read") from None


@contextmanager
def _noting(path: Path, reasons: list[SnapshotReason]) -> Iterator[None]:
    """What keeps a file from being used goes to the reasons, under its name."""
    try:
        yield
    except SnapshotRefused as error:
        reasons += [SnapshotReason(code, f"{path.name}: {line}") for code, line in error.reasons]
    except StorageError as error:
        reasons.append(SnapshotReason(Code.UNREADABLE, str(error)))


@dataclass(frozen=True)
class PendingRun:
    """A run that has yet to compute the rest of the prompt, and how it got there."""

    run: PagedRun
    load_ms: float | None = None
    bytes_read: int | None = None
    rebuilt: Rebuilt | None = None
    snapshot: Path | None = None
    lossless: bool | None = None
    other_numerics: tuple[str, ...] = ()


@dataclass(frozen=True)
class RestoreRequest:
    """What `restore` was asked for."""

    model: PagedModel
    tokens: tuple[int, ...]
    config: PagerConfig
    policy: Policy | str
    coder: ChunkCoder | None
    unproven: bool
    salt: str
    every: int
    seed: int
    key: Key | None = None

    def check(self) -> None:
        """Refuse the prompt where a run would, before there is one; the errors are those of `refuse_tokens`."""
        counted("every", self.every, least=1)
        refuse_tokens(self.model, self.tokens)

    def fresh(self) -> PagedRun:
        """A run that has seen nothing."""
        return PagedRun(self.model, self.config, self._policy(), every=self.every, salt=self.salt, seed=self.seed)

    def _policy(self) -> Policy:
        if isinstance(self.policy, str):
            return build(self.policy, self.model.geometry(self.config.chunk_tokens), self.seed)
        return copy.deepcopy(self.policy)

    def warm(self, paths: Sequence[Path]) -> tuple[PendingRun | None, tuple[SnapshotReason, ...]]:
        """A run after the longest prefix there is, or every reason why there is none.

        Of equal prefixes one without loss comes first, then one of the numerics of this run.
        """
        if not paths:
            return None, (SnapshotReason(Code.NO_SNAPSHOT, "there is no snapshot to be restored"),)
        began, reasons, usable = self.now(), [], []
        for path in paths:
            with _noting(path, reasons), read.open(path, self.key) as snapshot:
                usable.append((self._rank(snapshot), path))
        for _, path in sorted(usable, key=lambda one: one[0]):
            with _noting(path, reasons), read.open(path, self.key) as snapshot:
                standing = self._loaded(snapshot)
                return replace(standing, load_ms=self.now() - began), ()
        return None, tuple(reasons)

    def _rank(self, snapshot: read.Snapshot) -> tuple[int, bool, bool]:
        """The lowest is tried first; `SnapshotRefused` for one that cannot be used."""
        upto, _ = self._usable(snapshot)
        other = differing(snapshot.manifest.made, numerics_of(self.model))
        return -upto, not snapshot.manifest.lossless, bool(other)

    def _usable(self, snapshot: read.Snapshot) -> tuple[int, ChunkCoder | None]:
        """Tokens, from one chunk on, and what decodes them; or `SnapshotRefused`. No pool is made for it."""
        tokens, size, policy = self.tokens, snapshot.geometry.chunk_tokens, self._policy()
        own = salts(self.salt, self.config, policy, self.every)
        wanted = expected(snapshot, self.model, self.config, own, self._codec(snapshot))
        if reasons := snapshot.check(wanted, tokens, unproven=self.unproven):
            raise SnapshotRefused(reasons, snapshot.path)
        shared = min(snapshot.usable_prefix(tokens), (len(tokens) - 1) // size * size)
        if upto := same_as_cold(snapshot.manifest, shared, self.config, policy, self.every, self.salt):
            return upto, self._coder(snapshot)
        raise refusal(
            Code.PREFIX,
            f"of the {len(tokens)} tokens of the prompt, {snapshot.usable_prefix(tokens)} are shared: none of them "
            f"leaves one to compute and a pool of {self.config.pool_tokens} tokens as a cold run would have it",
        )

    def _loaded(self, snapshot: read.Snapshot) -> PendingRun:
        upto, coder = self._usable(snapshot)
        run, rebuilt = PagedRun.restored(
            self.model,
            snapshot,
            upto,
            self.config,
            self._policy(),
            coder=coder,
            unproven=self.unproven,
            every=self.every,
            salt=self.salt,
            seed=self.seed,
        )
        return PendingRun(
            run,
            bytes_read=snapshot.nbytes,
            rebuilt=rebuilt,
            snapshot=snapshot.path,
            lossless=snapshot.manifest.lossless,
            other_numerics=tuple(sorted(run.other_numerics)),
        )

    def _codec(self, snapshot: read.Snapshot) -> CodecIdentity | None:
        """How the payload has to be coded: as the given coder does it, or else as any is for which one can be made."""
        found = snapshot.manifest.identity.codec
        return found if found is None or self.coder is None else self.coder.codec

    def _coder(self, snapshot: read.Snapshot) -> ChunkCoder | None:
        """What decodes a payload that is this model's; None for one that is stored as it is."""
        identity = snapshot.manifest.identity
        if identity.codec is None or self.coder is not None:
            return None if identity.codec is None else self.coder
        try:
            turns = self.model.turns(snapshot.length) if identity.codec.placement == "pre_rope" else None
            return coder_for(identity, None, turns)
        except UserError as error:
            code = Code.CODEC if identity.codec.calibration_hash is None else Code.CALIBRATION
            raise refusal(code, f"the payload cannot be decoded without a coder for it: {error}") from None

    def now(self) -> float:
        """Milliseconds, once the GPU has done what it was told."""
        if self.model.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() * 1e3
