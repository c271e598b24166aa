"""What each verb of `kvlab ledger` does, and its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvlab.cli.commands import Verbs
from kvlab.cli.flags import CHECKING, SIGNING, path, place, result, switch
from kvlab.cli.given import key_of
from kvlab.core.errors import UserError

LEDGER = Verbs(
    """\
What was made of what: verify the log, prove an entry, make a checkpoint.

Every rule of the workflow adds to the log, and its past cannot be changed unseen (docs/trust.md).""",
    ends="""
Exit codes: 0 done, and as it was; 1 the log is another one, or files are; 2 the input is wrong.""",
)
# as in `kvlab_mechanisms.ledger`
LOG, CHECKPOINT = Path("results/ledger/log.jsonl"), Path("results/ledger/checkpoint.json")
Log = Annotated[Path, path(f"the log; default: {LOG}")]
Checkpoint = Annotated[Path | None, path(f"its checkpoint; default: {CHECKPOINT}")]
Key = Annotated[Path | None, CHECKING]


@LEDGER.verb
def verify_verb(
    log: Log = LOG,
    checkpoint: Checkpoint = None,
    key: Key = None,
    proof: Annotated[Path | None, path("what `kvlab ledger prove` wrote: verified without the log")] = None,
    files: Annotated[bool, switch("hold the files that are there against the log too", "--files")] = False,
) -> int:
    """Hold the log against its checkpoint and every line against what a line is; or a proof against the checkpoint.

    With --files, what the log says of files is held against those that are there.
    """
    from kvlab_mechanisms.ledger import checkpoint as checkpoints
    from kvlab_mechanisms.ledger import log as logs
    from kvlab_mechanisms.ledger import proof as proofs

    known = _checkpoint(checkpoint, key)
    if proof:
        if known is None:
            raise UserError(f"a proof is held against a checkpoint, and there is no {CHECKPOINT}")
        entry = proofs.read(proof, known)
        print(f"entry of {entry.job} is in the log of {known.size} entries: it made {', '.join(entry.outputs)}")
        return 0
    found = logs.read(log)
    checkpoints.verify(found, known)
    after = f", of which {known.size} are those of the checkpoint" if known else "; there is no checkpoint yet"
    print(f"{log}: {len(found.lines)} entries{after}")
    if found.torn:
        print(f"its last line was cut short after {found.torn} bytes; the next job that ends takes it away")
    return _other_files(found) if files else 0


def _other_files(found) -> int:
    """Say which files are not what the log says; returns 1 where there are some."""
    from kvlab_mechanisms.ledger.jobs import latest, others

    entries = found.entries()
    wrong, there = others(entries), sum(Path(file).exists() for file in latest(entries))
    print(f"{there - len(wrong)} of {there} files that are there are what their last job left")
    for file in wrong:
        print(f"{file} is another")
    return 1 if wrong else 0


@LEDGER.verb
def prove_verb(
    file: Annotated[Path, place("as a rule names it: results/gap/metrics/MODEL.json")],
    out: Annotated[Path, result("the proof, JSON")],
    log: Log = LOG,
    checkpoint: Checkpoint = None,
    key: Key = None,
) -> None:
    """Write the proof that the job which made a file is in the log, and that the file is what it made."""
    from kvlab_mechanisms.ledger import checkpoint as checkpoints
    from kvlab_mechanisms.ledger import log as logs
    from kvlab_mechanisms.ledger import proof as proofs

    found, known = logs.read(log), _checkpoint(checkpoint, key)
    tree = checkpoints.verify(found, known)
    size = known.size if known else len(tree)
    number = proofs.write(out, found, tree, file.as_posix(), size)
    print(f"{out}: {file} was made by entry {number} of {size}, root {tree.root(size).hex()}")


@LEDGER.verb
def checkpoint_verb(
    log: Log = LOG,
    key: Annotated[Path | None, SIGNING] = None,
    checkpoint: Annotated[Path, result("what is written, if it goes on from what is there")] = CHECKPOINT,
) -> None:
    """Write size and root of the log, after it was verified against the last checkpoint; keep the file in git."""
    from kvlab_mechanisms.ledger import checkpoint as checkpoints
    from kvlab_mechanisms.ledger import log as logs

    old = checkpoints.Checkpoint.read(checkpoint) if checkpoint.exists() else None
    key = key_of(key)
    if old and old.signature:
        if key is None:
            raise UserError(f"{checkpoint} is signed, and the next one would not be; give its --key FILE")
        old.refuse_unsigned(key)
    new = checkpoints.advance(logs.read(log), old, key)
    new.write(checkpoint)
    print(f"{checkpoint}: {new.size} entries, {new.size - (old.size if old else 0)} of them new, root {new.root}")


@LEDGER.verb
def check_verb(files: Annotated[list[Path], place("YAML or JSON")]) -> None:
    """Hold files against the schemas that their models declare; a line for everything that is wrong.

    Which schema is told by where a file lies: params.yaml, registry/mechanisms.yaml, results/gap/metrics/MODEL.json.
    """
    from kvlab_pipeline.cli.contracts import held

    for file in files:
        print(f"{file}: {held(file)}, as the schema says")


def _checkpoint(checkpoint: Path | None, key: Path | None):
    """What is to be believed, or None where there is none yet."""
    from kvlab_mechanisms.ledger.checkpoint import Checkpoint

    file, key = checkpoint or CHECKPOINT, key_of(key)
    known = Checkpoint.read(file) if file.exists() else None
    if key and known is None:
        raise UserError(f"--key is for a signed checkpoint, and there is no {file}")
    if key and known:
        known.refuse_unsigned(key)
    return known
