"""What `kvlab logits` runs once its inputs are checked. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from pathlib import Path

import numpy as np

from kvlab.cli.checked import info_of
from kvlab.core.errors import CorpusError
from kvlab.core.model import load_tokenizer
from kvlab.core.origin import told_of
from kvlab.engines.registry import start
from kvlab.measure.base_logits import BaseLogits, divergence
from kvlab.measure.quick_run import BOOTSTRAP
from kvlab.stats.bootstrap import Column, Estimate
from kvlab.text.corpus import bos
from kvlab.text.excerpts import FEWEST


@dataclass(frozen=True)
class TwoReferences:
    """Two references on the same tokens.

    Parameters
    ----------
    kl, top1 : Estimate
        Nats per token, from llama.cpp's to ours; the share of tokens whose most probable successor is the same.
    perplexity : tuple of float
        Of llama.cpp's and of ours.
    facts : dict
        Of what, on what.
    about : tuple of str
        The same in lines for people.
    """

    kl: Estimate
    top1: Estimate
    perplexity: tuple[float, float]
    facts: dict
    about: tuple[str, ...]

    def data(self) -> dict:
        """For programs."""
        found = {"kl": self.kl.to_json(), "top1": self.top1.to_json(), "perplexity": list(self.perplexity)}
        return self.facts | found


def compared(model: Path, base: BaseLogits, dtype: str, most: int) -> TwoReferences:
    """A model against llama.cpp's logits, over at most so many chunks, evenly spread.

    Raises
    ------
    CorpusError
        There is but one chunk.
    StorageError
        The file's numbers are no probabilities, or its tokens are outside of its vocabulary.
    """
    info = info_of(model)
    disclosure, prefix, count = told_of(info.path), bos(load_tokenizer(info)), min(most, base.chunks)
    if count < FEWEST:
        raise CorpusError(f"{base.path} holds {base.chunks} chunk; an interval needs {FEWEST}")
    chunks = [base.chunks * number // count for number in range(count)]
    kl, same, lost = [], [], []
    engine = start("hf", info, dtype, max_tokens=base.context)
    try:
        for chunk in chunks:
            ids = base.tokens[chunk].tolist()
            labels = np.array(ids[base.first + 1 :])
            given = [*prefix, *ids[len(prefix) :]]
            ours = engine.score(given, base.first).double().log_softmax(-1).cpu().numpy()
            theirs = base.log_probabilities(chunk)
            kl.append(divergence(theirs, ours))
            same.append(theirs.argmax(1) == ours.argmax(1))
            lost.append([one[np.arange(len(labels)), labels].clip(min=-50) for one in (theirs, ours)])
        device = engine.device
    finally:
        engine.close()
    window, position = np.indices((len(chunks), base.rows)).reshape(2, -1)
    columns = [Column.of(window, position, np.concatenate(one).astype(float)) for one in (kl, same)]
    perplexity = tuple(exp(-float(one)) for one in np.array(lost).mean((0, 2)))
    about = (
        f"{model}: {info.n_layers} layers, a vocabulary of {info.vocab_size}; transformers, {dtype}, {device}",
        *([disclosure] if disclosure else []),
        f"{len(chunks)} of {base.chunks} chunks of {base.context} tokens of {base.path}, of each the last {base.rows}",
    )
    facts = {
        "model": str(model),
        "model_hash": info.model_hash,
        "disclosure": disclosure,
        "base": str(base.path),
        "chunks": chunks,
        "context": base.context,
        "dtype": dtype,
        "device": device,
    }
    return TwoReferences(BOOTSTRAP.mean(columns[0]), BOOTSTRAP.rate(columns[1]), perplexity, facts, about)
