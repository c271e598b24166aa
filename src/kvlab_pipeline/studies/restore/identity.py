"""Whether a warm run can be told from a cold one: by its tokens, by its logits, in another process, in a small pool."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from kvlab.core.model import ModelInfo
from kvlab.kvstore.hf.equality import logits_digest
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.restore import Restored, restore
from kvlab_pipeline.studies.restore.prompts import pool_of, shared_tokens, snapshot_of
from kvlab_pipeline.studies.restore.record import Evicted, RestoreSettings, RunAgreement


class Answer(NamedTuple):
    """What a run gave: tokens, digest of the logits after the prompt and after every token, tokens restored."""

    tokens: tuple[int, ...]
    logits: str
    prefix_len: int


class SharedPrompt(NamedTuple):
    """A prompt, and a snapshot of its beginning."""

    prompt: tuple[int, ...]
    snapshot: Path


def agreements(
    model: PagedModel, prompts: Sequence[Sequence[int]], settings: RestoreSettings, folder: Path, other: Executor
) -> tuple[RunAgreement, RunAgreement]:
    """Cold against warm, in this process and in `other`, which knows nothing but the files."""
    size, length = settings.chunk_tokens, len(prompts[0])
    config = pool_of(size, length + settings.decode)
    shared = shared_tokens(length, settings.suffix, size)
    asked = [
        SharedPrompt(
            tuple(prompt), snapshot_of(model, prompt[:shared], config, folder / f"{model.dtype}-{number}").path
        )
        for number, prompt in enumerate(prompts)
    ]
    bar = tqdm(asked, desc=f"cold {model.dtype}", unit="prompt")
    cold = [answer(model, one.prompt, None, config, settings.decode) for one in bar]
    warm = answers(model, asked, config, settings.decode)
    setting = (model.info, model.dtype, model.attention, torch.get_num_threads())
    apart = other.submit(answers_anew, *setting, asked, config, settings.decode).result()
    return agreement("this", model.dtype, settings, cold, warm), agreement("new", model.dtype, settings, cold, apart)


def agreement(
    process: str, dtype: str, settings: RestoreSettings, cold: Sequence[Answer], warm: Sequence[Answer]
) -> RunAgreement:
    """How many warm answers are the cold ones."""
    pairs = list(zip(cold, warm, strict=True))
    return RunAgreement(
        process=process,
        dtype=dtype,
        prompts=len(pairs),
        decode=settings.decode,
        prefix_len=min(one.prefix_len for one in warm),
        tokens_equal=sum(ours.tokens == theirs.tokens for ours, theirs in pairs),
        logits_equal=sum(ours.logits == theirs.logits for ours, theirs in pairs),
    )


def answers(model: PagedModel, asked: Sequence[SharedPrompt], config: PagerConfig, decode: int) -> list[Answer]:
    """Every prompt, from its snapshot."""
    return [answer(model, one.prompt, one.snapshot, config, decode) for one in asked]


def answers_anew(
    info: ModelInfo,
    dtype: str,
    attention: str,
    threads: int,
    asked: Sequence[SharedPrompt],
    config: PagerConfig,
    decode: int,
) -> list[Answer]:
    """The same in a process that has to load the model first; equal threads, for they decide the last bits."""
    torch.set_num_threads(threads)
    return answers(PagedModel.load(info, dtype, attention), asked, config, decode)


def answer(model: PagedModel, prompt: Sequence[int], snapshot: Path | None, config: PagerConfig, decode: int) -> Answer:
    """One prompt, cold without a snapshot; with one it has to be used."""
    done = restore(model, prompt, snapshot, config, mode="consume" if snapshot else "recompute")
    return answered(done, decode)


def answered(done: Restored, decode: int) -> Answer:
    """What a run gave, and what it then decodes."""
    decoded = done.run.decode(decode)
    return Answer(decoded.tokens, logits_digest(torch.cat([done.logits[None], decoded.logits])), done.report.prefix_len)


def evicted(
    model: PagedModel, prompts: Sequence[Sequence[int]], settings: RestoreSettings, folder: Path
) -> list[Evicted]:
    """Cold against warm where chunks have to go, policy by policy, by the restore that does both."""
    size, length = settings.chunk_tokens, len(prompts[0])
    config = pool_of(size, int(length * settings.pool))
    shared = shared_tokens(length, settings.suffix, size)
    found = []
    for policy in tqdm(settings.policies, desc="small pool", unit="policy"):
        said = []
        for number, prompt in enumerate(prompts[: settings.evicted_prompts]):
            made = snapshot_of(model, prompt[:shared], config, folder / f"{policy}-{number}", policy)
            said.append(restore(model, prompt, made.path, config, policy, mode="verify", decode=settings.decode).report)
        compared = [report.comparison for report in said if report.comparison]
        found.append(
            Evicted(
                policy=policy,
                pool_tokens=config.pool_tokens,
                prompts=len(said),
                restored=len(compared),
                prefix_len=min(report.prefix_len for report in said),
                page_outs=min(report.page_outs for report in said),
                tokens_equal=sum(one.tokens_equal for one in compared),
                residency_equal=sum(one.residency_equal for one in compared),
                max_abs_dlogit=max((one.max_abs_dlogit for one in compared), default=None),
            )
        )
    return found
