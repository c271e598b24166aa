"""A GGUF file, as far as kvlab knows what it says: anything else in it is refused before a model is made of it."""

from __future__ import annotations

import re
from collections import Counter
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

from kvlab.core.errors import ModelError, suggestion
from kvlab.core.model import reason

ARCHITECTURES = MappingProxyType({"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"})
"""Those of GGUF files that are read, and the `model_type` that each is to transformers."""
SETTINGS = MappingProxyType(
    {
        "context_length": "max_position_embeddings",
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "attention.key_length": "head_dim",
        "vocab_size": "vocab_size",
    }
)
"""Settings of an architecture that go into config.json as they are, and their names there."""
READ = frozenset({*SETTINGS, "rope.freq_base", "rope.dimension_count", "attention.value_length"})
SLIDING = "attention.sliding_window"  # of gemma3; no other architecture here has one
BEGUN = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken")
"""Ways to split text (``tokenizer.ggml.pre``) of models whose texts begin with a token, unless a file says no."""
SPLITS = ("default", "gpt-2", "smollm", "qwen2", "deepseek-r1-qwen", *BEGUN)
"""All that transformers follows."""
TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4"),
)
"""Of tensors, as the package gguf names and dequantises them."""
UNKNOWN_TYPE = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")


class GgufFile:
    """A file, read by its header; the tensors are mapped, not loaded.

    Parameters
    ----------
    path : Path
        Of the file.

    Raises
    ------
    ModelError
        The file is none or is cut short (``model.broken-gguf``), is of an architecture (``model.architecture``), a kind
        of quantised tensor (``model.gguf-type``), a setting or a tokenizer (``model.gguf-setting``) that is not known.
    """

    def __init__(self, path: Path):
        self.path = path
        self._reader = _read(path)
        self.architecture = str(self.said("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"{path} is of architecture {self.architecture!r}; allowed: {', '.join(ARCHITECTURES)}"
                f"{suggestion(self.architecture, ARCHITECTURES)}",
                code="model.architecture",
            )
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._refuse_types()
        self._refuse_settings()

    def said(self, key: str, default: Any = None) -> Any:
        """What the metadata say under a key."""
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def setting(self, key: str, default: Any = None) -> Any:
        """The same of a key of the architecture's."""
        return self.said(f"{self.architecture}.{key}", default)

    @property
    def name(self) -> str:
        """What the file calls its model."""
        return str(self.said("general.name", self.path.stem))

    @property
    def begins_texts(self) -> bool:
        """Whether a text begins with a token that says so: as the file says, else as llama.cpp takes its kind."""
        kind, split = self.said("tokenizer.ggml.model"), self.said("tokenizer.ggml.pre")
        return bool(self.said("tokenizer.ggml.add_bos_token", kind == "llama" or split in BEGUN))

    @cached_property
    def tokens(self) -> list[str]:
        """The vocabulary, by id."""
        return self.said("tokenizer.ggml.tokens", [])

    @property
    def kinds(self) -> dict[str, float]:
        """The share of all weights that is stored as each type, the largest first."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            counts[tensor.tensor_type.name] += int(tensor.n_elements)
        return {kind: count / counts.total() for kind, count in counts.most_common()}

    def values(self, name: str) -> np.ndarray:
        """A tensor in float32, dequantised."""
        tensor = self.tensors[name]
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)

    def _refuse_types(self) -> None:
        for tensor in self.tensors.values():
            if tensor.tensor_type.name not in TYPES:
                raise _no_type(self.path, f"{tensor.tensor_type.name}, as of {tensor.name}")

    def _refuse_settings(self) -> None:
        """`ModelError` for what would change what the model computes, and is not read."""
        start = f"{self.architecture}."
        given = {key.removeprefix(start) for key in self._reader.fields if key.startswith(start)}
        unread = sorted(given - READ - ({SLIDING} if self.architecture == "gemma3" else set()))
        if unread:
            raise ModelError(
                f"{self.path} sets {start}{unread[0]} to {self.setting(unread[0])!r}, which is not read here; a model"
                " without it would be another one",
                code="model.gguf-setting",
            )
        lacking = [key for key in (*list(SETTINGS)[:-2], "rope.freq_base") if key not in given]
        if lacking:
            raise ModelError(f"{self.path} does not say {start}{lacking[0]}", code="model.gguf-setting")
        kind, expected = self.said("tokenizer.ggml.model"), "llama" if self.architecture == "gemma3" else "gpt2"
        if kind != expected:
            raise ModelError(
                f"{self.path} has a tokenizer of kind {kind!r}; allowed for {self.architecture}: {expected!r}",
                code="model.gguf-setting",
            )
        split = self.said("tokenizer.ggml.pre", "default")
        if split not in SPLITS:
            raise ModelError(
                f"{self.path} splits text as {split!r}; allowed: {', '.join(sorted(SPLITS))}"
                f"{suggestion(str(split), SPLITS)}",
                code="model.gguf-setting",
            )


def _read(path: Path) -> GGUFReader:
    """The reader of a whole file."""
    try:
        return GGUFReader(path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", code="model.broken-gguf") from None
    except Exception as error:  # numpy's and the reader's own, by where the file ends
        if found := UNKNOWN_TYPE.search(str(error)):
            raise _no_type(path, f"number {found[1]}") from None
        raise ModelError(
            f"{path} is no whole GGUF file ({reason(error)}); get it again", code="model.broken-gguf"
        ) from None


def _no_type(path: Path, kind: str) -> ModelError:
    return ModelError(
        f"{path} has tensors of type {kind}, which is not read; allowed: {', '.join(TYPES)}", code="model.gguf-type"
    )
