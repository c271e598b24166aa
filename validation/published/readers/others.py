"""A grid of means by setting, and the sidecar of a Sigma_q."""

from __future__ import annotations

from validation.published import checks
from validation.published.reading import count, items, optional, required, text
from validation.published.rows import Contents, GridRow, SettingsGrid, SigmaSidecar

MEASURED = ("ppl_delta", "kl", "top1", "seconds")


def grid(data: dict, file: str) -> Contents:
    """Means by setting; every field that is not a measurement is a setting."""
    rows = []
    for i, row in enumerate(items(data, "rows")):
        settings = {k: v for k, v in row.items() if k not in MEASURED and not isinstance(v, dict | list)}
        place = f"rows[{i}]"
        required(row, "variance_ratio", place)
        change = required(row, "ppl_delta", place)
        kl, top1 = optional(row, "kl", place), optional(row, "top1", place)
        rows.append(GridRow(settings=settings, change=change, kl=kl, top1=top1))
    return Contents(grids=(SettingsGrid(file=file, model=text(data, "model_name") or file, rows=tuple(rows)),))


def sigma(data: dict, file: str) -> Contents:
    """Diagnostics of Sigma_q by layer and head; the condition numbers and traces are recomputed."""
    head, found, conditions, off = count(data, "head_dim"), [], [], []
    for i, row in enumerate(items(data, "diagnostics")):
        place = f"diagnostics[{i}]"
        low, high, stored = (required(row, name, place) for name in ("eig_min", "eig_max", "condition"))
        conditions.append(stored)
        if low > 0:
            found.append(checks.number(file, "Sigma_q", f"{place}.condition", stored, high / low, 0.0))
        mean, largest = optional(row, "diag_mean", place), optional(row, "off_diag_max_abs", place)
        if mean and largest is not None:
            off.append(largest / mean)
        trace = optional(row, "sigma_trace", place)
        if trace is not None and mean is not None and head:
            found.append(checks.number(file, "Sigma_q", f"{place}.sigma_trace", trace, mean * head, 0.0))
    made = SigmaSidecar(
        file=file,
        n_layers=count(data, "num_layers"),
        kv_heads=count(data, "num_kv_heads"),
        head_dim=head,
        condition=tuple(conditions),
        off_diagonal=tuple(off),
    )
    return Contents(sigmas=(made,), checks=tuple(found))
