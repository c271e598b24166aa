"""The gap phases: engines without a codec (1), noise (2), single layers (3), codec error by layer (4)."""

from __future__ import annotations

import statistics

from validation.published import checks
from validation.published.readers.cells import mean_checks, stem, stream_in, whitening_given
from validation.published.reading import (
    FileRefused,
    count,
    file_name,
    items,
    layers,
    optional,
    perplexity,
    required,
    text,
    tokens,
)
from validation.published.rows import (
    CellFacts,
    Check,
    Contents,
    LayerEffect,
    LayerErrors,
    PassageScores,
    PublishedCell,
    SingleLayers,
)

MODES = {"both": "kv", "k": "k", "v": "v"}
STATISTICS = {"min": min, "max": max, "mean": statistics.fmean, "median": statistics.median}


def engines(data: dict, file: str) -> Contents:
    """Phase 1: vLLM against HF on the same passages, codec off."""
    windows = []
    for index, one in enumerate(items(data, "per_passage")):
        place = f"per_passage[{index}]"
        windows.append(
            PassageScores(
                window=index,
                ppl_ref=perplexity(one, "ppl_hf", place),
                ppl_alt=perplexity(one, "ppl_vllm", place),
                n_tokens=tokens(one, place),
                top1=optional(one, "top1_agreement", place),
                kl=optional(one, "mean_sym_kl_topk", place),
                abs_dlogp=optional(one, "mean_abs_dlogp_true", place),
            )
        )
    facts = CellFacts(model=text(data, "model_path"), context=count(data, "ctx_len"), eval=count(data, "n_eval"))
    name = f"{text(data, 'model_name') or stem(file)}: vllm against hf, no codec"
    cell = PublishedCell(file=file, name=name, role="engine", facts=facts, windows=tuple(windows), kl_kind="top_k")
    names = {
        "mean_ppl_rel_gap": "ppl_rel_gap",
        "mean_top1_agreement": "top1_agreement",
        "mean_sym_kl_topk": "mean_sym_kl_topk",
        "mean_abs_dlogp_true": "mean_abs_dlogp_true",
    }
    found = [*change_checks(data["per_passage"], cell, "ppl_rel_gap"), *mean_checks(data, cell, names)]
    return Contents(cells=(cell,), checks=(*found, *passage_count(data, cell)))


def change_checks(rows: list[dict], cell: PublishedCell, key: str) -> list[Check]:
    """The relative change of every passage, from its two perplexities."""
    found = []
    for one, row in zip(cell.windows, rows, strict=True):
        stored = optional(row, key, f"per_passage[{one.window}]")
        if stored is not None:
            name = f"per_passage[{one.window}].{key}"
            found.append(checks.number(cell.file, cell.name, name, stored, one.change, 1.0))
    return found


def passage_count(data: dict, cell: PublishedCell) -> list[Check]:
    """The number of passages."""
    stored = count(data, "n_passages")
    return [] if stored is None else [checks.number(cell.file, cell.name, "n_passages", stored, len(cell.windows), 0.0)]


def noise(data: dict, file: str) -> Contents:
    """Phase 2: Gaussian noise of several sizes on K, V or both."""
    cells, found = [], []
    mode = text(data, "mode")
    for index, part in enumerate(items(data, "per_sigma")):
        place = f"per_sigma[{index}]"
        sigma = required(part, "sigma", place)
        rows = items(part, "per_passage", place)
        windows = [
            PassageScores(
                window=i,
                ppl_ref=perplexity(row, "ppl_ref", f"{place}.per_passage[{i}]"),
                ppl_alt=perplexity(row, "ppl_alt", f"{place}.per_passage[{i}]"),
                n_tokens=tokens(row, f"{place}.per_passage[{i}]"),
                abs_dlogp=optional(row, "mean_abs_dlogp_true", f"{place}.per_passage[{i}]"),
            )
            for i, row in enumerate(rows)
        ]
        facts = CellFacts(
            engine=text(data, "engine"),
            protocol="in_forward",
            stream=MODES.get(mode or ""),
            codec="noise",
            context=count(data, "ctx_len"),
            eval=count(data, "n_eval"),
            inferred=("protocol",),
        )
        name = f"{text(data, 'model_name') or stem(file)}: noise {sigma:g} on {text(data, 'engine') or 'an engine'}"
        cell = PublishedCell(file=file, name=name, role="noise", facts=facts, windows=tuple(windows), sigma=sigma)
        cells.append(cell)
        names = {"mean_ppl_delta_rel": "ppl_delta_rel", "mean_abs_dlogp": "mean_abs_dlogp_true"}
        found += [*change_checks(rows, cell, "ppl_delta_rel"), *mean_checks(part, cell, names)]
        found += passage_count(part, cell)
    return Contents(cells=tuple(cells), checks=tuple(found))


