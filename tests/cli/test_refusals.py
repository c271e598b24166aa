"""A mistake on the command line is one line, exit code 2, and told before torch is imported for it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

pytestmark = pytest.mark.full

# Each line runs in a process of its own, which says afterwards whether it has loaded torch. They are forked from one
# that has loaded kvlab alone: to start Python for each takes half a second.
PROGRAM = """
import json, os, sys
from kvlab.cli.main import main

codes = []
for folder, words in json.load(sys.stdin):
    child = os.fork()
    if not child:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
        try:
            main(words)
        finally:
            print("torch" in sys.modules, flush=True)
        sys.exit()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""
RECIPE = json.dumps({"recipe": {"k": {"codec": "identity"}, "v": {"codec": "identitty"}}})
MODEL = "models/reference"

IMPORT = "gate import --plain {0} --coded {0} --task ruler_v1 --mechanism kv_quantization/fp8"
IMPORT += " --context-tokens 4096 --out {1}"

REFUSED = {
    "a verb": ("mesure", "'measure'"),
    "a flag": (f"measure {MODEL} --text README.md --codek klt", "'--codec'"),
    "a flag of a verb of a group": ("snapshot inspect x.kv --jsn", "'--json'"),
    "a shell": ("completion bahs", "'bash'"),
    "no model": ("measure models/refrence --text README.md", "did you mean 'models/reference'"),
    "a folder that is no model": ("measure docs --text README.md", "'docs' has no config.json"),
    "no text": (f"measure {MODEL} --text READM.md", "cannot read READM.md: no such file"),
    "a text that is none": (f"measure {MODEL} --text {MODEL}/model.safetensors", "no UTF-8 text"),
    "a text that is short": (f"measure {MODEL} --text CITATION.cff --context 2048", "too few for 2 windows"),
    "a codec": (f"measure {MODEL} --text README.md --codec klr", "did you mean 'klt'"),
    "a counterpart": (f"measure {MODEL} --text README.md --against kivvi", "did you mean 'kivi'"),
    "a counterpart that is measured": (f"measure {MODEL} --text README.md --against klt", "measured already"),
    "bits": (f"measure {MODEL} --text README.md --bits 9", "--bits 9; allowed: more than 0, at most 8"),
    "bits that a codec does not have": (f"calibrate --model {MODEL} --codec fp8 --bits 4 --out x.kv", "no choice"),
    "an engine": (f"measure {MODEL} --text README.md --engine vlm", "'vllm'"),
    "positions": (f"measure {MODEL} --text README.md --context 4096", "4096 positions"),
    "a number": (f"measure {MODEL} --text README.md --windows 1", "'1'; allowed: a whole number of at least 2"),
    "no calibration": (f"measure {MODEL} --text README.md --calibration x.kv", "run `kvlab calibrate`"),
    "a calibration that is none": (f"measure {MODEL} --text README.md --calibration README.md", "`kvlab calibrate`"),
    "a folder to write": (f"measure {MODEL} --text README.md --json docs", "docs: it is a folder"),
    "a device to write": (
        f"measure {MODEL} --text README.md --json /dev/full",
        "cannot write /dev/full: it is a device",
    ),
    "no name to write": ("step corpus --out ''", "cannot write '': it is no path; name a file"),
    "calibrate into another name": (f"calibrate --model {MODEL} --out klt4.json", "ends in .kv"),
    "calibrate nothing": ("calibrate --model nothing --out x.kv", "model directory 'nothing' does not exist"),
    "recipe of no codec": ("recipe --model smollm2-135m --codec hadamrad --out r.json", "did you mean 'hadamard'"),
    "recipe without its calibration": ("recipe --model smollm2-135m --out r.json", "kvlab calibrate"),
    "encode no recipe": ("encode --recipe r.json --capture README.md --out x", "run `kvlab recipe`"),
    "encode a recipe that is none": ("encode --recipe {recipe} --capture README.md --out x", "identitty"),
    "inspect nothing": ("inspect --stream x.kvls", "run `kvlab encode`"),
    "inspect another file": ("inspect --stream README.md", "README.md: this is no coded cache"),
    "decode another file": (
        "decode --model smollm2-135m --recipe {right} --stream README.md --out x",
        "README.md: this is no coded cache",
    ),
    "snapshot of no model": ("snapshot save x.kvs --model nothing --text README.md", "model directory 'nothing'"),
    "snapshot of no text": (f"snapshot save x.kvs --model {MODEL} --text nothing", "cannot read nothing"),
    "eval of no recipe": ("eval --task gsm8k --engine hf --recipe nothing --out x", "cannot read nothing"),
    "snapshot without chunks": (
        f"snapshot save x.kvs --model {MODEL} --text README.md --chunk-tokens 0",
        "chunk_tokens is 0; it has to be a whole number from 1",
    ),
    "snapshot in a small pool": (
        f"snapshot save x.kvs --model {MODEL} --text README.md --pool-tokens 3",
        "no multiple",
    ),
    "inspect no snapshot": ("snapshot inspect x.kvs", "cannot read x.kvs: No such file"),
    "diff of no snapshot": ("snapshot diff x.kvs README.md", "cannot read x.kvs: No such file"),
    "restore of no snapshot": (
        f"snapshot restore x.kvs --model {MODEL} --text README.md --mode consume",
        "cannot read x.kvs: No such file",
    ),
    "calibrated on what is scored": (
        f"measure {MODEL} --text README.md --calib-text README.md",
        "what is scored must not have been calibrated on",
    ),
    "an eval": (f"eval --model {MODEL} --task ruler --engine hf --codec klt --bits 4 --out x", "ruler_v1"),
    "an eval's codec": (f"eval --model {MODEL} --task ruler_v1 --engine hf --codec klr --out x", "'klt'"),
    "an eval's cache": (
        f"eval --model {MODEL} --task ruler_v1 --engine hf --cache-dtype fp8_e4m3 --out x",
        "hf cache dtype 'fp8_e4m3' is not known; allowed: auto",
    ),
    "gate of no rows": ("gate check nothing.json", "nothing.json"),
    "rows that are a folder": ("gate check docs", "cannot read docs: Is a directory"),
    "rows that are no text": ("gate check {tmp}/binary", "binary is no text in UTF-8"),
    "rows that are none": ("gate check {tmp}/list.json", "row 1 is 1; allowed: an object"),
    "evidence behind a link": (
        "gate check README.md --evidence {tmp}/dangling",
        "a link to nowhere, which is not there",
    ),
    "evidence behind itself": ("gate check README.md --evidence {tmp}/loop", "a link that leads to itself"),
    "evidence in a file": ("gate check README.md --evidence README.md/x", "a part of the path is no folder"),
    "evidence of a long name": (f"gate check README.md --evidence {'x' * 300}", "File name too long"),
    "a page in a file": ("gate check README.md --out README.md/GATE.md", "README.md is no folder"),
    "no store": ("gate query nothing.db", "there is no store at nothing.db: no such file; `kvlab gate ingest`"),
    "an empty store": ("gate query {tmp}/empty", "empty: it is empty; `kvlab gate ingest` makes a store"),
    "a store that is a folder": ("gate export docs x.parquet", "cannot use docs: it is a folder"),
    "a store that is none": ("gate diff README.md a b", "it is no SQLite database"),
    "a configuration that is none": ("gate config {tmp}/list.json", "holds [1, 2, 3]; allowed: a mapping"),
    "a registry that is none": ("gate registry --evals {tmp}/list.json", "a mapping with a list 'evals', not list"),
    "import of no runs": (IMPORT.format("docs", "x"), "docs holds no results_*.json"),
    "import into a file": (IMPORT.format("docs", "README.md"), "cannot write into 'README.md': it is no folder"),
    "an eval of no model": (
        "eval --model nothing --params nothing.yaml --task ruler_v1 --engine hf --recipe {right} --out x",
        "nothing.yaml",
    ),
    "an eval into a file": (
        f"eval --model {MODEL} --task ruler_v1 --engine hf --recipe {{right}} --out README.md",
        "cannot write into 'README.md'",
    ),
    "an eval's recipe that is none": (
        f"eval --model {MODEL} --task ruler_v1 --engine hf --recipe {{tmp}}/list.json --out x",
        "list.json is no recipe file, it has no `recipe`",
    ),
    "a snapshot in a file": (
        f"snapshot save README.md/x.kvs --model {MODEL} --text README.md",
        "README.md is no folder",
    ),
    "a prompt that is no list": (
        f"snapshot save x.kvs --model {MODEL} --tokens {{recipe}}",
        "no JSON list of token ids",
    ),
    "a prompt that is broken": (f"snapshot save x.kvs --model {MODEL} --tokens README.md", "README.md is not JSON"),
    "a text with an apostrophe in its name": (
        f'snapshot save x.kvs --model {MODEL} --text "{{tmp}}/it\'s a text.md"',
        "it's a text.md: no such file",
    ),
    "published nothing": ("published nothing --out x", "nothing does not exist"),
    "calibrate on a folder": (f"calibrate --model {MODEL} --text docs --out x.kv", "cannot read docs: Is a directory"),
    "calibrate twice into one file": (
        f"calibrate --model {MODEL} --codec hadamard --out {{tmp}}/x.kv --decoder {{tmp}}/../{{tmp.name}}/x.kv",
        "the second would replace the first; name two files",
    ),
    "calibrate no number of bits": (f"calibrate --model {MODEL} --codec hadamard --bits nan --out x.kv", "--bits nan"),
    "a step": ("step mesure", "'measure'"),
    "a step without its input": ("step sigma --capture nothing --out x", "run `kvlab step capture`"),
    "a step with wrong parameters": ("step corpus --params '{{\"bits\": 99}}' --out x", "bits"),
    "a step with true for a number": ("step corpus --params '{{\"bits\": true}}' --out x", "'bits' is true; allowed"),
    "a step with a key twice": ('step corpus --params \'{{"bits": 2, "bits": 3}}\' --out x', "'bits' twice"),
    "params that are none": ("params --params /dev/zero", "/dev/zero is too large"),
    "params with an alias": ("params --set 'codec=[&a 1, *a]'", "*a stands for what is said elsewhere"),
    "a study": ("step page README.md --study restor --out x", "'restore'"),
}


