"""What must stay equal, to the byte, while the house is rebuilt: computed here, and kept as JSON beside this file.

    python tests/goldens/made.py                     # writes what the code of today makes: only when a change is meant
    python tests/goldens/made.py --quick .runs/quick   # names what differs from a quick preset that ran before
    python tests/goldens/made.py --quick .runs/quick --write

The quick preset takes five minutes (`make findings PRESET=quick`), so no test runs it.
A golden goes when the rebuilding is over.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

BITS = (1, 1.5, 2, 3, 4, 5, 8)


def recipe_ids() -> dict[str, str]:
    """The id of every codec's recipe at every bits that it takes, plain and with what may stand in front of it."""
    from kvlab.codecs.catalogue import PUBLISHED
    from kvlab.codecs.recipes import named_recipe
    from kvlab.core.errors import UserError
    from kvlab.core.recipe import STREAMS

    found = {}
    for name in (*STREAMS, *PUBLISHED):
        for front in ("", "+center", "+center+whiten", "+center+weigh"):
            for bits in (None, *BITS):
                try:
                    made = named_recipe(name + front, bits)
                except UserError:
                    continue  # the codec has no such bits, or takes nothing in front of it
                found[f"{name}{front} {bits}"] = made.recipe_id
    return found


def coded_bytes() -> dict[str, str]:
    """Of planted K of two blocks and a half, what each codec writes, by codec, condition and bits; on one thread.

    More threads add numbers up in another order, which moves a code here and there.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _coded_bytes()
    finally:
        torch.set_num_threads(threads)


def _coded_bytes() -> dict[str, str]:
    from codec import ladder_making, making
    from kvlab.codecs.stream.bitstream import frame_bytes

    found = {}
    for name, condition in ladder_making.storing(ladder_making.RECIPES):
        for bits in (2, 4):
            codec = ladder_making.codec(name, condition, bits)
            encoded = codec.encode(ladder_making.planted(), making.SITE)
            found[f"{name} {condition} {bits}"] = hashlib.sha256(frame_bytes(encoded)).hexdigest()
    return found


def mutations() -> list[dict[str, Any]]:
    """The gate's table of corruptions, each with the code that finds it."""
    from validation.gate.corruptions import table

    return table()


def faults() -> list[str]:
    """The faults that the audit of the chain plants."""
    from validation.audit.run import PAGES, PLANTS, TABLES

    return sorted([*PLANTS, *TABLES, *PAGES])


GOLDENS: dict[str, Callable[[], Any]] = {made.__name__: made for made in (recipe_ids, coded_bytes, mutations, faults)}


CHANGES = {"code", "digest", "versions", "seconds"}  # with the code and the machine, whatever the numbers do


def quick(folder: Path) -> dict[str, str]:
    """A hash of the numbers of each table and of the metrics that the quick preset made, to six digits."""
    import polars as pl

    tables = {path: pl.read_parquet(path).to_dicts() for path in sorted((folder / "results").rglob("*.parquet"))}
    metrics = folder / "results/gap/metrics/reference.json"
    read = tables | {metrics: json.loads(metrics.read_text())}
    return {
        str(path.relative_to(folder)): hashlib.sha256(json.dumps(_rounded(told)).encode()).hexdigest()
        for path, told in read.items()
    }


def _rounded(told: Any) -> Any:
    if isinstance(told, dict):
        return {key: _rounded(value) for key, value in told.items() if not CHANGES & set(key.split("_"))}
    if isinstance(told, list):
        return [_rounded(one) for one in told]
    return f"{told:.6g}" if isinstance(told, float) else told


def kept(name: str) -> Any:
    """A golden as it was written."""
    return json.loads((HERE / f"{name}.json").read_text())


def write(name: str, found: Any) -> None:
    """Write a golden."""
    (HERE / f"{name}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def main() -> None:
    """Write the goldens, or hold a run of the quick preset against its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", type=Path, help="the folder of a run of the quick preset")
    parser.add_argument("--write", action="store_true", help="keep that run as the golden")
    args = parser.parse_args()
    if args.quick is None:
        for name, made in GOLDENS.items():
            write(name, made())
    elif args.write:
        write("quick", quick(args.quick))
    else:
        found, before = quick(args.quick), kept("quick")
        differing = sorted(name for name in found | before if found.get(name) != before.get(name))
        sys.exit("\n".join(["differs:", *differing]) if differing else 0)


if __name__ == "__main__":
    main()
