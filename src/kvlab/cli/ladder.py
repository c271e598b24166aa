"""The steps of the ladder beside its cells. Heavy imports are inside the verbs."""

from __future__ import annotations

import argparse

from kvlab.cli.flags import OUT, WINDOWS, path
from kvlab.cli.given import params_of

COMPONENTS = path("--components", "what `kvlab step components` wrote")
ARCHIVE = path("--archive", "what `kvlab step archive` wrote; needed by archive", required=False, nargs="?")
DOCUMENTS = path("--documents", "what `kvlab step corpus` kept; without, the corpus is read again", required=False)


def ladder_verb(args: argparse.Namespace) -> None:
    """Weigh the calibrations of the ladder's rungs as files, and measure the model's coding gain."""
    from kvlab.calibration.load import Fitted
    from kvlab.studies.ladder.facts import facts

    fitted = Fitted(args.sigma, None, args.components, None, args.archive)
    facts(params_of(args), args.windows, fitted, args.out)


def ladder_further_verb(args: argparse.Namespace) -> None:
    """Score codecs at longer contexts, and klt fitted on parts of the calibration."""
    from kvlab.calibration.load import Fitted
    from kvlab.studies.ladder.further import further

    further(params_of(args), args.windows, args.documents, Fitted(args.sigma, None, args.components, None), args.out)


def verbs(sigma) -> dict:
    """Both verbs with their flags."""
    shared = [WINDOWS, sigma, COMPONENTS]
    return {ladder_verb: [*shared, ARCHIVE, OUT], ladder_further_verb: [DOCUMENTS, *shared, OUT]}
