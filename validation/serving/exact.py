"""What coded pages lose as they are served: KL through vLLM's pages against vLLM's own cache.

Windows are of an encyclopedia, another text than the calibration's. All tokens of a window are coded in the forward,
and the last `SCORED` are scored.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from kvlab.core.model import resolve
from kvlab.core.params import Model
from kvlab.core.records import read_json, write_json
from kvlab.stats.bootstrap import Bootstrap, Column
from validation.serving.quality import SCORED, cut, from_pages, losses


def measured(model: Path, recipes: list[Path], windows: int, length: int, dtype: str = "bfloat16") -> dict:
    """KL of each recipe file.

    Parameters
    ----------
    windows, length : int
        How many windows, and the tokens of each.

    Returns
    -------
    dict
        ``documents``, which article each window is of; ``windows``, nats per token of each, by recipe; ``kl``, their
        mean with its interval over articles.
    """
    from kvlab.engines.registry import start

    layers = read_json(model / "config.json")["num_hidden_layers"]
    engine = start("vllm", resolve(Model(path=str(model), n_layers=layers)), dtype, max_tokens=length)
    documents, texts = cut(model, 0, windows, length)
    context = length - SCORED
    clean = [engine.score(ids, context, None).float() for ids in texts]
    engine.close()
    found = {path.stem: losses(clean, from_pages(model, path, texts, dtype, context)) for path in recipes}
    return {
        "documents": documents,
        "windows": found,
        "kl": {name: mean_over_articles(values, documents).to_json() for name, values in found.items()},
    }


def mean_over_articles(values: list[float], documents: list[int]):
    """The mean with the interval of a bootstrap over the documents of the windows."""
    windows = np.arange(len(values))
    column = Column.of(windows, np.zeros_like(windows), np.array(values), documents)
    return Bootstrap(resamples=10_000, confidence=0.95, seed=0).combine([column], lambda m: m[..., 0])


def main() -> None:
    """``python -m validation.serving.exact MODEL WINDOWS TOKENS OUT.json RECIPE...``."""
    model, windows, length, out, *recipes = sys.argv[1:]
    write_json(Path(out), measured(Path(model), list(map(Path, recipes)), int(windows), int(length)))


if __name__ == "__main__":
    main()