def single_layers(data: dict, file: str) -> Contents:
    """Phase 3: one layer coded at a time; means only, the passages are not in the file."""
    rows = items(data, "per_layer")
    effects = tuple(
        LayerEffect(
            layer=layer_of(row, i),
            change=required(row, "mean_ppl_delta_rel", f"per_layer[{i}]"),
            top1=optional(row, "mean_top1_agreement", f"per_layer[{i}]"),
        )
        for i, row in enumerate(rows)
    )
    if len({one.layer for one in effects}) != len(effects):
        raise FileRefused("per_layer names a layer twice")
    settings = data.get("config") if isinstance(data.get("config"), dict) else {}
    facts = CellFacts(
        model=text(data, "model_path"),
        engine=text(data, "engine"),
        protocol="in_forward",
        stream=stream_in(text(data, "model_name") or ""),
        codec="block",
        variance_ratio=optional(settings, "variance_ratio", "config"),
        bits_k=optional(settings, "bit_width_k", "config"),
        bits_v=optional(settings, "bit_width_v", "config"),
        block_size=count(settings, "block_size", "config"),
        whitening=whitening_given(settings),
        calibration=file_name(text(settings, "q_calib")),
        codebook_k=file_name(text(settings, "k_centroids")),
        codebook_v=file_name(text(settings, "v_centroids")),
        outlier_threshold=optional(settings, "outlier_threshold", "config"),
        boundary_layers=layers(settings, "boundary_skip_layers"),
        context=count(data, "ctx_len"),
        eval=count(data, "n_eval"),
        n_layers=count(data, "num_layers"),
        inferred=("protocol",),
    )
    made = SingleLayers(file=file, n_windows=count(data, "n_passages"), facts=facts, effects=effects)
    stored = count(data, "num_layers")
    found = () if stored is None else (checks.number(file, "layers", "num_layers", stored, len(effects), 0.0),)
    return Contents(layers=(made,), checks=found)


def layer_of(row: dict, i: int) -> int:
    """The layer's number."""
    layer = count(row, "layer", f"per_layer[{i}]")
    if layer is None:
        raise FileRefused(f"per_layer[{i}].layer is missing")
    return layer


def codec_error(data: dict, file: str) -> Contents:
    """Phase 4: error of the same codec on what each engine captured, by layer."""
    rows = items(data, "per_layer")
    names = [key for key in rows[0] if key != "layer" and isinstance(rows[0][key], int | float)]
    values = {name: tuple(required(row, name, f"per_layer[{i}]") for i, row in enumerate(rows)) for name in names}
    found = [*ratio_checks(values, file), *statistic_checks(data, values, file)]
    stored = count(data, "n_layers_compared")
    if stored is not None:
        found.append(checks.number(file, "layers", "n_layers_compared", stored, len(rows), 0.0))
    made = LayerErrors(file=file, n_windows=count(data, "n_passages"), values=values)
    return Contents(errors=(made,), checks=tuple(found))


def ratio_checks(values: dict[str, tuple[float, ...]], file: str) -> list[Check]:
    """vLLM's error over HF's, layer by layer."""
    found = []
    for stream in ("K", "V"):
        above, below = values.get(f"{stream}_mse_vllm"), values.get(f"{stream}_mse_hf")
        for i, stored in enumerate(values.get(f"{stream}_mse_ratio", ()) if above and below else ()):
            if below[i] > 0:
                ours = above[i] / below[i]
                found.append(checks.number(file, "layers", f"per_layer[{i}].{stream}_mse_ratio", stored, ours, 0.0))
    return found


def statistic_checks(data: dict, values: dict[str, tuple[float, ...]], file: str) -> list[Check]:
    """Smallest, largest, mean and median over layers, and the plain means."""
    found = []
    for name, own in values.items():
        scale = max(map(abs, own))
        stored = data.get(f"{name}_stats")
        for kind in STATISTICS if isinstance(stored, dict) else ():
            if kind in stored:
                given, ours = required(stored, kind, f"{name}_stats"), STATISTICS[kind](own)
                found.append(checks.number(file, "layers", f"{name}_stats.{kind}", given, ours, scale))
        if isinstance(data.get(name), int | float):
            given = required(data, name, "")
            found.append(checks.number(file, "layers", name, given, statistics.fmean(own), scale))
    return found
