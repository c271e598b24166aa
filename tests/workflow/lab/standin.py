"""Stands in for `python -m kvlab` in a scratch clone, so that the whole pipeline runs in seconds.

A verb writes the files that the real one writes, and they hold a digest of everything it was given, the
model's weights among it: they change exactly when the real ones could. `saw` lists the models and the bits of
all that a file was made from, through every step before: a file that mixes two runs says so itself.

`STANDIN_TRACE` names a file that gets a line for every verb that really ran, `STANDIN_SLEEP` is how many
seconds a verb takes, and `STANDIN_FAIL` names a verb that fails.
"""

import csv
import hashlib
import io
import json
import os
import sys
import time
from pathlib import Path

MADE = {"calib", "results"}  # what verbs write; of other files, as a registry, only the bytes count
GROUPS = ("gate",)  # verbs that are followed by one
FIGURES = ("gap_shapley", "baseline", "cells", "layers", "noise", "residual", "d_eff", "mitigations", "ladder")


def main():
    if not Path("src/kvlab/__main__.py").samefile(__file__):
        sys.exit(f"{__file__} is not the code of this folder")
    verb, words = sys.argv[1], sys.argv[2:]
    if verb == "step":
        verb, words = words[0], words[1:]
    if verb in GROUPS:
        verb, words = f"{verb}_{words[0]}", words[1:]
    flags = named(words)
    jobs = flags.pop("--measure", [])
    params = json.loads(flags.pop("--params", ["{}"])[0])
    flags.pop("--store", None)  # where something lies decides nothing
    folder = Path(flags.pop("--results", ["results"])[0])
    outs = [folder / job.replace("/", f"/{params['model']['slug']}/") for job in jobs]
    if verb == "weights":  # writes beside what it reads
        flags["--out"] = [str(Path(flags["--origin"][0]).with_name("model.safetensors"))]
    outs = [out.with_suffix(".parquet") for out in outs] or [Path(flags.pop("--out")[0])]
    with open(os.environ.get("STANDIN_TRACE", os.devnull), "a") as trace:
        trace.write("".join(f"{verb} {out}\n" for out in outs))
    time.sleep(float(os.environ.get("STANDIN_SLEEP", 0)))
    if verb == os.environ.get("STANDIN_FAIL"):
        sys.exit(f"kvlab {verb}: failed, because STANDIN_FAIL says so")
    own = {"rows": ["--current"]}  # of another verb it is what is read
    made = ("--html", "--json", "--summary", *own.get(verb, []))
    beside = [Path(flags.pop(flag)[0]) for flag in made if flag in flags]
    told = description(verb, params, flags | {"--measure": jobs})
    for path in [*(path for out in outs for path in written(verb, out, flags["files"])), *beside]:
        write(path, content(path, told | {"file": str(path)}))


def named(words):
    """The command line as {flag: its words}; those before every flag are under "files"."""
    flags = {"files": []}
    for word in words:
        if word.startswith("--"):
            flags[word] = []
        else:
            flags[list(flags)[-1]].append(word)
    return flags


def description(verb, params, flags):
    """What the files of a verb say: model, bits, what its inputs saw, and a digest of all that it was given."""
    given = hashlib.sha256(json.dumps([verb, params, flags], sort_keys=True).encode())
    model = params.get("model", {})
    for path in sorted(Path(model.get("path", "none")).glob("*.safetensors")):
        given.update(path.read_bytes())
    saw = {"models": {model.get("slug")}, "bits": {params.get("bits")}}
    for path in (Path(word) for words in flags.values() for word in words if Path(word).is_file()):
        given.update(path.read_bytes())
        if path.parts[0] not in MADE:
            continue
        for kind, values in read(path.name, path.read_text())["saw"].items():
            saw[kind] |= set(values)
    seen = {kind: sorted(values - {None}) for kind, values in saw.items()}
    return {"verb": verb, "model": model.get("slug"), "saw": seen, "digest": given.hexdigest()}


def written(verb, out, records):
    """Every file that a verb writes for `--out`; a page with a figure for each model has them by its records' names."""
    if verb == "planted":
        return [out / "REPORT.md", out / "planted.json"]
    if verb == "capacity":
        return [out / "CAPACITY.md", out / "capacity.json"]
    if verb == "service":
        return [out / "LOAD.md", out / "load.json", out / "steps.json"]
    if verb == "ranks":
        return [out, out.with_suffix(".json")]
    if verb == "sigma":
        beside = [f"{out.stem}{end}" for end in (".json", "-post_rope.safetensors", "-post_rope.json")]
    elif verb == "codebooks":
        beside = [f"{out.stem}/tables.safetensors"]
    elif verb == "weights":
        beside = ["tokenizer.json", "chat_template.jinja"]
    elif verb == "needles":
        beside = [f"{out.stem}.json", "ruler.parquet", "ruler.json"]
    elif verb == "gate_report":
        beside = [f"{out.stem}-reasons.md"]
    elif verb == "gate_trust":
        beside = ["detection.svg", "detection.csv"]
    elif verb == "page" and out.name == "REPORT.md":
        beside = [f"{Path(record).stem}.svg" for record in records]
    elif verb == "report":
        beside = [f"figures/{name}.{kind}" for name in FIGURES for kind in ("svg", "csv")]
    else:
        binary = out.suffix in {".safetensors", ".parquet"} and verb not in ("capture", "archive")
        beside = [f"{out.stem}.json"] if binary else []
    return [out, *(out.parent / name for name in beside)]


def content(path, words):
    """The text of a file: JSON; in a table, a column of it; in the metrics that DVC reads, numbers beside it."""
    bits = words["saw"]["bits"]
    if path.suffix == ".csv":
        table = io.StringIO()
        rows = [["sigma", "layer", "value", "words"], [0.1, 0, bits[0] if bits else 0, json.dumps(words)]]
        csv.writer(table, lineterminator="\n").writerows(rows)
        return table.getvalue()
    numbers = {slug: {"bits": bits[0]} for slug in words["saw"]["models"]} if path.name == "summary.json" else {}
    return json.dumps(words | numbers) + "\n"


def read(name, text):
    """What a file says of itself."""
    return json.loads(next(csv.DictReader(io.StringIO(text)))["words"] if name.endswith(".csv") else text)


def write(path, text):
    """The whole file or none of it, as the real verbs write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


if __name__ == "__main__":
    main()
