"""Made-up parts of the layer and noise studies for metrics.json; `make` is the `Maker` of `example_metrics`."""

from __future__ import annotations

from itertools import product

SIGMAS = (0.011, 0.031, 0.11, 0.31)


def peer_rows(make, engines: tuple[str, ...]) -> list[dict]:
    """``baseline_peers``: the second engine against `hf` in bfloat16; empty with one engine."""
    return [
        {
            "run": f"{engine}-bfloat16-default",
            "against": "hf-bfloat16-sdpa",
            "dtype": "bfloat16",
            "kl": make.estimate(5e-4),
            "ppl_ratio": make.around(1 + make.number(1e-3), 2e-4),
            "top1_agreement": make.around(make.random.uniform(0.5, 0.9), 0.01),
        }
        for engine in engines
        if engine != "hf" and "hf" in engines
    ]


def layer_parts(make, engines: tuple[str, ...]) -> dict:
    """``layers`` and ``additivity`` under one protocol; the layers' numbers are random too."""
    first = make.random.randrange(11, 90)
    places = list(product(engines, ("in_forward",)))
    return {
        "layers": [
            {
                "engine": engine,
                "protocol": protocol,
                "stream": stream,
                "kind": kind,
                "layer": layer,
                "boundary": layer == first,
                "label": f"{kind} layer {layer}",
                "cell_id": f"{make.count()}",
                "kl": make.estimate(0.01),
                "p_value": make.random.uniform(0.001, 0.01),
                "q_value": make.random.uniform(0.01, 0.6),
                "q_stands_out": make.random.uniform(0.01, 0.6),
                "bits_per_value": make.number(3),
            }
            for (engine, protocol), stream, kind in product(places, "kv", ("only", "but"))
            for layer in range(first, first + 5)
        ],
        "additivity": [_sum(make, *place, stream) for place, stream in product(places, ("k", "v", "kv"))],
    }


def _sum(make, engine: str, protocol: str, stream: str) -> dict:
    joint, total = make.number(0.05), make.number(0.02)
    apart = stream != "kv"
    return {
        "engine": engine,
        "protocol": protocol,
        "stream": stream,
        "parts": "layers" if apart else "streams",
        "joint": make.around(joint),
        "sum": make.around(total),
        "ratio": make.around(joint / total),
        "interaction": make.around(make.number(0.01)),
        "left_out_sum": make.estimate(0.03) if apart else None,
        "boundary_excess": make.estimate(0.01) if apart else None,
        "compared": [2 * make.sides(engine, engine)[0], 2 * make.sides(engine, engine)[1]],
    }


def noise_parts(make, engines: tuple[str, ...]) -> dict:
    """``noise``, ``noise_slope``, ``closure`` and ``structure``, with noise on two groups of layers."""
    sizes = [size * make.random.uniform(0.9, 1.1) for size in SIGMAS]
    places = list(product(engines, "kv", ("all", "boundary")))
    streams = list(product(engines, ("k", "v", "kv")))
    runs = [(engine, "kv", f"{engine}-bfloat16-default") for engine in engines]
    sigma = make.random.uniform(0.001, 0.002)
    return {
        "noise": [
            _place(*place)
            | {"protocol": "in_forward", "sigma": size, "kl": make.around(size**2 * make.random.uniform(0.9, 1.1))}
            for place, size in product(places, sizes)
        ],
        "noise_slope": [_place(*place) | _fit(make) for place in places],
        "closure": [_closure(make, sigma, *place, "cast") for place in streams]
        + [_closure(make, sigma, *place) for place in runs],
        "structure": [
            {
                "engine": engine,
                "stream": stream,
                "codec": make.estimate(0.01),
                "isotropic": make.estimate(0.005),
                "ratio": make.estimate(1.0),
                "compared": make.sides(engine, engine),
            }
            for engine, stream in streams
        ],
    }


def _place(engine: str, stream: str, group: str) -> dict:
    return {"engine": engine, "stream": stream, "group": group}


def _fit(make) -> dict:
    ends = [make.random.uniform(0.001, 0.005), make.random.uniform(0.2, 0.25)]
    return {"slope": make.around(2 * make.number(0.5)), "range": ends, "points": 3, "coefficient": make.estimate(0.3)}


def _closure(make, sigma: float, engine: str, stream: str, against: str) -> dict:
    cast = against == "cast"
    return {
        "engine": engine,
        "stream": stream,
        "against": against,
        "dtype": "bfloat16",
        "sigma": sigma,
        "in_range": False,
        "predicted": make.estimate(1e-6),
        "measured": make.estimate(1e-6),
        "ratio": make.estimate(1.0) if cast else None,
        "factor": 1 + make.number(1),
        "reading": "closes" if cast else None,
        "share": None if cast else make.estimate(0.1),
        "cast_share": None if cast else make.estimate(0.1),
        "compared": make.sides(engine, engine) if cast else None,
    }
