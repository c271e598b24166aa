"""What codecs cost at the bits that they take.

    python -m validation.rates measure --model models/reference --windows calib/corpus/reference/windows.safetensors \\
        --codec klt archive hadamard --bits 1 2 3 4 --out results/codec/rates/reference-snapshot.json
    python -m validation.rates page results/codec/rates/*.json --out results/codec
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from kvlab.cli.checked import Named, recipes_of, whole_bits
from kvlab.codecs.recipes import named_recipe
from kvlab.core.errors import UserError
from kvlab.core.records import read_json, write_json
from validation.rates.page import write

ASKED = re.compile(r"(?P<name>[\w+-]+)(\[(?P<settings>\w+=\d+(,\w+=\d+)*)\])?(=(?P<bits>[\d.]+(,[\d.]+)*))?")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    measuring = verbs.add_parser("measure", help="measure codecs on one model under one protocol")
    measuring.add_argument("--model", type=Path, required=True)
    measuring.add_argument("--windows", type=Path, required=True, help="what `kvlab step corpus` wrote for the model")
    measuring.add_argument("--codec", nargs="+", required=True, help="NAME, NAME=BITS,BITS or NAME[setting=value]=BITS")
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


def named(asked: str, bits: list[float]) -> list[Named]:
    """A codec at each of some bits: ``NAME``, ``NAME=BITS,BITS``, or ``NAME[setting=value]=BITS`` of whole numbers.

    Raises
    ------
    UserError
        It is nothing of that kind, or no codec has that name, such settings or such bits.
    """
    found = ASKED.fullmatch(asked)
    if not found:
        raise UserError(
            f"codec {asked!r} is not understood; allowed: NAME, NAME=BITS,BITS, NAME[setting=value]=BITS",
            code="user.codec-not-understood",
        )
    name, settings, own = found["name"], found["settings"], found["bits"]
    widths = [float(one) for one in own.split(",")] if own else bits
    if not settings:
        return recipes_of(name, widths)
    given = {key: int(value) for key, _, value in (one.partition("=") for one in settings.split(","))}
    label = f"{name} ({settings.replace('=', ' ')})"
    return [Named(label, width, named_recipe(name, whole_bits(width), **given)) for width in widths]


if __name__ == "__main__":
    main()
