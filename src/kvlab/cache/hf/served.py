"""`klt` of K after its rotary embedding in a transformers cache: the rows and the loops of vLLM's coded pages.

Every token has a row of bytes, K's and V's one after the other, and each sequence's first and last tokens are kept as
they were computed, too (`pages.exact`). Read exact are the tokens of a call, the last `recent` up to its first one, and
the first `sink`; all others are read coded. Without `recent` a call's last token is kept, which reads itself.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvlab.cache.hf.attention_view import Unopened
from kvlab.cache.hf.layer import STREAMS, Call, StreamCoding, kept
from kvlab.cache.hf.served_call import Sequences, ServedCall
from kvlab.cache.pages.exact import Ring, chunks_beside, singles_beside
from kvlab.cache.pages.layer import LayerPages
from kvlab.cache.pages.rope import MeanByPosition, Rotation
from kvlab.codecs.shared.apart import apart
from kvlab.core.errors import NonFinite

GRAIN = 64  # tokens by which the room of a sequence grows, or a sixteenth of what it holds


@dataclass(frozen=True, eq=False)
class ServedView(Unopened):
    """K or V of one layer in one call.

    Parameters
    ----------
    layer : ServedLayer
        Which holds the call's tokens already.
    stream : {"k", "v"}
        Which one this is.
    call : ServedCall
    own : pair of Tensor
        The call's K and V as they came [n, kv_heads, head_dim].
    exact : Tensor
        What was kept exact before the call, where a row has several tokens in it; else what is now.
    like : Tensor
        This one as it came [batch, kv_heads, tokens, head_dim].
    opened : dict
        What was decoded for K and V both, shared with the other view.
    """

    layer: ServedLayer
    stream: str
    call: ServedCall
    own: tuple[Tensor, Tensor]
    exact: Tensor
    like: Tensor
    opened: dict[str, Tensor]

    @property
    def columns(self) -> int:
        """See `Unopened`."""
        return self.call.after.columns

    @property
    def batch(self) -> int:
        """See `Unopened`."""
        return self.call.batch

    def attend(self, query: Tensor, value: ServedView, mask: Tensor | None, scale: float) -> Tensor | None:
        """See `Unopened`."""
        if not self.call.is_causal(mask):
            return None
        q, step, layer = self.call.flat(query), self.call.step, self.layer
        if layer.pages.on_gpu:
            if self.call.several:
                return None
            coded = layer.pages.attend_single(layer.held, q, self.call.span, step.coded(), scale)
            singles_beside(coded, q, layer.exact, step.exact, scale, loops=False)
        else:
            coded = layer.pages.attend(layer.held, q, step, scale, layer.exact)
            if self.call.several:
                chunks_beside(coded, q, *self.own, self.exact, step, scale)
        return self.call.unflat(coded.mean.to(query.dtype))

    @torch.compiler.disable
    @apart
    def whole(self) -> Tensor:
        """See `Unopened`."""
        if not self.opened:
            past = self.layer.past(self.layer.pages, self.call.before, self.exact, self.like)
            self.opened.update(zip(STREAMS, past, strict=True))
        return torch.cat([self.opened[self.stream], self.like], dim=2)


class ServedLayer(CacheLayerMixin):
    """K and V of one layer, a row of bytes for each token.

    Parameters
    ----------
    pages : LayerPages
        How they are coded; this layer's own.
    mean : Tensor
        Of K before its rotary embedding, float32 [kv_heads, head_dim].
    ring : Ring
        Of exact tokens.
    """

    is_sliding = False
    supports_early_init = False
    working_bytes = 0

    def __init__(self, pages: LayerPages, mean: Tensor, ring: Ring):
        super().__init__()
        self.pages, self.mean, self.ring = pages, mean, ring
        self.reset()

    def reset(self) -> None:
        """Forget all tokens and all counts."""
        self.sequences, self.is_initialized = Sequences(), False
        self.held, self.exact = torch.empty(0, 1, 0, self.pages.bytes, dtype=torch.uint8), torch.empty(0)
        self.fires = 0
        self.pages.forget()
        if self.pages.on_gpu:
            self.pages.faults.zero_()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Room for the batch that arrives."""
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, head_dim = key_states.shape
        self.held = key_states.new_empty(batch, 1, 0, self.pages.bytes, dtype=torch.uint8)
        self.exact = key_states.new_zeros(2, batch, heads, self.ring.tokens, head_dim)
        self.is_initialized = True

    def call(self, pads: list[int], tokens: int, device: torch.device) -> ServedCall:
        """A forward of so many columns, of which each row's first ones are padding."""
        before = self.sequences if self.sequences.pads else Sequences.empty(len(pads))
        after = before.after(pads, tokens)
        most, capacity = max(after.lengths), self.held.shape[2]
        if most > capacity:
            capacity = most + max(GRAIN, most // 16)
        return ServedCall(before, after, tokens, capacity, self.ring, device)

    def turn(self, rotation: Rotation) -> None:
        """Take the rotary embedding of all positions up to some."""
        self.pages.rotation = MeanByPosition(rotation, self.mean)

    @torch.no_grad()
    def update(self, key_states: Tensor, value_states: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Store the tokens of one call and give attention what it may see; see `CodecLayer.update`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        served = call.served
        self._fit(served.capacity)
        self.sequences, exact = served.after, self.exact
        own = served.flat(key_states), served.flat(value_states.to(key_states.dtype))  # autocast leaves K in float32
        if served.rows:
            exact = exact.clone() if served.several else exact
            self.pages.write(*own, self.held, served.own_slots, served.positions, served.step.exact, self.exact)
            self.fires += len(served.rows)
        if not served.before.columns:
            return key_states, value_states
        both, opened = zip(STREAMS, (key_states, value_states), strict=True), {}
        seen = [ServedView(self, stream, served, own, exact, like, opened) for stream, like in both]
        return tuple(part.whole() for part in seen) if call.whole or not served.rows else tuple(seen)

    def refuse_faults(self) -> None:
        """`NonFinite` after a call that gave some layer a token which cannot be coded; asked on a GPU, once a call."""
        if self.pages.on_gpu and self.pages.faults.item():
            raise NonFinite(
                "a value of K or V of this call is NaN, infinite, or so large that its components do not fit float32",
                code="non-finite.call",
            )

    def _fit(self, capacity: int) -> None:
        if capacity > (had := self.held.shape[2]):
            held = self.held.new_empty(len(self.held), 1, capacity, self.pages.bytes)
            held[:, :, :had] = self.held
            self.held = held

    def decoded(self, stream: str, like: Tensor, call: Call) -> Tensor:
        """What is stored as a later call sees it [batch, heads, tokens, head_dim]; counted as no attention's."""
        return self.past(copy.copy(self.pages), self.sequences, self.exact, like)[STREAMS.index(stream)]

    def past(self, pages: LayerPages, before: Sequences, exact: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """K and V that a call reads of tokens before it, [batch, heads, columns, head_dim] in `like`'s dtype.

        `exact` is what was kept when it began. Padding is zero.
        """
        capacity = self.held.shape[2]
        k, v = (like.new_zeros(len(before.pads), like.shape[1], before.columns, like.shape[3]) for _ in STREAMS)
        ends = zip(before.pads, before.lengths, before.coded(self.ring), strict=True)
        for row, (pads, length, (first, until)) in enumerate(ends):
            positions = torch.arange(first, until)
            coded = pages.read(self.held, row * capacity + positions, positions) if until > first else None
            places = self.ring.place(torch.arange(until, length))
            for which, own in enumerate((k[row, :, pads:], v[row, :, pads:])):
                own[:, :first] = exact[which, row, :, :first]
                own[:, until:] = exact[which, row][:, places]
                if coded is not None:
                    own[:, first:until] = coded[which]
        return k, v

    def block_size(self, stream: str) -> int:
        """Every token is coded by itself."""
        return 1

    @property
    def padding_and_held(self) -> list[tuple[int, int]]:
        """Padding of each row, and its tokens after that."""
        return list(zip(self.sequences.pads, self.sequences.lengths, strict=True))

    @property
    def is_croppable(self) -> bool:
        """Whether a crop leaves no trace: what is recent is read coded after one."""
        return self.ring.recent <= 1

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self.sequences.pads)

    def get_seq_length(self) -> int:
        """Tokens of each row, padding included."""
        return self.sequences.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what attention sees."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens (a negative number), or all but the first ones (a positive number)."""
        self.sequences = self.sequences.cropped(kept(self.get_seq_length(), tokens_to_remove), self.ring.recent)

    def select(self, indices: list[int]) -> None:
        """The rows of these indices, in their order."""
        self.sequences = self.sequences.chosen(indices)
        if self.is_initialized:
            self.held, self.exact = self.held[indices], self.exact[:, indices]

    def coding(self, layer: int) -> list[StreamCoding]:
        """What is held, by stream; tokens that are kept exact are coded too."""
        heads, head_dim = self.mean.shape
        tokens = sum(self.sequences.lengths)
        ends = zip(self.sequences.lengths, self.sequences.coded(self.ring), strict=True)
        exact = sum(first + length - until for length, (first, until) in ends)
        return [
            StreamCoding(
                layer=layer,
                stream=stream,
                fires=self.fires,
                read_back=self.pages.read_back,
                coded_tokens=tokens,
                exact_tokens=exact,
                coded_bytes=self.held.shape[0] * self.held.shape[2] * getattr(self.pages, stream).bytes,
                exact_bytes=self.exact.nbytes // 2,
                values=tokens * heads * head_dim,
            )
            for stream in STREAMS
        ]

    def fork(self) -> ServedLayer:
        """A layer of its own."""
        twin = copy.copy(self)
        twin.pages, twin.held, twin.exact = copy.copy(self.pages), self.held.clone(), self.exact.clone()
        return twin


def with_faults(layers: list[ServedLayer]) -> list[ServedLayer]:
    """Layers of one cache, which on a GPU note in one place of their own what cannot be coded."""
    if layers[0].pages.on_gpu:
        faults = torch.zeros_like(layers[0].pages.faults)
        for layer in layers:
            layer.pages.faults = faults
    return layers
