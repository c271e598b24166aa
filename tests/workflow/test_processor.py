"""What is said before a run in bfloat16 on a processor that has no instructions for it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"


@pytest.fixture
def processor(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    found = importlib.import_module("processor")
    monkeypatch.setattr(found, "which", lambda name: None)
    monkeypatch.setattr(found, "lacks_bfloat16", lambda: True)
    return found


@pytest.fixture
def told(processor, capsys):
    """What is said before jobs with these benchmarks, in parameters with this value somewhere."""

    def answer(value, *benchmarks, nodes=None, touch=False):
        jobs = [SimpleNamespace(benchmark=name and f"results/benchmarks/{name}.tsv") for name in benchmarks]
        settings, dag = SimpleNamespace(nodes=nodes), SimpleNamespace(needrun_jobs=lambda: jobs)
        workflow = SimpleNamespace(resource_settings=settings, touch=touch, dag=dag)
        said = {"layers": {"windows": 4}, "gap": {"dtypes": ["float32", value]}}
        processor.tell(workflow, {"m": SimpleNamespace(model_dump=lambda mode: said)})
        return capsys.readouterr().err

    return answer


def test_it_is_said_once_before_a_model_runs_in_bfloat16_here(told):
    assert told("bfloat16", None, "capture/m/hf", "measure/m/x").count("PRESET=float32") == 1


@pytest.mark.parametrize(
    ("value", "name", "how"),
    [
        ("float32", "capture/m/hf", {}),
        ("bfloat16", "gate/m/rows", {}),
        ("bfloat16", "capture/m/hf", {"nodes": 4}),
        ("bfloat16", "capture/m/hf", {"touch": True}),
    ],
    ids=["float32", "no model runs", "on a cluster", "nothing is made"],
)
def test_else_nothing_is_said(told, value, name, how):
    assert told(value, None, name, **how) == ""


def test_the_preset_that_is_named_asks_for_no_bfloat16(processor):
    from kvlab.core.paramfile import preset, read_yaml
    from kvlab_pipeline.studies.settings import by_model

    said = read_yaml(Path("params.yaml"))
    models = {name: by_model(data) for name, data in {"default": said, "float32": preset("float32", said)}.items()}
    asked = {
        name: processor.asked(one.model_dump(mode="json") for one in found.values()) for name, found in models.items()
    }
    assert asked == {"default": True, "float32": False}
