"""A run that can be saved, and taken up again from a snapshot, in this process or another.

What it does from there on is what a cold run does: the same forwards, over the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvlab.errors import SnapshotRefused, UserError
from kvlab.kvstore.hf.forwards import Decoded, Forwards
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.hf.sameness import SCORED_AT, pool_salt, same_as_cold, scored_at
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.counts import counted
from kvlab.kvstore.paging.pager import Pager
from kvlab.kvstore.paging.residency import Policy
from kvlab.kvstore.paging.scorer import Rebuilt
from kvlab.kvstore.snapshot.chain import links
from kvlab.kvstore.snapshot.identity import Identity
from kvlab.kvstore.snapshot.manifest import Manifest
from kvlab.kvstore.snapshot.payload import ChunkCoder
from kvlab.kvstore.snapshot.read import Snapshot
from kvlab.kvstore.snapshot.write import Saved, Source, save
from kvlab.records import versions

__all__ = ["Decoded", "PagedRun"]
NUMERICS = ("engine", "attention", "device", "threads", "order", "torch", "transformers")
"""What a manifest's `made` says that may change the last bits of a number."""


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
        A policy that scores does so, and selects, behind each forward that reaches or passes a multiple of so many
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

    @property
    def salts(self) -> tuple[str, str]:
        """Of snapshots that this run can go on from: made with every chunk in the pool, and with such a pool."""
        return self.salt, pool_salt(self.salt, self.pager.config, self.policy, self.every)

    @property
    def made(self) -> dict[str, str]:
        """What decides the last bits of K and V beside the weights, and of what the scores are.

        Where what was restored says otherwise, both.
        """
        here = versions() | self.model.made | {"order": self._cache.order}
        both = {name: f"{was}, then {here.get(name, 'none')}" for name, was in self.other_numerics.items()}
        return here | both | ({SCORED_AT: str(self._scored_at)} if self.policy.needs else {})

    def save(
        self,
        path: Path | str,
        *,
        upto: int | None = None,
        coder: ChunkCoder | None = None,
        evidence: Sequence[str] = (),
        made: Mapping[str, str] | None = None,
    ) -> Saved:
        """Write the chunks that a cold run would leave in the same bits.

        Parameters
        ----------
        path : Path
        upto : int, optional
            Tokens, at most `exact`, which it is when left out; cut down to whole chunks.
        coder, evidence, made
            See `snapshot.write.save`.

        Raises
        ------
        UserError
            When these tokens fill no chunk, or are more than `exact`.
        StorageError
            See `snapshot.write.save`.
        """
        geometry = self.pager.geometry
        upto = self.exact if upto is None else geometry.floor(counted("upto", upto))
        if upto > self.exact:
            raise UserError(
                f"{upto} tokens cannot be saved, at most {self.exact}: what stands behind them was decoded, not"
                " prefilled in whole chunks, or read what a cold run would not; prefill it in a run of its own"
            )
        chunks = upto // geometry.chunk_tokens
        source = Source(
            identity=self.model.identity(geometry.chunk_tokens, self.salts[upto > self._complete]),
            payloads=(self.pager.payload(chunk) for chunk in range(chunks)),
            ledger=self.pager.ledger(chunks),
            tokens=self.tokens,
        )
        return save(path, source, upto=upto, coder=coder, evidence=evidence, made=dict(made or {}) | self.made)

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
        """A run that stands behind a snapshot's first tokens; it has logits after the next one.

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
            When the snapshot is another model's, or damaged. Nothing of it is used.
        UserError
            When `upto` is no whole number of its chunks.
        """
        run = cls(model, config, policy, every=every, salt=salt, seed=seed, order=order, block_order=block_order)
        run._refuse(snapshot, upto, coder, unproven)
        return run, run._load(snapshot, upto, coder, order, block_order)

    def expected(self, snapshot: Snapshot, coder: ChunkCoder | None = None) -> Identity:
        """The identity that a snapshot has to have for this run to go on from it.

        Parameters
        ----------
        snapshot : Snapshot
            Either of `salts` will do.
        coder : ChunkCoder, optional
            What will decode it.
        """
        found = snapshot.manifest.identity.salt
        salt = found if found in self.salts else self.salt
        return self.model.identity(self.pager.geometry.chunk_tokens, salt).coded(coder.codec if coder else None)

    def _refuse(self, snapshot: Snapshot, upto: int, coder: ChunkCoder | None, unproven: bool) -> None:
        size = self.pager.geometry.chunk_tokens
        if reasons := snapshot.check(self.expected(snapshot, coder), unproven=unproven):
            raise SnapshotRefused(reasons, snapshot.path)
        if counted("upto", upto, least=1) % size or upto > snapshot.length:
            raise UserError(
                f"{upto} tokens cannot be restored: allowed are multiples of {size} up to {snapshot.length}"
            )

    def _load(self, snapshot: Snapshot, upto: int, coder: ChunkCoder | None, order: str, block_order) -> Rebuilt | None:
        geometry, config, ledger = self.pager.geometry, self.pager.config, snapshot.ledger
        chunks, device = snapshot.chunks(upto, coder), self.model.device
        loaded = Pager.restored(geometry, config, self.policy, chunks, ledger, upto, device, block_order=block_order)
        loaded.reselect()  # a longer context's pool, or a smaller one's, has left blocks free
        self._hold(loaded, order)
        self.tokens = list(snapshot.tokens[:upto])
        self.chain = links(self.tokens, geometry.chunk_tokens, self.salt)
        self._inherit(snapshot.manifest, upto)
        if (scorer := self._scorer) is None:
            return None
        return scorer.rebuild(self.chain, map(loaded.payload, range(loaded.sealed)), ledger.upto(loaded.sealed))

    def _inherit(self, manifest: Manifest, upto: int) -> None:
        """What this run may claim of chunks that it has not computed."""
        self._scored_at = scored_at(manifest) or 0
        here, was = self.made, manifest.made
        self.other_numerics = {name: was[name] for name in NUMERICS if name in was and was[name] != here.get(name)}
        if manifest.lossless:  # other bits than a cold run's are never saved as such
            config, own = self.pager.config, manifest.identity.salt != self.salt
            self._complete = min(upto, config.pool_tokens) if own else upto
            self.exact = same_as_cold(manifest, upto, config, self.policy, self.every, self.salt)
