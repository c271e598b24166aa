"""One layer of the coded cache: rows per sequence and stream, and what attention is shown of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvlab.base.errors import CapabilityError
from kvlab.cache.coded_rows import Row, Straight, StreamCoder, Turn
from kvlab.codec.base import Encoded
from kvlab.codec.klt.joining import arrays_of

STREAMS = ("k", "v")


@dataclass(frozen=True)
class StreamCoding:
    """What one layer's K or V holds, and what was done to it.

    Attributes
    ----------
    layer, stream : int, {"k", "v"}
    fires : int
        Times that the codec encoded.
    read_back : int
        Decoded tokens handed to attention, over all calls.
    coded_tokens, exact_tokens : int
        Tokens in blocks, and tokens that are kept as they are or wait for their block to be complete, over all rows.
    coded_bytes, exact_bytes : int
        Bytes of their arrays. What beams share counts once, as tokens and as bytes.
    values : int
        Numbers that all these tokens are.
    """

    layer: int
    stream: Literal["k", "v"]
    fires: int
    read_back: int
    coded_tokens: int
    exact_tokens: int
    coded_bytes: int
    exact_bytes: int
    values: int

    @property
    def nbytes(self) -> int:
        """Coded and exact."""
        return self.coded_bytes + self.exact_bytes

    @property
    def bits_per_value(self) -> float:
        """Bits held per number held; NaN when there is none."""
        return 8 * self.nbytes / self.values if self.values else float("nan")


@dataclass(frozen=True)
class Call:
    """What the layers need to know of the running forward: new padding and the turn of each row."""

    pads: list[int]
    turns: list[Turn]


class CodecLayer(CacheLayerMixin):
    """K and V of one layer, one row per sequence of the batch.

    Parameters
    ----------
    coders : dict of str to StreamCoder
        By stream.
    turned : frozenset of str
        Streams that the codec sees before the rotary embedding.
    semantics : {"in_forward", "serving"}
        See `hf_cache`.
    keep_decoded : bool
        Hold a decoded copy of everything, rather than decode everything in every call.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, coders: dict[str, StreamCoder], turned: frozenset[str], semantics: str, keep_decoded: bool):
        super().__init__()
        self.coders, self.turned, self.semantics, self.keep_decoded = coders, turned, semantics, keep_decoded
        self.reset()

    def reset(self) -> None:
        """Forget all tokens and all counts."""
        self.rows: dict[str, list[Row]] = {stream: [] for stream in STREAMS}
        self.copies: dict[str, Tensor] = {}
        self.is_initialized = False
        for coder in self.coders.values():
            coder.fires = coder.read_back = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Empty rows for the batch that arrives."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.rows = {stream: [Row()] * key_states.shape[0] for stream in STREAMS}
        self.is_initialized = True

    @torch.no_grad()
    def update(self, key_states: Tensor, value_states: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Store the tokens of one call and give attention what it may see.

        Parameters
        ----------
        key_states, value_states : Tensor
            [batch, heads, tokens, head_dim].
        call : Call
            From `KVCache.update`.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._updated("k", key_states, call), self._updated("v", value_states, call)

    def _updated(self, stream: str, x: Tensor, call: Call) -> Tensor:
        old = None
        if self.semantics == "serving":
            old = self._view(stream, x, call)
            self._count_read(stream)
        news = self._append(stream, x, call)
        if self.keep_decoded:
            self._copy_news(stream, x, news, call)
        if old is not None:
            return torch.cat([old, x], dim=2)
        self._count_read(stream)
        return self._view(stream, x, call)

    def _append(self, stream: str, x: Tensor, call: Call) -> list[list[tuple[int, Encoded]]]:
        """Every row with its new tokens; what was coded, by row."""
        coder, news = self.coders[stream], []
        for index, row in enumerate(self.rows[stream]):
            pads = call.pads[index]
            row = replace(row, pads=row.pads + pads)
            self.rows[stream][index], new = coder.append(row, x[index, :, pads:], self._turn(stream, call, index))
            news.append(new)
        return news

    def _view(self, stream: str, like: Tensor, call: Call) -> Tensor:
        """What is stored as attention sees it [batch, heads, tokens, head_dim]."""
        if stream in self.copies:
            return self.copies[stream]
        coder = self.coders[stream]
        return torch.stack(
            [coder.view(row, self._turn(stream, call, i), like) for i, row in enumerate(self.rows[stream])]
        )

    def _copy_news(self, stream: str, x: Tensor, news: list[list[tuple[int, Encoded]]], call: Call) -> None:
        """Put what was just coded in its place in the decoded copy."""
        copied = torch.cat([self.copies[stream], x], dim=2) if stream in self.copies else x.clone()
        for index, row in enumerate(self.rows[stream]):
            copied[index, :, : row.pads] = 0
            for first, encoded in news[index]:
                decoded = self._turn(stream, call, index).redo(self.coders[stream].codec.decode(encoded), first)
                copied[index, :, first : first + encoded.shape[1]] = decoded.to(x.dtype)
        self.copies[stream] = copied

    def _turn(self, stream: str, call: Call, index: int) -> Turn:
        return call.turns[index] if stream in self.turned else Straight()

    def _count_read(self, stream: str) -> None:
        self.coders[stream].read_back += sum(row.coded for row in self.rows[stream])

    @property
    def is_croppable(self) -> bool:
        """Whether a crop leaves no trace: codes that can be cut where a token ends, and no last tokens kept exactly."""
        return all(coder.joiner is not None and not coder.kept.recent for coder in self.coders.values())

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self.rows["k"])

    def get_seq_length(self) -> int:
        """Tokens of each row, padding included."""
        return self.rows["k"][0].length if self.rows["k"] else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what attention sees."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens (a negative number), or all but the first ones (a positive number)."""
        length = kept(self.get_seq_length(), tokens_to_remove)
        for stream in STREAMS:
            self.rows[stream] = [self.coders[stream].cropped(row, length) for row in self.rows[stream]]
        self.copies = {stream: copied[:, :, :length].contiguous() for stream, copied in self.copies.items()}

    def select(self, indices: list[int]) -> None:
        """The rows of these indices, in their order; rows taken twice share their blocks."""
        self.rows = {stream: [rows[i] for i in indices] for stream, rows in self.rows.items()}
        self.copies = {stream: copied[indices] for stream, copied in self.copies.items()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """See `select`."""
        self.select(chosen(beam_idx, self.batch_size))

    def batch_select_indices(self, indices: Tensor) -> None:
        """See `select`."""
        self.select(chosen(indices, self.batch_size))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times; the copies share their blocks."""
        self.select(repeated(self.batch_size, repeats))

    def offload(self) -> None:
        """Refused: a coded cache is small and stays where it is."""
        raise CapabilityError("a coded cache cannot be offloaded; pass no cache_implementation beside it")

    prefetch = offload

    def coding(self, layer: int) -> list[StreamCoding]:
        """What is held, by stream."""
        return [self._held(layer, stream) for stream in STREAMS]

    def _held(self, layer: int, stream: str) -> StreamCoding:
        coder, rows = self.coders[stream], self.rows[stream]
        # by identity: rows that are beams of one prefix hold the very same blocks and tails
        blocks = list({id(block.encoded): block for row in rows for block in row.blocks}.values())
        ends = (end for row in rows for end in (row.head, row.tail) if end is not None)
        tails = list({id(end): end for end in ends}.values())
        coded, exact = sum(block.tokens for block in blocks), sum(tail.shape[1] for tail in tails)
        return StreamCoding(
            layer=layer,
            stream=stream,
            fires=coder.fires,
            read_back=coder.read_back,
            coded_tokens=coded,
            exact_tokens=exact,
            coded_bytes=sum(array.nbytes for block in blocks for array in arrays_of(block.encoded)),
            exact_bytes=sum(tail.nbytes for tail in tails),
            values=(coded + exact) * coder.values_per_token,
        )

    def fork(self) -> CodecLayer:
        """A layer of its own that shares the blocks, which never change."""
        twin = copy.copy(self)
        twin.coders = {stream: copy.copy(coder) for stream, coder in self.coders.items()}
        twin.rows = {stream: list(rows) for stream, rows in self.rows.items()}
        twin.copies = {stream: copied.clone() for stream, copied in self.copies.items()}
        return twin


def kept(length: int, tokens_to_remove: int) -> int:
    """Tokens left by a `crop`: of transformers' two meanings of its argument, by its sign."""
    if tokens_to_remove > 0:
        return min(length, tokens_to_remove)
    return max(0, length + tokens_to_remove)


def chosen(indices: Tensor, rows: int) -> list[int]:
    """Row numbers from an index or a mask; none while there are no rows, as in transformers' own caches."""
    if not rows:
        return []
    return torch.arange(rows)[torch.as_tensor(indices).cpu()].tolist()


def repeated(rows: int, times: int) -> list[int]:
    """Each row number `times` times, one after the other."""
    return [row for row in range(rows) for _ in range(times)]
