"""What transformers' `QuantizedCache` makes of a prompt, with optimum-quanto or HQQ behind it."""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import Field, model_validator

from kvlab.core.codec_settings import Conditioned, Plugin, Published, Values


class QuantizedCacheStream(Conditioned):
    """Groups of `group` values of an affine grid, found by `backend`; numbers beside the codes in the model's `dtype`.

    quanto's groups are neighbouring channels of a token; HQQ's along its first axis, as transformers asks for it, hold
    every value of the block at a distance of its 64th part; a prompt of at most `block_size` tokens is one block.
    """

    codec: Literal["quantized_cache"] = "quantized_cache"
    backend: Literal["quanto", "hqq"]
    bits: Literal[2, 4, 8]
    group: int = Field(default=64, ge=2, le=65536)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    @model_validator(mode="after")
    def _affine(self):
        if (self.backend, self.bits) == ("quanto", 8):
            raise ValueError("transformers calls quanto with 2 or 4 bits; allowed with 8: hqq")
        return self


def _cache(backend: str, bits: int, k: None, v: None, more: Values) -> Values:
    both = QuantizedCacheStream(backend=backend, bits=bits, **more)
    return {"k": both, "v": both, "rotary": "after"}


CODEC = Plugin(
    QuantizedCacheStream,
    "kvlab.codecs.quantized_cache.codec:QuantizedCacheCodec",
    as_published=True,
    published={
        f"{backend}-int{bits}": Published(
            partial(_cache, backend, bits),
            f"transformers 5.19, QuantizedCache(backend={backend!r}, nbits={bits}), with {package}",
            f"K after its rotary embedding and V, a prompt of theirs: {bits} bits in groups of 64",
            "generated tokens stay exact until there are 127, and are then coded anew together with all before",
            in_pipeline=True,
            fixed=True,
        )
        for backend, package, widths in (("quanto", "optimum-quanto 0.2.7", (4, 2)), ("hqq", "HQQ 0.2.8", (8, 4, 2)))
        for bits in widths
    },
)
