"""A model over two processes, once around: `split_user.py MODEL ANSWERS`. At the end it loses one of them.

Run as a process: the group of two cannot be had beside the one that an engine in this process belongs to.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

IDS = torch.randint(0, 320, (96,), generator=torch.Generator().manual_seed(0)).tolist()


class Shift:
    """Records what passes, and moves K and V by an amount that differs between heads, layers and parts."""

    def __init__(self):
        self.seen = {}

    def __call__(self, layer, part, x):
        self.seen[f"{part}{layer}"] = x.clone()
        if part != "q":
            return x + 0.2 * (1 + layer + torch.arange(x.shape[0]).view(-1, 1, 1)) * (1 if part == "k" else -1)


def answers(engine) -> dict[str, torch.Tensor]:
    """Logits without a tap, and on both sides of the rotary embedding; what the first tap saw."""
    before, after = Shift(), Shift()
    found = {
        "plain": engine.score(IDS, 10),
        "pre_rope": engine.score(IDS, 10, before),
        "post_rope": engine.score(IDS, 10, after, "post_rope"),
        "again": engine.score(IDS, 10),
    }
    return {name: x.clone().contiguous() for name, x in (found | before.seen).items()}


def main() -> None:
    from kvlab.core.model import resolve
    from kvlab.core.params import Model
    from kvlab.engines.registry import start

    model, out = sys.argv[1:]
    engine = start("vllm", resolve(Model(path=model, n_layers=3, tensor_parallel=2)), "float32", max_tokens=96)
    save_file(answers(engine), Path(out))
    (follower,) = [child for child in psutil.Process().children() if "kvlab.engines.vllm.follower" in child.cmdline()]
    follower.kill()
    time.sleep(60)


if __name__ == "__main__":
    main()
