"""KL through coded pages against the `in_forward` cell of the same recipe, on the same windows.

Both code every token of a window before its rotary embedding and let attention see what was decoded; one by hooks on
vLLM's own cache, the other by its pages. A codec rounds, so the two agree on the average only: what a rounding of
float32 does to the logits is measured beside them (`perturbed`), and their losses must be equivalent
(`stats.equivalence`). Where a file is named, its windows are counted as done, and further ones are added to it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvlab.core.errors import MixedIdentity, UserError
from kvlab.core.records import file_hash, read_json, write_json
from kvlab.stats.bootstrap import Bootstrap, Column, Estimate
from kvlab.stats.equivalence import windows_within, within

MARGIN = 0.02  # of the loss: what an equivalence of engines is asked for
EPSILON = 1e-7  # of K and V: the rounding of float32
CONTEXT, SCORED = 512, 128
PERTURBED = 4  # windows of a call on which the rounding of float32 is measured too
PARTS = ("documents", "in_forward", "pages", "perturbed", "apart")


def compared(model: Path, recipe: Path, windows: int, kept: Path | None = None, dtype: str = "float32") -> dict:
    """What both say on windows of an encyclopedia: the first of each article, then the second, and so on.

    Parameters
    ----------
    windows : int
        How many are measured now, after those that `kept` holds.
    kept : Path, optional
        JSON of earlier calls, which this one adds its windows to.

    Returns
    -------
    dict
        ``documents``, which article each window is of; ``in_forward``, ``pages``, ``perturbed`` and ``apart``, nats
        per window; ``relative``, the difference of the losses over the loss with its interval; ``state``, and the
        ``windows`` at which that is not open any more, were the difference what was found.

    Raises
    ------
    MixedIdentity
        `kept` is of another model, recipe or dtype.
    UserError
        The encyclopedia does not hold as many windows.
    """
    own = {"model": file_hash(model / "model.safetensors"), "recipe": file_hash(recipe), "dtype": dtype}
    found = earlier(kept, own)
    documents, texts = cut(model, len(found["documents"]), windows)
    more = {"documents": documents} | measured(model, recipe, texts, dtype)
    found |= {part: found[part] + more[part] for part in PARTS}
    if kept is not None:
        write_json(kept, found)
    relative = relative_difference(found["in_forward"], found["pages"], found["documents"])
    state, needed = within(relative, MARGIN), windows_within(relative, MARGIN)
    return found | {"relative": relative.to_json(), "state": state, "windows": needed}


def earlier(kept: Path | None, own: dict[str, str]) -> dict:
    """What earlier calls measured, under the same identity; nothing where there were none."""
    if kept is None or not kept.exists():
        return {"of": own} | {part: [] for part in PARTS}
    found = read_json(kept)
    other = {name: {value, found["of"].get(name)} for name, value in own.items() if found["of"].get(name) != value}
    if other:
        raise MixedIdentity(other)
    return found


def measured(model: Path, recipe: Path, texts: list[list[int]], dtype: str) -> dict[str, list[float]]:
    """Losses of each window, hooks first, then pages in a process of their own."""
    import torch

    from kvlab.cache.files.prepared import prepared
    from kvlab.cache.files.recipe import read_recipe_file
    from kvlab.codecs.base import Site
    from kvlab.core.model import resolve
    from kvlab.core.params import Model
    from kvlab.engines.registry import start

    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    info = resolve(Model(path=str(model), n_layers=layers))
    engine, ready = start("vllm", info, dtype, max_tokens=CONTEXT + SCORED), prepared(read_recipe_file(recipe), info)
    codecs = {stream: ready.codec(stream) for stream in "kv"}

    def tap(epsilon: float) -> Callable:
        source = torch.Generator().manual_seed(0)

        def code(layer: int, part: str, x: torch.Tensor) -> torch.Tensor | None:
            if part not in codecs:
                return None
            moved = x * (1 + epsilon * torch.randn(x.shape, generator=source)) if epsilon else x
            return codecs[part].decode(codecs[part].encode(moved, Site(0, layer, part)))

        return code

    def scored(own: Callable | None, count: int | None = None) -> list[torch.Tensor]:
        return [engine.score(ids, CONTEXT, own).float() for ids in texts[:count]]

    clean, coded, moved = scored(None), scored(tap(0.0)), scored(tap(EPSILON), PERTURBED)
    engine.close()
    pages = from_pages(model, recipe, texts, dtype)
    return {
        "in_forward": losses(clean, coded),
        "pages": losses(clean, pages),
        "perturbed": losses(coded[:PERTURBED], moved),
        "apart": losses(coded, pages),
    }


def cut(model: Path, first: int, count: int, length: int = CONTEXT + SCORED) -> tuple[list[int], list[list[int]]]:
    """Windows `first` to `first` + `count`, and which article each is of; none shares a token with another."""
    from transformers import AutoTokenizer

    from kvlab.text.encyclopedia import extract

    tokenizer = AutoTokenizer.from_pretrained(model)
    articles = [tokenizer(article.text)["input_ids"] for article in extract()]
    places = in_turn([len(ids) // length for ids in articles])
    if first + count > len(places):
        raise UserError(f"the encyclopedia makes {len(places)} windows of this model; asked for are {first + count}")
    chosen = places[first : first + count]
    return [number for number, _ in chosen], [articles[number][turn * length :][:length] for number, turn in chosen]


def in_turn(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Document and place of each window where documents hold so many: all first ones, then all second ones."""
    turns = range(max(counts, default=0))
    return [(number, turn) for turn in turns for number, count in enumerate(counts) if turn < count]


def from_pages(model: Path, recipe: Path, texts: list[list[int]], dtype: str, context: int = CONTEXT) -> list:
    """Logits after the `context` of a vLLM whose cache is coded pages, each window in one step."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        task = {"model": str(model), "dtype": dtype, "cache": str(recipe.absolute()), "bytes": 1 << 28}
        task |= {"longest": len(texts[0]) + 1, "prefix_caching": False, "loads": ["quality"]}
        task |= {
            "chunk": len(texts[0]),
            "most": 1,
            "windows": texts,
            "context": context,
            "logits": f"{folder}/logits.pt",
        }
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


def relative_difference(loss: Sequence[float], other: Sequence[float], documents: Sequence[int]) -> Estimate:
    """(other - loss) / loss of the means, with the interval of a bootstrap over the documents of the windows."""
    windows = np.arange(len(loss))
    columns = [Column.of(windows, np.zeros_like(windows), np.array(values), documents) for values in (loss, other)]
    bootstrap = Bootstrap(resamples=10_000, confidence=0.95, seed=0)
    return bootstrap.combine(columns, lambda m: (m[..., 1] - m[..., 0]) / m[..., 0])


def main() -> None:
    """``python -m validation.serving.quality MODEL RECIPE WINDOWS [KEPT.json]``: prints the result as JSON."""
    model, recipe, windows, *kept = sys.argv[1:]
    print("ANSWER", json.dumps(compared(Path(model), Path(recipe), int(windows), *map(Path, kept))))


if __name__ == "__main__":
    main()
