"""Every stage of making the reference model, in order: trained on text, then on copying."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from kvlab.core.errors import ModelError, ParamsError
from kvlab.core.machine import cpu_name
from kvlab.text.docstrings import PACKAGES, Document, describe, extract, split
from validation.reference import copying, publish
from validation.reference.card import model_card
from validation.reference.evaluate import WINDOW, evaluate
from validation.reference.optimise import Progress, TrainingCheckpoint, TrainingRecipe, line_logger, optimise
from validation.reference.stream import batch, pack
from validation.reference.tokenizer import train_tokenizer

THREADS = 2
RECORDED = ("torch", "transformers", "tokenizers", "safetensors", "numpy")  # packages that made the model
COPYING = TrainingRecipe(tokens=5_000_000, learning_rate=1e-3, shapes=(*copying.FIRST, *copying.THEN), compiled=False)
TEXT_SHARE = 0.75  # of the minutes of a run with a ceiling
SIZE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def build(out: Path, tokens: int, max_minutes: float | None, resume: bool, copying_only: bool) -> None:
    """Extract the corpus, train tokenizer and model, verify them and put them at `out`.

    Parameters
    ----------
    out : Path
        The folder of the model.
    tokens : int
        Training tokens to spend on text.
    max_minutes : float or None
        Ceiling of the training loops together.
    resume : bool
        Continue a stopped run.
    copying_only : bool
        Leave the training on text as it is: take the model at `out`, and train it on copying.
    """
    if tokens < 1 or (max_minutes is not None and max_minutes <= 0):
        raise ParamsError(
            f"tokens and minutes must be above zero, not {tokens} and {max_minutes}", code="params.not-above-zero"
        )
    documents = extract()
    build_from(
        documents,
        describe(documents, PACKAGES),
        SIZE,
        TrainingRecipe(tokens),
        COPYING,
        out,
        max_minutes,
        resume,
        copying_only,
    )


def build_from(
    documents: list[Document],
    corpus: dict,
    size: dict,
    recipe: TrainingRecipe,
    lessons: TrainingRecipe,
    out: Path,
    max_minutes: float | None = None,
    resume: bool = False,
    copying_only: bool = False,
) -> None:
    """As `build`, for a given corpus, model size and recipes.

    Parameters
    ----------
    documents : list of Document
        The corpus.
    corpus : dict
        Its description, to be recorded.
    size : dict
        Arguments of ``Qwen2Config``.
    recipe, lessons : Recipe
        How to train on text, and on copying after it.
    out : Path
        The folder of the model.
    max_minutes : float or None
        Ceiling of the training loops together.
    resume : bool
        Continue a stopped run.
    copying_only : bool
        Train the model at `out` on copying alone.

    Raises
    ------
    ModelError
        The model at `out`, which is to go on, was made of another corpus or size, or has been trained on copying.
    """
    publish.restore(out)
    partial = _partial_folder(out, resume)
    torch.set_num_threads(THREADS)
    torch.manual_seed(recipe.seed)
    texts = {name: [document.text for document in side] for name, side in split(documents).items()}
    identity = {"corpus": corpus["sha256"], "size": size}
    if copying_only:
        tokenizer, model, run = _trained_on_text(out, corpus)
        stream, minutes = pack(tokenizer, texts["train"]), max_minutes
    else:
        text_minutes, minutes = _shared(max_minutes)
        tokenizer = train_tokenizer(texts["train"], size["vocab_size"], size["max_position_embeddings"])
        model, stream = Qwen2ForCausalLM(_config(size, tokenizer)), pack(tokenizer, texts["train"])
        run = _text_phase(stream, identity, recipe).run(model, partial, text_minutes, resume)
        run["training"]["stream_tokens"] = len(stream)
    phase = _copying_phase(stream, len(tokenizer), identity | {"text": run["recipe"]}, lessons)
    run |= {"copying": phase.run(model, partial, minutes, resume), "corpus": corpus}
    model_folder = partial / "model"
    finished = _finish(model, tokenizer, texts["test"], model_folder)
    run = finished | run
    (model_folder / "corpus.json").write_text(json.dumps(run["corpus"], indent=1) + "\n")
    (model_folder / "run.json").write_text(json.dumps(run, indent=1) + "\n")
    (model_folder / "README.md").write_text(model_card(run))
    publish.replace(model_folder, out)
    shutil.rmtree(partial)


@dataclass(frozen=True)
class Phase:
    """One training loop of a run, with a checkpoint and a log of its own."""

    name: str
    identity: dict
    recipe: TrainingRecipe
    batch: Callable

    def run(self, model, partial: Path, max_minutes: float | None, resume: bool) -> dict:
        """Train, from the phase's checkpoint if there is one to resume, and return the record of the phase.

        Raises
        ------
        ModelError
            The first phase has no checkpoint to resume from.
        """
        path, log = partial / f"checkpoint-{self.name}.pt", partial / f"progress-{self.name}.jsonl"
        begun = path.exists() or not any(partial.glob("checkpoint-*.pt"))
        checkpoint = TrainingCheckpoint(path, self.identity)
        logged = line_logger(log)
        progress = optimise(model, self.batch, self.recipe, max_minutes, checkpoint, resume and begun, logged)
        numbers = _training_numbers(progress, self.recipe, log)
        return {"recipe": asdict(self.recipe), "training": numbers, "machine": f"{THREADS} CPU threads ({cpu_name()})"}


def _text_phase(stream: Tensor, identity: dict, recipe: TrainingRecipe) -> Phase:
    """Training on the corpus' texts."""
    known = identity | {"recipe": asdict(recipe)}
    return Phase("text", known, recipe, lambda at, _: batch(stream, at.step, at.seen, recipe.shapes))


