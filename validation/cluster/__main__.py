"""Ranks and hand-overs, measured on this machine.

python -m validation.cluster --model models/reference --out results/cluster/CLUSTER.md
python -m validation.cluster --model models/reference --codec hadamard=4 --tokens 64 --out /tmp/CLUSTER.md
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from kvlab.core.errors import KvlabError
from kvlab.core.records import write_json
from validation.cluster import page

TOKENS = (64, 512)  # of the prompts
CODECS = ("hadamard=4", "hadamard=2", "int=8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a model")
    parser.add_argument("--codec", nargs="*", default=CODECS, help="NAME=BITS, of codecs that need no calibration")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of the prompts")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--without-vllm", action="store_true", help="leave vLLM's own connector out")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        write_page(args.model, args.codec, args.tokens, args.ranks, not args.without_vllm, args.out)
    except KvlabError as error:
        parser.error(" ".join(str(error).split()))


def write_page(model: Path, codecs: Sequence[str], tokens: Sequence[int], ranks: int, vllm: bool, out: Path) -> None:
    """Measure, and write the page and, beside it, its numbers."""
    from validation.cluster.measure import measure

    found = measure(model, codecs, tokens, ranks, vllm)
    write_json(out.with_suffix(".json"), found)
    page.write(found, out)


if __name__ == "__main__":
    main()
