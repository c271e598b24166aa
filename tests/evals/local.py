"""Two local tasks and their registry, written into a folder: answers that are written, endings that are scored."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from kvlab.gate.registry import SHIPPED

SENTENCES = [
    ("Return the sum of all elements", "in the input array."),
    ("Parameters\n----------\naxis : int, optional\n    Axis along", "which the values are computed."),
    ("Parameters\n----------\npath : str\n    The path to", "the file to be read."),
    ("Returns\n-------\nbool\n    True if the graph", "is directed, False otherwise."),
    ("Raises\n------\nValueError\n    If the number of", "elements is not equal to the shape."),
    ("Args:\n    dim (int): the dimension", "along which to compute the result."),
    ("Keyword args:\n    out (Tensor, optional): the", "output tensor of the function."),
    ("Number of hidden layers in", "the model that is used."),
    ("Whether or not to return", "the hidden states of all layers."),
    ("If None, the default", "value of the parameter is used."),
    ("Parameters\n----------\ndtype : data-type, optional\n    The data type", "of the returned array."),
    ("Write the object", "to a file with the given name."),
    ("Returns\n-------\nlist\n    A list of", "the names of all the columns."),
    ("Compute the mean", "of the values along the given axis."),
    ("Create a new graph", "with the same nodes and edges."),
    ("Return a copy", "of the object with the new index."),
]
EXTRA = {"harness": "lm-evaluation-harness", "scope": "toy", "baseline_required": True, "version": "1"}


def documents() -> list[dict]:
    """A beginning, its ending, and four endings, of which three are those of other beginnings."""
    found = []
    for number, (text, ending) in enumerate(SENTENCES):
        choices = [SENTENCES[(number + step) % len(SENTENCES)][1] for step in (1, 2, 3)]
        choices.insert(number % 4, ending)
        found.append({"text": text, "ending": ending, "choices": choices, "gold": number % 4})
    return found


def write(folder: Path, **changes) -> Path:
    """Both tasks and ``evals.yaml``, the shipped one with theirs added; `changes` go into each task."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in documents()))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "target_delimiter": " ",
        "metadata": {"version": 1.0},
    }
    written = {
        "task": "toy_written",
        "output_type": "generate_until",
        "doc_to_target": "{{ending}}",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    chosen = {
        "task": "toy_chosen",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    for task in (written, chosen):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(common | task | changes))
    metric = {
        "direction": "higher",
        "margin": 0.9,
        "unit": "share of items",
        "why": "a toy's",
        "floor": None,
        "rate": True,
    }
    registry = yaml.safe_load((SHIPPED / "evals.yaml").read_text())
    registry["evals"] += [
        EXTRA
        | {"quality_eval_id": task["task"], "task": task["task"], "generates": generates, "band": [1, 4096]}
        | {"metrics": [metric | {"key": key}], "description": "a toy"}
        for task, key, generates in ((written, "exact_match", True), (chosen, "acc", False))
    ]
    (folder / "evals.yaml").write_text(yaml.safe_dump(registry))
    return folder
