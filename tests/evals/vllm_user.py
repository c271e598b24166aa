"""Lines of `kvlab`, one after the other, on one start of vLLM; prints the evidence of each."""

from __future__ import annotations

import functools
import shlex
import sys
from pathlib import Path

from kvlab.cli import main as cli
from kvlab.evals import vllm

if __name__ == "__main__":
    start = vllm.sides
    vllm.sides = functools.cache(start)
    for line in sys.argv[1:]:
        cli.main(shlex.split(line))
        print(" ".join(Path("out/evidence.json").read_text().split()), flush=True)
