"""Every stage of making the reference model, in order."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvlab.corpus_docstrings import PACKAGES, Document, describe, extract, split
from kvlab.errors import ParamsError
from kvlab.reference import publish
from kvlab.reference.card import model_card
from kvlab.reference.evaluate import WINDOW, evaluate
from kvlab.reference.machine import machine_class, software
from kvlab.reference.optimise import Checkpoint, Progress, Recipe, line_logger, optimise
from kvlab.reference.stream import pack
from kvlab.reference.tokenizer import train_tokenizer

THREADS = 2
SIZE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def build(out: Path, tokens: int, max_minutes: float | None, resume: bool) -> None:
    """Extract the corpus, train tokenizer and model, verify them and put them at `out`.

    Parameters
    ----------
    out : Path
        The folder of the model.
    tokens : int
        Training tokens to spend.
    max_minutes : float or None
        Ceiling of the training loop.
    resume : bool
        Continue a stopped run.
    """
    if tokens < 1 or (max_minutes is not None and max_minutes <= 0):
        raise ParamsError(f"tokens and minutes must be above zero, not {tokens} and {max_minutes}")
    documents = extract()
    build_from(documents, describe(documents, PACKAGES), SIZE, Recipe(tokens), out, max_minutes, resume)


def build_from(
    documents: list[Document],
    corpus: dict,
    size: dict,
    recipe: Recipe,
    out: Path,
    max_minutes: float | None = None,
    resume: bool = False,
) -> None:
    """As `build`, for a given corpus, model size and recipe.

    Parameters
    ----------
    documents : list of Document
        The corpus.
    corpus : dict
        Its description, to be recorded.
    size : dict
        Arguments of ``Qwen2Config``.
    recipe : Recipe
        How to train.
    out : Path
        The folder of the model.
    max_minutes : float or None
        Ceiling of the training loop.
    resume : bool
        Continue a stopped run.
    """
    publish.restore(out)
    partial = _partial_folder(out, resume)
    torch.set_num_threads(THREADS)
    torch.manual_seed(recipe.seed)
    texts = {name: [document.text for document in side] for name, side in split(documents).items()}
    tokenizer = train_tokenizer(texts["train"], size["vocab_size"], size["max_position_embeddings"])
    model = Qwen2ForCausalLM(_config(size, tokenizer))
    stream = pack(tokenizer, texts["train"])
    identity = {"corpus": corpus["sha256"], "size": size, "recipe": asdict(recipe)}
    checkpoint = Checkpoint(partial / "checkpoint.pt", identity)
    log = partial / "progress.jsonl"
    progress = optimise(model, stream, recipe, max_minutes, checkpoint, resume, line_logger(log))
    training = _training_numbers(progress, len(stream), recipe, log)
    model_folder = partial / "model"
    run = _finish(model, tokenizer, texts["test"], model_folder)
    run |= {"recipe": asdict(recipe), "training": training, "corpus": corpus}
    _write_records(model_folder, run)
    publish.replace(model_folder, out)
    shutil.rmtree(partial)


def _partial_folder(out: Path, resume: bool) -> Path:
    partial = out.with_name(f".{out.name}.partial")
    if not resume:
        shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True, exist_ok=True)
    (partial / ".gitignore").write_text("*\n")  # checkpoints are large and of no use to others
    return partial


def _config(size: dict, tokenizer) -> Qwen2Config:
    end = tokenizer.eos_token_id
    return Qwen2Config(**size, tie_word_embeddings=True, bos_token_id=end, eos_token_id=end, pad_token_id=None)


def _finish(model, tokenizer, test: list[str], folder: Path) -> dict:
    """Score the trained weights, write them, read them back and score them again."""
    shutil.rmtree(folder, ignore_errors=True)
    trained = evaluate(model.float(), tokenizer, test)
    parameters = model.num_parameters()
    publish.write_model(model, tokenizer, folder)
    stored = publish.verify(folder, tokenizer, test, trained)
    return {
        "model": _model_numbers(model.config, parameters),
        "test": {"window": WINDOW, "trained": asdict(trained), "stored": asdict(stored)},
        "machine": machine_class(THREADS),
        "software": software(),
        "files": publish.file_hashes(folder),
    }


def _model_numbers(config: Qwen2Config, parameters: int) -> dict:
    return {
        "architecture": "Qwen2ForCausalLM",
        "parameters": parameters,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "mlp": config.intermediate_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.hidden_size // config.num_attention_heads,
        "vocabulary": config.vocab_size,
        "positions": config.max_position_embeddings,
    }


def _training_numbers(progress: Progress, stream_tokens: int, recipe: Recipe, log: Path) -> dict:
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    spent = progress.seen >= recipe.tokens
    losses = {line["tokens"]: line["loss"] for line in lines}  # a resumed run repeats some steps
    return {
        "tokens": progress.seen,
        "steps": progress.step,
        "seconds": round(progress.seconds, 1),
        "stream_tokens": stream_tokens,
        "ended": "its tokens were spent" if spent else "its time was up",
        "curve": [list(point) for point in losses.items()],
    }


def _write_records(folder: Path, run: dict) -> None:
    (folder / "corpus.json").write_text(json.dumps(run["corpus"], indent=1) + "\n")
    (folder / "run.json").write_text(json.dumps(run, indent=1) + "\n")
    (folder / "README.md").write_text(model_card(run))
