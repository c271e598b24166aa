"""Build the wheel, look at what is in it, install it and use it outside of the repository: `make wheel-test`.

Nothing is downloaded: the new environment reads its dependencies from the one that runs this. The Cache may load
nothing that only an extra would install.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "reference"
EXTRAS = ("vllm", "lm_eval", "datasets", "matplotlib", "markdown_it", "snakemake", "dvc")

GENERATE = f"""
import sys

import kvlab
if "torch" in sys.modules:
    sys.exit("`import kvlab` loads torch")

from transformers import AutoModelForCausalLM, AutoTokenizer
from kvlab import Cache, recipe

folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
cache = Cache(model, recipe("hadamard", bits=4, block_size=16))
inputs = tokenizer("def read_json(path):", return_tensors="pt")
answer = model.generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)
cache.check()
if answer.shape[1] <= inputs["input_ids"].shape[1] or not 4 < cache.bits_per_value < 8:
    sys.exit(f"{{answer.shape}} {{cache.bits_per_value}} bits per value")
if loaded := set(sys.modules) & set({EXTRAS!r}):
    sys.exit(f"the Cache loads {{loaded}}, which only extras install")
print(f"{{cache.bits_per_value:.2f}} bits per value from {{kvlab.__file__}}")
"""


def wheel(folder: Path) -> Path:
    """The wheel of the working tree, built in `folder` with the setuptools that is installed."""
    copy = folder / "copy"  # setuptools builds inside of what it is given
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-cache-dir")
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(copy)]
    answer = subprocess.run(command, capture_output=True, text=True)
    found = list(folder.glob("*.whl"))
    if answer.returncode or len(found) != 1:
        raise SystemExit(f"no wheel was built: {answer.stderr.strip() or found}")
    return found[0]


def faults(wheel_path: Path, package: Path = ROOT / "src" / "kvlab") -> list[str]:
    """What is missing in a wheel, and what has no place in it."""
    with zipfile.ZipFile(wheel_path) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    due = {
        f"kvlab/{path.relative_to(package)}"
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    return [f"missing: {name}" for name in sorted(due - names)] + [f"strange: {name}" for name in sorted(names - due)]


def environment(folder: Path, wheel_path: Path) -> Path:
    """The interpreter of a new environment with the wheel in it, and with this environment's packages beside it."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    own = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*command, "--target", str(own), str(wheel_path)], check=True)
    # one line is a folder to look in; the *.pth files in there, such as this checkout's own, are not followed
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def used(python: Path, folder: Path, model: Path) -> list[str]:
    """What went wrong when the wheel was used in `folder`; each thing that works is printed."""
    kvlab = [python, "-m", "kvlab"]
    wrong = []
    for command in ([python, "-c", GENERATE, str(model)], [*kvlab, "--help"], [*kvlab, "gate", "registry"]):
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVLAB"))}
        answer = subprocess.run(
            command, cwd=folder, env=environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
        )
        shown = " ".join(map(str, command[1:])) if command[1] == "-m" else "a few tokens through the Cache"
        if answer.returncode:
            wrong.append(f"{shown}: {(answer.stderr or answer.stdout).strip()}")
        else:
            print(f"works: {shown}: {(answer.stdout.strip().splitlines() or ['nothing said'])[-1]}")
    return wrong


def main() -> None:
    """Exit code 1 and what is wrong, or a line for each thing that works."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--model", type=Path, default=MODEL, help="folder of a small model; default: models/reference")
    model = asked.parse_args().model.resolve()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        built = wheel(folder)
        print(f"{built.name}: {built.stat().st_size >> 10} KiB")
        wrong = faults(built) or used(environment(folder / "venv", built), folder, model)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
