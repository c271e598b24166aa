"""The fitted `archive` codec of a model in the pipeline's calibration: one file for all bits."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvlab.calibration.archive import FILED, Archive, fit_archive
from kvlab.calibration.asked import read_asked
from kvlab.calibration.capture import Captured
from kvlab.calibration.components import Fitting, refuse_another_capture
from kvlab.calibration.facts import header_facts
from kvlab.calibration.metrics import ErrorMetrics
from kvlab.calibration.sigma import load_whiteners
from kvlab.core.errors import CalibrationMismatch
from kvlab.core.model import ModelInfo, resolve
from kvlab.core.params import Params
from kvlab.core.records import atomic, file_hash, to_header

IDENTITY = ("model_hash", "corpus_hash", "engine", "sigma_hash")


def write_archive(params: Params, asked: Path, capture: Path, sigma: Path, out: Path) -> None:
    """Fit the codec on a capture and write it: the tensors of `Archive.tensors`, and `IDENTITY` in the header.

    Where `asked` (of `kvlab step asked`) names none, the file holds no tensor: nobody may read it, and it says so.

    Raises
    ------
    CalibrationMismatch
        Capture and Sigma_q belong to another model, or not to each other.
    CapabilityError
        The capture holds nothing of layers together.
    """
    torch.set_num_threads(params.jobs.threads)
    info = resolve(params.model)
    captured = Captured(capture, info.model_hash)
    refuse_another_capture(captured, sigma)
    identity = captured.identity | {"sigma_hash": file_hash(sigma), "codecs": list(read_asked(asked))}
    tensors = {}
    if identity["codecs"]:
        whiteners = load_whiteners(sigma, info.model_hash)
        metrics = ErrorMetrics(info, captured.context)
        found = fit_archive(captured, Fitting(captured, whiteners, metrics, params.calibration.ridge), info)
        tensors = {f"{FILED}{name}": tensor.contiguous() for name, tensor in found.tensors.items()}
    with atomic(out) as temporary:
        save_file(tensors, temporary, metadata=to_header(identity))


def load_archive(path: Path, identity: dict[str, str], info: ModelInfo) -> Archive | None:
    """What `write_archive` wrote; None where it was for nobody.

    Parameters
    ----------
    identity : dict of str to str
        `IDENTITY`, as the header must say it.

    Raises
    ------
    CalibrationMismatch
        The file is missing, no such file, or of another identity; names what differs.
    """
    header = archive_identity(path)
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name in IDENTITY:
        if header[name] != identity[name]:
            raise CalibrationMismatch(
                f"{path} was fitted for {name} {header[name]}, this is {identity[name]};"
                " run `kvlab step archive` again",
                code="calibration.other-fit",
            )
    return Archive.read(path, tensors, info)


def archive_identity(path: Path) -> dict[str, str]:
    """`IDENTITY` as a file says it; `CalibrationMismatch` when it cannot be read, or is another file."""
    try:
        with safe_open(path, "pt") as file:
            found = header_facts(file.metadata(), path, dict.fromkeys(IDENTITY, str), "archive")
            return {name: found[name] for name in IDENTITY}
    except (OSError, SafetensorError) as error:
        raise CalibrationMismatch(
            f"cannot read {path}: {error}; run `kvlab step archive`", code="calibration.unreadable"
        ) from None
