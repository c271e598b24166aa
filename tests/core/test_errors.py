"""Every error has a code that is its own; a code given where it is raised goes into more detail, never elsewhere."""

from __future__ import annotations

import ast
import copy
import functools
import pickle
import re
from pathlib import Path

import pytest

from kvlab.core.errors import KvlabError, ParamsError, StreamError
from refusals import refused

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*(\.[a-z0-9]+(-[a-z0-9]+)*)*")


@functools.cache
def trees() -> list[ast.Module]:
    """The syntax trees of all sources; not made on import, which every process does."""
    return [ast.parse(path.read_text()) for top in ("src", "validation") for path in sorted((ROOT / top).rglob("*.py"))]


def class_codes() -> dict[str, set[str]]:
    """The codes of error classes, by the class's name."""
    found: dict[str, set[str]] = {}
    for tree in trees():
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef(name=name, body=body):
                    for line in body:
                        match line:
                            case ast.Assign(targets=[ast.Name(id="code")], value=ast.Constant(value=str() as code)):
                                found.setdefault(name, set()).add(code)
    return found


def raised_codes() -> set[tuple[str, str]]:
    """Class and code of everything that is made with a code of its own."""
    return {
        (getattr(node.func, "id", getattr(node.func, "attr", "")), keyword.value.value)
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "code" and isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str)
    }


@pytest.mark.full
def test_the_code_of_a_class_is_its_own():
    codes = [code for found in class_codes().values() for code in found]
    assert len(codes) == len(set(codes)) > 30
    assert [code for code in codes if not CODE.fullmatch(code)] == []


@pytest.mark.full
def test_a_code_begins_with_that_of_its_class():
    known = class_codes()
    wrong = [
        (name, code)
        for name, code in raised_codes()
        if name in known and not (CODE.fullmatch(code) and any(code.startswith(f"{own}.") for own in known[name]))
    ]
    assert wrong == []


def test_the_code_survives_pickling_and_copying():
    error = StreamError("cut short", code="stream.short")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (str(again), again.code) == ("cut short", "stream.short")
    assert pickle.loads(pickle.dumps(ParamsError("a", "b", code="params.x"))).code == "params.x"


def test_refused_looks_at_class_code_and_data():
    with refused(StreamError, "stream.short", 7):
        raise StreamError("7 bytes are missing", code="stream.short")
    with refused(KvlabError):
        raise KvlabError("whatever")
    for code, data in (("stream.long", 7), ("stream.short", 8)):
        with pytest.raises(AssertionError), refused(StreamError, code, data):
            raise StreamError("7 bytes are missing", code="stream.short")
