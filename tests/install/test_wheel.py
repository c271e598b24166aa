"""The wheel: everything of the package and nothing else, installed into an environment of its own and used there."""

import zipfile
from pathlib import Path

import pytest

from validation import wheel

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return wheel.wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_works_outside_of_the_repository(built, tiny_model, tmp_path, capsys):
    assert wheel.faults(built) == []
    python = wheel.environment(tmp_path / "venv", built)
    assert wheel.used(python, tmp_path, tiny_model) == []
    assert f"{tmp_path / 'venv'}" in capsys.readouterr().out.splitlines()[0]  # where it was imported from


def test_what_is_missing_or_strange_is_named(built, tmp_path):
    left_out = f"kvlab/gate/registry/{min(path.name for path in (ROOT / 'src/kvlab/gate/registry').glob('*.yaml'))}"
    other = tmp_path / built.name
    with zipfile.ZipFile(built) as whole, zipfile.ZipFile(other, "w") as changed:
        for name in whole.namelist():
            if name != left_out:
                changed.writestr(name, whole.read(name))
        changed.writestr("tests/test_x.py", "")
    assert wheel.faults(other) == [f"missing: {left_out}", "strange: tests/test_x.py"]
