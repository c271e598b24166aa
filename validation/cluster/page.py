"""CLUSTER.md out of what `measure` found. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from kvlab.core.records import write_text
from kvlab.output import format as fmt
from kvlab.output.rendering import environment, tidy

TEMPLATES = Path(__file__).parent / "templates"
COLLECTIVES = ("collective", "tensor, float32", "bytes that all ranks sent", "ours, us", "torch.distributed's own, us")
HANDOVERS = (
    "K and V",
    "prompt",
    "way",
    "bytes",
    "hand-over, ms",
    "pays below, MB/s",
    "prefill, ms",
    "a step there, ms",
    "KL, nats per token",
)
VLLM = ("prompt", "bytes", "saving, ms", "loading, ms")


def write(found: dict, path: Path) -> None:
    """Write the page; `NonFinite` when a number is NaN or infinite."""
    fmt.refuse_non_finite(found, "cluster")
    write_text(Path(path), tidy(environment(TEMPLATES).get_template("cluster.md.j2").render(context(found))))


def context(found: dict) -> dict:
    """Everything that the template names, as text."""
    named = ", ".join(f"{name} {version}" for name, version in sorted(found["versions"].items()))
    rows = found["vllm"].get("rows")
    return {
        "model": found["model"],
        "machine": f"{found['machine']}. {named}",
        "world": found["world"],
        "collectives": fmt.table(COLLECTIVES, [_collective(one) for one in found["collectives"]]),
        "handovers": fmt.table(HANDOVERS, [_handover(one, found["handovers"]) for one in found["handovers"]]),
        "vllm": fmt.table(VLLM, [_connector(one) for one in rows]) if rows else "",
        "reason": found["vllm"].get("reason", ""),
    }


def _collective(row: dict) -> list[str]:
    return [row["name"], row["shape"], f"{row['bytes']:,}", *(fmt.number(row[key]) for key in ("ours_us", "theirs_us"))]


def _handover(row: dict, rows: list[dict]) -> list[str]:
    limit = pays_below(row, rows)
    taken = [fmt.number(row["handover_ms"]), "–" if limit is None else fmt.number(limit)]
    others = [fmt.number(row[key]) for key in ("prefill_ms", "step_ms", "kl")]
    return [row["codec"], f"{row['tokens']} tokens", row["way"], f"{row['bytes']:,}", *taken, *others]


def pays_below(row: dict, rows: list[dict]) -> float | None:
    """The bandwidth below which a coded hand-over is sooner done than the exact one, MB/s.

    Bytes that are saved over the seconds that coding takes more, as measured on this machine, whose own ways are
    taken to cost nothing by the byte. None for the exact one, and where coding takes no longer.
    """
    same = (one for one in rows if all(one[key] == row[key] for key in ("tokens", "way")) and one["codec"] == "exact")
    exact = next(same, row)
    longer = row["handover_ms"] - exact["handover_ms"]
    return (exact["bytes"] - row["bytes"]) / longer / 1e3 if longer > 0 else None


def _connector(row: dict) -> list[str]:
    return [f"{row['tokens']} tokens", f"{row['bytes']:,}", fmt.number(row["save_ms"]), fmt.number(row["load_ms"])]
