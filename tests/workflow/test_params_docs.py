"""The parameter table and the JSON schema: up to date, and of one mind with `kvlab params`."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from itertools import cycle, islice
from pathlib import Path

import jsonschema
import pytest

import embedded
from kvlab.core.errors import ParamsError
from kvlab.core.paramfile import PRESETS, overlay, preset, read_yaml
from kvlab_pipeline.studies.settings import by_model, resolved

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "workflow" / "scripts"
SCHEMA, TABLE = "workflow/schemas/config.schema.json", "config/PARAMS.md"

# What one key asks of another is beyond the words of a schema: `kvlab params` alone refuses it, in these words.
BEYOND_A_SCHEMA = {
    r"names layer -?\d+": {"codec": {"whiten_skip_layers": [6]}},
    r"boundary_layers names every layer": {"codec": {"boundary_layers": [0, 1, 2, 3, 4, 5]}},
    r"\.layers is empty": {"cells": {"k-only": {"layers": []}}},
    r"gap\.dtype is .* one of gap\.dtypes": {"gap": {"dtypes": ["float32"]}},
    r"engines are compared in 'float32'": {"gap": {"dtypes": ["bfloat16"]}},
    r"\.windows is \d+; allowed: at most \d+, which is (windows|baseline)\.": {"noise": {"windows": 33}},
    r"ladder\.fewer is \d+; allowed: at most \d+, which is ladder\.windows": {"ladder": {"fewer": 17}},
    r"ladder\.texts names 'other'": {"corpus": {"other": None}},
    r"ladder\.conditioned names .* not in ladder\.codecs": {"ladder": {"codecs": ["klt"], "conditioned": ["int"]}},
    r"which are captured": {"calibration": {"engines": ["vllm"]}},
    r"baseline\.dtypes is .* must contain 'float32'": {"baseline": {"dtypes": ["bfloat16"]}},
    r"mitigations\.uniform has": {"mitigations": {"uniform": [[4, 3], [3, 4]]}},
    r"names a rung, so it can change neither": {"cells": {"klt": {"codec": {"pca": "exact"}}}},
    r"whose components are fitted before": {"cells": {"klt": {"placement": "post_rope"}}},
    r"span is 'window', but": {"cells": {"whole-window": {"protocols": ["snapshot"]}}},
    r"which only hf can choose": {"cells": {"eager": {"engines": ["vllm"]}}},
    r"\.against is .*(no entry|the entry itself|which has no|measured in)": {"cells": {"k-only": {"against": "k"}}},
    r"kvstore\.\S+ is \d+; allowed: at most": {"kvstore": {"policy": {"needles": 201}}},
    r"tradeoffs\.\S+ is \d+; allowed: at most": {"tradeoffs": {"windows": 1000}},
    r"mechanisms\.patterns names": {"mechanisms": {"patterns": ["latent"]}},
    r"mechanisms\.kept names": {"mechanisms": {"kept": ["window"]}},
    r"tradeoffs\.sparse": {"tradeoffs": {"sparse": ["latent"]}},
    r"the tokens of the test split": {"kvstore": {"restore": {"lengths": [10**6]}}},
    r"leaves no whole chunk of": {"kvstore": {"restore": {"suffix": 512}}},
    r"gives its results no folder name": {"models": {"0": {"path": "/", "slug": None}}},
    r"model directory .* (does not exist|has no config)": {"models": {"0": {"path": "src"}}},
    r"models\.\d+\.studies": {"models": {"0": {"studies": []}}},
    r"baseline\.reruns is \d+; allowed: at most \d+, which is baseline\.windows": {"baseline": {"reruns": 17}},
    r"is a hub id; pin it": {"models": {"0": {"path": "an/other"}}},
    r"names .* twice; allowed: each once": {"engines": ["hf", "hf"]},
    r"has \d+ entries; allowed: at most": {"noise": {"sigmas": [number / 100 for number in range(65)]}},
    r"a path without braces": {"corpus": {"source": "texts/{y}.txt"}},
}
WRONG = ("words", "", None, True, -7, 0, 0.5, 10**6, [], [None], ["words"], [0.5], {}, {"zzz": 1})

# Of the places in params.yaml every fourth, and all at night.
NOT_ALL = pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.nightly)])


def docs(*arguments, cwd=ROOT) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPTS / "params_docs.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def validator():
    schema = json.loads((ROOT / SCHEMA).read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.fixture(scope="module")
def document() -> dict:
    """The parameters of the embedded model with every default written out."""
    with contextlib.chdir(ROOT):
        return resolved(embedded.document())


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Where params.yaml finds its models."""
    monkeypatch.chdir(ROOT)


