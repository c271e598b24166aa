"""The engines without a codec: each against itself, against the fp32 truth, and against the other."""

from __future__ import annotations

from kvlab.base.params import Params
from kvlab.lab.plan import baseline_runs
from kvlab.stats.bootstrap import Bootstrap
from kvlab.studies.baseline.truth import peer_of
from kvlab.studies.counterparts import LEVELS, corner_cell
from kvlab.studies.estimates import sides
from kvlab.studies.gather import Results, comparable

AGREEMENT_KL = 1e-6  # nats per token; fp32 engines without a codec may differ by rounding only
JITTER_MULTIPLE = 10  # two roundings differ in size, and what grows from them scatters; a bug is far larger
AGREEMENT_CODEC = 0.02  # relative; the same codec must cost the same on both engines in fp32


def floor_entry(params: Params, results: Results, boot: Bootstrap, engine: str) -> dict:
    """KL of an engine to itself in ``gap.dtype``: run again, and with an identity codec in place."""
    entry = {}
    for measured in results.select("factors", engine=engine, dtype=params.gap.dtype):
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
        **distance(results, boot, run, "plain"),
    }


def peer_entries(params: Params, results: Results, boot: Bootstrap) -> list[dict]:
    """The engines without codec against each other in one dtype below float32; empty with one engine.

    Returns
    -------
    list of dict
        ``run``, ``against`` (the truth's engine in the same dtype, first in KL), ``dtype``, and the `distance`
        between the two. How far each is from the fp32 truth is its own `baseline_entry`.

    Raises
    ------
    MissingResult
        A run was measured without the comparison.
    """
    runs = baseline_runs(params)
    pairs = [(run, peer_of(runs, run)) for run in results.runs]
    return [
        {"run": run, "against": against, "dtype": results.runs[run].dtype, **distance(results, boot, run, "peer")}
        for run, against in pairs
        if against
    ]


def distance(results: Results, boot: Bootstrap, run: str, what: str) -> dict:
    """A run from what it is compared with: KL in nats per token, ratio of perplexities, rate of equal top tokens."""
    return {
        "kl": boot.mean(results.run_column(run, "kl", what)).to_json(),
        "ppl_ratio": boot.exp_mean(results.run_column(run, "delta_nll", what)).to_json(),
        "top1_agreement": boot.rate(results.run_column(run, "top1_agreement", what)).to_json(),
    }


def agreement_entry(params: Params, results: Results, boot: Bootstrap) -> tuple[dict | None, list[str]]:
    """Whether the engines agree in float32, with and without the codec; None with one engine.

    A codec's rounding carries a difference in the last bit up through the layers, so that even one engine,
    its K and V moved by 2^-22, lands some way off; `jitter_kl` is that distance. The engines agree when,
    under every protocol,

    - the identity cell's mean KL between them is below 1e-6 nats;
    - the codec's own KL is not resolved to differ by more than 2 % of HF's: the interval of
      `relative_difference` (signed, vLLM minus HF over HF) reaches into that band;
    - `cross_kl`, the KL between their codec runs, is below 2 % of the codec's own KL, or else not resolved
      above ten times `jitter_kl`.
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
        why += [f"{protocol}: {problem}" for problem in disagreements(codec[protocol])]
    return {"identity": identity, "codec": codec, "holds": not why, "why": why}, why


def codec_agreement(params: Params, results: Results, boot: Bootstrap, run: str, protocol: str) -> dict:
    """The codec in float32 on both engines: KL between them, each one's own KL, their difference."""
    cells = [corner_cell(params, results, engine=e, protocol=protocol, dtype="float32") for e in LEVELS["engine"]]
    comparable(cells, {"engine"})
    columns = [measured.column("kl") for measured in cells]
    apart = [results.run_column(run, "kl", what, protocol) for what in ("kv", "jitter")]
    return {
        "cross_kl": boot.mean(apart[0]).to_json(),
        "jitter_kl": boot.mean(apart[1]).to_json(),
        "beyond_jitter": boot.combine(apart, lambda m: m[..., 0] - JITTER_MULTIPLE * m[..., 1]).to_json(),
        "hf_kl": boot.mean(columns[0]).value,
        "vllm_kl": boot.mean(columns[1]).value,
        "relative_difference": boot.combine(columns, lambda m: m[..., 1] / m[..., 0] - 1).to_json(),
        "difference": boot.difference(columns[1], columns[0]).to_json(),
        "compared": sides(*cells[::-1]),
    }


def disagreements(codec: dict) -> list[str]:
    """What speaks against the same codec doing the same thing on both engines; see `agreement_entry`."""
    found = []
    low, high = (codec["relative_difference"][end] for end in ("low", "high"))
    if low > AGREEMENT_CODEC or high < -AGREEMENT_CODEC:
        found.append(f"the codec's KL differs by {low:.1%} to {high:.1%}, over {AGREEMENT_CODEC:.0%}")
    cross = codec["cross_kl"]["value"]
    if cross > AGREEMENT_CODEC * codec["hf_kl"] and codec["beyond_jitter"]["low"] > 0:
        found.append(
            f"the codec's runs are KL {cross:.2g} apart, over {JITTER_MULTIPLE} times what a rounding error does"
        )
    return found
