"""Several models beside one another: what each pays for the codec, and what each further one pays beside the first.

Made of the models' metrics alone. Models that cut the text into the same tokens are compared window by window. Where
the tokens differ no window has a counterpart, and an interval of a difference is made of the two intervals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from kvlab.core.errors import Fault, MixedIdentity, UserError
from kvlab.core.records import atomic, read_json
from kvlab.output import format as fmt
from kvlab.stats.bootstrap import Bootstrap, Estimate
from kvlab.stats.independent import difference
from kvlab.stats.shapley import shapley
from kvlab_pipeline.rendering.withheld import crosses, undecided, withheld_because
from kvlab_pipeline.report import across
from kvlab_pipeline.report.claims import while_engines_open
from kvlab_pipeline.report.digest import refuse_broken
from kvlab_pipeline.report.schema import load
from kvlab_pipeline.studies.estimates import UNIT, claim
from kvlab_pipeline.studies.factors.chapter import ENGINE
from kvlab_pipeline.studies.factors.numbers import from_windows
from kvlab_pipeline.studies.measured import flat

BITS = "bits per value"
LAYER_NUMBERS = ("boundary_layers", "whiten_skip_layers", "layers")
NUMBERS = ("value", "low", "high")


def read(paths: Sequence[Path]) -> list[dict]:
    """The metrics of each model.

    Raises
    ------
    StorageError, MissingResult
        As in `schema.read`.
    UserError
        A model is there twice.
    """
    found: dict[str, dict] = {}
    for path in paths:
        metrics = load(path)
        slug = metrics["identity"]["slug"]
        if slug in found:
            raise UserError(f"--metrics names the model {slug!r} twice, the second time in {path}; name each once")
        found[slug] = metrics
    return list(found.values())


def build(found: Sequence[dict]) -> dict:
    """The contents of ``comparison.json``.

    Parameters
    ----------
    found : sequence of dict
        ``metrics.json`` of each model; the first is what the others are held against.

    Returns
    -------
    dict
        ``models``, ``rows`` (one per model and quantity), ``claims`` (one per further model and quantity of KL) and
        ``across`` (per factor, what its share does on each model and on how many; see `report.across`).
        What compares engines is None for a model whose engines do not agree; `withheld` says why.

    Raises
    ------
    MixedIdentity
        Models were measured under other parameters, package versions or devices; names the fields.
    """
    first, *others = found
    for other in others:
        refuse_other_conditions(first, other)
    compared = {slug_of(other): differences(other, first) for other in others}
    return {
        "models": [model_entry(one, first) for one in found],
        "rows": [row for one in found for row in model_rows(one, first, compared.get(slug_of(one), {}))],
        "claims": [told for other in others for told in model_claims(other, first, compared[slug_of(other)])],
        "across": across.build(found),
    }


def read_comparison(path: Path) -> dict:
    """A ``comparison.json`` as `kvlab step compare` wrote it.

    Raises
    ------
    StorageError, StaleResult
        It cannot be read, or was changed after it was written.
    UserError
        It is no comparison.
    """
    found = read_json(path)
    if not isinstance(found, dict):
        raise UserError(f"{path} is no comparison of models; run `kvlab step compare`")
    refuse_broken(found, str(path), "kvlab step compare")
    return found


def write_table(path: Path, comparison: dict) -> None:
    """Write ``comparison.csv``: a row per model and quantity; what has no interval, or no counterpart, is empty."""
    table = pl.DataFrame([flat_row(row) for row in comparison["rows"]], infer_schema_length=None)
    with atomic(path) as temporary:
        table.write_csv(temporary)


# --------------------------------------------------------------------------------- what is refused


def refuse_other_conditions(first: dict, other: dict) -> None:
    """`MixedIdentity` unless two models were measured under the same parameters, by the same packages and device."""
    slugs, (mine, theirs) = (slug_of(first), slug_of(other)), (conditions(one) for one in (first, other))
    layers = [one["settings"]["n_layers"] for one in (first, other)]
    differing = {
        name: [f"{given.get(name)} ({slug})" for given, slug in zip((mine, theirs), slugs, strict=True)]
        for name in sorted(mine.keys() | theirs.keys())
        if not same(name, mine.get(name), theirs.get(name), *layers)
    }
    if differing:
        raise MixedIdentity(differing)


def conditions(metrics: dict) -> dict[str, object]:
    """Everything that has to be the same for all models, flat; not which studies stand beside the gap."""
    settings = {key: value for key, value in metrics["settings"].items() if key not in ("n_layers", "studies")}
    identity = metrics["identity"]
    return flat(settings | {"versions": identity["versions"], "device": identity["device"]})


def same(name: str, mine: object, theirs: object, my_layers: int, their_layers: int) -> bool:
    """Whether two leaves agree; layers do when they are equal counted from the first layer or from the last."""
    if not (name.endswith(LAYER_NUMBERS) and isinstance(mine, list) and isinstance(theirs, list)):
        return mine == theirs
    return len(mine) == len(theirs) and all(
        i == j or i - my_layers == j - their_layers for i, j in zip(mine, theirs, strict=True)
    )


# ------------------------------------------------------------------------------------- estimates


def estimates(metrics: dict) -> dict[str, Estimate]:
    """KL of the corners, the gap and the shares; none where they may not be printed."""
    if withheld(metrics):
        return {}
    kl = metrics["gap"]["measures"]["kl"]
    given = {f"kl.{name}": kl[name] for name in ("low", "high", "gap")}
    given |= {f"kl.share.{part['factor']}": part["share"] for part in kl["parts"]}
    return {name: Estimate(**one) for name, one in given.items()}


def withheld(metrics: dict) -> str | None:
    """Why a model's gap may not be printed."""
    return withheld_because(metrics, {}) if crosses(metrics["gap"]) else None


