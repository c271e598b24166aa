"""Codecs of whole caches: bytes and speed on a cache that the model makes of scored text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from kvlab.calibration.archive import Archive
from kvlab.calibration.archive_file import archive_identity, load_archive
from kvlab.codecs.archive.file import load
from kvlab.core.errors import MixedIdentity, UserError
from kvlab.core.model import ModelInfo
from kvlab.core.params import Params
from kvlab.core.recipe import WHOLE, Recipe
from kvlab.engines.registry import start
from kvlab.measure.coding import CleanCapture
from kvlab.text.corpus import TokenWindows
from kvlab_pipeline.studies.ladder.plan import rungs
from validation.bench import clock


def whole_rungs(params: Params) -> list[tuple[str, Recipe]]:
    """(label, recipe) of the ladder's codecs of whole caches, which no single tensor can be coded with."""
    return [(label, recipe) for label, recipe in rungs(params) if recipe.k.codec in WHOLE]


def opened(path: Path, info: ModelInfo, corpus_hash: str) -> Archive:
    """The fitted codec in a file.

    Raises
    ------
    MixedIdentity
        It was fitted beside other windows than are scored.
    UserError
        It was fitted for nobody.
    """
    identity = archive_identity(path)
    if identity["corpus_hash"] != corpus_hash:
        raise MixedIdentity({"corpus_hash of --archive and --windows": {identity["corpus_hash"], corpus_hash}})
    found = load_archive(path, identity | {"model_hash": info.model_hash}, info)
    if found is None:
        raise UserError(f"{path} holds no codec: none was asked for in the parameters that it was written with")
    return found


def measured(
    params: Params, info: ModelInfo, archive: Archive, tokens: TokenWindows, rounds: int, threads: Sequence[int]
) -> list[dict]:
    """Every whole rung on the context of the first scored window, in float32.

    Returns
    -------
    list of dict
        ``label``, ``bits`` (asked for), ``stored`` (bits per value of the file), ``tokens``, and MB/s of bfloat16 by
        task (``write``: from K, V and tokens to bytes; ``read``: back) and number of threads.
    """
    ids, context = tokens.test[0].tolist(), tokens.context
    clean = CleanCapture(context)
    with closing(start(params.ladder.engine, info, "float32", max_tokens=len(ids))) as engine:
        engine.score(ids, context, clean)
    ids, values = ids[:context], sum(x.numel() for x in clean.kept.values())
    tasks, stored = {}, {}
    for label, recipe in whole_rungs(params):
        data = archive.encode(recipe, clean.kept, ids)
        stored[label] = 8 * len(data) / values
        tasks[label, "write"] = lambda recipe=recipe: archive.encode(recipe, clean.kept, ids)
        tasks[label, "read"] = lambda data=data: list(archive.decoded(load(data), ids))
    taken = clock.interleaved(tasks, rounds, tuple(threads))
    return [
        {
            "label": label,
            "bits": recipe.k.bits,
            "stored": stored[label],
            "tokens": context,
            "speed": {
                task: {str(count): clock.rate(2 * values, taken[label, task, count]) for count in threads}
                for task in ("write", "read")
            },
        }
        for label, recipe in whole_rungs(params)
    ]
