"""Steps of the studies that stand on pages of their own: what they measure, and the page of all models' records."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from kvlab.cli.flags import NEEDLES, OUT, SIGMA, WINDOWS, Flag, path, place, result, word
from kvlab.cli.given import params_of

STUDIES = ("restore", "policy", "tradeoffs", "bitplanes", "placement")


def restore_verb(args: argparse.Namespace) -> None:
    """Measure whether a restored context says the same to the bit, and what restoring it saves."""
    from kvlab.calibration.load import Fitted
    from kvlab_pipeline.studies.restore.measure import measure
    from kvlab_pipeline.studies.restore.record import Settings

    params, fitted = params_of(args), Fitted(args.sigma, components=args.components, archive=args.archive)
    measure(params, Settings.of(params), args.windows, fitted, args.out)


def policy_verb(args: argparse.Namespace) -> None:
    """Measure how many needles are found, and how much attention mass is kept, in a pool that holds a part of them."""
    from kvlab_pipeline.studies.policy.measure import measure

    measure(params_of(args), args.needles, args.out)


def tradeoffs_verb(args: argparse.Namespace) -> None:
    """Measure what codecs, evictions, latents, sparse reading and self-speculation cost and buy at equal bytes."""
    from kvlab.calibration.load import Fitted
    from kvlab_pipeline.studies.tradeoffs.measure import measure

    fitted = Fitted(args.sigma, components=args.components)
    measure(params_of(args), args.windows, args.documents, fitted, args.out)


def bitplanes_verb(args: argparse.Namespace) -> None:
    """Measure how well a few bits of each key rank what attention looks at."""
    from kvlab_pipeline.studies.bitplanes.measure import measure

    measure(params_of(args), args.windows, args.out)


def placement_verb(args: argparse.Namespace) -> None:
    """Measure what it changes when the blocks of the pool lie in another order."""
    from kvlab_pipeline.studies.placement.measure import measure

    measure(params_of(args), args.windows, args.out)


def page_verb(args: argparse.Namespace) -> None:
    """Write a study's page from the records of all models."""
    from kvlab_pipeline.studies.page import write

    write(args.study, args.records, args.out)


OF_PARAMS: dict[Callable, list[Flag]] = {
    restore_verb: [
        *(WINDOWS, SIGMA),
        path("--components", "what `kvlab step components` wrote"),
        path("--archive", "what `kvlab step archive` wrote; needed by archive", required=False, nargs="?"),
        OUT,
    ],
    policy_verb: [NEEDLES, OUT],
    tradeoffs_verb: [
        *(WINDOWS, SIGMA),
        path("--components", "what `kvlab step components` wrote"),
        path("--documents", "what `kvlab step corpus` kept of the test split"),
        OUT,
    ],
    bitplanes_verb: [WINDOWS, OUT],
    placement_verb: [WINDOWS, OUT],
}
VERBS: dict[Callable, list[Flag]] = {
    page_verb: [
        place("records", "of the same study, one for each model", nargs="+"),
        word("--study", "whose records they are", required=True, choices=STUDIES),
        result("--out", "the page, Markdown"),
    ],
}
