"""KL through coded pages against the `in_forward` cell of the same recipe, on the same windows.

Both code every token of a window before its rotary embedding and let attention see what was decoded; one by hooks on
vLLM's own cache, the other by its pages. A codec rounds, so the two agree on the average only: what a rounding of
float32 does to the logits is measured beside them (`perturbed`), and their losses must be equivalent
(`stats.equivalence`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvlab.stats.bootstrap import Bootstrap, Column, Estimate
from kvlab.stats.equivalence import within

MARGIN = 0.02  # of the loss: what an equivalence of engines is asked for
EPSILON = 1e-7  # of K and V: the rounding of float32
CONTEXT, SCORED = 512, 128


def compared(model: Path, recipe: Path, windows: int, dtype: str = "float32") -> dict:
    """What both say on windows of an encyclopedia, each of another article.

    Returns
    -------
    dict
        ``in_forward``, ``pages``, ``perturbed`` and ``apart``: nats per window; ``relative``, the difference of the
        losses over the loss with its interval, and ``state``.
    """
    found = in_forward(model, recipe, windows, dtype)
    relative = relative_difference(found["in_forward"], found["pages"])
    return found | {"relative": relative.to_json(), "state": within(relative, MARGIN)}


def in_forward(model: Path, recipe: Path, windows: int, dtype: str) -> dict[str, list[float]]:
    """Losses of each window, hooks first, then pages in a process of their own."""
    import torch

    from kvlab.base.model import resolve
    from kvlab.base.params import Model
    from kvlab.cache.prepared import prepared
    from kvlab.cache.recipe_file import read_recipe_file
    from kvlab.codec.base import Site
    from kvlab.engines.registry import start

    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    info = resolve(Model(path=str(model), n_layers=layers))
    engine, ready = start("vllm", info, dtype, max_tokens=CONTEXT + SCORED), prepared(read_recipe_file(recipe), info)
    codecs, texts = {stream: ready.codec(stream) for stream in "kv"}, articles(model, windows)

    def tap(epsilon: float) -> Callable:
        source = torch.Generator().manual_seed(0)

        def code(layer: int, part: str, x: torch.Tensor) -> torch.Tensor | None:
            if part not in codecs:
                return None
            moved = x * (1 + epsilon * torch.randn(x.shape, generator=source)) if epsilon else x
            return codecs[part].decode(codecs[part].encode(moved, Site(0, layer, part)))

        return code

    kinds = {"clean": None, "in_forward": tap(0.0), "perturbed": tap(EPSILON)}
    logits = {kind: [engine.score(ids, CONTEXT, own).float() for ids in texts] for kind, own in kinds.items()}
    engine.close()
    logits["pages"] = from_pages(model, recipe, texts, dtype)
    return {
        "in_forward": losses(logits["clean"], logits["in_forward"]),
        "pages": losses(logits["clean"], logits["pages"]),
        "perturbed": losses(logits["in_forward"], logits["perturbed"]),
        "apart": losses(logits["in_forward"], logits["pages"]),
    }


def articles(model: Path, count: int) -> list[list[int]]:
    """The beginnings of so many articles, as tokens."""
    from transformers import AutoTokenizer

    from kvlab.text.encyclopedia import extract

    tokenizer = AutoTokenizer.from_pretrained(model)
    found = (tokenizer(article.text)["input_ids"][: CONTEXT + SCORED] for article in extract())
    return [ids for ids, _ in zip((ids for ids in found if len(ids) == CONTEXT + SCORED), range(count), strict=False)]


def from_pages(model: Path, recipe: Path, texts: list[list[int]], dtype: str) -> list:
    """Logits of a vLLM whose cache is coded pages, each window in one step."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        task = {"model": str(model), "dtype": dtype, "cache": str(recipe.absolute()), "bytes": 1 << 28}
        task |= {"longest": CONTEXT + SCORED + 1, "prefix_caching": False, "loads": ["quality"]}
        task |= {"windows": texts, "context": CONTEXT, "logits": f"{folder}/logits.pt"}
        (Path(folder) / "task.json").write_text(json.dumps(task))
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "KVLAB_"))}
        arm = [sys.executable, "-m", "validation.serving.arm", f"{folder}/task.json"]
        subprocess.run(arm, check=True, stdout=subprocess.DEVNULL, env=clean)
        return list(torch.load(task["logits"]))


def losses(reference: list, other: list) -> list[float]:
    """Mean KL of each window, nats per token."""
    import torch

    from kvlab.stats.divergences import token_record

    label = torch.zeros(len(reference[0]), dtype=torch.int64)
    return [token_record(a, b, label)["kl"].mean().item() for a, b in zip(reference, other, strict=True)]


def relative_difference(loss: list[float], other: list[float]) -> Estimate:
    """(other - loss) / loss of the means, with the interval of a bootstrap over windows."""
    windows = np.arange(len(loss))
    columns = [Column.of(windows, np.zeros_like(windows), np.array(values)) for values in (loss, other)]
    bootstrap = Bootstrap(resamples=10_000, confidence=0.95, seed=0)
    return bootstrap.combine(columns, lambda m: (m[..., 1] - m[..., 0]) / m[..., 0])


def main() -> None:
    """``python -m validation.serving.quality MODEL RECIPE WINDOWS``: prints the result as JSON."""
    model, recipe, windows = sys.argv[1:]
    print("ANSWER", json.dumps(compared(Path(model), Path(recipe), int(windows))))


if __name__ == "__main__":
    main()
