"""`--key` of the verbs that write and read coded caches and snapshots: who made a file."""

from __future__ import annotations

import argparse

from kvlab.cli.flags import path

SIGNING = path("--key", "sign with this shared secret: a file of 32 bytes or more", required=False)
CHECKING = path("--key", "refuse what is not signed with this shared secret", required=False)


def key_of(args: argparse.Namespace):
    """The key that `--key` names; None without one.

    Raises
    ------
    StorageError
        The file cannot be read.
    UserError
        It is too short or too long for a key.
    """
    from kvlab.codecs.stream.seal import Key

    return None if args.key is None else Key.read(args.key)
