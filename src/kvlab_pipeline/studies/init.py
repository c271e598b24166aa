"""A params.yaml for somebody's own model: the repository's, with that model, its engines and how much is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import get_args

import yaml

from kvlab.core.errors import ParamsError, StorageError, UnknownName
from kvlab.core.model import read_config
from kvlab.core.params import ModelEntry, Section, Windows
from kvlab.core.recipe import Engine
from kvlab_pipeline.studies.kvstore_params import KVStore
from kvlab_pipeline.studies.settings import by_model, sections

LEAST_CONTEXT = 8  # as of `Windows.context`

WINDOWS = 8  # half of them of each text
# What a model of some hundred million parameters takes some twelve minutes for on two cores.
ASKED = ("ladder", "layers", "noise")
SAID = {
    "baseline": {"hf_attention": ["sdpa"]},
    "gap": {"other_windows": 2},
    "ladder": {"codecs": ["klt", "hadamard", "kivi", "fp8", "archive"], "ablated": [], "in_forward": []},
    "layers": {"streams": ["kv"], "protocols": ["snapshot"], "left_out": False},
    "mechanisms": {
        "codecs": ["archive"],
        "in_forward": [],
        "pages": ["klt"],
        "caches": ["klt", "kivi", "fp8"],
        "cached_bits": [4],
        "cache_dtypes": ["fp8_e4m3"],
        "needles": 4,
        "tasks": [],
        "greedy": 4,
    },
    "noise": {"protocol": "snapshot", "streams": ["kv"], "groups": ["all"], "sigmas": [0.01, 0.03, 0.1]},
    "kvstore": {
        "restore": {"codecs": ["klt", "hadamard", "kivi", "int", "fp8", "archive"]},
        "placement": {"orders": 16},
    },
}

TEMPLATE = Template("""\
# yaml-language-server: $$schema=workflow/schemas/config.schema.json
# What a person changes. Every other parameter has a default; all of them, with what is allowed: config/PARAMS.md.
# `kvlab params` checks this file and prints it with every default written out, and the recipe ids.
# A smaller study is one edit, as `test: 4` under `windows`; `make findings PRESET=full` measures more of everything.
# For one run: `dvc exp run -S bits=4`, or `-S '++noise.seed=3'` for what this file does not say.

bits: 3                       # K stream: bits per coefficient of `codec`, per value of the default `klt`; 1..8
v_bits: 2                     # V stream: the same

# Each model goes through every stage, and its results lie under its slug (if none is given, the last part of `path`,
# a directory or a hub id with its `revision`). The first one leads the report; what holds on all is its headline.
# A further one may name `studies` of its own, of those below: only they are measured of it, and no gate.
models:
$models
corpus:
  source: $source          # calibrates: `docstrings`, a text file or glob, or `datasets:ID[/config=NAME]`
  other: encyclopedia         # scored beside it: `encyclopedia`, `licences`, a text file or glob, or null

windows:
  context: $context                # tokens whose K and V are coded
  eval: 128                   # tokens that are scored after them
  test: $test                    # windows that are scored, half of them of each text
  calib: 32                   # windows that the calibration sees (16,384 tokens); never the scored ones
  other: $other                   # windows of `corpus.other` that are scored
  seed: 0

# What runs: codec cells on these engines, under these protocols.
engines:
$engines
protocols:
- in_forward
- snapshot
studies:                      # beside engine baseline and factorial; also: cells, mitigations, split
$asked
jobs:
  threads: 1                  # torch threads of a job; jobs run side by side on the other cores

# A section of which nothing is changed stays empty, but stays: DVC looks for its name.
calibration:                  # which engines are captured and what is fitted on that: engines, origin, dtype, ...
  engines:
  - $origin
  dtype: bfloat16
codec: {}                     # the studied recipe: block_size, whiten, boundary_layers, outlier_threshold, ...
cells: {}                     # single changes: `my-cell: {bits: 4}` adds one, `k-only: null` takes one out
$studies
stats: {}                     # the bootstrap: resamples, confidence, seed
verdict: {}                   # thresholds: accept_ppl, accept_top1, marginal_ppl, marginal_top1
report:
  title: What the KV codec costs, and why
""")


def write(
    out: Path,
    model: str,
    engines: Sequence[str] = ("hf", "vllm"),
    windows: int = WINDOWS,
    revision: str | None = None,
    source: str = "docstrings",
) -> None:
    """Write a commented params.yaml for one model.

    Parameters
    ----------
    out : Path
        What is written; it must not be there yet.
    model : str
        Directory of a model, or a hub id that is in the local cache.
    engines : sequence of str
        Those that run and are captured.
    windows : int
        Scored windows of each text; studies that ask for more by default take these.
    revision : str, optional
        Of a hub id.
    source : str
        Text, as `corpus.source`.

    Raises
    ------
    UserError
        A file is there, the model cannot be read or is too short for a window, or a value is not allowed. Nothing
        is written.
    """
    if out.exists():
        raise StorageError(
            f"{out} exists, and is not written over; name another file with --out, or move it away",
            code="storage.exists",
        )
    for engine in engines:
        if engine not in get_args(Engine):
            raise UnknownName("engine", engine, get_args(Engine))
    entry = {"path": model} | ({"revision": revision} if revision else {})
    listed = {"models": [entry], "engines": list(engines), "windows": {"test": windows, "other": windows}}
    (settings,) = by_model(listed).values()
    scalar = yaml.safe_dump(source).removesuffix("...\n").strip()
    text = TEMPLATE.substitute(
        models=_flow([entry]),
        source=f"{scalar:<10}",
        context=f"{_context(settings.model, settings.windows):<3}",
        test=f"{windows:<2}",
        other=f"{windows:<2}",
        engines=_flow(list(engines)),
        asked=_flow(list(ASKED)),
        origin="hf" if "hf" in engines else engines[0],
        studies="\n".join(_section(section, SAID.get(section.key, {})) for section in (*sections().values(), KVStore)),
    )
    by_model(yaml.safe_load(text))
    from kvlab.core.records import write_text

    write_text(out, text)


def _context(model: ModelEntry, windows: Windows) -> int:
    """Coded tokens of a window: as usual, or as many as the model has positions for beside the scored ones."""
    positions = read_config(model).get("max_position_embeddings", windows.length + 1)
    context = min(windows.context, positions - windows.eval - 1)
    if context < LEAST_CONTEXT:
        raise ParamsError(
            f"{model.path} has {positions} positions; allowed: at least {windows.eval + LEAST_CONTEXT + 1}"
        )
    return context


def _section(section: type[Section], said: dict) -> str:
    """The section of a study: what is said of it, and what could be."""
    told = f"# {section.told}: {', '.join(section.model_fields)}"
    if not said:
        return f"{section.key + ': {}':<30}{told}"
    values = "".join(f"  {line}\n" for line in _flow(said).splitlines())
    return f"{section.key + ':':<30}{told}\n{values}".rstrip()


def _flow(value: list) -> str:
    return yaml.safe_dump(value, sort_keys=False).rstrip()
