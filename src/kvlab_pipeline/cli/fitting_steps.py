"""The steps that fit a calibration: from what is asked for to the files that codecs read. Heavy imports are inside."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from kvlab.cli.flags import CAPTURE, OUT, SIGMA, WINDOWS, Flag, path, word
from kvlab.cli.given import params_of


def asked_verb(args: argparse.Namespace) -> None:
    """Say which codecs of whole caches are asked for."""
    from kvlab.calibration.asked import write_asked

    write_asked(args.codecs, args.out)


def capture_verb(args: argparse.Namespace) -> None:
    """Capture Q, K and V of the calibration windows."""
    from kvlab.calibration.capture import capture

    capture(params_of(args), args.engine, args.windows, args.out, args.asked_for)


def sigma_verb(args: argparse.Namespace) -> None:
    """Fit Sigma_q."""
    from kvlab.calibration.sigma import fit_sigma

    fit_sigma(params_of(args), args.capture, args.out)


def codebooks_verb(args: argparse.Namespace) -> None:
    """Fit the Lloyd-Max tables."""
    from kvlab_pipeline.jobs.codebooks import fit_codebooks

    fit_codebooks(params_of(args), args.capture, args.sigma, args.rotated, args.out)


def components_verb(args: argparse.Namespace) -> None:
    """Fit the components of K and V."""
    from kvlab.calibration.components import fit_components

    fit_components(params_of(args), args.capture, args.sigma, args.out)


def archive_verb(args: argparse.Namespace) -> None:
    """Fit the codec of whole caches."""
    from kvlab.calibration.archive_file import write_archive

    write_archive(params_of(args), args.asked_for, args.capture, args.sigma, args.out)


ASKED = "what `kvlab step asked` wrote"
OF_PARAMS: dict[Callable, list[Flag]] = {
    capture_verb: [
        word("--engine", "hf or vllm", required=True),
        *(WINDOWS, path("--asked-for", f"{ASKED}; without, no codec of whole caches is", required=False), OUT),
    ],
    sigma_verb: [CAPTURE, OUT],
    codebooks_verb: [
        *(CAPTURE, SIGMA),
        path("--rotated", "the Sigma_q after the rotary embedding; needed by post_rope cells", required=False),
        OUT,
    ],
    components_verb: [CAPTURE, SIGMA, OUT],
    archive_verb: [path("--asked-for", ASKED), CAPTURE, SIGMA, OUT],
}
VERBS: dict[Callable, list[Flag]] = {
    asked_verb: [word("--codecs", "their names; none: nothing is asked for", nargs="*", default=[]), OUT],
}
