"""The engines without a codec: each against itself, against the fp32 truth, and against the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import get_args

import numpy as np

from kvlab.core.params import Params
from kvlab.stats.bootstrap import Bootstrap, Column, Estimate
from kvlab.stats.equivalence import State, all_of, below_one, windows_below_one, windows_within, within
from kvlab_pipeline.jobs.plan import baseline_runs
from kvlab_pipeline.studies.baseline.truth import own_jitter, peer_of, trial_windows
from kvlab_pipeline.studies.baselines import LEVELS, corner_cell
from kvlab_pipeline.studies.estimates import sides
from kvlab_pipeline.studies.gather import comparable
from kvlab_pipeline.studies.measured import Results
from kvlab_pipeline.studies.tidy import (
    COUNT,
    NATS,
    RATIO,
    SHARE,
    WINDOWS,
    By,
    Compared,
    Estimand,
    Level,
    Sentences,
    Several,
    Single,
    VerdictField,
)

# How far a run without a codec is from what it is compared with, on the same tokens.
DISTANCE = {"kl": Estimand(NATS), "ppl_ratio": Estimand(RATIO), "top1_agreement": Estimand(SHARE)}

FLOOR = Several(
    {
        "engine": Level(),
        "run": Level("rerun: once more; identity_PROTOCOL: with a codec that changes nothing"),
        "kl": Estimand(NATS, "of the engine to itself"),
    }
)

# An engine as it is, against the float32 truth (transformers with sdpa attention).
BASELINE = Several({"run": Level(), "engine": Level(), "dtype": Level(), "attention": Level()} | DISTANCE)

# An engine as it is, against the other engine in the same dtype.
PEERS = Several({"run": Level(), "against": Level(), "dtype": Level()} | DISTANCE)

STATES = VerdictField(
    get_args(State),
    "equivalent only where whole intervals lie inside the bounds, differ where they lie outside, else open",
)

# The studied codec in float32 on both engines, under one protocol.
CODED = {
    "cross_kl": Estimand(NATS, "between the two engines, both coded"),
    "jitter_kl": Estimand(NATS, "between transformers, coded, and itself with K and V moved by a rounding error"),
    "beyond_jitter": Estimand(NATS, "cross_kl minus a multiple of jitter_kl"),
    "beyond_band": Estimand(NATS, "cross_kl minus a part of the codec's own KL"),
    "jitters": Estimand(
        COUNT, "rounding errors of each window over which an engine's own KL is averaged, beside the one without"
    ),
    "hf_kl": Estimand(NATS),
    "vllm_kl": Estimand(NATS),
    "relative_difference": Estimand(
        RATIO, "what the codec costs on vLLM over what it costs on transformers, minus one"
    ),
    "difference": Estimand(NATS, "what the codec costs on vLLM minus what it costs on transformers"),
    "compared": Compared(),
    "state": STATES,
}

# Whether the engines compute the same function in float32: an equivalence test.
AGREEMENT = Single(
    {
        "identity": By("protocol", Estimand(NATS, "between the engines with a codec that changes nothing")),
        "codec": By("protocol", CODED),
        "state": STATES,
        "windows_needed": Estimand(
            WINDOWS, "at which nothing would be open, power 80 %, post hoc; null where nothing is, or none settles it"
        ),
        "bounds": {
            "identity_kl": Estimand(NATS, "that the KL without a codec must be below"),
            "relative": Estimand(
                RATIO, "what the codec's KL may differ by, and what the KL between the coded runs may be, over its own"
            ),
            "jitter_multiple": Estimand(RATIO, "how many times jitter_kl the KL between the coded runs may be instead"),
        },
    }
)

PARTS = {
    "floor": FLOOR,
    "baseline": BASELINE,
    "baseline_peers": PEERS,
    "agreement": AGREEMENT,
    "agreement_why": Sentences("what differs or is open, or why the agreement is null: one engine was measured"),
}

AGREEMENT_KL = 1e-6  # nats per token; fp32 engines without a codec may differ by rounding only
JITTER_MULTIPLE = 10  # two roundings differ in size, and what grows from them scatters; a bug is far larger
AGREEMENT_CODEC = 0.02  # relative; the same codec must cost the same on both engines in fp32
BOUNDS = {"identity_kl": AGREEMENT_KL, "relative": AGREEMENT_CODEC, "jitter_multiple": JITTER_MULTIPLE}


def floor_entries(params: Params, results: Results, boot: Bootstrap, engine: str) -> list[dict]:
    """KL of an engine to itself in ``gap.dtype``: run again, and with an identity codec in place."""
    entries = []
    for measured in results.select("factors", engine=engine, dtype=params.gap.dtype):
        if measured.role in ("rerun", "identity"):
            run = "rerun" if measured.role == "rerun" else f"identity_{measured.cell.protocol}"
            entries.append({"engine": engine, "run": run, "kl": boot.divergence(measured.column("kl"))})
    return entries


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
        "kl": boot.divergence(results.run_column(run, "kl", what)).to_json(),
        "ppl_ratio": boot.exp_mean(results.run_column(run, "delta_nll", what)).to_json(),
        "top1_agreement": boot.rate(results.run_column(run, "top1_agreement", what)).to_json(),
    }


def agreement_entry(params: Params, results: Results, boot: Bootstrap) -> tuple[dict | None, list[str]]:
    """Whether the engines compute the same function in float32, without a codec and with the studied one.

    A codec's decisions are discontinuous: a float32 rounding that flips one of them grows from layer to
    layer, so that even one engine,
    its K and V moved by 2^-22, lands some way off; `jitter_kl` is that distance. Under every protocol,

    - the identity cell's KL between them has to be below 1e-6 nats, with its whole interval: without that no
      number of two engines is set side by side;
    - the codec's own KL is held to be the same when the whole interval of `relative_difference` (signed, vLLM minus
      HF over HF) lies within 2 %, and to differ when all of it lies outside (`stats.equivalence.within`);
    - `cross_kl`, the KL between their codec runs, is held to be rounding when its upper end is below 2 % of the
      codec's own KL, or below ten times `jitter_kl`, and to be more when both lower ends are above.

    Whatever is neither is *open*, and `state` is that of the weakest of these tests (`equivalence.all_of`). Fewer
    windows widen every interval, so they never make the engines equivalent, only leave it open.

    Returns
    -------
    dict or None
        ``identity`` and ``codec`` by protocol, ``state``,
        ``windows_needed`` (at which all that is open would be decided with a power of 80 %, post hoc; None when
        nothing is open, or when no number of windows settles it), ``bounds``. None with one engine.
    list of str
        Why it is None, or what differs or is open, in words.
    """
    if set(params.engines) != set(LEVELS["engine"]):
        return None, [f"only {', '.join(params.engines)} was measured; agreement needs hf and vllm"]
    (run,) = [name for name, r in results.runs.items() if (r.engine, r.dtype) == ("vllm", "float32")]
    identity, codec, found = {}, {}, []
    for protocol in params.protocols:
        cross = boot.mean(results.run_column(run, "kl", "identity", protocol))
        identity[protocol] = cross.to_json()
        codec[protocol], tests = codec_agreement(params, results, boot, run, protocol)
        found += [replace(test, words=f"{protocol}: {test.words}") for test in (uncoded(cross), *tests)]
    state = all_of(test.state for test in found)
    deciding = [test for test in found if test.state == state != "equivalent"]
    why = [test.words for test in deciding]
    needed = [test.windows_needed for test in deciding]
    settles = None if state != "open" or None in needed else max(needed)
    entry = {"identity": identity, "codec": codec, "state": state, "windows_needed": settles}
    return entry | {"bounds": BOUNDS}, why


@dataclass(frozen=True)
class Tested:
    """One test of the engines' agreement: its outcome, that in words, and at how many windows it is not open."""

    state: State
    words: str
    windows_needed: int | None


