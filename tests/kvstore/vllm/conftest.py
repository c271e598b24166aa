"""Engines of vLLM with the connector, each in its own process, and prompts of real text."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import logging
import textwrap
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvlab.core.model import ModelInfo, resolve
from kvlab.core.params import Model
from kvstore.vllm.served import Engine, Nursery

CHUNK = 16


@pytest.fixture(scope="session")
def reference(root) -> Path:
    return root / "models" / "reference"


@pytest.fixture(scope="session")
def info(reference) -> ModelInfo:
    return resolve(Model(path=str(reference), n_layers=6))


@pytest.fixture(scope="session")
def prompts(reference) -> list[list[int]]:
    """Twenty prompts of 150 to 400 tokens: documentation, as the model has learnt it."""
    modules = (argparse, contextlib, inspect, logging, textwrap)
    text = "\n".join(inspect.getdoc(thing) or "" for m in modules for _, thing in inspect.getmembers(m))
    ids = Tokenizer.from_file(str(reference / "tokenizer.json")).encode(text).ids
    lengths = [150 + 250 * n // 19 for n in range(20)]
    starts = [sum(lengths[:n]) for n in range(20)]
    assert len(ids) > sum(lengths)
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


@pytest.fixture(scope="session")
def nursery(tmp_path_factory):
    one = Nursery(tmp_path_factory.mktemp("nursery"))
    yield one
    one.close()


@pytest.fixture(scope="session")
def engine(nursery, reference, tmp_path_factory):
    """Without vLLM's own prefix cache; blocks of 32 tokens, chunks of 16."""
    folder = tmp_path_factory.mktemp("engine") / "snapshots"
    one = Engine(nursery, reference, folder, {"chunk_tokens": CHUNK, "across_engines": True}, block_size=32,
                 enable_prefix_caching=False)  # fmt: skip
    yield one
    one.close()


def whole(prompt: list[int]) -> int:
    """Tokens of a prompt that a snapshot can serve; the last one is always computed."""
    return (len(prompt) - 1) // CHUNK * CHUNK
