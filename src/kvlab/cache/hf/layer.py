"""One layer of the coded cache: rows per sequence and stream, and what attention is shown of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvlab.cache.hf.attention_view import Reader, Stored
from kvlab.cache.hf.coder import LOOSE, StreamCoder
from kvlab.cache.hf.decoded_window import DecodedColumns, Grant
from kvlab.cache.hf.sequences import Straight, TokenRow, Turn
from kvlab.cache.hf.served_call import ServedCall
from kvlab.codecs.klt.joining import arrays_of
from kvlab.core.errors import CapabilityError

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
        Tokens in blocks, and tokens that are kept as they are or wait for their block to be complete, over all rows. A
        layer of `served` codes what it keeps, too.
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
    """What the layers need to know of the running forward.

    Parameters
    ----------
    pads : list of int
        New padding of each row.
    turns : list of Turn
        Of each row.
    whole : bool
        Whether attention has to be given tensors, rather than what is stored.
    served : ServedCall or None
        What layers of `served` need to know, and no others.
    """

    pads: list[int]
    turns: list[Turn]
    whole: bool = True
    served: ServedCall | None = None


class CodecLayer(CacheLayerMixin):
    """K and V of one layer, one row per sequence of the batch.

    Parameters
    ----------
    coders : dict of str to StreamCoder
        By stream.
    turned : frozenset of str
        Streams that the codec sees before the rotary embedding.
    semantics : {"in_forward", "serving"}
        See `kv_cache`.
    readers : dict of str to Reader
        What reads the coded tokens of each stream.
    layer_bytes : int or None
        What may be held decoded beside what is stored; None for all of it.
    window : int or None
        Last tokens that a token sees, itself among them; None for all. What no later token sees is let go, a block at a
        time. Its column stays: the model's mask hides it.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(
        self,
        coders: dict[str, StreamCoder],
        turned: frozenset[str],
        semantics: str,
        readers: dict[str, Reader],
        layer_bytes: int | None,
        window: int | None = None,
    ):
        super().__init__()
        self.window = window
        for coder in coders.values() if window is not None else ():
            coder.size = coder.size or LOOSE  # tokens without end in one block could not be let go
        self.coders, self.turned, self.semantics, self.layer_bytes = coders, turned, semantics, layer_bytes
        self.readers = readers
        self.reset()

    def reset(self) -> None:
        """Forget all tokens and all counts."""
        self.rows: dict[str, list[TokenRow]] = {stream: [] for stream in STREAMS}
        self.windows = {stream: DecodedColumns() for stream in STREAMS}
        self.is_initialized = False
        for coder in self.coders.values():
            coder.fires = coder.read_back = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Empty rows for the batch that arrives."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.rows = {stream: [TokenRow()] * key_states.shape[0] for stream in STREAMS}
        self.is_initialized = True

    @torch.no_grad()
    def update(
        self, key_states: Tensor, value_states: Tensor, call: Call
    ) -> tuple[Tensor, Tensor] | tuple[Stored, Stored]:
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
        self._grant(key_states)
        found = [self._updated(stream, x, call) for stream, x in (("k", key_states), ("v", value_states))]
        self._let_go()
        return tuple(seen.whole() for seen in found) if call.whole else tuple(found)

    def refuse_faults(self) -> None:
        """Nothing: what cannot be coded is refused when it comes."""

    def _grant(self, x: Tensor) -> None:
        """Give K and V the room in the window that they have after `x`; first to the one that has to give some up."""
        granted = Grant.of(self.layer_bytes, x[:, :, :1].numel() * x.element_size())
        rooms = dict(zip(STREAMS, granted.rooms(self.get_seq_length() + x.shape[2]), strict=True))
        for stream in reversed(STREAMS):
            self.windows[stream].fit(rooms[stream], x)

    def _updated(self, stream: str, x: Tensor, call: Call) -> Stored:
        old = self._seen(stream, x, call, own=x) if self.semantics == "serving" else None
        if old is not None:
            self._count_read(stream)
        self._append(stream, x, call)
        if old is not None:
            return old
        self._count_read(stream)
        return self._seen(stream, x, call)

    def _append(self, stream: str, x: Tensor, call: Call) -> None:
        """Every row with its new tokens, and the window with what was coded of them."""
        before, window, turns = self.rows[stream][0].length, self.windows[stream], self._turns(stream, call)
        rows = [replace(row, pads=row.pads + pads) if pads else row for row, pads in self._with(stream, call.pads)]
        parts = [own[:, pads:] for own, pads in zip(x, call.pads, strict=True)]
        self.rows[stream], news = self.coders[stream].append(rows, parts, turns)
        window.extend(before, before + x.shape[2])
        for piece in news:
            window.put(piece, turns)

    def _let_go(self) -> None:
        if self.window is None:
            return
        seen = self.get_seq_length() + 1 - self.window  # the first column that the next token sees
        for stream, rows in self.rows.items():
            self.rows[stream] = [self.coders[stream].without(row, seen) for row in rows]

    def _with(self, stream: str, pads: list[int]) -> zip[tuple[TokenRow, int]]:
        return zip(self.rows[stream], pads, strict=True)

    def _seen(self, stream: str, like: Tensor, call: Call, own: Tensor | None = None) -> Stored:
        """What is stored, as attention may see it, with the call's own tokens after it."""
        return Stored(
            coder=self.coders[stream],
            reader=self.readers[stream],
            rows=tuple(self.rows[stream]),
            turns=self._turns(stream, call),
            window=self.windows[stream].seen,
            own=own,
            like=like,
        )

    def _turns(self, stream: str, call: Call) -> list[Turn]:
        return call.turns if stream in self.turned else [Straight()] * len(call.turns)

    def _count_read(self, stream: str) -> None:
        self.coders[stream].read_back += sum(row.coded for row in self.rows[stream])

    def decoded(self, stream: str, like: Tensor, call: Call) -> Tensor:
        """What is stored as a later call sees it [batch, heads, tokens, head_dim]."""
        return self._seen(stream, like, call).whole()

    @property
    def padding_and_held(self) -> list[tuple[int, int]]:
        """Padding of each row, and what is stored after it."""
        return [(row.pads, row.held) for row in self.rows["k"]]

    @property
    def is_croppable(self) -> bool:
        """Whether a crop leaves no trace: codes that can be cut where a token ends, and no last tokens kept exactly."""
        cuts = all(coder.joiner is not None and not coder.kept.recent for coder in self.coders.values())
        return cuts and self.window is None

    def block_size(self, stream: str) -> int | None:
        """Tokens of a block; None where a block has as many as come."""
        return self.coders[stream].size

    @property
    def working_bytes(self) -> int:
        """Of what is held decoded."""
        return sum(window.nbytes for window in self.windows.values())

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
        """Remove the last tokens (a negative number), or all but the first ones (a positive number).

        Raises
        ------
        CapabilityError
            The token after them would see some that the window had left, and that were let go.
        """
        length = kept(self.get_seq_length(), tokens_to_remove)
        let_go = max((row.start for rows in self.rows.values() for row in rows if row.gone), default=0)
        if self.window is not None and length + 1 - self.window < let_go:
            raise CapabilityError(
                f"the cache cannot go back to {length} tokens: a layer with a window of {self.window} has let go of its"
                f" first {let_go}; reset() it, or keep a copy.deepcopy of it to go back to",
                code="capability.left-the-window",
            )
        for stream in STREAMS:
            self.rows[stream] = [self.coders[stream].cropped(row, length) for row in self.rows[stream]]
            self.windows[stream].crop(length)

    def select(self, indices: list[int]) -> None:
        """The rows of these indices, in their order; rows taken twice share their blocks."""
        self.rows = {stream: [rows[i] for i in indices] for stream, rows in self.rows.items()}
        for window in self.windows.values():
            window.select(indices)

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
        raise CapabilityError(
            "a coded cache cannot be offloaded; pass no cache_implementation beside it", code="capability.offload"
        )

    prefetch = offload

    def coding(self, layer: int) -> list[StreamCoding]:
        """What is held, by stream."""
        return [self._held(layer, stream) for stream in STREAMS]

    def _held(self, layer: int, stream: str) -> StreamCoding:
        coder, rows = self.coders[stream], self.rows[stream]
        # by identity: rows that are beams of one prefix hold the very same blocks and tails
        blocks = list({id(block.encoded): block for row in rows for block in row.blocks}.values())
        loose = list({id(row.loose): row.loose for row in rows if row.loose is not None}.values())
        tails = list({id(end): end for row in rows for _, end in row.exact}.values())
        coded, exact = sum(block.tokens for block in blocks), sum(tail.shape[1] for tail in tails)
        coded += sum(map(len, loose))
        return StreamCoding(
            layer=layer,
            stream=stream,
            fires=coder.fires,
            read_back=coder.read_back,
            coded_tokens=coded,
            exact_tokens=exact,
            coded_bytes=sum(array.nbytes for block in blocks for array in arrays_of(block.encoded))
            + sum(part.nbytes for part in loose),
            exact_bytes=sum(tail.nbytes for tail in tails),
            values=(coded + exact) * coder.values_per_token,
        )

    def fork(self) -> CodecLayer:
        """A layer of its own that shares the blocks, which never change."""
        twin = copy.copy(self)
        twin.coders = {stream: copy.copy(coder) for stream, coder in self.coders.items()}
        twin.rows = {stream: list(rows) for stream, rows in self.rows.items()}
        twin.windows = {stream: window.fork() for stream, window in self.windows.items()}
        return twin


def kept(length: int, tokens_to_remove: int) -> int:
    """Tokens left by a `crop`: of transformers' two meanings of its argument, by its sign."""
    asked = int(tokens_to_remove)  # transformers 5.15 gives a tensor
    return min(length, asked) if asked > 0 else max(0, length + asked)


def chosen(indices: Tensor, rows: int) -> list[int]:
    """Row numbers from an index or a mask; none while there are no rows, as in transformers' own caches."""
    if not rows:
        return []
    return torch.arange(rows)[torch.as_tensor(indices).cpu()].tolist()


def repeated(rows: int, times: int) -> list[int]:
    """Each row number `times` times, one after the other."""
    return [row for row in range(rows) for _ in range(times)]