def uncoded(cross: Estimate) -> Tested:
    """Without a codec the engines may differ by rounding only; this is never open."""
    words = f"without codec the engines differ by KL {cross.value:.2g}, at most {cross.high:.2g}, over {AGREEMENT_KL:g}"
    return Tested("equivalent" if cross.high < AGREEMENT_KL else "differ", words, cross.n_windows)


def codec_agreement(
    params: Params, results: Results, boot: Bootstrap, run: str, protocol: str
) -> tuple[dict, tuple[Tested, Tested]]:
    """The codec in float32 on both engines: KL between them, each one's own KL, their difference; and its tests."""
    cells = [corner_cell(params, results, engine=e, protocol=protocol, dtype="float32") for e in LEVELS["engine"]]
    comparable(cells, {"engine"})
    shared = trial_windows(params)  # on which the runs were compared
    many = shared if params.baseline.jitters else None
    columns = [measured.column("kl", many) for measured in cells]
    numbers = range(1, params.baseline.jitters + 1)
    again = [
        [results.run_column(run, "kl", own_jitter(name, n), protocol) for n in numbers] for name in LEVELS["engine"]
    ]
    own_costs = [[column, *further] for column, further in zip(columns, again, strict=True)]
    apart = [results.run_column(run, "kl", what, protocol) for what in ("kv", "jitter")]
    relative = boot.combine(list(chain(*own_costs)), lambda m: relative_mean(m, len(numbers) + 1))
    either = replace(boot, confidence=(1 + boot.confidence) / 2)  # one of two bounds suffices: half the error each
    beyond_jitter = either.combine(apart, lambda m: m[..., 0] - JITTER_MULTIPLE * m[..., 1])
    own = cells[0].column("kl", shared)
    beyond_band = either.combine([apart[0], own], lambda m: m[..., 0] - AGREEMENT_CODEC * m[..., 1])
    cross = boot.mean(apart[0])
    entry = {
        "cross_kl": cross.to_json(),
        "jitter_kl": boot.mean(apart[1]).to_json(),
        "beyond_jitter": beyond_jitter.to_json(),
        "beyond_band": beyond_band.to_json(),
        "jitters": params.baseline.jitters,
        "hf_kl": mean_of(own_costs[0]),
        "vllm_kl": mean_of(own_costs[1]),
        "relative_difference": relative.to_json(),
        "difference": boot.difference(columns[1], columns[0]).to_json(),
        "compared": sides(*cells[::-1]),
    }
    tests = (same_cost(relative), same_result(cross, [beyond_band, beyond_jitter]))
    return entry | {"state": all_of(test.state for test in tests)}, tests


