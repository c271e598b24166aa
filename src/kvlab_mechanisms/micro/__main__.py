"""Single operations of mechanisms beside a library, in one process.

python -m kvlab_mechanisms.micro --out results/micro/BENCH.md               # all rows
python -m kvlab_mechanisms.micro --rows r10 r11 --out /tmp/BENCH.md         # some, with their siblings
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from kvlab.core.errors import UserError
from kvlab_mechanisms.micro import page, timing
from kvlab_mechanisms.micro.page import run
from kvlab_mechanisms.micro.row import published
from kvlab_mechanisms.micro.rows import ALL


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=[], help="ids, all by default")
    parser.add_argument("--rounds", type=int, default=timing.ROUNDS)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        write_page(args.rows, args.rounds, args.out)
    except UserError as error:
        parser.error(str(error))


def write_page(rows: Sequence[str], rounds: int, out: Path) -> None:
    """Check and time rows, all where none is named, and write the page.

    Raises
    ------
    UserError
        There is no such row, or the machine is busy.
    """
    if unknown := [name for name in rows if name not in published()]:
        raise UserError(f"no row {unknown[0]!r}; there are r01 to r{len(published()):02d}")
    refuse_busy()
    chosen = (row for make in ALL for row in make() if not rows or row.seed in rows)
    page.write(run(chosen, rounds), out)


def refuse_busy() -> None:
    """`UserError` where more runs than there are cores: what is timed then is the others."""
    load, cores = os.getloadavg()[0], os.cpu_count()
    if load > cores:
        raise UserError(
            f"the load of this machine is {load:.1f} and it has {cores} cores; time it when nothing else runs"
        )


if __name__ == "__main__":
    main()
