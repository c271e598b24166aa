"""How far codecs are from the rate-distortion limit of a whole cache: LIMIT.md and limit.json.

python -m validation.limit --model models/smollm2-135m --text notes.txt --out results/codec
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvlab.base.records import write_json
from kvlab.cli.checked import recipes_of
from validation.limit.measure import measure
from validation.limit.page import write


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--codec", nargs="+", default=["archive", "klt", "hadamard", "kivi"])
    parser.add_argument("--bits", type=float, nargs="+", default=[2, 3, 4])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--calib-windows", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    asked = [one for codec in args.codec for one in recipes_of(codec, args.bits)]
    found = measure(args.model, args.text, asked, args.context, args.windows, args.calib_windows)
    write_json(args.out / "limit.json", found)
    write(found, args.out)


if __name__ == "__main__":
    main()
