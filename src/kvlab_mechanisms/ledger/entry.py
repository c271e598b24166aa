"""What an entry of the log is, and the one way in which it is written.

An entry says of a job what it made of what: nothing of when, where or how long, so that the same work leaves the same
entry on every machine. The encoding is the canonical JSON of recipes: keys sorted, no spaces, ASCII. It holds texts
alone; two entries that differ anywhere are different bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from pydantic import Field, ValidationError

from kvlab.core.errors import StorageError, UserError
from kvlab.core.settings import Frozen

SHA256 = re.compile(r"[0-9a-f]{64}")
ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))  # canonical JSON, as `kvlab.core.recipe` writes it
Digests = dict[str, str]


class Entry(Frozen):
    """One job.

    Attributes
    ----------
    job : str
        Its rule, and its wildcards: ``sigma_engine engine=hf model=smollm2-135m``.
    inputs, outputs : dict of str to str
        sha256 of each file by its path, 64 hexadecimal digits; of a folder that of its files
        (`kvlab_mechanisms.ledger.jobs`).
    params : str
        sha256 of the job's parameters as Snakemake keeps them, the digests of its code among them.
    versions : dict of str to str
        Packages that decide a number.
    """

    job: str = Field(min_length=1)
    inputs: Digests
    outputs: Digests = Field(min_length=1)
    params: str
    versions: dict[str, str]


def encoded(entry: Entry) -> bytes:
    """The bytes of an entry, without the end of the line; `UserError` where a digest is none."""
    for path, digest in [*entry.inputs.items(), *entry.outputs.items(), ("the parameters", entry.params)]:
        if not SHA256.fullmatch(digest):
            raise UserError(f"the digest of {path} is {digest!r}; allowed: 64 hexadecimal digits of a sha256")
    return ENCODER.encode(vars(entry)).encode()


def decoded(line: bytes, place: str) -> Entry:
    """The entry of a line; `StorageError`, which names the `place`, for any other bytes than `encoded` writes."""
    try:
        data = json.loads(line)
        entry = Entry.model_validate(data) if isinstance(data, Mapping) else None
        right = entry is not None and encoded(entry) == line
    except (ValueError, RecursionError, ValidationError, UserError):
        right = False
    if not right:
        raise StorageError(f"{place} is no entry as the ledger writes them: it was changed, or is of another program")
    return entry
