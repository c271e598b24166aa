"""A made-up metrics.json and verdict.json in the contract's shape; another seed, other numbers everywhere."""

from __future__ import annotations

import math
import random
from itertools import pairwise, product

from kvlab.core.recipe import digest
from kvlab_pipeline.report.schema import VERSION
from pipeline.report.example_ladder import ladder_parts
from pipeline.report.example_mitigations import mitigations_part
from pipeline.report.example_residual import residual_part
from pipeline.report.example_studies import layer_parts, noise_parts, peer_rows

TWO = ("hf", "vllm")


class Maker:
    """Draws numbers; everything that it returns depends on the seed."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.scale = 10 ** self.random.uniform(-0.7, 0.7)
        self.windows = self.random.randrange(100, 999)
        self.tokens = self.windows * self.random.randrange(101, 999)
        self.ranks = [f"{rank:.4f}" for rank in sorted(self.random.uniform(50, 100) for _ in range(4))]
        self.edges = sorted(self.random.uniform(0, 0.9) for _ in range(4))
        self.last_edge = self.random.uniform(0.9, 1)
        self.confidence = self.random.randrange(60001, 99999) / 100000

    def number(self, size: float) -> float:
        """Between `size` and three times it, at the scale of this seed."""
        return size * self.scale * self.random.uniform(1.0, 3.0)

    def count(self) -> int:
        return self.random.randrange(1001, 99999)

    def around(self, value: float, half: float | None = None) -> dict:
        """An Estimate around a value; a tenth of it on either side unless told."""
        half = abs(value) * self.random.uniform(0.05, 0.15) if half is None else half
        low, high = value - half * self.random.uniform(0.8, 1), value + half * self.random.uniform(0.8, 1)
        return {
            "value": value,
            "low": low,
            "high": high,
            "n_windows": self.windows,
            "n_tokens": self.tokens,
            "method": "bca",
            "confidence": self.confidence,
        }

    def estimate(self, size: float) -> dict:
        return self.around(self.number(size))

    def sides(self, first: str, second: str) -> list[list[dict]]:
        """What an entry compares: a cell of each engine."""
        ids = [(engine, "c" + digest({"of": [engine, self.count()]})) for engine in (first, second)]
        return [[{"cell_id": cell_id, "engine": engine, "bits_per_value": None}] for engine, cell_id in ids]


def build(seed: int = 0, engines: tuple[str, ...] = TWO, unresolved: tuple[str, ...] = ()) -> dict:
    """metrics.json; the shares of the factors in `unresolved` get an interval that contains zero."""
    make = Maker(seed)
    ratios = tuple(round(make.random.uniform(0.5, 0.999), 4) for _ in range(2))
    recipes = {digest(recipe): recipe for recipe in (_recipe(make, ratio) for ratio in ratios)}
    return {
        "schema_version": VERSION,
        "identity": _identity(make, recipes),
        "sizes": {
            "context": make.count(),
            "eval": make.count(),
            "windows": make.windows,
            "confidence": make.confidence,
            "resamples": make.count(),
        },
        "floor": [row for engine in engines for row in _floor(make, engine)],
        "baseline": [_baseline(make, *run) for run in _runs(engines)],
        "baseline_peers": peer_rows(make, engines),
        "agreement": _agreement(make) if len(engines) > 1 else None,
        "agreement_why": [] if len(engines) > 1 else ["one engine"],
        "gap": _gap(make, engines, ratios, unresolved),
        "factors": _gap(make, engines, ratios, unresolved, dtype=("float32", "bfloat16")),
        "cells": _cells(make, engines, ratios, list(recipes)),
        **layer_parts(make, engines),
        **noise_parts(make, engines),
        "residual": residual_part(make, ratios, engines),
        "mitigations": mitigations_part(make, engines),
        "codebooks": [_codebook(make, *choice) for choice in product("kv", ratios)],
        **_sigma(make, engines),
        **ladder_parts(make, engines[0], list(recipes)),
    }


def _recipe(make, ratio):
    return {"k": {"bits": make.count(), "variance_ratio": ratio}, "v": {"codec": "identity"}}


def _identity(make, recipes):
    version = ".".join(str(make.count()) for _ in range(3))
    return {
        "model_hash": f"{make.count()}",
        "corpus_hash": f"{make.count()}",
        "calibration": {"hf": f"{make.count()}"},
        "calibration_origin": "hf",
        "versions": {"torch": version, "numpy": version},
        "machine": {"cores": make.count(), "system": "Linux"},
        "device": "cpu",
        "recipes": recipes,
        "model": "models/reference",
        "corpus": "docstrings",
    }


def _floor(make, engine):
    runs = ("rerun", "identity_in_forward", "identity_snapshot")
    return [{"engine": engine, "run": run, "kl": make.estimate(1e-7)} for run in runs]


def _runs(engines):
    return [
        (engine, dtype, attention)
        for engine in engines
        for dtype in ("float32", "bfloat16")
        for attention in (("sdpa", "eager") if engine == "hf" else ("default",))
    ]


def _baseline(make, engine, dtype, attention):
    return {
        "run": f"{engine}-{dtype}-{attention}",
        "engine": engine,
        "dtype": dtype,
        "attention": attention,
        "kl": make.estimate(1e-9 if dtype == "float32" else 3e-4),
        "ppl_ratio": make.around(1 + make.number(1e-3), 2e-4),
        "top1_agreement": make.around(make.random.uniform(0.5, 0.9), 0.01),
    }


def _agreement(make):
    def cell():
        return {
            "cross_kl": make.estimate(1e-8),
            "jitter_kl": make.estimate(1e-8),
            "beyond_jitter": make.estimate(1e-8),
            "hf_kl": make.number(0.03),
            "vllm_kl": make.number(0.03),
            "relative_difference": make.estimate(1e-3),
            "difference": make.estimate(1e-3),
            "compared": make.sides("vllm", "hf"),
            "beyond_band": make.estimate(1e-8),
            "state": "equivalent",
        }

    protocols = ("in_forward", "snapshot")
    return {
        "identity": {protocol: make.estimate(1e-9) for protocol in protocols},
        "codec": {protocol: cell() for protocol in protocols},
        "state": "equivalent",
        "windows_needed": None,
        "bounds": {
            "identity_kl": make.number(1e-6),
            "relative": make.number(0.02),
            "jitter_multiple": float(make.count()),
        },
    }


def _gap(make, engines, ratios, unresolved, **more):
    levels = {"protocol": ("snapshot", "in_forward"), "variance_ratio": ratios} | more
    if len(engines) > 1:
        levels = {"engine": engines, **levels}
    return {
        "factors": list(levels),
        "low": {"engine": engines[0]} | {name: pair[0] for name, pair in levels.items()},
        "high": {"engine": engines[0]} | {name: pair[1] for name, pair in levels.items()},
        "measures": {name: _measure(make, levels, engines[0], unresolved) for name in ("kl", "delta_nll")},
        "compared": make.sides(engines[-1], engines[0]),
    }


def _measure(make, levels, engine, unresolved):
    shares = {name: make.number(0.02) * (10 if name == "variance_ratio" else 1) for name in levels}
    parts = [
        {"factor": name, "share": make.around(share, 1.5 * share if name in unresolved else None)}
        for name, share in shares.items()
    ]
    low, gap = make.number(0.01), math.fsum(shares.values())
    names = list(levels)
    pairs = [[a, b] for i, a in enumerate(names) for b in names[i + 1 :]]
    return {
        "low": make.around(low),
        "high": make.around(low + gap),
        "gap": make.around(gap),
        "parts": parts,
        "interactions": [{"factors": pair, "effect": make.estimate(1e-3)} for pair in pairs],
        "corners": [
            {"engine": engine} | dict(zip(names, choice, strict=True)) | {"value": make.estimate(0.03)}
            for choice in product(*levels.values())
        ],
    }


def _cells(make, engines, ratios, recipe_ids):
    cells = []
    for engine, protocol in product(engines, ("in_forward", "snapshot")):
        cells.append(_cell(make, engine, "float32", protocol, "identity", "kv", None, "identity"))
        cells.append(_cell(make, engine, "bfloat16", protocol, "identity", "kv", None, "identity"))
        cells.append(_cell(make, engine, "bfloat16", protocol, "kv", "kv", ratios[0], recipe_ids[0]))
        for number, stream in product(range(make.random.randrange(1, 6)), "kv"):
            label = f"{stream}-only-x{number}"
            cells.append(_cell(make, engine, "bfloat16", protocol, label, stream, ratios[0], recipe_ids[0]))
        cells.append(_cell(make, engine, "bfloat16", protocol, "kv", "kv", ratios[1], recipe_ids[1]))
    return cells


def _cell(make, engine, dtype, protocol, label, stream, ratio, recipe_id):
    coded = ratio is not None
    percentiles = {rank: make.number(0.01) for rank in make.ranks}
    edges = make.edges
    bins = [
        {"low": low, "high": high, "kl": make.number(0.01), "n_tokens": make.count()} for low, high in pairwise(edges)
    ]
    return {
        "cell_id": digest({"of": [engine, dtype, protocol, label, ratio]}),
        "recipe_id": recipe_id,
        "role": "codec" if coded else "identity",
        "label": label,
        "engine": engine,
        "dtype": dtype,
        "protocol": protocol,
        "stream": stream,
        "against": None,
        "difference": make.around(make.number(1e-3), 1e-2) if stream != "kv" else None,
        "p_value": make.number(1e-5) if stream != "kv" else None,
        "q_value": make.number(1e-4) if stream != "kv" else None,
        "compared": make.sides(engine, engine),
        "variance_ratio": ratio,
        "bits_per_value": make.number(3),
        "canary_kl": make.number(1) if coded else None,
        "d_eff_mean": {"k": make.number(10), "v": make.number(10)} if coded else {},
        "outlier_rate": {"k": make.number(0.01)} if coded else {},
        "kl": make.estimate(0.02),
        "kl_net": make.estimate(0.02) if coded else make.around(make.number(1e-8), 1e-7),
        "delta_nll": make.estimate(0.01),
        "ppl_ratio": make.around(1 + make.number(0.02), 0.004),
        "top1_agreement": make.around(make.random.uniform(0.7, 0.9), 0.01),
        "flips_to_wrong": make.estimate(0.02),
        "flips_to_right": make.estimate(0.01),
        "published_estimator": make.around(make.number(0.02), 0.02),
        "kl_percentiles": percentiles,
        "kl_by_confidence": [*bins, {"low": edges[-1], "high": make.last_edge, "kl": None, "n_tokens": 0}],
    }


def _codebook(make, stream, ratio):
    return {
        "stream": stream,
        "variance_ratio": ratio,
        "samples": make.count(),
        "distortion": make.number(0.03),
        "levels": [make.number(1) for _ in range(3)],
    }


def _sigma(make, engines):
    def one():
        return {"condition_median": make.number(1e3), "off_diagonal_ratio_median": make.number(0.2)}

    drift = make.estimate(1e-3) if len(engines) > 1 else None
    moved = drift and {"trace_ratio": {"all_layers": drift}}
    return {"sigma": {engine: one() for engine in engines}, "sigma_drift": moved}


def verdict(metrics: dict, seed: int = 0, allowed: bool = True) -> dict:
    """verdict.json for some metrics."""
    make = Maker(seed + 1000)
    words = ("ACCEPT", "MARGINAL", "REJECT", "INCONCLUSIVE")
    keys = ("cell_id", "recipe_id", "label", "engine", "dtype", "protocol", "variance_ratio")
    cells = [
        {key: cell[key] for key in keys}
        | {
            "verdict": words[index % 4],
            "windows_needed": make.count() if index % 4 == 3 else None,
            "reasons": ["the interval says so"],
        }
        for index, cell in enumerate(c for c in metrics["cells"] or [] if c["variance_ratio"] is not None)
    ]
    return {
        "cells": cells,
        "preconditions": [{"name": "fp32 agreement", "holds": allowed, "detail": "checked | held to a bound"}],
        "publishable": allowed,
        "cross_engine_allowed": allowed,
    }
