"""Single operations of mechanisms beside a library, in one process.

python -m validation.micro --out results/micro/BENCH.md               # all rows
python -m validation.micro --rows r10 r11 --out /tmp/BENCH.md         # some, with their siblings
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from kvlab.base.errors import UserError
from validation.micro import page, timing
from validation.micro.row import published
from validation.micro.rows import ALL
from validation.micro.run import run


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=[], help="ids, all by default")
    parser.add_argument("--rounds", type=int, default=timing.ROUNDS)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        written(args.rows, args.rounds, args.out)
    except UserError as error:
        parser.error(str(error))


def written(rows: Sequence[str], rounds: int, out: Path) -> None:
    """Check and time rows, all where none is named, and write the page.

    Raises
    ------
    UserError
        There is no such row, or the machine is busy.
    """
    if unknown := [name for name in rows if name not in published()]:
        raise UserError(f"no row {unknown[0]!r}; there are r01 to r{len(published()):02d}")
    refuse_busy()
    asked = (row for make in ALL for row in make() if not rows or row.seed in rows)
    page.write(run(asked, rounds), out)


def refuse_busy() -> None:
    """`UserError` where more runs than there are cores: what is timed then is the others."""
    load, cores = os.getloadavg()[0], os.cpu_count()
    if load > cores:
        raise UserError(
            f"the load of this machine is {load:.1f} and it has {cores} cores; time it when nothing else runs"
        )


if __name__ == "__main__":
    main()
