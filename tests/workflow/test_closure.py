"""The import closure: what a rule's code depends on, read without running it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "workflow" / "scripts" / "closure.py"
SOURCES = {
    "pkg/__init__.py": "",
    "pkg/top.py": "import json\nfrom pkg import near\n\ndef later():\n    from pkg.sub.deep import thing\n",
    "pkg/near.py": "from .sub import leaf\n",
    "pkg/sub/__init__.py": "from .deep import thing\n",
    "pkg/sub/deep.py": "thing = 1\n",
    "pkg/sub/leaf.py": "import pkg.top\n",
    "pkg/alone.py": "NAMES = {'deep': 'pkg.sub.deep:thing'}\n",
}


@pytest.fixture
def code(tmp_path, monkeypatch):
    for name, text in SOURCES.items():
        path = tmp_path / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("closure", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.code


def files(*names: str) -> tuple[str, ...]:
    return tuple(sorted(f"src/pkg/{name}" for name in names))


def test_imports_are_followed_relative_circular_and_inside_functions(code):
    assert code("pkg.top") == files("__init__.py", "top.py", "near.py", "sub/__init__.py", "sub/deep.py", "sub/leaf.py")


def test_a_parent_package_counts_with_what_it_imports(code):
    assert code("pkg.sub.deep") == files("__init__.py", "sub/__init__.py", "sub/deep.py")


def test_what_is_loaded_by_name_is_named_beside_it(code):
    assert code("pkg.alone") == files("__init__.py", "alone.py")
    assert "src/pkg/sub/deep.py" in code("pkg.alone", "pkg.sub.deep")


def test_a_missing_module_is_refused(code):
    with pytest.raises(ValueError, match=r"'pkg\.gone', which is not in src/"):
        code("pkg.top", "pkg.gone")
