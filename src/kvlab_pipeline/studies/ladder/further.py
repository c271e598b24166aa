"""The ladder at longer contexts, and `klt` fitted on parts of the calibration: what no cell of a study can ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import torch

from kvlab.calibration import calibrate
from kvlab.calibration import load as calibration
from kvlab.calibration.capture import observe
from kvlab.calibration.load import Calibrated, FittedFiles
from kvlab.core.errors import CorpusError
from kvlab.core.model import ModelInfo, load_tokenizer, resolve
from kvlab.core.params import Params
from kvlab.core.records import write_json
from kvlab.engines.base import Engine
from kvlab.engines.registry import start
from kvlab.measure.quick_run import NamedCodec, Scored, score
from kvlab.text import corpus
from kvlab.witness.plain import PlainModel
from kvlab_pipeline.jobs.measure import provenance
from kvlab_pipeline.studies.ladder.params import CONTEXT_CODECS
from kvlab_pipeline.studies.ladder.plan import cheapest
from kvlab_pipeline.studies.ladder.record import Further, WindowScore, parts


def further(params: Params, windows_path: Path, texts: Path | None, fitted: FittedFiles, out: Path) -> None:
    """Write the record, see `record.Further`.

    Parameters
    ----------
    texts : Path, optional
        What `kvlab step texts` wrote; without, the corpus is read again.

    Raises
    ------
    CalibrationMismatch
        The calibration is of another model or of other windows.
    CorpusError
        A text is too short for the longest context.
    WitnessDisagrees
        A second computation of a codec's last window comes to something else.
    """
    torch.set_num_threads(params.jobs.threads)
    info, asked = resolve(params.model), params.ladder
    windows = corpus.load(windows_path, info.model_hash)
    calibrated = calibration.load(fitted, info.model_hash, windows.corpus_hash)
    contexts = [one for one in asked.contexts if one + windows.eval < info.max_positions]
    longest = max((windows.context, *contexts)) + windows.eval
    plain = cache(partial(PlainModel, info.path))
    with closing(start(asked.engine, info, "float32", max_tokens=longest)) as engine:
        runs = [*grown(params, engine, windows, calibrated, plain)] if asked.growth else []
        codecs = [codec for codec in CONTEXT_CODECS if codec in params.ladder.codecs]
        for context in contexts:
            rows = long_windows(params, info, context, texts)
            named = [NamedCodec(*cheapest(params, codec), calibrated) for codec in codecs]
            found = score(engine, rows, context, named, plain)
            runs.append(ContextRun(context, len(windows.calib) * windows.context, found))
    record = Further(
        provenance=provenance(info, windows, {calibrated.origin: calibrated}),
        origin=calibrated.origin,
        eval=windows.eval,
        left_out=tuple(sorted(set(asked.contexts) - set(contexts))),
        scores=tuple(one for run in runs for one in scores(params, run)),
        witnessed=tuple(one.witnessed for run in runs for one in run.found if one.witnessed),
    )
    write_json(out, record.model_dump(mode="json"))


class ContextRun(NamedTuple):
    """What was found of some codecs at a context, their calibration having seen so many tokens."""

    context: int
    tokens: int
    found: list[Scored]


def grown(
    params: Params,
    engine: Engine,
    windows: corpus.TokenWindows,
    whole: Calibrated,
    plain: Callable[[], PlainModel],
) -> Iterator[ContextRun]:
    """`klt` fitted on the first so many of the calibration's windows, and on all, on the same scored windows.

    A part is captured anew, by the engine that scores and in its float32; the whole is the calibration that the ladder
    reads, of which a witness sees the ladder's own cells; here it does where there is no part.
    """
    (label, recipe), context = cheapest(params, "klt"), windows.context
    rows, calib = windows.test[: params.ladder.fewer], windows.calib[:, :context].tolist()
    counts = parts(params.ladder.growth, len(calib))
    for count in counts:
        observed = observe(engine, calib[:count], context, windows.corpus_hash, params.calibration.sample)
        fitted = calibrate.fitted(observed, engine.info, [recipe], params.calibration.ridge)
        found = score(engine, rows, context, [NamedCodec(label, recipe, fitted)], plain)
        yield ContextRun(context, count * context, found)
    found = score(engine, rows, context, [NamedCodec(label, recipe, whole)], None if counts else plain)
    yield ContextRun(context, len(calib) * context, found)


def scores(params: Params, run: ContextRun) -> Iterator[WindowScore]:
    """A run's sums, window by window; window i is of the text that the i-th scored one is of."""
    for found in run.found:
        agrees = (pl.col("top1_ref") == pl.col("top1_alt")).sum().alias("agreeing")
        sums = found.tokens.group_by("window", maintain_order=True).agg(pl.col("kl").sum(), agrees, pl.len())
        for window, kl, agreeing, count in sums.iter_rows():
            yield WindowScore(
                label=found.variant.name,
                text=params.corpus.text_of(window),
                context=run.context,
                calibration_tokens=run.tokens,
                bits_per_value=found.cost.bits_per_value,
                window=window,
                kl_sum=kl,
                agreeing=agreeing,
                tokens=count,
            )


def long_windows(params: Params, info: ModelInfo, context: int, texts: Path | None) -> np.ndarray:
    """Windows of another context from the texts that are scored, in turn, int32 [windows, context + eval].

    They are made of the documents of the test split and of the other text alone, none of which the calibration reads
    (`corpus.build` refuses one that both have), in a seeded order: whole documents, one after the other.
    """
    scored, total, length = params.corpus.scored, params.ladder.context_windows, context + params.windows.eval
    documents, _ = corpus.documents_of(params, texts)
    tokenizer = load_tokenizer(info)
    prefix, found = corpus.bos(tokenizer), np.empty((total, length), dtype=np.int32)
    for place, text in enumerate(scored):
        count = len(range(place, total, len(scored)))
        body = length - len(prefix)
        ids = enough(documents[text], tokenizer, count * body, params.windows.seed)
        if len(ids) < count * body:
            raise CorpusError(
                f"the {text} text has {len(ids)} tokens, and {count} windows of {length} need {count * body};"
                " ask for a shorter context in ladder.contexts, or for fewer ladder.context_windows",
                code="corpus.too-short",
            )
        head = np.tile(np.array(prefix, dtype=np.int32), (count, 1))
        found[place :: len(scored)] = np.concatenate([head, ids[: count * body].reshape(count, body)], axis=1)
    return found


def enough(documents: Sequence[str], tokenizer, tokens: int, seed: int) -> np.ndarray:
    """Documents in a seeded order as one stream of ids, so many of them that it holds `tokens`, or all."""
    order, parts, held = np.random.default_rng(seed).permutation(len(documents)), [], 0
    for first in range(0, len(order), 32):
        if held >= tokens:
            break
        parts.append(corpus.stream([documents[i] for i in order[first : first + 32]], tokenizer))
        held += len(parts[-1])
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
