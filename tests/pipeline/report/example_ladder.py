"""Made-up parts of the ladder for metrics.json; `make` is the `Maker` of `example_metrics`."""

from __future__ import annotations

from itertools import pairwise, product

from kvlab_pipeline.studies.ladder.chapter import TOLD

TEXTS = ("test", "other")
CODECS = ("klt", "hadamard", "kivi")
PLACES = (("snapshot", "context"), ("in_forward", "context"), ("in_forward", "window"))


def ladder_parts(make, engine: str, recipe_ids: list[str]) -> dict:
    """Every part on two texts, on one engine; which rungs there are is random too."""
    bits = {codec: sorted(make.random.sample(range(11, 999), make.random.randrange(2, 6))) for codec in CODECS}
    rungs = [(codec, f"{codec} {number}", make.number(3)) for codec in CODECS for number in bits[codec]]
    ends = sorted(make.random.sample(range(11, 9999), 4))
    inside = [next(rung for rung in rungs if rung[0] == codec) for codec in CODECS[:2]]
    places = [(PLACES[0], rung) for rung in rungs] + list(product(PLACES[1:], inside))
    whole = inside[0][1]
    return {
        "ladder": [
            _rung(make, engine, text, place, rung, recipe_ids[0], ends)
            for text, (place, rung) in product(TEXTS, places)
        ],
        "ladder_answers": _answers(make, rungs),
        "ladder_ablation": [
            _ablation(make, engine, text, *pair)
            for text in TEXTS
            for pair in (
                (f"{whole} less escapes", whole),
                (f"{whole} less tables", whole),
                (f"{whole} less tables, metric", f"{whole} less tables"),
            )
        ],
        "ladder_state": [_state(make, rung, recipe_ids[0]) for rung in rungs],
        "ladder_gain": [_gain(make, *place) for place in product(TEXTS, ("k", "v"), ("all", "later"))],
        "ladder_further": [one for text in TEXTS for one in _further(make, text, inside)],
    }


def _narrow(make, size: float) -> dict:
    """An estimate of so many digits that two seeds do not print the same by chance: there are many of them."""
    value = make.number(size)
    return make.around(value, value * make.random.uniform(1e-3, 2e-3))


def _apart(make, resolved: bool) -> dict:
    """A difference to a rival; one that is not resolved has an interval just beyond zero."""
    value = make.number(0.3)
    return _narrow(make, 0.3) if resolved else make.around(value, 1.3 * value)


def _rung(make, engine: str, text: str, place: tuple, rung: tuple, recipe_id: str, ends: list[int]) -> dict:
    codec, label, bits = rung
    rival = None if codec == "kivi" else "kivi"
    return {
        "text": text,
        "label": label,
        "codec": codec,
        "whole": False,
        "protocol": place[0],
        "span": place[1],
        "cell_id": f"{make.count()}",
        "recipe_id": recipe_id,
        "calibrated": codec == "klt",
        "bits_per_value": bits,
        "kl": _narrow(make, 0.01),
        "top1_agreement": make.around(make.random.uniform(0.7, 0.9), 1e-4),
        "by_offset": [{"first": a, "last": b - 1, "kl": _narrow(make, 0.01)} for a, b in pairwise(ends)],
        "rival": rival and f"{rival} {make.count()}",
        "difference": rival and _apart(make, resolved=codec == "klt"),
        "compared": rival and make.sides(engine, engine),
    }


def _answers(make, rungs: list[tuple]) -> list[dict]:
    """Two limits: at the lower one the texts agree and nothing ties, at the higher one neither is so."""
    limits = sorted(make.random.sample(range(11, 999), 2))
    choices = ((rungs[0], rungs[0], ()), (rungs[0], rungs[1], (rungs[-1][1], rungs[-2][1])))
    return [
        {
            "text": text,
            "whole": False,
            "at_most": limit / 2,
            "label": label,
            "bits_per_value": bits,
            "kl": _narrow(make, 0.01),
            "tried": make.count(),
            "ties": list(ties),
        }
        for limit, (*best, ties) in zip(limits, choices, strict=True)
        for text, (_, label, bits) in zip(TEXTS, best, strict=True)
    ]


def _ablation(make, engine: str, text: str, label: str, against: str) -> dict:
    return {
        "text": text,
        "label": label,
        "against": against,
        "cell_id": f"{make.count()}",
        "bits_per_value": make.number(3),
        "kl": _narrow(make, 0.01),
        "difference": _narrow(make, 1e-3),
        "times": make.around(1 + make.number(0.1), 1e-4),
        "compared": make.sides(engine, engine),
    }


def _state(make, rung: tuple, recipe_id: str) -> dict:
    codec, label, bits = rung
    calibrated = codec == "klt"
    return {
        "label": label,
        "recipe_id": recipe_id,
        "text": TEXTS[-1],
        "rate": bits,
        "exact_tokens": make.count() / 2,
        "whole_bytes": make.count() if calibrated else 0,
        "decoder_bytes": make.count() if calibrated else 0,
        "resident_bytes": make.count() if calibrated else 0,
        "at": [{"tokens": tokens, "bits_per_value": make.number(3)} for tokens in TOLD],
        "even_with_bfloat16": make.number(300) if codec != "kivi" else None,
        "instead": f"hadamard {make.count()}" if calibrated else None,
        "even_with_instead": make.number(3000) if calibrated else None,
    }


def _gain(make, text: str, stream: str, tokens: str) -> dict:
    return {
        "text": text,
        "stream": stream,
        "tokens": tokens,
        "over_even": _narrow(make, 4),
        "over_plain": _narrow(make, 6),
        "fitted_over_even": make.number(4),
        "fitted_over_plain": make.number(6),
    }


def _further(make, text: str, inside: list[tuple]) -> list[dict]:
    """`klt` on three parts of its calibration, the last of them all of it, and two codecs at one longer context."""
    (_, klt, _), (_, other, _) = inside
    parts = sorted(make.random.sample(range(1001, 99999), 3))
    sizes = [make.count() for _ in range(2)]
    grown = [("growth", klt, sizes[0], part, None if part == parts[-1] else klt) for part in parts]
    longer = [("context", klt, sizes[1], parts[-1], None), ("context", other, sizes[1], parts[-1], klt)]
    return [
        {
            "what": what,
            "text": text,
            "label": label,
            "context": context,
            "calibration_tokens": tokens,
            "bits_per_value": make.number(3),
            "kl": _narrow(make, 0.01),
            "top1_agreement": make.around(make.random.uniform(0.7, 0.9), 1e-4),
            "against": against,
            "times": make.around(1 + make.number(0.1), 1e-4) if against else None,
        }
        for what, label, context, tokens, against in grown + longer
    ]
