"""Two engines of vLLM in one process, the later with an fp8 cache: `fp8_user.py MODEL`; what both answer, as JSON.

Run as a process: both go with it, and the session's engine is not touched.
"""

from __future__ import annotations

import json
import sys

from engines.test_score_over import CONTEXT, IDS, PLACEMENTS, captured, kl, perturbed
from kvlab.core.model import resolve
from kvlab.core.params import Model
from kvlab.engines.base import Engine
from kvlab.engines.registry import start


def main() -> None:
    info = resolve(Model(path=sys.argv[1], n_layers=3))
    plain = start("vllm", info, "float32", max_tokens=96)
    caches = {placement: captured(plain, IDS, CONTEXT, placement) for placement in PLACEMENTS}
    moved = {placement: perturbed(cache) for placement, cache in caches.items()}
    reference = plain.score(IDS, CONTEXT)
    oracle = {placement: Engine.score_over(plain, IDS, cache, placement) for placement, cache in moved.items()}
    kept = {placement: plain.score_over(IDS, cache, placement) for placement, cache in moved.items()}

    def against(placement: str) -> dict[str, float]:
        """KL over the clean cache from one pass, and over the moved one from a full pass with a tap."""
        pairs = {"clean": (reference, caches), "moved": (oracle[placement], moved)}
        return {
            name: kl(expected, plain.score_over(IDS, given[placement], placement), IDS, CONTEXT)
            for name, (expected, given) in pairs.items()
        }

    found = {placement: {"alone": against(placement)} for placement in PLACEMENTS}
    fp8 = start("vllm", info, "float32", max_tokens=96, cache_dtype="fp8_e4m3")
    for placement in PLACEMENTS:
        found[placement]["beside"] = against(placement)
    found["storage"] = {"plain": plain.storage.dtype, "fp8": fp8.storage.dtype}
    found["fp8 effect"] = kl(reference, fp8.score(IDS, CONTEXT), IDS, CONTEXT)
    for placement in PLACEMENTS:
        fp8.score_over(IDS, moved[placement], placement)
        found[placement]["after"] = against(placement)
        found[placement]["effect"] = kl(reference, kept[placement], IDS, CONTEXT)
        again = plain.score_over(IDS, moved[placement], placement)
        found[placement]["unchanged"] = bool((again == kept[placement]).all())
    fp8.close()
    plain.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
