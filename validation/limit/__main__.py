"""How far codecs are from the rate-distortion limit of a whole cache: LIMIT.md and limit.json.

python -m validation.limit --model models/smollm2-135m --text encyclopedia --out results/codec

The text is a file, or ``encyclopedia``: the articles of Wikipedia that the default run scores.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from kvlab.cli.checked import recipes_of
from kvlab.core.records import write_json
from kvlab.text import encyclopedia
from validation.limit.measure import measure
from validation.limit.page import write

ENCYCLOPEDIA = Path("encyclopedia")


def encyclopedia_file(folder: str) -> Path:
    """The articles in a file of that name, one after the other."""
    path = Path(folder) / ENCYCLOPEDIA
    path.write_text("\n\n".join(article.text for article in encyclopedia.extract()))
    return path


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="a file, or `encyclopedia`")
    parser.add_argument("--codec", nargs="+", default=["archive", "klt", "hadamard", "kivi"])
    parser.add_argument("--bits", type=float, nargs="+", default=[2, 3, 4])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--calib-windows", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    asked = [one for codec in args.codec for one in recipes_of(codec, args.bits)]
    with TemporaryDirectory() as folder:
        text = encyclopedia_file(folder) if args.text == ENCYCLOPEDIA else args.text
        found = measure(args.model, text, asked, args.context, args.windows, args.calib_windows)
    write_json(args.out / "limit.json", found)
    write(found, args.out)


if __name__ == "__main__":
    main()
