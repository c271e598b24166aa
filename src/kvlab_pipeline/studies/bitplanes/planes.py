"""Keys by a few bits each: signs, signs with a coarse size, three bits; and how the published study read them.

A group of a key is divided by its norm and coded by the table of N(0, 1), as its coordinates after a rotation are
close to (TurboQuant, Zandieh et al. 2025, arXiv 2504.19874, section 3.1). The published table,
+-{0.0215, 0.0657, 0.1178, 0.1907}, is this one divided by the root of its group of 128. Norms are stored in float16.

Codes 0..7 ascend and are antisymmetric: the size of a number is ``code - 4`` of a positive and ``3 - code`` of a
negative one. So a code's first bit is the sign, and the next one is the coarse size once it is folded so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvlab.codecs.shared.quantizer import codes, density, gaussian_table
from kvlab.codecs.shared.rotation import rotate
from kvlab.core.errors import CapabilityError
from kvlab_pipeline.studies.bitplanes.record import Basis

NORM_BITS = 16
FULL_BITS = 16  # a number of K that is kept whole, as caches are stored
PUBLISHED_GROUP, SLIPPED_GROUP = 128, 32  # of its table, and of the norms that were used with it
ROTATION_SEED = 0
MEAN_SIZE = (2 / torch.pi) ** 0.5  # of a number of N(0, 1)


@dataclass(frozen=True)
class PlanesVariant:
    """One way to store keys.

    Parameters
    ----------
    name : str
    bits : int or None
        Of a number; None where nothing is stored.
    read : callable or None
        What scoring reads of the keys, [..., head_dim]; None of the arm that scores at random.
    group : int or None
        Numbers that share a norm, as it was asked for.
    """

    name: str
    bits: int | None
    read: Callable[[Tensor], Tensor] | None
    group: int | None = None

    def width(self, head_dim: int) -> int | None:
        """How many numbers of such a key share a norm."""
        return None if self.group is None else width_of(self.group, head_dim)

    def bits_per_key(self, head_dim: int) -> float | None:
        """Every stored bit of one key, norms included."""
        width = self.width(head_dim)
        return None if self.bits is None else self.bits * head_dim + (NORM_BITS * head_dim / width if width else 0)


def arms(groups: tuple[int, ...]) -> list[PlanesVariant]:
    """Random, sign, sign and norm, top two bits, three bits, and the keys themselves."""
    grouped = [
        PlanesVariant(name, bits, partial(read, group=group), group)
        for name, bits, read in (("sign + norm", 1, sign_and_norm), ("top 2 bits", 2, top_two), ("3 bits", 3, three))
        for group in groups
    ]
    return [
        PlanesVariant("random", None, None),
        PlanesVariant("sign", 1, signs),
        *grouped,
        PlanesVariant("full", FULL_BITS, lambda keys: keys),
    ]


def controls() -> list[PlanesVariant]:
    """Mistakes of the published study: its two lower bits, norms of 32 under the table of 128, and another head."""
    return [
        PlanesVariant("low 2 bits", 2, partial(low_two, group=PUBLISHED_GROUP), PUBLISHED_GROUP),
        PlanesVariant("3 bits, table of 128", 3, mismatched, SLIPPED_GROUP),
        PlanesVariant("full, KV head 0", FULL_BITS, lambda keys: keys[:1].expand_as(keys)),
    ]


def turned(x: Tensor, basis: Basis) -> Tensor:
    """Keys or queries [..., head_dim] in a basis, float64; products of both are the same in every one.

    Raises
    ------
    CapabilityError
        When the dimension is no power of two, which the rotation needs.
    """
    width = x.shape[-1]
    if basis == "raw":
        return x.double()
    if width & (width - 1):
        raise CapabilityError(
            f"keys of {width} numbers cannot be rotated; their number has to be a power of two",
            code="capability.no-power-of-two",
        )
    return rotate(x.double(), ROTATION_SEED) * width**-0.5


def width_of(group: int, head_dim: int) -> int:
    """A group ends where the key does: keys are appended and evicted one by one, so none shares its norm.

    Raises
    ------
    CapabilityError
        When a key is no whole number of groups.
    """
    width = min(group, head_dim)
    if head_dim % width:
        raise CapabilityError(
            f"a key of {head_dim} numbers is no whole number of groups of {group}", code="capability.group"
        )
    return width


def normalised(keys: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Groups scaled to mean square 1 [..., groups, width], and the scale of each as float16 stores it."""
    grouped = keys.unflatten(-1, (-1, width_of(group, keys.shape[-1])))
    scale = (grouped.square().mean(-1, keepdim=True).sqrt()).half().double()
    return torch.where(scale > 0, grouped / scale, 0), scale


def signs(keys: Tensor) -> Tensor:
    """+-1; a negative zero is negative."""
    return 1 - 2 * torch.signbit(keys).double()


def sign_and_norm(keys: Tensor, group: int) -> Tensor:
    """Every number of a group as large as their mean."""
    scaled, scale = normalised(keys, group)
    return (signs(scaled) * MEAN_SIZE * scale).flatten(-2)


def three(keys: Tensor, group: int) -> Tensor:
    """The value of the table that is nearest."""
    scaled, scale = normalised(keys, group)
    return (table()[codes(scaled, table()).long()] * scale).flatten(-2)


def top_two(keys: Tensor, group: int) -> Tensor:
    """The sign, and whether the size is of the upper two of four; read as the mean of that half of N(0, 1)."""
    scaled, scale = normalised(keys, group)
    code = codes(scaled, table()).long()
    size = torch.where(code >= 4, code - 4, 3 - code)
    return (torch.where(code >= 4, 1, -1) * halves()[size // 2] * scale).flatten(-2)


def low_two(keys: Tensor, group: int) -> Tensor:
    """The published second arm: the lower two bits of the code, each pair of codes read as its mean size."""
    scaled, scale = normalised(keys, group)
    sizes = table().abs()
    means = (sizes[:4] + sizes[4:]) / 2
    return (means[codes(scaled, table()).long() % 4] * scale).flatten(-2)


def mismatched(keys: Tensor) -> Tensor:
    """Three bits by norms of 32 numbers and a table that was made for norms of 128."""
    scaled, scale = normalised(keys, SLIPPED_GROUP)
    wide = (PUBLISHED_GROUP / scaled.shape[-1]) ** 0.5
    return (table()[codes(scaled * wide, table()).long()] * scale / wide).flatten(-2)


def saturated(arm: PlanesVariant, keys: Tensor) -> float | None:
    """Share of an arm's codes at either end of the table; None of an arm without codes of three bits."""
    if arm.group is None or arm.name == "sign + norm":
        return None
    scaled, _ = normalised(keys, arm.group)
    if arm.read is mismatched:
        scaled = scaled * (PUBLISHED_GROUP / scaled.shape[-1]) ** 0.5
    code = codes(scaled, table())
    return float(((code == 0) | (code == 7)).double().mean())


def table() -> Tensor:
    """The eight values of N(0, 1), float64 ascending."""
    return gaussian_table(3)


def halves() -> Tensor:
    """Mean size of a number of N(0, 1) below and above the boundary of the two middle sizes."""
    edge = (table()[5] + table()[6]) / 2
    zero = torch.zeros((), dtype=torch.float64)
    outer = 1 - torch.special.ndtr(edge)
    return torch.stack([(density(zero) - density(edge)) / (0.5 - outer), density(edge) / outer])
