"""Rows forged together with all their evidence, resealed: none is certified, and none is supported by what cannot be.

The rows are those of a vLLM with coded pages beside which each request reads 34 tokens exact, of its own fp8 cache and
as it is, and of a codec over finished caches on transformers. A forger knows the schema, keeps row and evidence alike,
and computes every id anew. What then still agrees with all that can be known of so many items is in `CONSISTENT`: it
keeps its tier, as its evidence may be true, and only measuring it again (`tests/pipeline/test_replay.py`) tells.
"""

from __future__ import annotations

import copy
import json

import pytest

from gate.planted_records import (
    BASE,
    CONTEXT,
    GOOD,
    NEEDLES,
    OWN,
    PAGED,
    PLAIN_POOL,
    WINDOWS,
    claims,
    read_back,
    record,
    recounted,
    table,
)
from kvlab.gate import registry
from kvlab.gate.cases import Context
from kvlab.gate.catalogue import EVIDENCE
from kvlab.gate.catalogue.values import RowError
from kvlab.gate.evidence import EvidenceError, parse
from kvlab.gate.evidence.measures import measured, paired, rate_of
from kvlab_pipeline.gate_page.measured_rows import rows_of

REGISTRY = registry.load()
TOKEN = 2 * 6 * 64  # values
EXACT = 34 * TOKEN * 2  # bytes
POOL = PAGED.pool.model_copy(
    update={
        "exact_bytes": EXACT,
        "exact_requests": 1,
        "cache_blocks": (PAGED.pool.cache_memory_bytes - EXACT) // PAGED.pool.block_bytes,
    }
)


def kept_exact():
    runs = tuple(recounted(run, kv_bytes=run.kv_bytes + run.items * EXACT) for run in PAGED.evals)
    return PAGED.model_copy(update={"evals": runs, "kv_bytes": runs[0].kv_bytes, "pool": POOL})


VLLM = BASE.model_copy(
    update={"pool": PLAIN_POOL, "backend": "vllm.CPUAttentionBackendImpl", "protocol": "in_forward", "span": "window"}
    | {"evals": OWN.evals, "kv_values": OWN.kv_values}
)
VLLM = VLLM.model_copy(
    update={"evals": (runs := tuple(recounted(r, kv_bytes=2 * r.kv_values) for r in VLLM.evals))}
    | {"kv_bytes": runs[0].kv_bytes}
)
PAGES, FP8, BASELINE, CODEC = (
    f"reference/{name}" for name in ("vllm/klt-4-pages", "vllm/fp8_e4m3", "vllm/baseline", "hf/klt-4")
)


@pytest.fixture(scope="module")
def true():
    """The rows as JSON, each of which earns `supported`."""
    vllm = (VLLM, kept_exact(), OWN)
    made = rows_of(record("vllm", vllm), table(*vllm), "supported", 3)
    return made + rows_of(record("hf", (BASE, GOOD)), table(BASE, GOOD), "supported", 3)


def judged(rows, tmp_path):
    return claims(read_back(tmp_path, rows), Context(REGISTRY))


def test_the_true_rows_are_supported_and_nothing_is_certified_without_measuring_again(true, tmp_path):
    found = judged(true, tmp_path)
    assert {name: claim.earned for name, claim in found.items()} == dict.fromkeys(
        (PAGES, FP8, BASELINE, CODEC, "reference/hf/baseline"), "supported"
    ), {name: claim.findings for name, claim in found.items() if claim.earned != "supported"}
    assert not any(claim.certified for claim in found.values())


def test_a_forger_who_changes_nothing_writes_the_true_row(true):
    for row in true:
        same = copy.deepcopy(row)
        row_follows(same)
        assert json.dumps(same) == json.dumps(row)


# ------------------------------------------------------------------------------------ what is changed


def both(**fields):
    """The same numbers in the row and in what every piece observed, in the pool where they are of it."""

    def change(row):
        for name, value in fields.items():
            row[name] = value(row[name]) if callable(value) else value
            for piece in row[EVIDENCE]:
                seen = piece["observed"]
                place = seen["pool"] if name in (seen.get("pool") or ()) or name.startswith("exact_") else seen
                place[name] = value(place[name]) if callable(value) else value
        row_follows(row)

    return change


def seen(**fields):
    """What every piece observed, and the row where it says so too."""

    def change(row):
        for piece in row[EVIDENCE]:
            for name, value in fields.items():
                old = piece["observed"].get(name)
                piece["observed"][name] = value(old) if callable(value) else value
        row_follows(row)

    return change


