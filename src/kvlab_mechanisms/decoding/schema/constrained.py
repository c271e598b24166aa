"""Generation in transformers that a schema holds to its language: by xgrammar, or by the reference automaton.

XGrammar (Dong et al. 2024, 2411.15100) compiles to a pushdown automaton, so it takes all of JSON Schema and fills a
mask in about a microsecond; it is what to use. The reference is for tests, and for where xgrammar is not installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from kvlab.core.errors import CapabilityError, UnknownName
from kvlab_mechanisms.decoding.schema.automaton import Automaton
from kvlab_mechanisms.decoding.schema.json_schema import language
from kvlab_mechanisms.decoding.schema.tokens import END, TokenIndex

Backend = Literal["xgrammar", "reference"]


def constrained(
    schema: Mapping, tokenizer: PreTrainedTokenizerBase, vocabulary: int, backend: Backend = "xgrammar"
) -> LogitsProcessor:
    """A logits processor that allows texts of a schema alone; one for each call of `generate`.

    Parameters
    ----------
    vocabulary : int
        Of the model's logits.

    Raises
    ------
    ParamsError
        The reference does not read the schema.
    CapabilityError
        xgrammar is not installed.
    """
    if backend not in get_args(Backend):
        raise UnknownName("schema backend", backend, get_args(Backend))
    if backend == "reference":
        return SchemaProcessor(TokenIndex(Automaton(language(schema)), token_bytes(tokenizer), tokenizer.eos_token_id))
    try:
        import xgrammar
        from xgrammar.contrib.hf import LogitsProcessor as Processor
    except ModuleNotFoundError:
        raise CapabilityError(
            "this needs the package xgrammar, which vLLM brings; install it, or use backend='reference'"
        ) from None
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
    compiler = xgrammar.GrammarCompiler(info)
    return Processor(compiler.compile_json_schema(json.dumps(schema), any_whitespace=False, separators=(",", ":")))


class SchemaProcessor(LogitsProcessor):
    """The reference automaton in `generate`: what was there at the first call is the prompt."""

    def __init__(self, index: TokenIndex):
        self.index, self._prompt, self._states = index, -1, []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [rows, vocabulary] with minus infinity for what is not allowed; all is allowed after a row's end."""
        if self._prompt < 0:
            self._prompt, self._states = input_ids.shape[1], [self.index.start] * len(input_ids)
        elif input_ids.shape[1] > self._prompt:
            last = input_ids[:, -1].tolist()
            pairs = zip(self._states, last, strict=True)
            self._states = [state if state == END else self.index.advance(state, token) for state, token in pairs]
        rows = [
            row if state == END else self.index.constrain(row.clone(), state)
            for row, state in zip(scores, self._states, strict=True)
        ]
        return torch.stack(rows)


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> list[bytes | None]:
    """The bytes of each token of a byte-level BPE; None for special ones.

    Such a vocabulary writes a byte as a character that can be seen (Radford et al. 2019, GPT-2): printable Latin-1 as
    itself, the others as the code points from 256 on, in their order.

    Raises
    ------
    CapabilityError
        The vocabulary is of another kind.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    byte_of = {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    special, names = set(tokenizer.all_special_ids), tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    found = [None if i in special else name for i, name in enumerate(names)]
    if any(sign not in byte_of for token in found if token is not None for sign in token):
        raise CapabilityError("the reference automaton reads byte-level BPE vocabularies alone; use xgrammar")
    return [None if token is None else bytes(byte_of[sign] for sign in token) for token in found]