def differences(other: dict, first: dict) -> dict[str, Estimate]:
    """Each quantity of `other` minus that of `first`; those that both have."""
    mine, theirs = estimates(other), estimates(first)
    if not (mine and theirs):
        return {}
    if not paired(other, first):
        return {name: difference(mine[name], theirs[name]) for name in mine}
    sizes = first["sizes"]
    boot = Bootstrap(sizes["resamples"], sizes["confidence"], sizes["seed"])
    columns = [column for one in (other, first) for column in from_windows(one["gap"]["windows"])]
    half = len(columns) // 2
    return dict(
        zip(mine, boot.combine_many(columns, lambda m: effects(m[..., :half]) - effects(m[..., half:])), strict=True)
    )


def effects(corners: np.ndarray) -> np.ndarray:
    """Low corner, high corner, gap and shares [..., 3 + factors], of corner means [..., 2**factors]."""
    low, high = corners[..., :1], corners[..., -1:]
    return np.concatenate([low, high, high - low, shapley(corners)], axis=-1)


def paired(other: dict, first: dict) -> bool:
    """Whether two models scored the same tokens."""
    same_tokens = other["identity"]["corpus_hash"] == first["identity"]["corpus_hash"]
    return same_tokens and other["gap"]["windows"][0]["key"] == first["gap"]["windows"][0]["key"]


# ---------------------------------------------------------------------------------------- entries


def model_entry(metrics: dict, first: dict) -> dict:
    """Which model it is, and how it is compared with the first."""
    identity, kl = metrics["identity"], from_windows(metrics["gap"]["windows"])[0]
    return {name: identity[name] for name in ("slug", "model", "model_hash", "corpus_hash")} | {
        "n_windows": len(kl.windows),
        "n_tokens": kl.n_tokens,
        "paired": paired(metrics, first),
        "withheld": withheld(metrics),
        "undecided": undecided(metrics) is not None,
        "disclosure": identity.get("disclosure"),
        **{end: metrics["gap"][end] for end in ("low", "high")},
    }