def identity(**fields):
    """What was measured on what: in the row, in the evidence, and of its baseline."""

    def change(row):
        for name, value in fields.items():
            row[name] = value
            for piece in row[EVIDENCE]:
                piece["identity"][name] = piece["baseline_identity"][name] = value

    return change


def row_follows(row):
    """Row numbers anew from the first piece, as somebody would who knows how they are made."""
    first = next(p for p in row[EVIDENCE] if p["quality_eval_id"] == row.get("quality_eval_id", "kv_fidelity"))
    now = first["observed"]
    for name in ("kv_bytes", "kv_values", "fires", "expected_fires", "codec", "backend", "kv_cache_dtype", "bits"):
        if now.get(name) is not None:
            row[name] = int(now[name]) if name == "bits" else now[name]
    row["stored_span"] = now["span"]
    row["bits_per_value"] = 8 * now["kv_bytes"] / now["kv_values"]
    if "compression_ratio" in row:
        row["compression_ratio"] = row["bits_per_value"] / 16
    if now.get("pool"):
        row |= now["pool"] | {"capacity_tokens": now["pool"]["cache_blocks"] * now["pool"]["block_tokens"]}


def pool(**fields):
    """The pool's numbers, in row and evidence, with bytes as they were unless said."""

    def change(row):
        for piece in row[EVIDENCE]:
            held = piece["observed"]["pool"]
            for name, value in fields.items():
                held[name] = value(held.get(name, 0)) if callable(value) else value
        row_follows(row)

    return change


def one_piece(name, **fields):
    """The counts of one eval alone."""

    def change(row):
        for piece in row[EVIDENCE]:
            if piece["quality_eval_id"] == name:
                old = piece["observed"]
                piece["observed"] = old | {key: value(old[key]) for key, value in fields.items()}
        row_follows(row)

    return change


def chain(*changes):
    def change(row):
        for one in changes:
            one(row)

    return change


def metrics(name, key, of, **more):
    """A metric of one eval made anew of other scores, by the gate's own code."""

    def change(row):
        piece = next(p for p in row[EVIDENCE] if p["quality_eval_id"] == name)
        for part, one in (("metrics", of), ("paired", of)):
            piece[part][key] = one.model_dump(mode="json")
        if key in row:
            row[key] = of.value
        for part, one in more.items():
            piece[part][key] = one.model_dump(mode="json")

    return change


def half(value):
    return value // 2


def cut(pieces):
    """Only some of the evidence is shown, and it says that nothing else was scored."""

    def change(row):
        row[EVIDENCE] = [one for one in row[EVIDENCE] if one["quality_eval_id"] in pieces]
        for one in row[EVIDENCE]:
            one["evals"] = list(pieces)

    return change


def without_exact(share):
    """A part of the exact tokens' bytes left out of all that was stored."""

    def change(row):
        for piece in row[EVIDENCE]:
            items = piece["metrics"][next(iter(piece["metrics"]))]["n"]
            piece["observed"]["kv_bytes"] -= round(items * EXACT * share)
        row_follows(row)

    return change