def _copying_phase(stream: Tensor, vocabulary: int, identity: dict, lessons: TrainingRecipe) -> Phase:
    """Training on copying, in texts of the corpus."""

    def lesson(at: Progress, done: float) -> Tensor:
        return copying.batch(stream, vocabulary, at.step, done, lessons.seed)

    return Phase("copying", identity | {"recipe": asdict(lessons)}, lessons, lesson)


def _shared(max_minutes: float | None) -> tuple[float | None, float | None]:
    """The minutes of both phases."""
    if max_minutes is None:
        return None, None
    return TEXT_SHARE * max_minutes, (1 - TEXT_SHARE) * max_minutes


def _trained_on_text(out: Path, corpus: dict) -> tuple:
    """Tokenizer, model in float32 and record of the text phase of the model at `out`."""
    try:
        run = json.loads((out / "run.json").read_text())
        tokenizer = PreTrainedTokenizerFast.from_pretrained(out)  # as it was trained, whatever the model's type
        for name in ("is_local", "local_files_only"):  # noted in loading, and not of the tokenizer
            tokenizer.init_kwargs.pop(name, None)
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"there is no model at {out} that could go on: {error}", code="model.none-there") from None
    if run["corpus"]["sha256"] != corpus["sha256"]:
        raise ModelError(f"the model at {out} was made of another corpus; train it anew", code="model.other-corpus")
    if "copying" in run:
        raise ModelError(
            f"the model at {out} was trained on copying already; train it anew", code="model.trained-already"
        )
    return tokenizer, model, {key: run[key] for key in ("recipe", "training", "machine")}


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
        "software": {"python": platform.python_version()} | {name: version(name) for name in RECORDED},
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


def _training_numbers(progress: Progress, recipe: TrainingRecipe, log: Path) -> dict:
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    spent = progress.seen >= recipe.tokens
    losses = {line["tokens"]: line["loss"] for line in lines}  # a resumed run repeats some steps
    return {
        "tokens": progress.seen,
        "steps": progress.step,
        "seconds": round(progress.seconds, 1),
        "ended": "its tokens were spent" if spent else "its time was up",
        "curve": [list(point) for point in losses.items()],
    }
