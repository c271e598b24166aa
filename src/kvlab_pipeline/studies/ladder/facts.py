"""What the ladder's rungs need beside their bytes (their calibration as files), and how much there is to gain.

A ratio between a transform codec and one without a transform is a fact about the model: how uneven the components of
its K and V are. The coding gain says how much of such a ratio any transform codec would have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from tqdm import tqdm

from kvlab.cache.files.calibration import write_calibration
from kvlab.cache.hf.codec_tables import resident_bytes
from kvlab.calibration import load as calibration
from kvlab.calibration.facts import read_facts
from kvlab.calibration.load import Calibrated, FittedFiles
from kvlab.codecs.shared.components import Components
from kvlab.codecs.shared.grouping import joined
from kvlab.core.errors import CalibrationMismatch
from kvlab.core.model import ModelInfo, resolve
from kvlab.core.params import Params
from kvlab.core.records import write_json
from kvlab.engines.registry import start
from kvlab.measure.coding import STREAMS, CleanCapture
from kvlab.measure.windows import Window, windows_of
from kvlab.text import corpus
from kvlab_pipeline.jobs.measure import provenance
from kvlab_pipeline.studies.ladder import record

TINY = 1e-30
PARTS = {"all": 0, "later": 1}  # the first token that counts


def facts(params: Params, windows_path: Path, fitted: FittedFiles, out: Path) -> None:
    """Write the record, see `record.Facts`.

    Raises
    ------
    CalibrationMismatch
        The calibration is of another model or of other windows, or has no components.
    """
    torch.set_num_threads(params.jobs.threads)
    info = resolve(params.model)
    windows = corpus.load(windows_path, info.model_hash)
    calibrated = calibration.load(fitted, info.model_hash, windows.corpus_hash, info)
    if fitted.components is None:
        raise CalibrationMismatch("the ladder's facts need --components, of `kvlab step components`")
    tokens = read_facts(fitted.components.with_suffix(".json"), {"n_tokens": int}, "components")["n_tokens"]
    scored = windows_of(windows, "test")[: record.gain_windows(params)]
    found = record.Facts(
        provenance=provenance(info, windows, {calibrated.origin: calibrated}),
        origin=calibrated.origin,
        calibration_tokens=tokens,
        values_per_token=info.values_per_token,
        context=windows.context,
        artefacts=tuple(artefacts(params, calibrated, info)),
        fitted=tuple(on_calibration(calibrated)),
        gains=tuple(on_windows(params, info, calibrated, scored)),
    )
    write_json(out, found.model_dump(mode="json"))


def artefacts(params: Params, calibrated: Calibrated, info: ModelInfo) -> Iterator[record.Artefact]:
    """The calibration of every rung that has one, written and weighed, and made into what codes."""
    with TemporaryDirectory() as folder:
        for recipe in tqdm(record.calibrated_rungs(params), desc="artefacts", unit="rung"):
            sizes = []
            for decoder in (False, True):
                path = write_calibration(Path(folder) / "one.kv", recipe, calibrated, info, decoder=decoder)
                sizes.append(path.stat().st_size)
            held = resident_bytes(recipe, calibrated, info)
            yield record.Artefact(
                recipe_id=recipe.recipe_id, whole_bytes=sizes[0], decoder_bytes=sizes[1], resident_bytes=held
            )


# -------------------------------------------------------------------------------------- coding gain


def on_calibration(calibrated: Calibrated) -> Iterator[record.FittedGain]:
    """The gain by the calibration's own moments: components' variances as expected out of sample."""
    for stream in STREAMS:
        decibels = torch.stack([of_fit(one) for one in calibrated.components[stream].values()]).mean((0, 2))
        yield record.FittedGain(stream=stream, over_even=float(decibels[0]), over_plain=float(decibels[1]))


def of_fit(components: Components) -> Tensor:
    """Both gains of each group of heads on the text that was fitted, dB float64 [2, groups]."""
    variance = components.variance.double()
    moment = components.head_covariance.double().diagonal(dim1=-2, dim2=-1) + components.mean.double().square()
    return gains(variance, variance, plain(components, moment.sum(-1)))


def on_windows(params: Params, info: ModelInfo, calibrated: Calibrated, scored: list[Window]) -> Iterator[record.Gain]:
    """The gain on each scored window, of which the calibration knows nothing."""
    longest = max(len(window.ids) for window in scored)
    with closing(start(params.ladder.engine, info, "float32", max_tokens=longest)) as engine:
        for window in tqdm(scored, desc="coding gain", unit="window"):
            clean = CleanCapture(window.context)
            engine.score(list(window.ids[: window.context + 2]), window.context, clean)  # the fewest that are scored
            for stream, (tokens, first) in product(STREAMS, PARTS.items()):
                own = calibrated.components[stream]
                found = [of_rows(one, clean.kept[layer, stream][:, first:]) for layer, one in own.items()]
                decibels = torch.stack(found).mean((0, 2))
                both = {"over_even": float(decibels[0]), "over_plain": float(decibels[1])}
                yield record.Gain(stream=stream, window=window.number, tokens=tokens, **both)


@torch.no_grad()
def of_rows(components: Components, rows: Tensor) -> Tensor:
    """Both gains of each group of heads on rows [heads, tokens, head_dim], dB float64 [2, groups]."""
    rows, groups = rows.double().cpu(), len(components.variance)
    found = joined(rows - components.mean.double()[:, None], groups) @ components.forward.double()
    power = rows.square().sum(-1).mean(-1)
    return gains(components.variance.double(), found.square().mean(1), plain(components, power))


def plain(components: Components, power: Tensor) -> Tensor:
    """Mean weighted square of a dimension before any transform, of each group, float64 [groups].

    Parameters
    ----------
    power : Tensor
        Mean square length of each head's vectors, float64 [heads]; it is taken to lie in all directions alike.
    """
    trace = components.head_metric.diagonal(dim1=-2, dim2=-1).sum(-1) / components.mean.shape[1]
    return (trace * power).unflatten(0, (len(components.variance), -1)).sum(1) / components.variance.shape[1]


def gains(allocated: Tensor, found: Tensor, plain: Tensor) -> Tensor:
    r"""Coding gain in dB of a transform with bits allocated to its components, at many bits, float64 [2, heads].

    With variances s the bits :math:`b_i = b + \frac12 \log_2(s_i / GM(s))` minimise the distortion, and it is
    :math:`c\,2^{-2b} GM(s)`, where b bits for every component give :math:`c\,2^{-2b} AM(s)`: the gain is their ratio
    (Jayant and Noll, Digital Coding of Waveforms, 1984, section 12.2; Goyal, Theoretical foundations of transform
    coding, IEEE Signal Processing Magazine 18(5), 2001). Where the components have the variances `found` and the bits
    were allocated by others, `allocated`, the distortion is :math:`c\,2^{-2b} GM(s) \cdot AM(found / s)`. 6.02 dB are
    one bit per value.

    Parameters
    ----------
    allocated, found : Tensor
        [heads, head_dim], positive.
    plain : Tensor
        Weighted variance of a dimension for a codec that spreads its error evenly over the values as they are [heads].
    """
    floor = TINY + allocated.mean(-1, keepdim=True) * 1e-12
    allocated = torch.maximum(allocated, floor)
    coded = allocated.log().mean(-1).exp() * (found / allocated).mean(-1)
    return 10 * (torch.stack((found.mean(-1), plain)).clamp(min=TINY) / coded.clamp(min=TINY)).log10()
