"""The import closure: what a rule's code depends on, read without running it."""

from __future__ import annotations

import importlib.util
import json
import os
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
    "pkg/sub/rules.py": "import json\n",
    "pkg/alone.py": "NAMES = {'deep': 'pkg.sub.deep:thing'}\n",
}


@pytest.fixture
def closure(tmp_path, monkeypatch):
    for name, text in SOURCES.items():
        path = tmp_path / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("closure", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.PACKAGES = {"pkg": module.SRC}
    module.forget()  # files are known by their relative path: those of another test have the same
    return module


@pytest.fixture
def code(closure):
    return closure.files


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
    with pytest.raises(ValueError, match=r"'pkg\.gone', which is not in this repository"):
        code("pkg.top", "pkg.gone")


def digest_after(closure, change) -> str:
    """The digest of pkg.top when src/pkg/near.py has been changed; `closure` reads each file once."""
    path = Path("src/pkg/near.py")
    path.write_text(change)
    closure.forget()
    return closure.Code("pkg.top")


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("from .sub import leaf  # a comment\n\n\n# another\n", True),
        ('"""A docstring."""\nfrom .sub import (\n    leaf,\n)\n', True),
        ("from .sub import leaf\nSIZE = 2\n", False),
        ("from .sub import leaf as other\n", False),
        ("from .sub import leaf\n'no docstring: it is not the first'\n", False),
    ],
)
def test_what_a_file_does_is_digested_and_not_how_it_is_written(closure, text, same):
    before = digest_after(closure, SOURCES["pkg/near.py"])
    assert (digest_after(closure, text) == before) is same


def test_docstrings_of_classes_and_functions_are_no_part_of_the_digest(closure):
    bare = digest_after(closure, "class A:\n    def f(self):\n        return 1\n")
    told = 'class A:\n    """A."""\n    def f(self):\n        """Return one."""\n        return 1\n'
    assert digest_after(closure, told) == bare
    assert digest_after(closure, told.replace("return 1", "return 2")) != bare


def test_a_digest_knows_its_files_and_another_module_is_another_digest(closure):
    alone = closure.Code("pkg.alone")
    assert alone.files == files("__init__.py", "alone.py")
    assert alone.records == ("results/code/pkg.alone.txt",)
    assert alone != closure.Code("pkg.sub.deep")
    assert alone == closure.Code("pkg.alone", "pkg.alone") == closure.Code("pkg", "pkg.alone")


RULE = """\
rule fit:
    \"\"\"Fit.\"\"\"
    output: "a"
    params:
        bits=3,
    shell: "run {params.bits}"
"""


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("bits=3,", "bits=3,  # three", True),
        ("bits=3,", "\n        bits=3,", True),
        ("        bits=3,", "      bits=3,", True),
        ("bits=3", "bits=4", False),
        ("run {", "run  {", False),
        ("    shell", "shell", False),
    ],
)
def test_of_rules_the_words_are_digested_and_no_comments(closure, old, new, same):
    path = Path("workflow/rules/fit.smk")
    path.parent.mkdir(parents=True)
    path.write_text(RULE)
    before = closure.record(closure.record_of(path))
    path.write_text(RULE.replace(old, new))
    closure.forget()
    assert (closure.record(closure.record_of(path)) == before) is same


def test_the_records_are_written_and_read_under_the_same_names(closure, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["closure.py", str(tmp_path / "code")])
    Path("workflow/rules").mkdir(parents=True)
    Path("workflow/rules/fit.smk").write_text(RULE)
    closure.main()
    written = {path.name: path.read_text() for path in (tmp_path / "code").iterdir()}
    assert written == {path.name: text for path, text in closure.records().items()}
    modules = {"pkg", "pkg.top", "pkg.near", "pkg.sub", "pkg.sub.deep", "pkg.sub.leaf", "pkg.sub.rules", "pkg.alone"}
    names = modules | {"fit.rules"}
    assert set(written) == {f"{name}.txt" for name in names}
    assert [line.split()[1] for line in written["pkg.top.txt"].splitlines()] == list(closure.files("pkg.top"))
    assert closure.record(closure.record_of("pkg.gone")) is None


@pytest.fixture
def kept(closure, monkeypatch, tmp_path):
    """The file of kept sources, and a function that gives the digest of pkg.top as a new process finds it."""
    place = tmp_path / ".kvlab/sources.json"
    monkeypatch.setenv(closure.code.KEPT, str(place))

    def anew() -> str:
        closure.forget()
        closure.code._READ.clear()
        closure.code._kept.cache_clear()
        digest = closure.Code("pkg.top")
        closure.code.keep()
        return digest

    anew()
    yield place, anew
    closure.code._READ.clear()
    closure.code._kept.cache_clear()


def test_a_kept_source_is_not_parsed_again(closure, kept, monkeypatch):
    place, anew = kept
    digest, written = anew(), place.stat().st_mtime_ns
    monkeypatch.setattr(closure.code.ast, "parse", None)
    assert anew() == digest and place.stat().st_mtime_ns == written


def test_an_edit_of_the_same_time_and_size_is_seen(kept):
    _, anew = kept
    path = Path("src/pkg/sub/deep.py")
    times = path.stat()
    digest = anew()
    path.write_text("thing = 2\n")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == times.st_size and anew() != digest


def sources(text: str, said: list) -> dict:
    """Kept sources that all say the same."""
    found = json.loads(text)
    return found | {"sources": dict.fromkeys(found["sources"], said)}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: sources(text, ["0", []]) | {"made_by": "another Python"},
        lambda text: [],
        lambda text: sources(text, []),
    ],
    ids=["half", "other maker", "other shape", "empty sources"],
)
def test_what_is_no_file_of_kept_sources_is_made_anew(kept, spoil):
    place, anew = kept
    digest, whole = anew(), place.read_text()
    spoilt = spoil(whole)
    place.write_text(spoilt if isinstance(spoilt, str) else json.dumps(spoilt))
    assert anew() == digest
    assert place.read_text() == whole
