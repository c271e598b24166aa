"""The section `kvstore`: what the studies of the paged cache and of its snapshots share, and the part of each."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from kvlab.core.params import Params, Section
from kvlab.core.recipe import DType
from kvlab_pipeline.studies.bitplanes.params import BitplanesStudy
from kvlab_pipeline.studies.placement.params import PlacementStudy
from kvlab_pipeline.studies.policy.params import PolicyStudy
from kvlab_pipeline.studies.restore.params import RestoreStudy


class KVStore(Section):
    """The paged KV cache and its snapshots, studied on hf."""

    key = "kvstore"
    told = "the paged cache and its snapshots"
    takes = ("windows", "mechanisms")

    dtype: DType = Field(default="float32", description="what the model computes in, and what K and V are held in")
    restore: RestoreStudy = RestoreStudy()
    policy: PolicyStudy = PolicyStudy()
    bitplanes: BitplanesStudy = BitplanesStudy()
    placement: PlacementStudy = PlacementStudy()

    def fitted(self, params: Params) -> KVStore:
        """Each part fitted."""
        return self.model_copy(update={name: part.fitted(params) for name, part in self._parts().items()})

    def problems(self, params: Params) -> Iterator[str]:
        """Those of each part."""
        for part in self._parts().values():
            yield from part.problems(params)

    def _parts(self) -> dict[str, Section]:
        return {name: getattr(self, name) for name in ("restore", "policy", "bitplanes", "placement")}
