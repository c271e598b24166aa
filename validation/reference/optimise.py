"""The training loop: schedule, steps, progress and checkpoints."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional
from tqdm import tqdm

from kvlab.core.errors import ModelError, NonFinite
from validation.reference.stream import SHAPES

LOG_EVERY = 25


@dataclass(frozen=True)
class TrainingRecipe:
    """How the model is trained; a checkpoint continues only under the recipe it began with."""

    tokens: int
    learning_rate: float = 2e-3
    warm_up: float = 0.02
    final_fraction: float = 0.02
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    shapes: tuple[tuple[int, int], ...] = SHAPES
    seed: int = 0
    compiled: bool = True


@dataclass
class Progress:
    """Where a run stands, over all its sittings."""

    step: int = 0
    seen: int = 0
    seconds: float = 0.0


class TrainingCheckpoint:
    """One file that holds all a run needs to go on.

    Parameters
    ----------
    path : Path
        The file.
    identity : dict
        What must be equal for a run to continue: corpus, recipe, model size.
    every : float
        Seconds between two saves.
    """

    def __init__(self, path: Path, identity: dict, every: float = 600.0):
        self.path, self.identity, self.every = path, identity, every
        self.saved_at = time.monotonic()

    def save_if_due(self, model, optimiser, progress: Progress) -> None:
        """Save when `every` seconds have passed since the last save."""
        if time.monotonic() - self.saved_at < self.every:
            return
        self.saved_at = time.monotonic()
        self.save(model, optimiser, progress)

    def save(self, model, optimiser, progress: Progress) -> None:
        """Write beside the file and rename, so that a kill leaves the former save."""
        state = {
            "identity": self.identity,
            "progress": asdict(progress),
            "model": model.state_dict(),
            "optimiser": optimiser.state_dict(),
        }
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.path)

    def load(self, model, optimiser) -> Progress:
        """Restore model and optimiser, and return where the run stood."""
        if not self.path.exists():
            raise ModelError("there is no checkpoint to resume from; start without resume", code="model.no-checkpoint")
        state = torch.load(self.path, weights_only=True)
        if state["identity"] != self.identity:
            raise ModelError(
                "the checkpoint belongs to another corpus or recipe; start without resume",
                code="model.other-checkpoint",
            )
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        return Progress(**state["progress"])


def make_optimiser(model, recipe: TrainingRecipe) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas, fused=True)


def learning_rate(recipe: TrainingRecipe, done: float) -> float:
    """Linear warm-up, then a cosine down to a small fraction.

    Parameters
    ----------
    recipe : Recipe
        The peak and the shape.
    done : float
        Share of the run that is done, 0 to 1.
    """
    if done < recipe.warm_up:
        return recipe.learning_rate * max(done / recipe.warm_up, 0.01)
    along = min(1.0, (done - recipe.warm_up) / (1 - recipe.warm_up))
    cosine = 0.5 * (1 + math.cos(math.pi * along))
    return recipe.learning_rate * (recipe.final_fraction + (1 - recipe.final_fraction) * cosine)


def share_done(recipe: TrainingRecipe, progress: Progress, max_minutes: float | None) -> float:
    """Share of the tokens or of the time, whichever is further on: a slow machine anneals too."""
    by_tokens = progress.seen / recipe.tokens
    by_time = progress.seconds / (60 * max_minutes) if max_minutes else 0.0
    return max(by_tokens, by_time)


def optimise(
    model,
    batch: Callable[[Progress, float], tuple[torch.Tensor, torch.Tensor]],
    recipe: TrainingRecipe,
    max_minutes: float | None,
    checkpoint: TrainingCheckpoint,
    resume: bool,
    log: Callable[[dict], None],
) -> Progress:
    """Train `model` in place until the tokens are spent or the time is up.

    Parameters
    ----------
    model : torch.nn.Module
        A causal language model of transformers.
    batch : callable
        The inputs and targets of a step, from where the run stands and the share of it that is done.
    recipe : Recipe
        How to train.
    max_minutes : float or None
        Ceiling of the training time, over all sittings.
    checkpoint : Checkpoint
        Where to save, and to resume from.
    resume : bool
        Continue from the checkpoint.
    log : callable
        Receives a dict of numbers every few steps.

    Returns
    -------
    Progress
        Steps, tokens and seconds of the whole run.
    """
    optimiser = make_optimiser(model, recipe)
    progress = checkpoint.load(model, optimiser) if resume else Progress()
    before, started = progress.seconds, time.monotonic()
    meter = Meter(recipe, progress, max_minutes, log)
    model.train()
    forward = torch.compile(model, dynamic=False) if recipe.compiled else model
    while (done := share_done(recipe, progress, max_minutes)) < 1:
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(recipe, done)
        inputs, targets = batch(progress, done)
        loss = train_step(model, forward, optimiser, inputs, targets, recipe.clip)
        progress.step += 1
        progress.seen += inputs.numel()
        progress.seconds = before + time.monotonic() - started
        meter.tick(loss, inputs.numel(), optimiser.param_groups[0]["lr"])
        checkpoint.save_if_due(model, optimiser, progress)
    meter.close()
    checkpoint.save(model, optimiser, progress)
    return progress


def train_step(model, forward, optimiser, inputs, targets, clip: float) -> float:
    """One update; the loss is the mean cross-entropy in nats per token."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = forward(input_ids=inputs, use_cache=False).logits
    loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    if not torch.isfinite(loss):
        raise NonFinite("the training loss is not finite; resume from the last checkpoint")
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return loss.item()


class Meter:
    """Reports loss, speed and remaining time, to a person on a terminal and to a log."""

    def __init__(self, recipe: TrainingRecipe, progress: Progress, max_minutes: float | None, log):
        self.recipe, self.progress, self.max_minutes, self.log = recipe, progress, max_minutes, log
        self.bar = tqdm(total=recipe.tokens, initial=progress.seen, unit="tok", unit_scale=True, disable=None)
        self.losses: list[float] = []
        self.mark = (progress.seen, progress.seconds)

    def tick(self, loss: float, tokens: int, rate: float) -> None:
        """Count one step, and log every few."""
        self.losses.append(loss)
        self.bar.update(tokens)
        if self.progress.step % LOG_EVERY:
            return
        seen, seconds = self.mark
        self.mark = (self.progress.seen, self.progress.seconds)
        done = share_done(self.recipe, self.progress, self.max_minutes)
        mean = sum(self.losses) / len(self.losses)
        self.losses.clear()
        self.bar.set_postfix(loss=f"{mean:.3f}")
        self.log(
            {
                "step": self.progress.step,
                "tokens": self.progress.seen,
                "loss": round(mean, 4),
                "learning_rate": float(f"{rate:.3g}"),
                "tokens_per_second": round((self.mark[0] - seen) / (self.mark[1] - seconds)),
                "minutes": round(self.progress.seconds / 60, 2),
                "minutes_left": round(self.progress.seconds / 60 * (1 / done - 1), 1),
            }
        )

    def close(self) -> None:
        """End the bar."""
        self.bar.close()


def line_logger(path: Path) -> Callable[[dict], None]:
    """A log that appends one JSON line per call."""

    def log(numbers: dict) -> None:
        with path.open("a") as file:
            file.write(json.dumps(numbers) + "\n")

    return log
