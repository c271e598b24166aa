"""Files of one or several codec cells with a list of passages: vLLM, its ablation, HF two-pass, Qwen3 snapshot."""

from __future__ import annotations

import statistics

from validation.published import checks, verdicts
from validation.published.reading import (
    FileRefused,
    count,
    file_name,
    flag,
    items,
    layers,
    optional,
    perplexity,
    text,
    tokens,
)
from validation.published.rows import CellFacts, Check, Contents, PassageScores, PublishedCell

STREAM_IN_NAME = (("k_only", "k"), ("v_only", "v"))
STREAMS = {"k": "k", "v": "v", "kv": "kv"}


def vllm_cell(data: dict, file: str) -> Contents:
    """One vLLM cell: production, k-only, v-only, other calibrations, snapshot mode."""
    name = text(data, "model_name") or file
    facts = vllm_facts(data, name)
    cell = PublishedCell(
        file=file,
        name=name,
        role="codec",
        facts=facts,
        windows=metric_windows(data, facts.eval),
        stored_verdict=text(data, "verdict"),
    )
    return Contents(cells=(cell,), checks=(*window_checks(data, cell), *cell_checks(data, cell)))


def ablation(data: dict, file: str) -> Contents:
    """Several vLLM cells that share passages: ``cells`` by name."""
    shared = text(data, "model_name") or file
    cells, found = [], []
    for name, part in data["cells"].items():
        if not isinstance(part, dict):
            raise FileRefused(f"cells.{name} is {part!r}, not an object")
        facts = vllm_facts(data, shared).model_copy(update=whitening_mode(text(part, "qp_mode")))
        identity = text(part, "mode") == "identity"
        cell = PublishedCell(
            file=file,
            name=f"{shared}: {name}",
            role="identity" if identity else "codec",
            facts=facts,
            windows=metric_windows(part, facts.eval, f"cells.{name}"),
            stored_verdict=text(part, "verdict"),
        )
        cells.append(cell)
        found += [*window_checks(part, cell), *cell_checks(part, cell), *count_checks(data, cell)]
    return Contents(cells=tuple(cells), checks=tuple(found))


def whitening_mode(mode: str | None) -> dict[str, str]:
    """What the ablation's mode says: whether K is whitened, and before or after the rotary embedding."""
    if mode is None:
        return {}
    placement = next((name for name in ("pre_rope", "post_rope") if name in mode.lower()), None)
    return {"whitening": "on", "placement": placement} if placement else {"whitening": "none"}


def whitening_given(data: dict) -> str | None:
    """``on`` or ``none`` when the file has a place for the calibration, None when it has not."""
    return ("on" if data["q_calib"] else "none") if "q_calib" in data else None


def vllm_facts(data: dict, name: str) -> CellFacts:
    """The recipe fields of a vLLM file."""
    snapshot = "snapshot" in (text(data, "recipe") or "").lower()
    protocol = "snapshot" if snapshot else "in_forward"
    inferred = [] if snapshot else ["protocol"]
    given = text(data, "compress_stream") or text(data, "compress")
    stream = STREAMS.get((given or "").lower()) or stream_in(name)
    if stream and not given:
        inferred.append("stream")
    return CellFacts(
        model=text(data, "model_path"),
        engine=text(data, "engine"),
        protocol=protocol,
        stream=stream,
        codec="block",
        variance_ratio=optional(data, "variance_ratio", ""),
        bits_k=optional(data, "bit_width_k", ""),
        bits_v=optional(data, "bit_width_v", ""),
        pca=text(data, "pca_method"),
        rank_fraction=optional(data, "rsvd_target_rank_factor", ""),
        block_size=count(data, "block_size"),
        skeleton=text(data, "skeleton_dtype"),
        share_basis_k=flag(data, "share_basis_k"),
        share_basis_v=flag(data, "share_basis_v"),
        whitening=whitening_given(data),
        calibration=file_name(text(data, "q_calib")),
        codebook_k=file_name(text(data, "k_centroids")),
        codebook_v=file_name(text(data, "v_centroids")),
        n_centres_k=count(data, "k_kmeans_k"),
        n_centres_v=count(data, "v_kmeans_k"),
        outlier_threshold=optional(data, "outlier_threshold", ""),
        v_outlier_threshold=optional(data, "v_outlier_threshold", ""),
        boundary_layers=layers(data, "boundary_skip_layers"),
        context=count(data, "ctx_len"),
        eval=count(data, "n_eval"),
        n_layers=layers_seen(data),
        inferred=tuple(inferred),
    )


def layers_seen(data: dict) -> int | None:
    """Layers of the model, as far as the file counts them; K and V are two calls of the codec's place."""
    first = next(iter(data["cells"].values())) if "cells" in data else data
    passage = (first.get("per_passage") or [{}])[0]
    captured, calls = count(passage, "n_layers_captured"), count(passage, "codec_layer_calls")
    if captured is not None:
        return captured
    return calls // 2 if calls else None


