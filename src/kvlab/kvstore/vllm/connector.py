"""vLLM's connector interface, version 1, over snapshots: each method hands on to one of the two halves.

    from vllm import LLM
    from vllm.config import KVTransferConfig
    from kvlab.kvstore.vllm.settings import transfer_config

    llm = LLM(model, kv_transfer_config=KVTransferConfig(**transfer_config("snapshots")))

vLLM makes one connector beside its scheduler, and one beside its model. Everything happens inside a step: loads
before its forward pass, saves after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvlab.kvstore.vllm.context import context_of
from kvlab.kvstore.vllm.jobs import Outcomes, WorkerCounts
from kvlab.kvstore.vllm.scheduler import Planner
from kvlab.kvstore.vllm.settings import ConnectorSettings
from kvlab.kvstore.vllm.worker import Mover

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class SnapshotConnector(KVConnectorBase_V1, SupportsHMA):
    """Restores requests from snapshots, and saves them.

    Parameters
    ----------
    vllm_config, role, kv_cache_config
        vLLM's; ``kv_connector_extra_config`` holds what `ConnectorSettings` takes.

    Raises
    ------
    UserError
        When the settings are wrong, or the engine's cache is none that could be saved; see `context_of`.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config, role, kv_cache_config)
        context = context_of(vllm_config, kv_cache_config, settings_of(self._kv_transfer_config))
        scheduling = role == KVConnectorRole.SCHEDULER
        self._planner = Planner(context) if scheduling else None
        self._mover = None if scheduling else Mover(context)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that does not happen is a cold miss later, and nothing worse."""
        return False

    # Beside the model

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Take the cache."""
        self._mover.take(kv_caches, self._vllm_config)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load; all of it is there when this returns."""
        self._mover.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is on its way."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: a snapshot holds a chunk's layers together, so it is written when all are there."""

    def wait_for_save(self) -> None:
        """Save."""
        self._mover.save(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Ended requests whose blocks were read and can be given away."""
        return self._mover.let_go(), None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be loaded."""
        return self._mover.failed_blocks()

    def build_connector_worker_meta(self) -> Outcomes | None:
        """What came of this step."""
        return self._mover.done()

    def counts(self) -> WorkerCounts:
        """What the worker has done so far."""
        return replace(self._mover.counts, failed=dict(self._mover.counts.failed))

    # Beside the scheduler

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """How much of a request a snapshot holds."""
        return self._planner.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """A request has got its blocks."""
        (block_ids,) = blocks.get_block_ids()
        self._planner.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The jobs of a step."""
        return self._planner.planned(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What came of them."""
        if connector_output.kv_connector_worker_meta is not None:
            self._planner.learned(connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended."""
        return self._planner.finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[Sequence[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same; there is one group of layers, as `context_of` sees to."""
        return self._planner.finished(request, block_ids[0])

    def reset_cache(self) -> bool:
        """Refused: the files are the user's, and belong to the weights on disk and not to new ones in memory."""
        return False


def settings_of(config: KVTransferConfig) -> ConnectorSettings:
    """The settings in vLLM's configuration, whose ``kv_role`` may say that nothing be saved, or nothing restored."""
    given = ConnectorSettings.read(config.kv_connector_extra_config)
    save = given.save if config.is_kv_producer else "never"
    return replace(given, restore=given.restore and config.is_kv_consumer, save=save)


def counts(llm: LLM) -> WorkerCounts:
    """What the connector of an engine has loaded and saved so far: proof that it did.

    Where vLLM runs its model in another process it takes a function only with
    ``VLLM_ALLOW_INSECURE_SERIALIZATION=1``; see the requests' own `kv_transfer_params` there.
    """
    return llm.collective_rpc(_counts)[0]


def settle(llm: LLM) -> None:
    """Let the answers that ended last be saved, in a process of its own; ``save="answer"`` needs it there.

    vLLM keeps their blocks for the step that follows, and runs none when no request is left. An engine in another
    process runs it by itself.
    """
    from vllm.v1.engine.core_client import InprocClient

    if isinstance(llm.llm_engine.engine_core, InprocClient):
        llm.llm_engine.step()


def _counts(_worker: Any) -> WorkerCounts:
    return get_kv_transfer_group().counts()
