"""Tables of the engines without a codec, from ``floor``, ``baseline``, ``baseline_peers`` and ``agreement``."""

from __future__ import annotations

from kvlab.output import format as fmt
from kvlab_pipeline.rendering.basis import Basis
from kvlab_pipeline.rendering.parts import KL_UNIT
from kvlab_pipeline.rendering.withheld import settling


def floor(rows: list[dict]) -> str:
    """What each engine differs from itself by."""
    names = sorted({row["run"] for row in rows})
    found = {(row["engine"], row["run"]): row["kl"] for row in rows}
    engines = dict.fromkeys(row["engine"] for row in rows)
    lines = [[f"`{engine}`", *(fmt.estimate(found.get((engine, name))) for name in names)] for engine in engines]
    return fmt.table(["engine", *(f"{name.replace('_', ' ', 1)}, {KL_UNIT}" for name in names)], lines)


def baseline(rows: list[dict], keys: tuple[str, ...] = ("engine", "dtype", "attention")) -> str:
    """Uncompressed runs against the float32 truth, or against whatever `keys` say."""
    lines = [
        [
            *(f"`{row[key]}`" for key in keys),
            fmt.estimate(row["kl"]),
            fmt.estimate(row["ppl_ratio"], 100, 1),
            fmt.estimate(row["top1_agreement"], 100),
        ]
        for row in rows
    ]
    headers = [*keys, f"KL, {KL_UNIT}", "perplexity change, %", "same top token, %"]
    return fmt.table(headers, lines)


def peers(rows: list[dict]) -> str:
    """Uncompressed runs of two engines in the same dtype, against each other."""
    return baseline(rows, ("run", "against", "dtype"))


def agreement(given: dict) -> str:
    """Float32 only: the identity cells across engines, and the codec cells measured on either engine."""
    protocols = list(dict.fromkeys([*given["identity"], *given["codec"]]))
    lines = []
    for protocol in protocols:
        coded = given["codec"].get(protocol) or {}
        lines.append(
            [
                f"`{protocol}`",
                fmt.estimate(given["identity"].get(protocol)),
                fmt.estimate(coded.get("cross_kl")),
                fmt.estimate(coded.get("jitter_kl")),
                fmt.number(coded.get("hf_kl")),
                fmt.number(coded.get("vllm_kl")),
                fmt.estimate(coded.get("relative_difference"), 100),
                coded.get("state", fmt.DASH),
            ]
        )
    headers = ["protocol", "no codec: KL between engines", "codec: KL between engines"]
    headers += ["codec: KL of `hf` to itself, jittered"]
    headers += ["codec: KL on `hf`", "codec: KL on `vllm`", "difference, %", "reading"]
    return fmt.table(headers, lines)


def agreement_context(found: dict | None, why: list[str], basis: Basis) -> dict | None:
    """The float32 check of the engines."""
    if not found:
        return None
    estimates = [*found["identity"].values(), *(row["cross_kl"] for row in found["codec"].values())]
    return {
        "table": agreement(found),
        "basis": basis(estimates),
        "state": found["state"],
        "why": why,
        "needed": settling(found),
        "bounds": {
            "codec": fmt.percent(found["bounds"]["relative"]),
            "jitter": fmt.plain(found["bounds"]["jitter_multiple"]),
            "identity": fmt.plain(found["bounds"]["identity_kl"]),
        },
        "level": basis.level,
    }


def context(metrics: dict, basis: Basis) -> dict:
    """What ``baseline.md.j2`` and ``agreement.md.j2`` name."""
    return {
        "baseline": basis.under(metrics.get("baseline"), baseline, "kl"),
        "peers": basis.under(metrics.get("baseline_peers"), peers, "kl"),
        "floor": basis.under(metrics.get("floor"), floor, "kl"),
        "agreement": agreement_context(metrics.get("agreement"), metrics.get("agreement_why") or [], basis),
    }
