"""A run that can be saved, and taken up again from a snapshot, in this process or another.

From there on it does what a cold run does: the same forwards. They are over the same bits when the snapshot was made
by the same numerics, see `snapshot.numerics`; else nothing of it is saved as a cold run's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from kvlab.codecs.stream.seal import Key
from kvlab.core.counts import counted
from kvlab.core.errors import SnapshotRefused, UserError
from kvlab.kvstore.hf.equality import SCORED_AT, expected, numerics_of, salts, same_as_cold, scored_at
from kvlab.kvstore.hf.forwards import Decoded, Forwards
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.ledger import Ledger
from kvlab.kvstore.paging.pager import Pager
from kvlab.kvstore.paging.residency import Policy, build
from kvlab.kvstore.paging.scorer import Rebuilt
from kvlab.kvstore.snapshot.chain import links
from kvlab.kvstore.snapshot.manifest import Manifest
from kvlab.kvstore.snapshot.numerics import differing, mixed
from kvlab.kvstore.snapshot.payload import ChunkCoder
from kvlab.kvstore.snapshot.read import Snapshot
from kvlab.kvstore.snapshot.write import Saved, SnapshotSource, save

__all__ = ["Decoded", "PagedRun"]


class PagedRun(Forwards):
    """One sequence on a paged model.

    Parameters
    ----------
    model : PagedModel
    config : PagerConfig
        Of the pool.
    policy : Policy or str
        A policy of this run alone, or the name of one, see `residency.build`.
    every : int
        A policy that scores does so, and selects, after each forward that reaches or passes a multiple of so many
        tokens.
    salt : str
        Keeps this context apart from others of the same tokens, see `Identity`.
    seed : int
        Of the policy `random`.
    order : {"logical", "slot"}
        In which order attention reads rows; "slot" is for the study of the noise that this makes.
    block_order : sequence of int or None
        See `Pager`.
    """

    _was: Mapping[str, str] | None = None  # `made` of the snapshot that was restored
    _lossy = False

    @property
    def salts(self) -> tuple[str, str]:
        """Of snapshots that this run can go on from: made with every chunk in the pool, and with such a pool."""
        return salts(self.salt, self.pager.config, self.policy, self.every)

    @property
    def made(self) -> dict[str, str]:
        """What decides the last bits of K and V beside the weights, and of what the scores are.

        Where what was restored says otherwise, both.
        """
        scored = {SCORED_AT: str(self._scored_at)} if self.policy.needs else {}
        return (self._here if self._was is None else mixed(self._was, self._here)) | scored

    @property
    def other_numerics(self) -> tuple[str, ...]:
        """In what the snapshot that was restored and this run differ of it; such a run is never `exact`."""
        return () if self._was is None else differing(self._was, self._here)

    @property
    def _here(self) -> dict[str, str]:
        return numerics_of(self.model, self._cache.order)

    def save(
        self,
        path: Path | str,
        *,
        upto: int | None = None,
        coder: ChunkCoder | None = None,
        evidence: Sequence[str] = (),
        made: Mapping[str, str] | None = None,
        key: Key | None = None,
    ) -> Saved:
        """Write the chunks that a cold run would leave in the same bits.

        Parameters
        ----------
        path : Path
        upto : int, optional
            Tokens, at most `exact`, which it is when left out; cut down to whole chunks.
        coder, evidence, made, key
            See `snapshot.write.save`.

        Raises
        ------
        UserError
            When these tokens fill no chunk, or are more than `exact`.
        StorageError
            See `snapshot.write.save`.
        """
        geometry = self.pager.geometry
        wanted = len(self.tokens) if upto is None else counted("upto", upto)
        upto = self.exact if upto is None else geometry.floor(upto)
        if upto > self.exact or (self.chain and not self.exact):
            code, why = self._inexact()
            raise UserError(
                f"{wanted} tokens cannot be saved, at most {self.exact}: {why}; prefill them in a run of their own",
                code=code,
            )
        chunks = upto // geometry.chunk_tokens
        source = SnapshotSource(
            identity=self.model.identity(geometry.chunk_tokens, self.salts[upto > self._complete]),
            payloads=(self.pager.payload(chunk) for chunk in range(chunks)),
            ledger=Ledger.untouched(chunks) if self.by_hand else self.pager.ledger(chunks),
            tokens=self.tokens,
            rows=partial(self.pager.rows, chunks=chunks),
        )
        made = dict(made or {}) | self.made
        return save(path, source, upto=upto, coder=coder, evidence=evidence, made=made, key=key)

    @classmethod
    def restored(
        cls,
        model: PagedModel,
        snapshot: Snapshot,
        upto: int,
        config: PagerConfig,
        policy: Policy | str = "lru",
        *,
        coder: ChunkCoder | None = None,
        unproven: bool = False,
        every: int = 64,
        salt: str = "",
        seed: int = 0,
        order: str = "logical",
        block_order: Sequence[int] | None = None,
    ) -> tuple[PagedRun, Rebuilt | None]:
        """A run that stands after a snapshot's first tokens; it has logits after the next one.

        Whether a cold run would stand there too is said by `exact`, see `sameness`.

        Parameters
        ----------
        model, config, policy, every, salt, seed, order, block_order
            See the class.
        snapshot : Snapshot
            Open.
        upto : int
            Tokens of it, whole chunks.
        coder : ChunkCoder, optional
            For a coded payload.
        unproven : bool
            See `Snapshot.check`.

        Returns
        -------
        PagedRun, Rebuilt or None
            And where the keys came from by which the policy scores; None for a policy that keeps none.

        Raises
        ------
        SnapshotRefused
            When the snapshot is another model's, or damaged. Nothing of it is used, and no run is begun.
        UserError
            When `upto` is no whole number of its chunks.
        """
        geometry = model.geometry(config.chunk_tokens)
        policy = build(policy, geometry, seed) if isinstance(policy, str) else policy
        own = salts(salt, config, policy, every)
        wanted = expected(snapshot, model, config, own, coder.codec if coder else None)
        if reasons := snapshot.check(wanted, unproven=unproven):
            raise SnapshotRefused(reasons, snapshot.path)
        _refuse_length(snapshot, upto)
        chunks, ledger = snapshot.chunks(upto, coder), snapshot.ledger
        pager = Pager.restored(geometry, config, policy, chunks, ledger, upto, model.device, block_order=block_order)
        pager.reselect()  # a longer context's pool, or a smaller one's, has left blocks free
        run = cls.__new__(cls)
        run._begin(model, pager, every, salt, order)
        return run, run._take_up(snapshot)

    def _take_up(self, snapshot: Snapshot) -> Rebuilt | None:
        """Everything beside the pager that is known of a snapshot's first tokens, which lie there."""
        pager, upto = self.pager, self.pager.length
        self.tokens = list(snapshot.tokens[:upto])
        self.chain = links(self.tokens, pager.geometry.chunk_tokens, self.salt)
        self._inherit(snapshot.manifest, upto)
        if (scorer := self._scorer) is None:
            return None
        return scorer.rebuild(self.chain, map(pager.payload, range(pager.sealed)), snapshot.ledger.upto(pager.sealed))

    def _inherit(self, manifest: Manifest, upto: int) -> None:
        """What this run may claim of chunks that it has not computed."""
        self._scored_at, self._was, self._lossy = scored_at(manifest) or 0, manifest.made, not manifest.lossless
        if not self._lossy and not self.other_numerics:  # other bits than a cold run's are never saved as such
            config, own = self.pager.config, manifest.identity.salt != self.salt
            self._complete = min(upto, config.pool_tokens) if own else upto
            self._exact = same_as_cold(manifest, upto, config, self.policy, self.every, self.salt)

    def _inexact(self) -> tuple[str, str]:
        """Why no more can be saved: a code, and in words."""
        if self._lossy:
            return "user.after-lossy", "they follow a snapshot whose payload is lossy"
        if self.other_numerics:
            others = ", ".join(self.other_numerics)
            return "user.after-other-numerics", f"they follow a snapshot that was made with another {others}"
        return (
            "user.inexact",
            "what stands after them was decoded, not prefilled in whole chunks, or read or changed by hand what a"
            " cold run would not",
        )


def _refuse_length(snapshot: Snapshot, upto: int) -> None:
    """`UserError` unless so many tokens are whole chunks of a snapshot."""
    size = snapshot.geometry.chunk_tokens
    if counted("upto", upto, least=1) % size or upto > snapshot.length:
        raise UserError(
            f"{upto} tokens cannot be restored: allowed are multiples of {size} up to {snapshot.length}",
            code="user.not-restorable",
        )