def model_rows(metrics: dict, first: dict, differences: dict[str, Estimate]) -> Iterator[dict]:
    """One model's quantities, and what each differs from the first model's by.

    Bits per value are counted over all that is stored for the scored windows, so they have no interval.
    """
    shared = {"model": slug_of(metrics), "against": None if metrics is first else slug_of(first)}
    measured = estimates(metrics)
    for name in quantities(metrics):
        one, apart = measured.get(name), differences.get(name)
        yield shared | {
            "quantity": name,
            "name": words(name),
            "unit": UNIT,
            "estimate": one and one.to_json(),
            "difference": apart and apart.to_json(),
        }
    for end, cell, other in zip(("low", "high"), corner_cells(metrics), corner_cells(first), strict=True):
        bits = cell["bits_per_value"]
        apart = None if metrics is first else counted(bits - other["bits_per_value"])
        name = f"bits_per_value.{end}"
        counts = {"quantity": name, "name": words(name), "unit": BITS}
        yield shared | counts | {"estimate": counted(bits), "difference": apart}


def counted(value: float) -> dict:
    """A number that was counted and not estimated."""
    return {"value": value, "low": None, "high": None}


def quantities(metrics: dict) -> list[str]:
    """Names of what is compared in nats per token."""
    return ["kl.low", "kl.high", "kl.gap", *(f"kl.share.{factor}" for factor in metrics["gap"]["factors"])]


def words(quantity: str) -> str:
    """A quantity in words."""
    kind, _, which = quantity.rpartition(".")
    if kind == "kl.share":
        return f"share of `{which}`"
    if which == "gap":
        return "gap between the published corners"
    return f"{'KL' if kind == 'kl' else BITS} of the {which} corner"


def corner_cells(metrics: dict) -> tuple[dict, dict]:
    """The cells of the low and of the high published corner."""
    found = []
    for end in ("low", "high"):
        corner = metrics["gap"][end] | {"study": "factors", "role": "codec"}
        cells = [cell for cell in metrics["cells"] if all(cell.get(key) == value for key, value in corner.items())]
        if len(cells) != 1:
            raise Fault(f"{len(cells)} cells of {slug_of(metrics)!r} are its {end} corner; there has to be one")
        found.append(cells[0])
    return found[0], found[1]


def model_claims(other: dict, first: dict, differences: dict[str, Estimate]) -> Iterator[dict]:
    """One claim per quantity of KL that both models have."""
    sides = [[reference(one, cell) for cell in corner_cells(one)] for one in (other, first)]
    for name, apart in differences.items():
        subject = f"From `{slug_of(first)}` to `{slug_of(other)}`, the {words(name)}"
        cells = {"kl.low": slice(0, 1), "kl.high": slice(1, 2)}.get(name, slice(None, None, -1))
        compared = [side[cells] for side in sides]
        of_engine = name == f"kl.share.{ENGINE}"
        told = claim("models", subject, apart.to_json(), compared, up="rises", down="falls", of_engine=of_engine)
        open_ = [agreement for one in (other, first) if (agreement := undecided(one))]
        yield while_engines_open(told, *open_) if of_engine and open_ else told


def reference(metrics: dict, cell: dict) -> dict:
    """A cell by its id, and whose it is: cells of two models may have one id."""
    return {key: cell[key] for key in ("cell_id", "engine", "bits_per_value")} | {"model": slug_of(metrics)}


def flat_row(row: dict) -> dict:
    """A row of ``comparison.csv``."""
    estimate, apart = (row[name] or {} for name in ("estimate", "difference"))
    return {
        **{name: row[name] for name in ("model", "quantity", "unit")},
        **{name: estimate.get(name) for name in NUMBERS},
        "clear_of_zero": clear(estimate),
        "against": row["against"],
        "difference": apart.get("value"),
        "difference_low": apart.get("low"),
        "difference_high": apart.get("high"),
        "difference_clear_of_zero": clear(apart),
        "difference_method": apart.get("method"),
        **{name: estimate.get(name) for name in ("n_windows", "n_tokens", "method")},
    }


def clear(estimate: dict) -> bool | None:
    """Whether an interval leaves zero out; None without one."""
    return None if estimate.get("low") is None else not fmt.contains_zero(estimate)


def slug_of(metrics: dict) -> str:
    """The name of a model."""
    return metrics["identity"]["slug"]
