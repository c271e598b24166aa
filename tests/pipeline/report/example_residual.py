"""A made-up part ``residual`` of metrics.json; `make` is the `Maker` of `example_metrics`."""

from __future__ import annotations

from itertools import product

GROUPS = ("coded", "all")


def residual_part(make, ratios: tuple[float, ...], engines: tuple[str, ...]) -> dict:
    """Errors of two layers and two groups of them, and the engines' ratios if there are two; all of it random."""
    first = make.random.randrange(101, 900)
    places = [("layer", layer, layer == first) for layer in (first, first + 1)]
    places += [(group, None, None) for group in GROUPS]
    return {
        "rows": [
            {"engine": engine} | _place(ratio, stream, place) | _errors(make, stream)
            for engine, ratio, stream, place in product(engines, ratios, ("k", "v"), places)
        ],
        "ratios": [
            _place(ratio, stream, place) | {"measure": measure} | _ratio(make, place)
            for ratio, (stream, measure), place in product(
                ratios, (("k", "raw"), ("k", "whitened"), ("v", "raw")), places
            )
            if len(engines) > 1
        ],
    }


def _place(ratio: float, stream: str, place: tuple) -> dict:
    group, layer, boundary = place
    return {"variance_ratio": ratio, "stream": stream, "group": group, "layer": layer, "boundary": boundary}


def _errors(make, stream: str) -> dict:
    return {
        "recipe_id": "made-up",
        "raw_error": make.estimate(0.02),
        "whitened_error": make.estimate(0.003) if stream == "k" else None,
        "d_eff": make.estimate(8.0),
        "outlier_rate": make.estimate(0.03) if stream == "k" else None,
        "bits_per_value": make.estimate(2.0),
        "frame_bytes": make.estimate(20000.0),
        "d_eff_shares": [{"d_eff": rank, "blocks": make.count(), "share": make.estimate(0.01)} for rank in (4, 7)],
        "d_eff_blocks": {str(make.count()): make.count() for _ in range(3)},
    }


def _ratio(make, place: tuple) -> dict:
    resolved = make.random.random() < 0.5
    half = make.number(0.003)
    found = make.around(1 + (3 if resolved else 0.3) * half * make.random.choice((-1, 1)), half)
    return {
        "ratio": found,
        "p_value": make.number(0.003),
        "q_value": make.number(0.003) if place[0] == "layer" else None,
        "resolved": resolved,
        "windows_needed": None if resolved else make.count(),
    }