@pytest.fixture
def params_docs(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("params_docs")


def refusal(data: dict) -> str | None:
    """In which words `kvlab params` refuses a params.yaml; None if it takes it."""
    try:
        by_model(data)
    except ParamsError as error:
        return str(error)
    return None


def places(node, path=()):
    """The path of every section and value, those in lists too."""
    if path:
        yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def value_at(data, path):
    for key in path:
        data = data[key]
    return data


def with_value(data: dict, path, value) -> dict:
    other = copy.deepcopy(data)
    value_at(other, path[:-1])[path[-1]] = value
    return other


def without(data: dict, path) -> dict:
    other = copy.deepcopy(data)
    del value_at(other, path[:-1])[path[-1]]
    return other


def test_the_files_agree_with_the_parameters():
    checked = docs("--check")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.full
def test_what_is_out_of_date_is_named_and_written(tmp_path):
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "models").symlink_to(ROOT / "models")
    missing = docs("--check", cwd=tmp_path)
    assert missing.returncode == 1 and TABLE in missing.stderr and SCHEMA in missing.stderr
    assert "run make params-docs" in missing.stderr and not (tmp_path / TABLE).exists()
    (tmp_path / "workflow").mkdir()
    assert docs(cwd=tmp_path).returncode == 0 and docs("--check", cwd=tmp_path).returncode == 0
    for name in (TABLE, SCHEMA):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()
    text = (tmp_path / "params.yaml").read_text()
    (tmp_path / "params.yaml").write_text(re.sub(r"^bits: \d", "bits: 7", text, flags=re.M))
    changed = docs("--check", cwd=tmp_path)
    assert changed.returncode == 1 and TABLE in changed.stderr and SCHEMA not in changed.stderr


def test_every_parameter_is_listed_once_says_what_it_means_and_reruns_a_stage(params_docs, document, monkeypatch):
    monkeypatch.chdir(ROOT)
    rows = re.findall(r"^\| `([^`]+)` \| [^|]+ \| [^|]+ \| ([^|]*) \|", (ROOT / TABLE).read_text(), re.M)
    assert not [name for name, meaning in rows if not meaning.strip()]
    stages = params_docs.stage_params()
    assert not [name for name, _ in rows if not params_docs.naming(name, stages)]
    names = Counter(name for name, _ in rows)
    assert names == Counter(leaf_names(json.loads((ROOT / SCHEMA).read_text())))
    assert not {generic(path) for path in places(document) if isinstance(path[-1], str)} - sections(names)


def leaf_names(schema, name=""):
    """Dotted names of what has no keys of its own; `N` and `NAME` where entries are counted or named."""
    inner = [*schema.get("properties", {}).items()]
    inner += [("NAME", part["anyOf"][0]) for part in schema.get("patternProperties", {}).values()]
    inner += [("N", schema["items"])] if "properties" in schema.get("items", {}) else []
    if not inner or name == "cells.NAME.codec":
        yield name
        return
    for key, part in inner:
        yield from leaf_names(part, f"{name}.{key}" if name else key)


def generic(path) -> str:
    """A place in params.yaml as the table names it."""
    path = [*map(str, path)]
    if len(path) > 1 and path[0] in ("models", "cells"):
        path[1] = {"models": "N", "cells": "NAME"}[path[0]]
    return ".".join(path[:3] if path[0] == "cells" else path)


def sections(names) -> set[str]:
    """The names, and every section that they lie in."""
    return {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)}


