"""How far a snapshot's K and V, and what is in the pool after them, are those of a cold run.

A token's K and V depend on what was in the pool when it was computed. As long as every chunk is, the pool's size and
policy make no difference, and a snapshot serves every run of the model. From the first token on that was computed
while a chunk was out, it serves runs with the same pool alone; it is then saved under a salt that says which.

All this is to the bit where the numerics are the same, see `snapshot.numerics`.
"""

from __future__ import annotations

import hashlib

from torch import Tensor

from kvlab.core.records import versions
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.residency import Policy
from kvlab.kvstore.snapshot.identity import CodecIdentity, ContextIdentity
from kvlab.kvstore.snapshot.manifest import Manifest
from kvlab.kvstore.snapshot.read import Snapshot

SCORED_AT = "scored_at"  # in a manifest's `made`: tokens of the run when its chunks were last scored


def salts(salt: str, config: PagerConfig, policy: Policy, every: int) -> tuple[str, str]:
    """Of snapshots that a run can go on from: made with every chunk in the pool, and with such a pool.

    Parameters
    ----------
    salt, config, policy, every
        See `pool_salt`.
    """
    return salt, pool_salt(salt, config, policy, every)


def pool_salt(salt: str, config: PagerConfig, policy: Policy, every: int) -> str:
    """The salt of what was computed while a chunk was out of such a pool.

    Parameters
    ----------
    salt : str
        Of the run.
    config : PagerConfig
    policy : Policy
    every : int
        Tokens between two selections, for a policy that scores.
    """
    parts = [f"pool {config.blocks} chunks", f"sinks {config.sink_chunks}", f"tail {config.tail_chunks}", policy.name]
    if (seed := getattr(policy, "seed", None)) is not None:
        parts.append(f"seed {seed}")
    if policy.needs:
        parts.append(f"every {every}")
    return f"{salt}[{', '.join(parts)}]"


def expected(
    snapshot: Snapshot, model: PagedModel, config: PagerConfig, own: tuple[str, str], codec: CodecIdentity | None
) -> ContextIdentity:
    """The identity that a snapshot has to have for a run to go on from it.

    Parameters
    ----------
    snapshot : Snapshot
    model, config
        The run's.
    own : tuple of str
        Its `salts`; either will do.
    codec : CodecIdentity or None
        Of the coder that will decode the payload.
    """
    found = snapshot.manifest.identity.salt
    return model.identity(config.chunk_tokens, found if found in own else own[0]).coded(codec)


def numerics_of(model: PagedModel, order: str = "logical") -> dict[str, str]:
    """What decides the last bits of what a run computes; for the `made` of a manifest."""
    return versions() | model.made | {"order": order}


def same_as_cold(manifest: Manifest, upto: int, config: PagerConfig, policy: Policy, every: int, salt: str) -> int:
    """Of a snapshot's first tokens, how many leave a run where it would be had it computed them itself.

    A snapshot that was made while every chunk was in the pool serves as far as this pool reaches. Policies that do
    not look at the data rank chunks by numbers that do not change afterwards, and so the pool at any earlier length
    can be told. Scores do change: those in a snapshot are right at the length at which they were made, and elsewhere
    as long as new ones come before the first chunk has to go.

    Parameters
    ----------
    manifest : Manifest
        Of a snapshot with the run's own identity.
    upto : int
        Tokens, whole chunks.
    config, policy, every, salt
        Of the run.

    Returns
    -------
    int
        At most `upto`, whole chunks.
    """
    own = manifest.identity.salt == pool_salt(salt, config, policy, every)
    if not policy.needs:
        return upto if own else min(upto, config.pool_tokens)
    known = scored_at(manifest)
    if own and known is not None and known <= upto:
        return upto
    reach = max(0, config.pool_tokens - every)
    return min(upto, reach - reach % config.chunk_tokens)


def scored_at(manifest: Manifest) -> int | None:
    """How many tokens the run had when the scores of a snapshot were made; None where that is not said."""
    said = manifest.made.get(SCORED_AT, "")
    return int(said) if said.isdecimal() else None


def logits_digest(logits: Tensor) -> str:
    """SHA-256 of the bits of float32 logits."""
    return hashlib.sha256(logits.float().cpu().contiguous().numpy().tobytes()).hexdigest()
