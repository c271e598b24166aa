"""Rows of what reads or keeps less, by the key of the mechanisms' parameters that asks for them, on the tiny model."""

from __future__ import annotations

import pytest

from kvlab.engines import registry
from kvlab.gate import registry as gate_registry
from kvlab.gate.catalogue import EVIDENCE
from kvlab.gate.evidence import problems, status
from kvlab_pipeline.studies.mechanisms import measure as measuring
from kvlab_pipeline.studies.mechanisms import records


def asking(params, key: str, *names: str, **more):
    """The parameters with these under a key, and one codec."""
    few = {"codecs": ("int",), "in_forward": (), "cache_dtypes": (), "protocols": ("snapshot",), key: names} | more
    return params.model_copy(update={"mechanisms": params.mechanisms.model_copy(update=few)})


def measurer(key: str, defaults: tuple[str, ...], request, params, windows, needles, fitted, engine_of, folder):
    """engine, names -> its record and table; the engines are those of the session."""

    def run(engine: str, *names: str):
        out = folder.mktemp(key) / f"{engine}.parquet"
        request.getfixturevalue(f"{engine}_engine")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(registry, "start", engine_of)
            asked = asking(params, key, *(names or defaults)).model_copy(update={"engines": (engine,)})
            measuring.mechanisms(asked, engine, windows, needles, {"hf": fitted}, "code", out)
        return records.read_mechanisms(out)

    return run


def assert_registered(variant, name: str) -> None:
    """The gate's registry has what is planned, and allows it this name of a pattern."""
    entry = gate_registry.load().mechanism(variant.mechanism, variant.variant)
    assert (entry.method, entry.scope) == (variant.method, variant.scope)
    assert name.partition(":")[0] in entry.patterns


def assert_vouched(found: dict, other: str) -> None:
    """The gate finds nothing wrong with a row and its evidence, and would if its pattern were another."""
    known, pieces = gate_registry.load(), found[EVIDENCE]
    told = [*status(found, pieces, known).reasons, *(one for piece in pieces for one in problems(piece, found, known))]
    assert {reason.code for reason in told} <= {"evidence_outside_band"}  # the tiny model's contexts are short
    codes = {reason.code for reason in problems(pieces[0], found | {"pattern": other}, known)}
    assert "evidence_other_pattern" in codes
