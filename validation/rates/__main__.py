"""What codecs cost at the bits that they take.

    python -m validation.rates measure --model models/reference --windows calib/corpus/reference/windows.safetensors \\
        --codec klt archive hadamard --bits 1 2 3 4 --out results/codec/rates/reference-snapshot.json
    python -m validation.rates page results/codec/rates/*.json --out results/codec
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvlab.base.records import read_json, write_json
from kvlab.cli.checked import recipes_of
from validation.rates.page import write


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    measuring = verbs.add_parser("measure", help="measure codecs on one model under one protocol")
    measuring.add_argument("--model", type=Path, required=True)
    measuring.add_argument("--windows", type=Path, required=True, help="what `kvlab step corpus` wrote for the model")
    measuring.add_argument("--codec", nargs="+", required=True, help="NAME, or NAME=BITS,BITS for bits of its own")
    measuring.add_argument("--bits", type=float, nargs="+", default=[2, 3, 4])
    measuring.add_argument("--protocol", choices=("snapshot", "in_forward"), default="snapshot")
    measuring.add_argument("--most", type=int, default=16, help="windows of each text")
    measuring.add_argument("--out", type=Path, required=True)
    writing = verbs.add_parser("page", help="write RATES.md and its figures")
    writing.add_argument("found", type=Path, nargs="+")
    writing.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.verb == "page":
        write([read_json(path) for path in args.found], args.out)
        return
    from validation.rates.measure import measure

    asked = [one for codec in args.codec for one in named(codec, args.bits)]
    write_json(args.out, measure(args.model, args.windows, asked, args.protocol, args.most))


def named(codec: str, bits: list[float]) -> list:
    """A codec at each of some bits; its own stand after its name."""
    name, _, own = codec.partition("=")
    return recipes_of(name, [float(one) for one in own.split(",")] if own else bits)


if __name__ == "__main__":
    main()