FLAT = measured([1e-4] * WINDOWS, False)
ABOUT_PAGES = {
    "no exact token is counted in bytes": without_exact(1),
    "half of the exact tokens are": without_exact(0.5),
    "one exact token in all windows is left out": without_exact(1 / 34 / 128),
    "exact tokens are counted once for all windows": chain(without_exact(1), seen(kv_bytes=lambda b: b + EXACT)),
    "exact tokens are left out over the needles alone": one_piece("needle", kv_bytes=lambda b: b - NEEDLES * EXACT),
    "exact tokens are left out over the windows alone": one_piece(
        "kv_fidelity", kv_bytes=lambda b: b - WINDOWS * EXACT
    ),
    "a request keeps half as many exact as its bytes say": pool(exact_bytes=half),
    "a request keeps half a token more": pool(exact_bytes=lambda b: b + TOKEN),
    "half a token more, and counted": chain(
        pool(exact_bytes=lambda b: b + TOKEN),
        one_piece("kv_fidelity", kv_bytes=lambda b: b + WINDOWS * TOKEN),
        one_piece("needle", kv_bytes=lambda b: b + NEEDLES * TOKEN),
    ),
    "all of a long context is exact, for nothing": pool(exact_bytes=lambda b: 600 * TOKEN * 2),
    "exact tokens are of no request": pool(exact_requests=0),
    "exact tokens are nobody's, and their bytes gone": chain(without_exact(1), pool(exact_bytes=0, exact_requests=4)),
    "memory for more requests than there is": pool(exact_requests=1000),
    "blocks of half the bytes": pool(block_bytes=half),
    "blocks of half the bytes, and half of all bytes": chain(pool(block_bytes=half), seen(kv_bytes=half)),
    "blocks of twice the values": pool(block_values=lambda v: 2 * v),
    "twice the values, in blocks and in all": chain(
        pool(block_values=lambda v: 2 * v), seen(kv_values=lambda v: 2 * v)
    ),
    "blocks of twice the tokens": pool(block_tokens=lambda t: 2 * t),
    "twice the blocks": pool(cache_blocks=lambda n: 2 * n),
    "half the memory": pool(cache_memory_bytes=half),
    "twice the capacity": lambda row: row.update(capacity_tokens=2 * row["capacity_tokens"]),
    "no pool": lambda row: [p["observed"].update(pool=None) for p in row[EVIDENCE]],
    "no pool, nor a word of it in the row": lambda row: (
        [p["observed"].update(pool=None) for p in row[EVIDENCE]],
        [row.pop(name, None) for name in (*POOL.model_dump(), "capacity_tokens")],
    ),
    "the needles' pool is another": lambda row: row[EVIDENCE][1]["observed"]["pool"].update(cache_blocks=1),
    "another backend": both(backend="vllm.CPUAttentionBackendImpl"),
    "no backend": both(backend=None),
    "nobody says by what it is coded": seen(served=None),
    "coded by another recipe": seen(served={"recipe_id": "0123456789ab", "calibration": None}),
    "coded by no calibration": seen(served=lambda s: s | {"calibration": None}),
    "pages that nobody zeroed": seen(canary_kl=None),
    "pages that moved nothing": seen(canary_kl=0.0),
    "no codec ran": both(codec=None, fires=0, expected_fires=0),
    "one fire for all windows": both(fires=1, expected_fires=1),
    "a fire less than due": both(fires=lambda n: n - 1, expected_fires=lambda n: n - 1),
    "half as many windows' fires": one_piece("needle", fires=lambda n: n - 1, expected_fires=lambda n: n - 1),
    "pages over contexts alone": chain(seen(span="context")),
    "eight times the context": identity(context_tokens=8 * CONTEXT, context_band="4k"),
    "stored as bfloat16": both(kv_cache_dtype="bfloat16"),
    "a snapshot": chain(identity(protocol="snapshot"), seen(span="context")),
    "needles left out": cut(["kv_fidelity"]),
    "windows left out": cut(["needle"]),
}
FP8S = {
    "fp8 in four bits": seen(kv_bytes=half),
    "fp8 over half of the values": seen(kv_values=half),
    "fp8 of a cache in bfloat16": both(kv_cache_dtype="bfloat16"),
    "fp8 over contexts alone": seen(span="context"),
    "fp8 that a codec ran beside": both(codec="klt", fires=12 * WINDOWS, expected_fires=12 * WINDOWS),
    "fp8 whose cache nobody reads": seen(canary_kl=0.0),
    "fp8 as the baseline": lambda row: row.update(mechanism="baseline", mechanism_variant=None),
    "fp8 lossless by another baseline": lambda row: [
        p["baseline"].update(kl=p["metrics"]["kl"]) for p in row[EVIDENCE] if "kl" in p["metrics"]
    ],
    "fp8 with fewer windows than its interval": lambda row: row[EVIDENCE][0]["metrics"]["kl"].update(n=8),
    "fp8 whose KL is below zero": metrics("kv_fidelity", "kl", measured([-1e-4] * WINDOWS, False)),
    "fp8 with all needles of more than there are": metrics("needle", "needle_recall", rate_of(NEEDLES, NEEDLES)),
}
CODECS = {
    "bits of half the codes": seen(kv_bytes=half),
    "a twentieth of the bytes less": seen(kv_bytes=lambda b: b * 19 // 20 - b // 20),
    "four times the context": identity(context_tokens=4 * CONTEXT, context_band="2k"),
    "a context of three": identity(context_tokens=3, context_band="3"),
    "values of half a token": seen(kv_values=lambda v: v - 1),
    "fires of one item": seen(fires=6, expected_fires=6),
    "fires of no item": seen(fires=0, expected_fires=0),
    "in the forward": chain(identity(protocol="in_forward"), seen(span="context")),
    "a finished cache of whole windows": seen(span="window"),
    "another codec": both(codec="kivi"),
    "idle": both(codec="identity"),
    "no canary": seen(canary_kl=None),
    "paired with somebody else": lambda row: [
        p["baseline_identity"].update(model_hash="another") for p in row[EVIDENCE]
    ],
    "against another recipe": lambda row: [p.update(baseline_recipe_id="0123456789ab") for p in row[EVIDENCE]],
    "evals that it is none of": lambda row: row[EVIDENCE][1].update(evals=["kv_fidelity"]),
    "two families": lambda row: row[EVIDENCE][1]["family"].update(tested=1),
    "another version of the eval": lambda row: [p.update(version="9") for p in row[EVIDENCE]],
    "an eval that nobody knows": lambda row: [p.update(quality_eval_id="vibes") for p in row[EVIDENCE]],
    "scores of fewer windows in one metric": metrics(
        "kv_fidelity", "kl", FLAT.model_copy(update={"n": 64, "lows": FLAT.lows[:3], "highs": FLAT.highs[:3]})
    ),
    "an interval of many from few": lambda row: row[EVIDENCE][1]["metrics"]["needle_recall"].update(n=10 * NEEDLES),
    "no baseline": lambda row: [p.update(baseline={}, paired={}) for p in row[EVIDENCE]],
    "imported and seen all the same": lambda row: [
        p.update(
            imported={"harness": "lm-evaluation-harness", "plain": "a", "coded": "b", "differs": {}, "changed": 1}
            | {"unobserved": []}
        )
        for p in row[EVIDENCE]
    ],
    "speed": lambda row: row.update(throughput_tok_s=1e9, support_status="supported", bits_per_value=1.0),
    "speculation": both(spec_decoding="mtp"),
    "an id of the true one": None,
}
FORGERIES = [(PAGES, ABOUT_PAGES), (FP8, FP8S), (CODEC, CODECS)]
CASES = [(row_id, name, change) for row_id, several in FORGERIES for name, change in several.items()]


def seal(row):
    for piece in row[EVIDENCE]:
        piece["evidence_id"] = parse(piece).content_id() or ""


@pytest.mark.parametrize(("row_id", "name", "change"), CASES, ids=[f"{name}" for _, name, _ in CASES])
def test_a_forged_row_is_not_supported(true, tmp_path, row_id, name, change):
    rows = copy.deepcopy(true)
    row = next(one for one in rows if one["row_id"] == row_id)
    if change is None:  # the id stays that of the true content
        row[EVIDENCE][0]["metrics"]["kl"]["value"] /= 2
    else:
        before = copy.deepcopy(row)
        change(row)
        assert row != before
        try:
            seal(row)
        except EvidenceError:
            return  # no evidence can be made of it
    try:
        claim = judged(rows, tmp_path)[row_id]
    except RowError:
        return  # nor a row
    assert not claim.certified and claim.earned != "supported", claim


CONSISTENT = {
    "a smaller KL, with the interval that its scores give": (
        PAGES,
        metrics("kv_fidelity", "kl", FLAT, paired=paired([1e-4] * WINDOWS, [0.0] * WINDOWS, False)),
    ),
    "another canary": (PAGES, seen(canary_kl=1.0)),
    "another machine": (FP8, identity(device="NVIDIA H100")),
    "fewer bits asked for than were": (CODEC, seen(bits=1.0)),
    "no calibration": (CODEC, chain(identity(calibration=None), lambda row: row.pop("calibration"))),
    "another codec, declared": (
        CODEC,
        chain(
            seen(codec="hadamard"),
            lambda row: row.update(
                mechanism="kv_quantization", mechanism_variant="hadamard", compression_method="hadamard"
            ),
        ),
    ),
    "a smaller family": (CODEC, lambda row: [p["family"].update(tested=1) for p in row[EVIDENCE]]),
}


@pytest.mark.parametrize("name", CONSISTENT)
def test_what_agrees_with_all_that_can_be_known_is_never_certified_for_it(true, tmp_path, name):
    row_id, change = CONSISTENT[name]
    rows = copy.deepcopy(true)
    row = next(one for one in rows if one["row_id"] == row_id)
    change(row)
    seal(row)
    claim = judged(rows, tmp_path)[row_id]
    assert claim.uncertified == "not measured again" and not claim.certified