@pytest.mark.parametrize(
    ("named", "parameter", "reads"),
    [
        ("codec", "codec.pca", True),
        ("codec.pca", "codec.pca", True),
        ("codec.pca", "codec", True),
        ("codec", "codecs", False),
        ("bits", "v_bits", False),
        ("ladder.bits", "bits", False),
    ],
)
def test_a_stage_reads_what_it_names_and_what_lies_in_it(params_docs, named, parameter, reads):
    stages = {"one": [named], "two": [], "three": [parameter]}
    assert params_docs.naming(parameter, stages) == ("all but two" if reads else "three")
    assert params_docs.naming(parameter, {"one": [named], "three": [parameter]}) == ("all" if reads else "three")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 65536}, "integer ≥ 1 and ≤ 65536"),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "number > 0 and < 1"),
        ({"type": "number"}, "number"),
        ({"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, "`a`, `b` or `null`"),
        ({"type": "array", "minItems": 2, "maxItems": 2, "prefixItems": [{"type": "string"}] * 2}, "list (2) of text"),
        ({"type": "array", "minItems": 1, "items": {"const": "a"}}, "list (at least 1) of `a`"),
        (
            {"type": "array", "minItems": 1, "maxItems": 2, "items": {"type": "boolean"}},
            "list (1 to 2) of `true`, `false`",
        ),
    ],
)
def test_what_is_allowed_in_words(params_docs, part, words):
    assert params_docs.allowed(part) == words


def test_params_yaml_and_every_preset_over_it_are_valid(validator, document):
    presets = sorted(path.stem for path in (ROOT / PRESETS).glob("*.yaml"))
    assert presets
    said = read_yaml(ROOT / "params.yaml")
    for data in [document, said, *(preset(name, said) for name in presets)]:
        validator.validate(data)
        assert refusal(data) is None


def test_several_models_and_entries_of_every_kind_are_valid(validator, document):
    model = document["models"][0]
    models = [model, model | {"slug": "other", "revision": "main", "tensor_parallel": 2}]
    cells = document["cells"] | {
        "k-only": None,
        "new-one": {"rung": "kivi+center", "layers": [-1], "bits": 4},
        "plain": {},
    }
    data = document | {"models": models, "cells": cells}
    validator.validate(data)
    assert refusal(data) is None


def test_an_unknown_key_is_refused_everywhere(validator, document):
    sections = [(), *(path for path in places(document) if isinstance(value_at(document, path), dict))]
    assert len(sections) > 20
    for path in sections:
        data = with_value(document, (*path, "zzz"), 1)
        assert not validator.is_valid(data) and refusal(data), path


@NOT_ALL
def test_a_missing_key_has_its_default_and_a_model_its_path(validator, document, step):
    needed = [("models",), ("models", 0, "path")]
    keys = [path for path in places(document) if isinstance(path[-1], str)]
    for path in [*needed, *keys[::step]]:
        data = without(document, path)
        words = refusal(data)
        assert validator.is_valid(data) == (words is None) or _beyond(words), (path, words)
        assert (words is not None) == (path in needed) or _beyond(words), (path, words)


@NOT_ALL
def test_what_params_refuses_the_schema_refuses(validator, document, step):
    """Every section and value replaced by values of other types; only what a schema cannot say may pass it.

    At night by all of them; otherwise some of the places, each by the one that follows the last one's.
    """
    passed, compared, chosen = [], Counter(), cycle(WRONG)
    for path in islice(places(document), 0, None, step):
        for wrong in islice(chosen, 1 if step > 1 else len(WRONG)):
            data = with_value(document, path, wrong)
            words = refusal(data)
            valid = validator.is_valid(data)
            compared[words is None, valid] += 1
            if words is not None and valid and not _beyond(words):
                passed.append((path, wrong, words))
    assert passed == []
    assert compared[False, False] > compared.total() / 2 and compared[True, True] > 0


@pytest.mark.parametrize("pattern", BEYOND_A_SCHEMA)
def test_what_a_schema_cannot_say_params_refuses(validator, document, pattern):
    data = overlay(document, BEYOND_A_SCHEMA[pattern])
    validator.validate(data)
    assert re.search(pattern, refusal(data) or "")


def _beyond(words: str | None) -> bool:
    return words is not None and any(re.search(pattern, words) for pattern in BEYOND_A_SCHEMA)