def here(root) -> list[str]:
    """What lies in the repository, but for what other tests may make meanwhile."""
    return sorted(path.name for path in root.iterdir() if path.name != ".kvlab")


@pytest.fixture(scope="module")
def answers(root, tmp_path_factory) -> dict[str, tuple]:
    """Exit code of each line, and the folder with what it was given and what it said."""
    folders, lines = {}, []
    for number, (case, (line, _)) in enumerate(REFUSED.items()):
        folder = tmp_path_factory.mktemp(f"case{number}")
        (folder / "recipe.json").write_text(RECIPE)
        (folder / "right.json").write_text(RECIPE.replace("identitty", "identity"))
        (folder / "empty").touch()
        (folder / "binary").write_bytes(bytes(range(256)))
        (folder / "list.json").write_text("[1, 2, 3]")
        (folder / "dangling").symlink_to("nowhere")
        (folder / "loop").symlink_to("loop")
        given = line.format(recipe=folder / "recipe.json", right=folder / "right.json", tmp=folder)
        said = tmp_path_factory.mktemp(f"said{number}")
        folders[case] = folder, said
        lines.append((str(said), shlex.split(given)))
    before = here(root)
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(lines),
        cwd=root,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{root / 'src'}:{root}"},
    )
    assert answer.returncode == 0 and here(root) == before, answer.stderr
    return {case: (code, *folders[case]) for case, code in zip(folders, json.loads(answer.stdout), strict=True)}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_one_line_and_costs_no_torch(case, answers):
    code, given, said = answers[case]
    out, err = ((said / name).read_text() for name in ("out", "err"))
    assert (code, err.count("\n")) == (2, 1), err
    assert REFUSED[case][1] in err, err
    assert out.strip() == "False"
    assert not (given / "empty").stat().st_size, "what is only read is not written to"