def stream_in(name: str) -> str | None:
    """The stream that a cell's name claims; the files have no field for it."""
    return next((stream for part, stream in STREAM_IN_NAME if part in name.lower()), None)


def metric_windows(data: dict, n_eval: int | None, where: str = "") -> tuple[PassageScores, ...]:
    """Windows of ``per_passage[].metrics``."""
    windows = []
    for index, passage in enumerate(items(data, "per_passage", where)):
        place = f"{where}.per_passage[{index}].metrics".lstrip(".")
        metrics = passage.get("metrics")
        metrics = metrics if isinstance(metrics, dict) else {}
        windows.append(
            PassageScores(
                window=index,
                ppl_ref=perplexity(metrics, "ppl_ref", place),
                ppl_alt=perplexity(metrics, "ppl_alt", place),
                n_tokens=tokens(metrics, place),
                top1=optional(metrics, "top1_agreement", place),
                kl=optional(metrics, "mean_kl", place),
                abs_dlogp=optional(metrics, "mean_abs_dlogp_true", place),
                coded_bytes=count(passage, "codec_total_compressed_bytes", f"{where}.per_passage[{index}]"),
            )
        )
    return counted(windows, n_eval)


def counted(windows: list[PassageScores], n_eval: int | None) -> tuple[PassageScores, ...]:
    """The windows with their number of scored tokens, where the file leaves it out but its shares betray it.

    The two-pass harness scores one token less than `n_eval`, the others score all: the agreements are whole shares
    of one of the two numbers, or the number stays unknown.
    """
    if n_eval is None or any(one.n_tokens is not None or one.top1 is None for one in windows):
        return tuple(windows)
    for n in (n_eval, n_eval - 1):
        if n > 0 and all(abs(one.top1 * n - round(one.top1 * n)) < 1e-4 for one in windows):
            return tuple(one.model_copy(update={"n_tokens": n}) for one in windows)
    return tuple(windows)


def window_checks(data: dict, cell: PublishedCell, key: str = "ppl_delta_rel") -> list[Check]:
    """The relative change of every passage, from its two perplexities."""
    found = []
    for one, passage in zip(cell.windows, data["per_passage"], strict=True):
        metrics = passage.get("metrics", passage)
        stored = optional(metrics, key, f"per_passage[{one.window}]")
        if stored is not None:
            single = checks.is_single([one.ppl_ref, one.ppl_alt, stored])
            name = f"per_passage[{one.window}].{key}"
            found.append(checks.number(cell.file, cell.name, name, stored, one.change, 1.0, single))
    return found


def mean_checks(data: dict, cell: PublishedCell, names: dict[str, str]) -> list[Check]:
    """Stored means: name of the mean -> name of the field per passage."""
    found = []
    for mean, field in names.items():
        stored = optional(data, mean, "")
        values = [one.get("metrics", one).get(field) for one in data["per_passage"]]
        if stored is not None and all(isinstance(value, int | float) for value in values):
            found.append(checks.mean(cell.file, cell.name, mean, stored, values))
    return found


def cell_checks(data: dict, cell: PublishedCell) -> list[Check]:
    """The summary of a cell: means, number of passages, verdict."""
    names = {"mean_ppl_delta_rel": "ppl_delta_rel", "mean_top1_agreement": "top1_agreement"}
    return [*mean_checks(data, cell, names), *count_checks(data, cell), *verdict_checks(cell)]


def count_checks(data: dict, cell: PublishedCell) -> list[Check]:
    """The number of passages."""
    found = []
    for key in ("n_passages", "n_passages_total"):
        stored = count(data, key)
        if stored is not None:
            found.append(checks.number(cell.file, cell.name, key, stored, len(cell.windows), 0.0))
    return found


def verdict_checks(cell: PublishedCell) -> list[Check]:
    """The verdict, by the study's own rule."""
    if cell.stored_verdict is None or any(one.top1 is None for one in cell.windows):
        return []
    ours = published_verdict(cell)
    return [checks.word(cell.file, cell.name, "verdict", cell.stored_verdict, ours)]


def published_verdict(cell: PublishedCell) -> str | None:
    """What the study's rule says of the cell's means; None where an agreement is not recorded."""
    if any(one.top1 is None for one in cell.windows):
        return None
    change = statistics.fmean(one.change for one in cell.windows)
    return verdicts.published(cell.rule, change, statistics.fmean(one.top1 for one in cell.windows))


# --------------------------------------------------------------------------------- HF, two passes


