"""Write the finished model, check what was written, and put it in the place of the old one."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvlab.core.errors import ModelError, NonFinite, StorageError
from validation.reference.evaluate import HeldOutScore, evaluate

MAX_BYTES = 14_000_000
TOLERANCE = 0.01
SAMPLE = "Parameters\n----------\nx : array_like\n    Input data.\n\nReturns\n-------\n"


def write_model(model, tokenizer, folder: Path) -> None:
    """Save weights in bf16 and the tokenizer, in the layout of transformers."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes files that only their owner may read


def verify(folder: Path, tokenizer, texts: Sequence[str], trained: HeldOutScore) -> HeldOutScore:
    """Read the model back as a user would, and refuse it when it is not what was trained.

    Parameters
    ----------
    folder : Path
        The folder written by `write_model`.
    tokenizer
        The tokenizer as trained.
    texts : sequence of str
        The held-out documents.
    trained : Score
        Their score under the weights as trained, in fp32.

    Returns
    -------
    Score
        The score of the stored bf16 weights, computed in fp32.

    Raises
    ------
    ModelError
        If the folder is too large, the tokenizer reads text differently, or the perplexity moved.
    NonFinite
        If a logit is not finite.
    """
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > MAX_BYTES:
        raise ModelError(f"the model takes {size} bytes, the limit is {MAX_BYTES}")
    stored = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    ids = stored(SAMPLE)["input_ids"]
    if ids != tokenizer(SAMPLE)["input_ids"] or stored.decode(ids) != SAMPLE:
        raise ModelError("the stored tokenizer does not read text as the trained one does")
    for dtype in (torch.bfloat16, torch.float32):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False).eval()
        with torch.inference_mode():
            if not torch.isfinite(model(torch.tensor([ids])).logits).all():
                raise NonFinite(f"the stored model gives logits that are not finite in {dtype}")
    score = evaluate(model, stored, texts)
    if abs(score.perplexity / trained.perplexity - 1) > TOLERANCE:
        raise ModelError(f"stored perplexity {score.perplexity:.3f}, trained {trained.perplexity:.3f}")
    return score


def file_hashes(folder: Path) -> dict[str, dict]:
    """Bytes and sha256 of every file of the model."""
    return {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(folder.iterdir())
        if path.is_file()
    }


def replace(new: Path, out: Path) -> None:
    """Put folder `new` at `out`; the old folder is deleted only once the new one is in place."""
    old = out.with_name(f".{out.name}.old")
    try:
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
            out.rename(old)
        new.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        restore(out)
        raise StorageError(f"cannot put the model at {out}: {error}") from error


def restore(out: Path) -> None:
    """Bring the old folder back if a run was killed between the two renames."""
    old = out.with_name(f".{out.name}.old")
    if old.exists() and not out.exists():
        old.rename(out)
