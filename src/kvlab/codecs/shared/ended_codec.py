"""Tokens at both ends of a cache left as they are, around any codec: attention sinks and the latest tokens.

KIVI (arXiv 2402.02750) keeps the last tokens in 16 bits, OSCAR (arXiv 2605.17757) the first and the last ones, KVQuant
(arXiv 2401.18079) the first one. What is kept is a block of the stream like any other, and counts with its 16 bits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvlab.codecs.base import Codec, Encoded, Place, Site, block_index, checked, finite, stored
from kvlab.codecs.shared.apart import apart
from kvlab.codecs.shared.exact_tokens import ExactTokens
from kvlab.core.errors import StreamError

HALVES = (torch.float16, torch.bfloat16)


class EndedCodec:
    """A codec for the tokens between both ends, which are stored in 16 bits.

    A 16-bit tensor's ends are stored as they are, those of a wider one as float16, or as bfloat16 where float16
    has no such numbers. The blocks of a coded tensor are the first tokens, those of the codec, and the last tokens;
    an end without tokens has no block. What is kept depends on where a token stands, so that such a codec codes no
    token by itself.

    Parameters
    ----------
    codec : Codec
        What codes the others.
    kept : Kept
    """

    per_token = False

    def __init__(self, codec: Codec, kept: ExactTokens):
        self.codec, self.kept = codec, kept

    @apart
    def encode(self, x: Tensor, site: Site) -> Encoded:
        """See `Codec.encode`."""
        checked(x, site)
        sizes = self.kept.split(x.shape[1])
        first, middle, last = x.detach().split(sizes, dim=1)
        inner = self.codec.encode(middle, site) if sizes[1] else None
        ends = [((sixteen(part),),) if part.shape[1] else () for part in (first, last)]
        found = Encoded(tuple(x.shape), site.layer, site.stream, (), (*ends[0], *ends[1]))
        if inner is None:
            return found
        blocks = (*ends[0], *inner.blocks, *ends[1])
        return replace(found, shared=inner.shared, blocks=blocks, stats=inner.stats, packed=inner.packed)

    @apart
    def decode(self, encoded: Encoded) -> Tensor:
        """See `Codec.decode`."""
        (sink, middle, recent), inner = self._parts(encoded)
        parts = [self._end(encoded, 0, sink)] if sink else []
        parts += [self.codec.decode(inner)] if middle else []
        parts += [self._end(encoded, -1, recent)] if recent else []
        return torch.cat(parts, dim=1)

    @apart
    def decode_block(self, encoded: Encoded, index: int) -> tuple[Place, Tensor]:
        """See `Codec.decode_block`."""
        (sink, middle, recent), inner = self._parts(encoded)
        block_index(encoded, index)
        if sink and index == 0:
            return (slice(None), slice(0, sink)), self._end(encoded, 0, sink)
        if recent and index == len(encoded.blocks) - 1:
            return (slice(None), slice(sink + middle, sink + middle + recent)), self._end(encoded, index, recent)
        (heads, tokens), values = self.codec.decode_block(inner, index - (sink > 0))
        moved = slice(tokens.start + sink, tokens.stop + sink) if isinstance(tokens, slice) else tokens + sink
        return (heads, moved), values

    def _parts(self, encoded: Encoded) -> tuple[tuple[int, int, int], Encoded]:
        """How the tokens are divided, and what the codec between the ends stored of them."""
        sizes, count = self.kept.split(encoded.shape[1]), len(encoded.blocks)
        ends = (sizes[0] > 0) + (sizes[2] > 0)
        if encoded.shape[1] < 1 or count < ends or (not sizes[1] and (count > ends or encoded.shared)):
            raise StreamError(f"{count} blocks cannot hold {encoded.shape[1]} tokens, of which {sizes[1]} are coded")
        heads, _, head_dim = encoded.shape
        blocks = encoded.blocks[int(sizes[0] > 0) : count - (sizes[2] > 0)]
        return sizes, replace(encoded, shape=(heads, sizes[1], head_dim), blocks=blocks)

    def _end(self, encoded: Encoded, index: int, tokens: int) -> Tensor:
        """The tokens of one end, float32."""
        heads, _, head_dim = encoded.shape
        arrays = encoded.blocks[index]
        dtype = arrays[0].dtype if arrays and arrays[0].dtype in HALVES else torch.float16
        (values,) = stored(arrays, (dtype, (heads, tokens, head_dim)))
        return finite(values.float(), "a block of tokens kept as they are")


def sixteen(x: Tensor) -> Tensor:
    """The tokens in 16 bits, contiguous, no view of what they are taken from."""
    if x.dtype in HALVES:
        return x.contiguous().clone()
    half = x.to(torch.float16)
    return (half if bool(torch.isfinite(half).all()) else x.to(torch.bfloat16)).contiguous()
