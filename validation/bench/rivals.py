"""The libraries that a user would pick, as they are called by the cache that HF transformers ships.

None of them is needed to run the bench; those that cannot be imported are named with how to install them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

import torch
from torch import Tensor

from kvlab.core.errors import CapabilityError

GROUP = 64  # of HF's `QuantizedCache`, its default
SLACK = 0.25  # bits; a lattice's range is the largest whose own declared bits exceed the nominal ones by no more
LARGEST_RANGE = 64
INSTALL = "pip install --no-deps -r requirements/bench.txt"


@dataclass(frozen=True)
class EncodedTensor:
    """What a library keeps of one tensor: its own object, and the size of the tensors in it."""

    held: object
    nbytes: float


@dataclass(frozen=True)
class LibraryCodec:
    """A library's quantiser at one setting: [heads, tokens, head_dim] there and back.

    Parameters
    ----------
    encode, decode : callable
        Tensor -> Stored; Stored -> Tensor.
    index_bits : float
        Bits per value of its codes alone.
    separate : bool
        False when encoding decodes too and decoding does nothing, so that only the former can be timed.
    """

    encode: Callable[[Tensor], EncodedTensor]
    decode: Callable[[EncodedTensor], Tensor]
    index_bits: float
    separate: bool = True


@dataclass(frozen=True)
class Library:
    """A library: its distribution, the module to look for, and how to make its quantiser.

    `make` takes nominal bits and head_dim; `CapabilityError` when the library has no such setting.
    """

    distribution: str
    module: str
    make: Callable[[int, int], LibraryCodec]

    @property
    def version(self) -> str | None:
        """The installed version; None when it cannot be imported."""
        try:
            return metadata.version(self.distribution) if find_spec(self.module) else None
        except (ModuleNotFoundError, metadata.PackageNotFoundError):
            return None


def nbytes(*tensors: Tensor) -> int:
    """Bytes of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def quantized_layer(name: str, axis: int, allowed: tuple[int, ...]) -> Callable[[int, int], LibraryCodec]:
    """A backend of HF's `QuantizedCache`, by the name of its layer class, grouping along `axis`."""

    def make(bits: int, head_dim: int) -> LibraryCodec:
        """See `Library.make`."""
        import transformers.cache_utils

        if bits not in allowed:
            raise CapabilityError(f"{name} has no {bits} bits for this cache; it has {', '.join(map(str, allowed))}")
        layer = getattr(transformers.cache_utils, name)(nbits=bits, axis_key=axis, axis_value=axis, q_group_size=GROUP)

        def encode(x: Tensor) -> EncodedTensor:
            layer.lazy_initialization(x[None], x[None])
            held = layer._quantize(x[None].contiguous(), axis)
            return EncodedTensor(held, nbytes(*stored_parts(held)))

        return LibraryCodec(encode, lambda stored: layer._dequantize(stored.held)[0].float(), float(bits))

    return make


def stored_parts(held: object) -> list[Tensor]:
    """Codes, scales and zeros of what a backend returned."""
    if isinstance(held, tuple):  # hqq: codes and a dictionary
        codes, meta = held
        return [codes, meta["scale"], meta["zero"]]
    return [held._data._data, held._scale, held._shift]  # quanto: a tensor subclass around packed codes


def lattice(class_name: str) -> Callable[[int, int], LibraryCodec]:
    """A lattice of `kakeyalattice`, which stores nothing: its bits are those that it declares."""

    def make(bits: int, head_dim: int) -> LibraryCodec:
        """See `Library.make`."""
        import kakeyalattice

        class_ = getattr(kakeyalattice, class_name)
        ranges = (class_(head_dim, q, device="cpu") for q in range(1, LARGEST_RANGE))
        fitting = [made for made in ranges if made.bits_per_token_per_head <= (bits + SLACK) * head_dim]
        if not fitting:
            raise CapabilityError(f"{class_name} has no range of {bits} bits at head_dim {head_dim}")
        codec = fitting[-1]
        declared = codec.bits_per_token_per_head / head_dim

        def encode(x: Tensor) -> EncodedTensor:
            return EncodedTensor(codec.roundtrip(x.float()), declared * x.numel() / 8)

        return LibraryCodec(encode, lambda stored: stored.held, declared - 32 / head_dim, separate=False)

    return make


LIBRARIES: dict[str, Library] = {
    "hqq": Library("hqq", "hqq.core.quantize", quantized_layer("HQQQuantizedLayer", 0, (2, 3, 4))),
    # Three bits on axis 1 fail inside hqq on a cache, whose tensors have four dimensions.
    "hqq-axis1": Library("hqq", "hqq.core.quantize", quantized_layer("HQQQuantizedLayer", 1, (2, 4))),
    "quanto": Library("optimum-quanto", "optimum.quanto", quantized_layer("QuantoQuantizedLayer", 0, (2, 4))),
    "kakeyalattice-d4": Library("kakeyalattice", "kakeyalattice", lattice("V14KakeyaZamirLatticeGPU")),
    "kakeyalattice-e8": Library("kakeyalattice", "kakeyalattice", lattice("V15KakeyaZamirE8GPU")),
}


def usable(library: Library) -> str | None:
    """Why a library cannot be used, None when it can; it is really run, on a small tensor.

    The first call may compile kernels, which must not be timed.
    """
    if library.version is None:
        return "not installed"
    try:
        rival = library.make(4, GROUP)
        rival.decode(rival.encode(torch.randn(1, GROUP, GROUP).bfloat16()))
    except Exception as error:  # whatever a library raises, its reason is printed and the bench goes on
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None
