"""Models whose layers see a window, in vLLM and in transformers: `windows_user.py MODEL ...`; what both say, as JSON.

Run as a process: the engines go with it, and the session's is not touched.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from engines.test_score_over import PLACEMENTS, captured, kl, perturbed
from kvlab.core.model import resolve_folder
from kvlab.engines.base import Engine
from kvlab.engines.registry import start

IDS = torch.randint(0, 320, (240,), generator=torch.Generator().manual_seed(1)).tolist()
CONTEXT = 200  # more than a window and a block of vLLM's cache together: its first block is no longer needed


def compared(folder: str) -> dict[str, float]:
    """KL of vLLM from transformers by protocol and placement, of the clean cache and of a moved one."""
    info = resolve_folder(Path(folder))
    theirs, ours = (start(name, info, "float32", max_tokens=len(IDS)) for name in ("vllm", "hf"))
    reference = ours.score(IDS, CONTEXT)
    found = {"in_forward": kl(reference, theirs.score(IDS, CONTEXT), IDS, CONTEXT)}
    for placement in PLACEMENTS:
        clean = captured(theirs, IDS, CONTEXT, placement)
        expected = captured(ours, IDS, CONTEXT, placement)
        found[f"apart {placement}"] = max(float((clean[at] - x).abs().max()) for at, x in expected.items())
        moved = perturbed(clean)
        oracle = Engine.score_over(ours, IDS, moved, placement)  # one pass, with the cache put in by a tap
        found[f"snapshot {placement}"] = kl(reference, theirs.score_over(IDS, clean, placement), IDS, CONTEXT)
        found[f"moved {placement}"] = kl(oracle, theirs.score_over(IDS, moved, placement), IDS, CONTEXT)
        found[f"effect {placement}"] = kl(reference, oracle, IDS, CONTEXT)
    theirs.close()
    return found


if __name__ == "__main__":
    print(json.dumps([compared(folder) for folder in sys.argv[1:]]), flush=True)
