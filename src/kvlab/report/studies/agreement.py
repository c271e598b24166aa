"""The engines without a codec: each against itself, against the fp32 truth, and against the other."""

from __future__ import annotations

from kvlab.params import Params
from kvlab.report.gather import Results, comparable
from kvlab.report.studies.counterparts import LEVELS, codec_cell
from kvlab.stats.bootstrap import Bootstrap

AGREEMENT_KL = 1e-6  # nats per token; fp32 engines without a codec may differ by rounding only
AGREEMENT_CODEC = 0.02  # relative; the same codec must cost the same on both engines in fp32


def floor_entry(params: Params, results: Results, boot: Bootstrap, engine: str) -> dict:
    """KL of an engine to itself in ``gap.dtype``: run again, and with an identity codec in place."""
    entry = {}
    for measured in results.select("cells", engine=engine, dtype=params.gap.dtype):
        if measured.role in ("rerun", "identity"):
            name = "rerun" if measured.role == "rerun" else f"identity_{measured.cell.protocol}"
            entry[name] = boot.mean(measured.column("kl")).to_json()
    return entry


def baseline_entry(results: Results, boot: Bootstrap, run: str) -> dict:
    """One engine, dtype and attention without codec, against the fp32 truth on the same tokens."""
    record = results.runs[run]
    return {
        "run": run,
        "engine": record.engine,
        "dtype": record.dtype,
        "attention": record.attention,
        "kl": boot.mean(results.run_column(run, "kl")).to_json(),
        "ppl_ratio": boot.exp_mean(results.run_column(run, "delta_nll")).to_json(),
        "top1_agreement": boot.rate(results.run_column(run, "top1_agreement")).to_json(),
    }


def agreement_entry(params: Params, results: Results, boot: Bootstrap) -> tuple[dict | None, list[str]]:
    """Whether the engines agree in float32, with and without the codec; None with one engine.

    They agree when, under every protocol, the identity cell's mean KL between the engines is below
    1e-6 nats, and the codec's own KL is not resolved to differ by more than 2 % of HF's: no interval of
    `relative_difference` (signed, vLLM minus HF over HF) lies wholly beyond. The interval decides because
    a codec's rounding carries a difference in the last bit up through the layers, so that the same engine,
    its K and V moved by 2^-22, lands about as far away; `jitter_kl` is that distance, to hold `cross_kl`
    against.
    """
    if set(params.engines) != set(LEVELS["engine"]):
        return None, [f"only {', '.join(params.engines)} was measured; agreement needs hf and vllm"]
    (run,) = [name for name, r in results.runs.items() if (r.engine, r.dtype) == ("vllm", "float32")]
    identity, codec, why = {}, {}, []
    for protocol in params.protocols:
        cross = boot.mean(results.run_column(run, "kl", "identity", protocol))
        identity[protocol] = cross.to_json()
        if not cross.value < AGREEMENT_KL:
            why.append(f"{protocol}: without codec the engines differ by KL {cross.value:.2g}, over {AGREEMENT_KL:g}")
        codec[protocol] = codec_agreement(params, results, boot, run, protocol)
        low, high = (codec[protocol]["relative_difference"][end] for end in ("low", "high"))
        if low > AGREEMENT_CODEC or high < -AGREEMENT_CODEC:
            why.append(f"{protocol}: the codec's KL differs by {low:.1%} to {high:.1%}, over {AGREEMENT_CODEC:.0%}")
    return {"identity": identity, "codec": codec, "holds": not why, "why": why}, why


def codec_agreement(params: Params, results: Results, boot: Bootstrap, run: str, protocol: str) -> dict:
    """The codec in float32 on both engines: KL between them, each one's own KL, their difference."""
    cells = [codec_cell(params, results, engine, protocol, "float32") for engine in LEVELS["engine"]]
    comparable(cells, {"engine"})
    columns = [measured.column("kl") for measured in cells]
    return {
        "cross_kl": boot.mean(results.run_column(run, "kl", "kv", protocol)).to_json(),
        "jitter_kl": boot.mean(results.run_column(run, "kl", "jitter", protocol)).to_json(),
        "hf_kl": boot.mean(columns[0]).value,
        "vllm_kl": boot.mean(columns[1]).value,
        "relative_difference": boot.combine(columns, lambda m: m[..., 1] / m[..., 0] - 1).to_json(),
    }
