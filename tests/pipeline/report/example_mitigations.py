"""A made-up part ``mitigations`` for metrics.json; `make` is the `Maker` of `example_metrics`."""

from __future__ import annotations

ARMS = ("uniform", "moved", "greedy", "extended", "hot", "klt uniform", "klt boundary", "klt hot")
FAVOURING = ("moved", "greedy", "extended", "hot", "klt boundary", "klt hot")


def mitigations_part(make, engines: tuple[str, ...]) -> dict:
    """Every arm under one protocol, on every engine."""
    layers = {name: sorted(make.random.sample(range(11, 90), 2)) for name in FAVOURING}
    steps = [
        {"search": "greedy", "step": n, "layers": layers["greedy"][:n]}
        | {"kl": make.number(0.01), "bits_per_value": make.number(3)}
        for n in range(3)
    ]
    return {
        "choice": {
            "engine": engines[0],
            "dtype": "bfloat16",
            "protocol": "snapshot",
            "windows": make.count(),
            "budget": make.number(5),
            "searches": steps,
        },
        "arms": [_arm(make, engine, name, layers.get(name, [])) for engine in engines for name in ARMS],
        "comparisons": [_comparison(make, engine, name, layers[name]) for engine in engines for name in FAVOURING],
        "generalises": [
            {"arm": name, "layers": layers[name], "calib": make.number(0.1), "test": make.estimate(0.1)}
            for name in FAVOURING
        ],
    }


def _arm(make, engine: str, name: str, layers: list[int]) -> dict:
    return {
        "engine": engine,
        "protocol": "snapshot",
        "arm": f"uniform {make.count()}/{make.count()}" if name == "uniform" else name,
        "cell_id": f"{make.count()}",
        "layers": layers,
        "bits_per_value": make.number(3),
        "kl": make.estimate(0.01),
        "kl_net": make.estimate(0.01),
        "delta_nll": make.estimate(0.01),
    }


def _comparison(make, engine: str, name: str, layers: list[int]) -> dict:
    return {
        "engine": engine,
        "protocol": "snapshot",
        "arm": name,
        "layers": layers,
        "against": "klt uniform" if name.startswith("klt") else "uniform curve",
        "beyond": "above" if name == "extended" else None,
        "same": False,
        "bits_per_value": make.number(3),
        "against_bits_per_value": make.number(3),
        "difference": make.estimate(1e-3),
        "log_ratio": make.estimate(0.1),
        "ratio": make.around(1 + make.number(0.1), 0.01),
        "windows_needed": make.count(),
        "compared": make.sides(engine, engine),
    }
