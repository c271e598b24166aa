"""What each verb of `kvlab ledger` does, and its flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from kvlab.cli.flags import Flag, path, result, word
from kvlab.cli.keys import CHECKING, SIGNING, key_of
from kvlab.core.errors import UserError

ABOUT = """\
What was made of what: a log that every rule of the workflow adds to, and whose past cannot be changed unseen
(docs/ledger.md).

  verify      whether the log goes on from the checkpoint, and whether files are what it says of them
  prove       that an entry is in the log: a file that proves it to whoever has the checkpoint
  checkpoint  size and root of the log as it is, for git
  check       whether params.yaml, a registry, rows or metrics are what their schema says

Exit codes: 0 done, and as it was; 1 the log is another one, or files are; 2 the input is wrong.
"""
LOG, CHECKPOINT = "results/ledger/log.jsonl", "results/ledger/checkpoint.json"  # as in `kvlab_mechanisms.ledger`


def verify_verb(args: argparse.Namespace) -> int:
    """Hold the log against its checkpoint and every line against what a line is; or a proof against the checkpoint.

    With --files, what the log says of files is held against those that are there.
    """
    from kvlab_mechanisms.ledger import checkpoint, log, proof

    known = _checkpoint(args)
    if args.proof:
        if known is None:
            raise UserError(f"a proof is held against a checkpoint, and there is no {CHECKPOINT}")
        entry = proof.read(args.proof, known)
        print(f"entry of {entry.job} is in the log of {known.size} entries: it made {', '.join(entry.outputs)}")
        return 0
    found = log.read(args.log)
    checkpoint.verify(found, known)
    after = f", of which {known.size} are those of the checkpoint" if known else "; there is no checkpoint yet"
    print(f"{args.log}: {len(found.lines)} entries{after}")
    if found.torn:
        print(f"its last line was cut short after {found.torn} bytes; the next job that ends takes it away")
    return _other_files(found) if args.files else 0


def _other_files(found) -> int:
    """Say which files are not what the log says; returns 1 where there are some."""
    from kvlab_mechanisms.ledger.jobs import latest, others

    entries = found.entries()
    wrong, there = others(entries), sum(Path(file).exists() for file in latest(entries))
    print(f"{there - len(wrong)} of {there} files that are there are what their last job left")
    for file in wrong:
        print(f"{file} is another")
    return 1 if wrong else 0


def prove_verb(args: argparse.Namespace) -> None:
    """Write the proof that the job which made a file is in the log, and that the file is what it made."""
    from kvlab_mechanisms.ledger import checkpoint, log, proof

    found, known = log.read(args.log), _checkpoint(args)
    tree = checkpoint.verify(found, known)
    size = known.size if known else len(tree)
    number = proof.write(args.out, found, tree, args.file.as_posix(), size)
    print(f"{args.out}: {args.file} was made by entry {number} of {size}, root {tree.root(size).hex()}")


def checkpoint_verb(args: argparse.Namespace) -> None:
    """Write size and root of the log, after it was verified against the last checkpoint; keep the file in git."""
    from kvlab_mechanisms.ledger import checkpoint, log

    old = checkpoint.Checkpoint.read(args.checkpoint) if args.checkpoint.exists() else None
    key = key_of(args)
    if old and old.signature:
        if key is None:
            raise UserError(f"{args.checkpoint} is signed, and the next one would not be; give its --key FILE")
        old.refuse_unsigned(key)
    new = checkpoint.advance(log.read(args.log), old, key)
    new.write(args.checkpoint)
    print(f"{args.checkpoint}: {new.size} entries, {new.size - (old.size if old else 0)} of them new, root {new.root}")


def check_verb(args: argparse.Namespace) -> None:
    """Hold files against the schemas that their models declare; a line for everything that is wrong.

    Which schema is told by where a file lies: params.yaml, registry/mechanisms.yaml, results/gap/metrics/MODEL.json.
    """
    from kvlab_pipeline.cli.contracts import held

    for file in args.files:
        print(f"{file}: {held(file)}, as the schema says")


def _checkpoint(args: argparse.Namespace):
    """What is to be believed, or None where there is none yet."""
    from kvlab_mechanisms.ledger.checkpoint import Checkpoint

    place, key = args.checkpoint or Path(CHECKPOINT), key_of(args)
    known = Checkpoint.read(place) if place.exists() else None
    if key and known is None:
        raise UserError(f"--key is for a signed checkpoint, and there is no {place}")
    if key and known:
        known.refuse_unsigned(key)
    return known


LOGS = path("--log", f"the log; default: {LOG}", required=False, default=Path(LOG))
FILES: list[Flag] = [LOGS, path("--checkpoint", f"its checkpoint; default: {CHECKPOINT}", required=False)]
VERBS: dict[Callable, list[Flag]] = {
    verify_verb: [
        *(*FILES, CHECKING),
        path("--proof", "what `kvlab ledger prove` wrote: verified without the log", required=False),
        word("--files", "hold the files that are there against the log too", action="store_true"),
    ],
    prove_verb: [
        *(*FILES, CHECKING),
        ("file", {"type": Path, "metavar": "FILE", "help": "as a rule names it: results/gap/metrics/MODEL.json"}),
        result("--out", "the proof, JSON"),
    ],
    checkpoint_verb: [
        *(LOGS, SIGNING),
        result(
            "--checkpoint",
            "what is written, if it goes on from what is there",
            required=False,
            default=Path(CHECKPOINT),
        ),
    ],
    check_verb: [("files", {"type": Path, "metavar": "FILE", "nargs": "+", "help": "YAML or JSON"})],
}
