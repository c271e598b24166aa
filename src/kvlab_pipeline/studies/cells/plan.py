"""The cells that params.yaml lists under `cells`: each changes something in the studied recipe."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product

from kvlab.codecs.block.studied import coded_layers, studied_recipe
from kvlab.codecs.recipes import named_recipe
from kvlab.core.errors import ParamsError
from kvlab.core.params import Params
from kvlab.core.recipe import IDENTITY, Cell, Recipe
from kvlab_pipeline.studies.cells.params import CellSettings, with_entry

READS = ("windows", "engines", "protocols", "gap", "cells")  # of params.yaml, beside what every codec reads


def cells(params: Params, engine: str) -> list[Cell]:
    """The entries on one engine, protocol by protocol, each another cell.

    An entry whose engine computes in another way than the studied cell's (another attention, K tapped after
    its rotary embedding) brings an identity cell of its own, which is its floor.

    Raises
    ------
    ParamsError
        Two entries are one cell.
    """
    found, names = [], {}
    for name, entry in params.cells.items():
        if engine in (entry.engines or params.engines):
            for protocol in (p for p in params.protocols if p in (entry.protocols or params.protocols)):
                if (entry.attention, entry.placement) != ("default", "pre_rope"):
                    found.append(_identity(params, entry, engine, protocol))
                layers = _layers(params, entry)
                found.append(_cell(params, entry, engine, protocol, name, layers, recipe(params, entry)))
                _refuse_twin(found[-1], names)
    return found


def _refuse_twin(cell: Cell, names: dict[str, str]) -> None:
    """`ParamsError` if an entry of `names`, by the ids of their cells, is the same cell."""
    other = names.setdefault(cell.cell_id, cell.label)
    if other != cell.label:
        raise ParamsError(
            f"cells.{other} and cells.{cell.label} are the same cell ({cell.engine}, {cell.protocol});"
            f" change one of them, or take it out with `{cell.label}: null`",
            code="params.same-cell",
        )


def repeated(params: Params, unasked: Collection[str]) -> list[str]:
    """Those of the `unasked` entries that would be, on some engine under some protocol, the same cell as another."""
    taken, found = set(), []
    for name in sorted(params.cells, key=lambda name: name in unasked):  # stable: the asked ones first
        entry = params.cells[name]
        measured = (entry.dtype or params.gap.dtype, entry.attention, entry.placement, entry.span)
        coded = (entry.origin or params.calibration.origin, entry.stream, _layers(params, entry), recipe(params, entry))
        places = product(entry.engines or params.engines, entry.protocols or params.protocols)
        cells = {(*place, *measured, *coded) for place in places}
        if name in unasked and cells & taken:
            found.append(name)
        else:
            taken |= cells
    return found


def recipe(params: Params, entry: CellSettings) -> Recipe:
    """The recipe of an entry."""
    changed = with_entry(params, entry)
    return named_recipe(entry.rung, params=changed) if entry.rung else studied_recipe(changed)


def _layers(params: Params, entry: CellSettings) -> tuple[int, ...]:
    if entry.layers == "all":
        return tuple(range(params.model.n_layers))
    return coded_layers(with_entry(params, entry)) if entry.layers == "coded" else tuple(sorted(set(entry.layers)))


def _identity(params: Params, entry: CellSettings, engine: str, protocol: str) -> Cell:
    everything = tuple(range(params.model.n_layers))
    plain = CellSettings(attention=entry.attention, placement=entry.placement, dtype=entry.dtype)
    return _cell(params, plain, engine, protocol, "identity", everything, IDENTITY)


def _cell(
    params: Params, entry: CellSettings, engine: str, protocol: str, label: str, layers: tuple[int, ...], recipe: Recipe
) -> Cell:
    dtype = entry.dtype or params.gap.dtype
    return Cell(
        study="cells",
        label=label,
        engine=engine,
        dtype=dtype,
        attention=entry.attention,
        protocol=protocol,
        placement=entry.placement,
        span=entry.span,
        origin=entry.origin or params.calibration.origin,
        stream=entry.stream,
        layers=layers,
        windows=params.gap.windows_in(dtype, params),
        recipe=recipe,
    )
