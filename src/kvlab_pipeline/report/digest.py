"""A result that says what it is: the digest of everything else in a JSON file.

It shows that a file was changed by hand or by accident after it was written. Who makes the digest anew as well is not
found out by it: that takes a signature.
"""

from __future__ import annotations

import hashlib

from kvlab.core.errors import StaleResult
from kvlab.core.recipe import canonical

DIGEST = "digest"


def digest_of(data: dict) -> str:
    """The sha256 of the canonical JSON of everything but the digest, 64 hexadecimal digits."""
    return hashlib.sha256(canonical({name: part for name, part in data.items() if name != DIGEST}).encode()).hexdigest()


def with_digest(data: dict) -> dict:
    """The same data with its digest."""
    return data | {DIGEST: digest_of(data)}


def refuse_broken(data: dict, origin: str, command: str) -> None:
    """`StaleResult`, which names `origin` and the `command` that makes it, unless the digest is that of the content."""
    if data.get(DIGEST) != digest_of(data):
        raise StaleResult(
            f"{origin} is not as it was written: its digest is another's; run `{command}` again", code="stale.changed"
        )
