"""The connector's half that stands beside the cache: it moves K and V between snapshots and vLLM's blocks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvlab.core.errors import CapabilityError, KvlabError, SnapshotRefused
from kvlab.core.records import versions
from kvlab.engines.vllm.pages import found_out, refuse_other
from kvlab.kvstore.paging.geometry import Geometry, named
from kvlab.kvstore.paging.ledger import Ledger
from kvlab.kvstore.snapshot import read
from kvlab.kvstore.snapshot.numerics import COMPUTED, PREFILL, mixed
from kvlab.kvstore.snapshot.reasons import Code, SnapshotReason
from kvlab.kvstore.snapshot.write import SnapshotSource, save
from kvlab.kvstore.vllm.context import EngineContext
from kvlab.kvstore.vllm.jobs import JobOutcome, Load, Outcomes, Save, StepJobs, WorkerCounts
from kvlab.kvstore.vllm.miss_reasons import MissReason, reasons_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Mover:
    """Loads and saves.

    A load that fails has changed blocks of its own request alone, and these are named to vLLM, which computes them.

    Parameters
    ----------
    context : Context
        Of the engine.

    Attributes
    ----------
    counts : Counts
        What was done so far.
    """

    def __init__(self, context: EngineContext):
        self.context, self.counts, self._rows = context, WorkerCounts(), None
        self._made = versions() | context.made | {COMPUTED: PREFILL}
        self._failed, self._done, self._read = set(), Outcomes(), set()

    def take(self, caches: Mapping[str, Tensor], config: VllmConfig) -> None:
        """The cache, as vLLM has laid it out.

        Parameters
        ----------
        caches : mapping of str to Tensor
            Of each layer, by its name.
        config : VllmConfig
            Knows the layers by the same names.

        Raises
        ------
        CapabilityError
            When K and V could not be read back from it.
        """
        from vllm.model_executor.models.utils import extract_layer_index

        geometry = self.context.identity.geometry
        names = sorted(caches, key=extract_layer_index)
        if [extract_layer_index(name) for name in names] != list(range(geometry.layers)):
            raise CapabilityError(
                f"snapshots cannot be used here: the cache is of layers {', '.join(names)}",
                code="capability.cache-layers",
            )
        layers = config.compilation_config.static_forward_context
        self._rows = PagedRows([caches[name] for name in names], [layers[name] for name in names], geometry)
        backend = layers[names[0]].get_attn_backend().get_name()
        self._made["attention"] = f"{backend} {getattr(layers[names[0]], 'isa', '')}".rstrip()

    def load(self, jobs: StepJobs) -> None:
        """Do the step's loads."""
        for job in jobs.loads:
            outcome = self._timed(self._loaded, job)
            if outcome.reasons:
                self._failed |= set(self._blocks(job, job.begin))
            self._done.loads[job.request] = outcome
            self.counts.loaded(outcome)

    def save(self, jobs: StepJobs) -> None:
        """Do the step's saves, but for those that a failed load has left without their beginning."""
        for job in jobs.saves:
            if self._failed.intersection(self._blocks(job)):
                line = "its K and V could not be loaded and are computed once more; it is saved then"
                outcome = JobOutcome.failed(job.path, (SnapshotReason(MissReason.LOAD_FAILED, line),))
            else:
                outcome = self._timed(self._saved, job)
                self.counts.saved(outcome)
            self._done.saves[job.request] = outcome
            if job.last:
                self._read.add(job.request)

    def failed_blocks(self) -> set[int]:
        """The blocks that were to be loaded in this step and hold nothing that may be used."""
        failed, self._failed = self._failed, set()
        return failed

    def done(self) -> Outcomes | None:
        """What came of this step's jobs; None when there were none."""
        done, self._done = self._done, Outcomes()
        return done if done.loads or done.saves else None

    def let_go(self) -> set[str]:
        """Ended requests whose blocks vLLM has kept for a save, and need not any more."""
        read_out, self._read = self._read, set()
        return read_out

    def _timed(self, act, job: Load | Save) -> JobOutcome:
        began = time.perf_counter()
        try:
            tokens, nbytes = act(job)
        except KvlabError as error:  # of the snapshot or the disk: a request without it is slower and not wrong
            return JobOutcome.failed(job.path, reasons_of(error))
        return JobOutcome(job.path, tokens, nbytes, 1000 * (time.perf_counter() - began))

    def _loaded(self, job: Load) -> tuple[int, int]:
        """Tokens that were put in the cache, and bytes of the file."""
        size = self.context.identity.geometry.chunk_tokens
        with read.open(job.path) as snapshot:
            unproven, coder = self.context.settings.unproven, self.context.coder
            reasons = snapshot.check(self.context.identity_for(job.salt), unproven=unproven)
            if snapshot.usable_prefix(job.tokens) < len(job.tokens):
                reasons.append(SnapshotReason(Code.PREFIX, "the file is another than the one that was chosen"))
            if reasons:
                raise SnapshotRefused(reasons, job.path)
            for number, chunk in enumerate(snapshot.chunks(len(job.tokens), coder)):
                if (number + 1) * size > job.begin:
                    self._rows.write(job.block_ids, number * size, chunk, job.begin)
            # vLLM shares its blocks, so what is saved from now on may begin with K and V of other numerics; how its own
            # tokens were computed is known of each save, and is said with it
            self._made = mixed({**snapshot.manifest.made, COMPUTED: PREFILL}, self._made)
            return len(job.tokens) - job.begin, snapshot.nbytes

    def _saved(self, job: Save) -> tuple[int, int]:
        rows = partial(self._rows.layer, block_ids=job.block_ids, tokens=len(job.tokens))
        # vLLM scores no chunk, evicts none of a running request, and asks for them in order
        identity, ledger = self.context.identity_for(job.salt), Ledger.untouched(self._count(job))
        source = SnapshotSource(identity, self._chunks(job), ledger, job.tokens, rows)
        saved = save(job.path, source, coder=self.context.coder, made=self._made | {COMPUTED: job.computed})
        return saved.manifest.length, saved.nbytes

    def _chunks(self, job: Save) -> Iterator[Tensor]:
        size = self.context.identity.geometry.chunk_tokens
        return (self._rows.read(job.block_ids, number * size) for number in range(self._count(job)))

    def _count(self, job: Save) -> int:
        return len(job.tokens) // self.context.identity.geometry.chunk_tokens

    def _blocks(self, job: Load | Save, begin: int = 0) -> list[int]:
        """The blocks that hold the job's tokens from one on."""
        size = self.context.block_tokens
        return job.block_ids[begin // size : -(-len(job.tokens) // size)]


# All layers of vLLM's paged cache, read and written in chunks of a snapshot.


class PagedRows:
    """All layers of vLLM's paged cache, in chunks of a snapshot.

    Parameters
    ----------
    caches : sequence of Tensor
        Of each layer in order, [blocks, kv_heads, block_tokens, 2 * head_dim].
    layers : sequence of Attention
        The layers that they belong to.
    geometry : Geometry
        Of the chunks.

    Raises
    ------
    CapabilityError
        When a cache has another shape, dtype or device, or its backend does more than put values in places.
    """

    def __init__(self, caches: Sequence[Tensor], layers: Sequence[Any], geometry: Geometry):
        self.caches, self.geometry = tuple(caches), geometry
        self.block_tokens = self.caches[0].shape[2]
        for cache in self.caches:
            self._refuse_strange(cache)
        self._places = found_out(layers[0], self.caches[0])
        for layer, cache in zip(layers, self.caches, strict=True):
            refuse_other(layer, cache, self._places)

    def read(self, block_ids: Sequence[int], start: int) -> Tensor:
        """The chunk whose first token is the sequence's token `start`: a payload of the geometry.

        Parameters
        ----------
        block_ids : sequence of int
            Of the sequence, from its first token on.
        start : int
            A position.
        """
        blocks, offsets = self._of(block_ids, start, start + self.geometry.chunk_tokens)
        rows = [torch.stack(self._places.read(cache, blocks, offsets)) for cache in self.caches]
        return torch.stack(rows).contiguous()

    def layer(self, layer: int, block_ids: Sequence[int], tokens: int) -> Tensor:
        """K and V of one layer of a sequence's first tokens, [2, kv_heads, tokens, head_dim]."""
        blocks, offsets = self._of(block_ids, 0, tokens)
        return torch.stack(self._places.read(self.caches[layer], blocks, offsets))

    def write(self, block_ids: Sequence[int], start: int, chunk: Tensor, begin: int = 0) -> None:
        """The inverse of `read`, without the tokens before position `begin`."""
        self.geometry.check_chunk(chunk)
        skipped = min(max(begin - start, 0), self.geometry.chunk_tokens)
        blocks, offsets = self._of(block_ids, start + skipped, start + self.geometry.chunk_tokens)
        for cache, (k, v) in zip(self.caches, chunk[:, :, :, skipped:].unbind(), strict=True):
            self._places.write(cache, blocks, offsets, k, v)

    def _of(self, block_ids: Sequence[int], start: int, end: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, end)
        blocks = torch.tensor(block_ids, dtype=torch.int64)[positions // self.block_tokens]
        return blocks, positions % self.block_tokens

    def _refuse_strange(self, cache: Tensor) -> None:
        geometry = self.geometry
        expected = (geometry.kv_heads, self.block_tokens, 2 * geometry.head_dim)
        plain = (
            cache.dim() == 4
            and cache.device.type == "cpu"
            and cache.stride()[1:] == (expected[1] * expected[2], expected[2], 1)
        )
        if not plain or tuple(cache.shape[1:]) != expected or cache.dtype != geometry.torch_dtype:
            raise CapabilityError(
                f"snapshots cannot be used here: a layer's cache is {list(cache.shape)} {named(cache.dtype)} on"
                f" {cache.device}, needed is [blocks, {', '.join(map(str, expected))}] {geometry.dtype} on the CPU, in"
                " order",
                code="capability.cache-layout",
            )
