"""Rows of `kvlab_mechanisms.ledger`: contracts, and the log with its proofs."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from kvlab.codecs.stream.tree import leaf
from kvlab_mechanisms.ledger import log
from kvlab_mechanisms.ledger.contract import Contract, decoded
from kvlab_mechanisms.ledger.log import LogEntry, ReadLog, encoded
from kvlab_mechanisms.ledger.merkle import Tree, proves_consistency, proves_inclusion
from kvlab_mechanisms.micro.row import BenchRow, hold, named

ROOT = Path(__file__).resolve().parents[4]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age"],
}
VALID = {"name": "Ada", "age": 36, "mail": "ada@example.org", "tags": ["a", "b"], "ok": True}
INVALID = {"name": "", "age": 200, "mail": 3}
CHAIN = "hashlib, a chain"


def rows() -> Iterator[BenchRow]:
    """All of them."""
    yield from contracts()
    yield from whole_file()
    yield from appends()
    yield from proofs(2010)
    yield from proofs(100_000)


def contracts() -> Iterator[BenchRow]:
    """Five fields that hold their contract, and three faults."""
    contract, bare = Contract(SCHEMA), Draft202012Validator(SCHEMA)
    good, bad = json.dumps(VALID), json.dumps(INVALID)

    def valid() -> None:
        hold(contract.reads(good) and bare.is_valid(VALID) and not contract.faults(VALID))

    def invalid() -> None:
        hold(not contract.reads(bad) and len(contract.faults(INVALID)) == len([*bare.iter_errors(INVALID)]) == 3)

    library = named("fastjsonschema", "fastjsonschema")
    quick = _quick(SCHEMA) if library else bare.is_valid
    name = f"{library or 'jsonschema'} and json"
    told = "jsonschema's walk, behind which NaN, Infinity and keys that are there twice are refused too; "
    told += "loses to compiled code, of which a file that is read once a job takes no notice"
    yield BenchRow(
        "r60", "5 fields, from text", valid, lambda: contract.reads(good), lambda: quick(json.loads(good)), name, told
    )
    yield BenchRow(
        "r61", "3 faults, from text, all told with their places", invalid, lambda: contract.faults(decoded(bad, "")),
        lambda: [*bare.iter_errors(json.loads(bad))], "jsonschema iter_errors",
        "the same library: ours makes a line with a place of each fault",
    )  # fmt: skip
    yield BenchRow(
        "r61-first", "3 faults, from text, the verdict alone", invalid, lambda: contract.reads(bad),
        lambda: quick(json.loads(bad)), name, told,
    )  # fmt: skip


def _quick(schema: dict) -> Callable[[object], bool]:
    """The verdict of code that fastjsonschema compiles."""
    import fastjsonschema

    compiled = fastjsonschema.compile(schema)

    def holds(value: object) -> bool:
        try:
            compiled(value)
        except fastjsonschema.JsonSchemaValueException:
            return False
        return True

    return holds


def whole_file() -> Iterator[BenchRow]:
    """params.yaml against its schema."""
    from kvlab.core.paramfile import read_yaml

    schema = json.loads((ROOT / "workflow" / "schemas" / "config.schema.json").read_text())
    data, contract, bare = read_yaml(ROOT / "params.yaml"), Contract(schema), Draft202012Validator(schema)

    def check() -> None:
        hold(contract.holds(data) and bare.is_valid(data) and not contract.holds(data | {"bits": "many"}))

    yield BenchRow(
        "r60-params", "params.yaml of this project", check, lambda: contract.holds(data),
        lambda: bare.is_valid(data), "jsonschema", "read already; the same library, and a look for NaN and Infinity",
    )  # fmt: skip


def entry(number: int) -> LogEntry:
    """A small one."""
    return LogEntry(job=f"r n={number}", inputs={}, outputs={"o": f"{number:064x}"}, params="0" * 64, versions={})


def appends() -> Iterator[BenchRow]:
    """An entry into a tree in memory, and onto the disk."""
    one, tree, line = entry(1), Tree(), encoded(entry(1))
    head = [b""]

    def add() -> None:
        tree.append(leaf(encoded(one)))

    def chained() -> None:
        head[0] = hashlib.sha256(head[0] + encoded(one)).digest()

    def check() -> None:
        own = Tree()
        for _ in range(3):
            own.append(leaf(encoded(one)))
        hold(own.root() == Tree([leaf(line)] * 3).root() and len(own) == 3)

    theirs, library = pymerkle([])
    yield BenchRow(
        "r62", f"{len(line)} bytes, into the tree in memory", check, add,
        (lambda: theirs.append_entry(encoded(one))) if library else chained, library or CHAIN,
        "with the canonical encoding of a checked record on both sides; the original joins its fields by a bar, so that"
        " two records can be one text",
    )  # fmt: skip
    folder = tempfile.TemporaryDirectory(prefix="kvlab-micro-")
    path, plain = Path(folder.name, "log.jsonl"), Path(folder.name, "plain.jsonl")

    def written() -> None:
        with plain.open("ab", buffering=0) as file:
            file.write(line + b"\n")
            os.fsync(file.fileno())

    def kept(_folder=folder) -> None:
        log.append([one], path)
        hold(log.read(path).entries()[-1] == one)

    yield BenchRow(
        "r62-disk", f"{len(line)} bytes, on the disk", kept, lambda: log.append([one], path), written,
        "open, write, fsync", "ours locks, and takes a torn line away",
    )  # fmt: skip


def proofs(count: int) -> Iterator[BenchRow]:
    """All entries verified, one entry, and ten new ones."""
    pattern = encoded(entry(0))
    lines = tuple(pattern.replace(b"n=0", b"n=%d" % number) for number in range(count))
    found, tree = ReadLog(Path("log"), lines, 0), Tree(map(leaf, lines))
    root, name = tree.root(), "" if count == 2010 else f"-{count}"

    def whole() -> bool:
        return found.tree().root() == root

    def chained() -> bytes:
        head = b""
        for line in lines:
            head = hashlib.sha256(head + line).digest()
        return head

    theirs, library = pymerkle(lines)

    def check() -> None:
        changed = ReadLog(Path("log"), (*lines[:7], lines[8], lines[7], *lines[9:]), 0)
        hold(whole() and changed.tree().root() != root and tree.root(count - 1) != root)
        hold(not library or theirs.get_root() == root, "pymerkle comes to another root")

    note = "the page's 2,236,000 us is a slip of units, of 2,236; " if count == 2010 else ""
    note += "a bare chain takes half, and proves nothing of one entry without all others"
    rival = (lambda: pymerkle(lines)) if library else chained
    yield BenchRow(f"r63{name}", f"{count:,} entries, all", check, whole, rival, library or CHAIN, note)
    yield from partly(count, lines, tree, theirs, library, chained)


def pymerkle(lines: Sequence[bytes]) -> tuple[Any, str]:
    """Its tree of these entries, and its name and version; nothing where it is not installed."""
    if not (library := named("pymerkle", "pymerkle")):
        return None, ""
    from pymerkle import InmemoryTree

    tree = InmemoryTree(algorithm="sha256")
    for line in lines:
        tree.append_entry(line)
    return tree, library


def partly(
    count: int, lines: tuple[bytes, ...], tree: Tree, theirs: Any, library: str, chained: Callable
) -> Iterator[BenchRow]:
    """What a tree needs less for than all entries."""
    at, root, path = count // 3, tree.root(), tree.inclusion(count // 3)
    old = Tree(map(leaf, lines[:-10]))
    before, steps = old.root(), tree.consistency(count - 10)

    def included() -> bool:
        return proves_inclusion(leaf(lines[at]), at, count, root, path)

    def goes_on() -> bool:
        return proves_consistency(count - 10, before, count, root, steps)

    def check() -> None:
        hold(included() and not proves_inclusion(leaf(lines[at + 1]), at, count, root, path))
        hold(goes_on() and not proves_consistency(count - 10, root, count, root, steps))

    rivals = [chained, chained]
    if library:
        from pymerkle import verify_consistency, verify_inclusion

        base, one = theirs.get_leaf(at + 1), theirs.prove_inclusion(at + 1, count)
        ten = theirs.prove_consistency(count - 10, count)
        rivals = [lambda: verify_inclusion(base, root, one), lambda: verify_consistency(before, root, ten)]
    told = "" if library else "a chain has to be walked whole"
    for name, shape, ours, rival in (
        ("one", f"one of {count:,} entries, by its proof", included, rivals[0]),
        ("suffix", f"10 new of {count:,} entries", goes_on, rivals[1]),
    ):
        yield BenchRow(f"r63-{count} {name}", shape, check, ours, rival, library or CHAIN, told)