def hf_two_pass(data: dict, file: str) -> Contents:
    """An HF cell: prefill, code the cache, score the rest over it. Engine and protocol are the harness's."""
    settings = data.get("config") if isinstance(data.get("config"), dict) else data
    n_eval = count(data, "n_eval")
    stats = [one.get("stats") or {} for one in items(data, "per_passage")]
    whitened = flag(settings, "q_precond")
    shared = flag(settings, "share_basis")
    facts = CellFacts(
        model=text(data, "model_path"),
        engine="hf",
        protocol="snapshot",
        stream=STREAMS.get((text(data, "compress") or "").lower()),
        codec="block",
        variance_ratio=optional(settings, "variance_ratio", ""),
        bits_k=optional(settings, "bit_width", ""),
        bits_v=optional(settings, "bit_width_v", ""),
        pca=text(settings, "pca_method"),
        rank_fraction=optional(settings, "rsvd_target_rank_factor", ""),
        block_size=count(settings, "block_size"),
        skeleton=text(settings, "skeleton_dtype"),
        share_basis_k=first(flag(settings, "share_basis_k"), shared),
        share_basis_v=first(flag(settings, "share_basis_v"), shared),
        whitening=None if whitened is None else ("on" if whitened else "none"),
        outlier_threshold=optional(settings, "outlier_threshold", ""),
        boundary_layers=boundary_of(stats),
        context=count(data, "ctx_len"),
        eval=n_eval,
        n_layers=len(stats[0].get("per_layer") or ()) or None,
        inferred=("engine", "protocol"),
    )
    windows = metric_windows(data, n_eval)
    name = text(data, "model_name") or ""
    name = stem(file) if stem(file).startswith(name) else f"{name} ({stem(file)})"
    cell = PublishedCell(file=file, name=name, role="codec", facts=facts, windows=windows, kl_kind="full")
    names = {
        "mean_ppl_delta_rel": "ppl_delta_rel",
        "mean_top1_agreement": "top1_agreement",
        "mean_kl": "mean_kl",
        "ppl_delta_mean": "ppl_delta_rel",
        "top1_mean": "top1_agreement",
        "kl_mean": "mean_kl",
    }
    found = [*window_checks(data, cell), *mean_checks(data, cell, names), *count_checks(data, cell)]
    return Contents(cells=(cell,), checks=tuple(found))


def first(*values):
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def boundary_of(stats: list[dict]) -> tuple[int, ...] | None:
    """Layers that every passage's statistics call uncompressed; None when there are no statistics by layer."""
    per_layer = [row for one in stats for row in one.get("per_layer") or ()]
    if not per_layer:
        return None
    return tuple(sorted({int(row["layer"]) for row in per_layer if row.get("boundary_uncompressed")}))


def stem(file: str) -> str:
    """The file's name without folders and ending."""
    return file_name(file).removesuffix(".json")


# -------------------------------------------------------------------------- snapshot on Qwen3 and later


def snapshot_qwen3(data: dict, file: str) -> Contents:
    """The later snapshot harness: other field names, a laxer verdict, codec statistics for every passage in a row."""
    name = text(data, "model_name") or file
    passages = items(data, "per_passage")
    stats = data.get("codec_stats") if isinstance(data.get("codec_stats"), list) else []
    sizes = bytes_by_passage(stats, len(passages))
    facts = vllm_facts(data, name).model_copy(
        update={
            "protocol": "snapshot",
            "whitening": whitening_seen(stats),
            "calibration": file_name(text(data, "q_calib")) if whitening_seen(stats) != "none" else None,
            "n_layers": len({row.get("layer") for row in stats}) or None,
            "inferred": ("protocol",),
        }
    )
    windows = [
        PassageScores(
            window=index,
            ppl_ref=perplexity(one, "ppl_ref", f"per_passage[{index}]"),
            ppl_alt=perplexity(one, "ppl_alt", f"per_passage[{index}]"),
            n_tokens=tokens(one, f"per_passage[{index}]"),
            top1=optional(one, "top1_pair", f"per_passage[{index}]"),
            coded_bytes=sizes[index],
        )
        for index, one in enumerate(passages)
    ]
    cell = PublishedCell(
        file=file,
        name=name,
        role="codec",
        facts=facts,
        windows=counted(windows, facts.eval),
        stored_verdict=text(data, "verdict"),
        rule="pass",
    )
    names = {"mean_delta_ppl": "delta_ppl", "mean_top1_pair": "top1_pair"}
    found = [*window_checks(data, cell, "delta_ppl"), *mean_checks(data, cell, names)]
    return Contents(cells=(cell,), checks=(*found, *count_checks(data, cell), *verdict_checks(cell)))


def whitening_seen(stats: list[dict]) -> str | None:
    """Whether K was whitened, from what the codec did: the file names its calibration even when it was switched off."""
    seen = {row["whitened"] for row in stats if row.get("stream") == "K" and isinstance(row.get("whitened"), bool)}
    if not seen:
        return None
    return "none" if seen == {False} else "on" if seen == {True} else "on some layers"


def bytes_by_passage(stats: list[dict], n: int) -> list[int | None]:
    """Compressed bytes of each passage; None when the statistics do not split into equal runs of layers."""
    size, rest = divmod(len(stats), n)
    runs = [stats[i * size : (i + 1) * size] for i in range(n)]
    order = [[(row.get("layer"), row.get("stream")) for row in run] for run in runs]
    if rest or not size or any(one != order[0] for one in order):
        return [None] * n
    sums = [sum(row.get("compressed_bytes") or 0 for row in run) for run in runs]
    return [int(one) if one else None for one in sums]
