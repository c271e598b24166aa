"""What each verb of `kvlab kvstore` does, and its flags. Heavy imports happen inside the verbs."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from kvlab.flags import MODEL, PARAMS, Flag, path, place, word
from kvlab.per_model import read_params

ABOUT = """\
Studies of the paged KV cache and of its snapshots, on hf (docs/kvstore.md). Each writes a record; `page` makes it
readable.

  restore     cold against warm: identity, time, bytes, and what each codec makes of a snapshot
  policy      which chunks a bounded pool should keep: needles found, attention mass kept
  bitplanes   how well a few bits of each key rank what attention looks at
  placement   whether it matters in which block a chunk lies
  page        RESTORE.md, POLICY.md, BITPLANES.md or PLACEMENT.md from the records of all models
"""
STUDIES = ("restore", "policy", "bitplanes", "placement")
WINDOWS = path("--windows", "windows.safetensors of `kvlab corpus`")


def restore_verb(args: argparse.Namespace) -> None:
    """Measure whether a restored context says the same to the bit, and what restoring it saves."""
    from kvlab.calibration.load import Fitted
    from kvlab.kvstore.studies.restore import measure

    fitted = Fitted(args.sigma, None, args.components, None)
    measure(read_params(args.params, args.model), args.windows, fitted, args.out)


def policy_verb(args: argparse.Namespace) -> None:
    """Measure how many needles are found, and how much attention mass is kept, in a pool that holds a part of them."""
    from kvlab.kvstore.studies.policy import measure

    measure(read_params(args.params, args.model), args.needles, args.out)


def bitplanes_verb(args: argparse.Namespace) -> None:
    """Measure how well a few bits of each key rank what attention looks at."""
    from kvlab.kvstore.studies.bitplanes import measure

    measure(read_params(args.params, args.model), args.windows, args.out)


def placement_verb(args: argparse.Namespace) -> None:
    """Measure what it changes when the blocks of the pool lie in another order."""
    from kvlab.kvstore.studies.placement import measure

    measure(read_params(args.params, args.model), args.windows, args.out)


def page_verb(args: argparse.Namespace) -> None:
    """Write a study's page from the records of all models."""
    from kvlab.kvstore.page import write

    write(args.study, args.records, args.out)


OUT = path("--out", "the record, JSON")
ASKED = (PARAMS, MODEL)
VERBS: dict[Callable, list[Flag]] = {
    restore_verb: [
        *ASKED,
        WINDOWS,
        path("--sigma", "what `kvlab sigma` wrote"),
        path("--components", "what `kvlab components` wrote"),
        OUT,
    ],
    policy_verb: [*ASKED, path("--needles", "needles.parquet of `kvlab needles`"), OUT],
    bitplanes_verb: [*ASKED, WINDOWS, OUT],
    placement_verb: [*ASKED, WINDOWS, OUT],
    page_verb: [
        place("records", "of the same study, one for each model", nargs="+"),
        word("--study", "whose records they are", required=True, choices=STUDIES),
        path("--out", "the page, Markdown"),
    ],
}
