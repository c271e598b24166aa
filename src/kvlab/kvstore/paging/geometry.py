"""How the KV cache of a model is cut into chunks, and what one chunk's bytes are."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kvlab.core.counts import counted
from kvlab.core.errors import LayoutMismatch, UnknownName

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
K, V = 0, 1  # their places on the second axis of a chunk


@dataclass(frozen=True)
class Geometry:
    """Sizes of a paged KV cache.

    A chunk is `chunk_tokens` consecutive tokens of all layers. Its *payload* is a contiguous tensor of
    `chunk_shape` on the CPU: the very bits that attention reads, K after the rotary embedding.

    Parameters
    ----------
    layers, kv_heads, head_dim : int
        Of the model's full-attention layers, all from 1.
    dtype : {"float32", "bfloat16", "float16"}
        Of K and V.
    chunk_tokens : int
        From 1.

    Raises
    ------
    ParamsError
        When a size is not a whole number from 1.
    UnknownName
        When the dtype is none of these.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    chunk_tokens: int = 64

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UnknownName("dtype", self.dtype, DTYPES)
        for field in fields(self):
            if field.name != "dtype":
                counted(field.name, getattr(self, field.name), least=1)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch names it."""
        return DTYPES[self.dtype]

    @property
    def chunk_shape(self) -> tuple[int, int, int, int, int]:
        """(layers, 2, kv_heads, chunk_tokens, head_dim); K lies at 0 of the second axis, V at 1."""
        return self.layers, 2, self.kv_heads, self.chunk_tokens, self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of one token: K and V of all its layers and heads."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.torch_dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one payload."""
        return self.chunk_tokens * self.row_bytes

    def floor(self, tokens: int) -> int:
        """The largest multiple of `chunk_tokens` that is not above `tokens`."""
        return tokens - tokens % self.chunk_tokens

    def chunks(self, tokens: int) -> int:
        """Chunks that hold `tokens` tokens, the last one perhaps in part."""
        return -(-tokens // self.chunk_tokens)

    def check_chunk(self, chunk: Tensor) -> None:
        """`LayoutMismatch` unless this has the shape and dtype of a chunk, wherever it lies."""
        if tuple(chunk.shape) != self.chunk_shape or chunk.dtype != self.torch_dtype:
            wanted = f"{list(self.chunk_shape)} {self.dtype}"
            raise LayoutMismatch(
                f"a chunk is {wanted}; given was {list(chunk.shape)} {named(chunk.dtype)}", code="layout.chunk"
            )

    def check_payload(self, payload: Tensor) -> None:
        """`LayoutMismatch` unless this is a payload of this geometry."""
        self.check_chunk(payload)
        if payload.device.type != "cpu" or not payload.is_contiguous():
            raise LayoutMismatch(
                f"a payload is contiguous on the CPU; given was a strided one or on {payload.device}",
                code="layout.memory",
            )

    def check_rows(self, rows: Tensor) -> None:
        """`LayoutMismatch` unless this is K or V of one layer, [kv_heads, n, head_dim]."""
        shape = tuple(rows.shape)
        if len(shape) != 3 or (shape[0], shape[2], rows.dtype) != (self.kv_heads, self.head_dim, self.torch_dtype):
            wanted = f"[{self.kv_heads}, n, {self.head_dim}] {self.dtype}"
            raise LayoutMismatch(
                f"K and V of one layer are {wanted}; given was {list(shape)} {named(rows.dtype)}", code="layout.rows"
            )


def named(dtype: torch.dtype) -> str:
    """A dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape hold the same bytes: NaN equals itself, and 0 is not -0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
