"""Which files have a contract, and where its schema comes from; those that the models declare are not written anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvlab.core.errors import UserError


def _params() -> dict:
    """Of params.yaml, as editors read it; it stands in a checkout."""
    from kvlab.core.records import read_json

    return read_json(Path(__file__).resolve().parents[3] / "workflow" / "schemas" / "config.schema.json")


def _registry(kind: str) -> dict:
    """Of a registry's file: a list of entries."""
    from kvlab.gate.registry import entries

    entry = {"mechanisms": entries.Mechanism, "evals": entries.Eval}[kind].model_json_schema()
    named = entry.pop("$defs", {})
    listed = {kind: {"type": "array", "items": entry}, "schema_version": {"type": "integer"}}
    return {
        "$defs": named,
        "type": "object",
        "properties": listed,
        "required": [*listed],
        "additionalProperties": False,
    }


def _rows() -> dict:
    """Of rows for the gate: a list of them, or one."""
    from kvlab.gate.catalogue import row_schema

    row = {word: said for word, said in row_schema().items() if word != "$schema"}
    return {"anyOf": [{"type": "array", "items": row}, row]}


def _metrics() -> dict:
    from kvlab_pipeline.report.schema import json_schema

    return json_schema()


CONTRACTS: dict[str, tuple[str, Callable[[], dict]]] = {
    "params": ("params.yaml", _params),
    "mechanisms": ("registry/mechanisms.yaml", lambda: _registry("mechanisms")),
    "evals": ("registry/evals.yaml", lambda: _registry("evals")),
    "rows": ("results/gate/rows/*.json", _rows),
    "metrics": ("results/gap/metrics/*.json", _metrics),
}
"""By kind: the files that have it, as the end of their path, and the schema."""


def kind_of(path: Path) -> str | None:
    """The kind of a file by its place; None for one without a contract."""
    return next((kind for kind, (end, _) in CONTRACTS.items() if path.match(end)), None)


def hold(kind: str, data: object, origin: object) -> None:
    """`ContractBroken`, with the name of the origin, unless data is what the schema of this kind says."""
    from kvlab_mechanisms.ledger.contract import Contract

    Contract.of(CONTRACTS[kind][1]()).refuse(data, origin)


def held(path: Path) -> str:
    """Hold a file against its contract; returns the kind.

    Raises
    ------
    UserError
        A file of this name has no contract.
    ContractBroken
        It is not what its schema says.
    StorageError, ParamsError
        It cannot be read.
    """
    from kvlab.core.strictyaml import from_yaml, read_text
    from kvlab_mechanisms.ledger.contract import read_strictly

    kind = kind_of(path)
    if kind is None:
        ends = ", ".join(end for end, _ in CONTRACTS.values())
        raise UserError(f"{path} has no contract; files that have one: {ends}")
    hold(kind, read_strictly(path) if path.suffix == ".json" else from_yaml(read_text(path), str(path)), path)
    return kind