def relative_mean(means: np.ndarray, each: int) -> np.ndarray:
    """The mean of the columns after the first `each` over the mean of those, minus one."""
    return means[..., each:].mean(-1) / means[..., :each].mean(-1) - 1


def mean_of(columns: Sequence[Column]) -> float:
    """Mean over tokens and columns."""
    return float(np.mean([column.sums.sum() / column.counts.sum() for column in columns]))


def same_cost(relative: Estimate) -> Tested:
    """Whether the codec's own KL is the same on both engines."""
    state, span = within(relative, AGREEMENT_CODEC), f"{relative.low:.1%} to {relative.high:.1%}"
    verb = {"equivalent": "lies within", "open": "is neither shown to be within nor outside", "differ": "is beyond"}
    words = f"the difference of the codec's KL, {span}, {verb[state]} {AGREEMENT_CODEC:.0%}"
    return Tested(state, words, windows_within(relative, AGREEMENT_CODEC))


def same_result(cross: Estimate, beyond: list[Estimate]) -> Tested:
    """Whether the codec's runs are no further apart than rounding explains; `beyond` are distances to the bounds."""
    state = below_one(beyond)
    verb = {"equivalent": "is below", "open": "is neither shown to be below nor over", "differ": "is over"}
    words = (
        f"the KL between the codec's runs, {cross.value:.2g}, {verb[state]} {AGREEMENT_CODEC:.0%} of the codec's own"
        f" {'or' if state == 'equivalent' else 'and'} {JITTER_MULTIPLE} times what a rounding error does"
    )
    return Tested(state, words, windows_below_one(beyond))
