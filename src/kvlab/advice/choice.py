"""Which setting of an engine's cache to take, of those that were measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlab.advice.serving import CacheFormat
from kvlab.advice.verdicts import Loss, bound

if TYPE_CHECKING:  # numpy comes with it
    from kvlab.stats.bootstrap import Estimate

MOST_EXACT = 4  # at most one of so many layers is proposed to be left in 16 bits
CLOSE = 2  # formats for which layers that carry the loss are looked for


@dataclass(frozen=True)
class Setting:
    """A format with the layers that stay in 16 bits.

    Parameters
    ----------
    format : CacheFormat
    exact : tuple of int
        Layers that the engine's line leaves in 16 bits, beside those that the engine leaves by itself.
    bits : float
        Per value of the whole cache, scales and layers in 16 bits counted.
    """

    format: CacheFormat
    exact: tuple[int, ...]
    bits: float

    @property
    def name(self) -> str:
        """For people."""
        left = f", {'layer' if len(self.exact) == 1 else 'layers'} {' '.join(map(str, self.exact))} in 16 bits"
        return self.format.name + (left if self.exact else "")

    def data(self) -> dict:
        """For programs."""
        return {
            "format": self.name,
            "recipe_id": self.format.recipe.recipe_id,
            "exact_layers": list(self.exact),
            "bits_per_value": self.bits,
        }


@dataclass(frozen=True)
class LossWish:
    """What is asked for: a class of loss at the fewest bits, or the least loss within some bits per value."""

    loss: Loss = "small"
    bits: float | None = None

    def granted(self, kl: Estimate, bits: float, floor: float) -> bool:
        """Whether a setting of this KL and these bits is what was asked for."""
        return bits <= self.bits if self.bits is not None else kl.high < bound(self.loss, floor)

    def rank(self, kl: Estimate, bits: float) -> tuple[float, float]:
        """The least is taken."""
        return (kl.high, bits) if self.bits is not None else (bits, kl.high)


def choose(found: Mapping[Setting, Estimate], wish: LossWish, floor: float) -> Setting | None:
    """The best setting that is what was asked for; None where none is.

    Parameters
    ----------
    found : mapping of Setting to Estimate
        The KL of each, nats per token.
    floor : float
        KL of K and V in 16 bits.
    """
    able = [one for one, kl in found.items() if wish.granted(kl, one.bits, floor)]
    return min(able, key=lambda one: wish.rank(found[one], one.bits), default=None)


def settled(
    found: Mapping[str, dict[Setting, Estimate]],
    as_read: Callable[[Mapping[str, Setting]], Mapping[str, Estimate]],
    wish: LossWish,
    floor: float,
) -> dict[str, Setting | None]:
    """`choose` of each engine, where a setting is taken only once it was measured as its engine reads it.

    `found`, by engine, may be of finished caches, which cost less than caches that are coded while they are computed:
    what looks best there is measured `as_read`, those of all engines together, and put in its place; it is still the
    best with that KL, or the next one is tried.
    """
    certain: dict[str, set[Setting]] = {name: set() for name in found}
    while True:
        best = {name: choose(each, wish, floor) for name, each in found.items()}
        open_ = {name: one for name, one in best.items() if one is not None and one not in certain[name]}
        if not open_:
            return best
        for name, kl in as_read(open_).items():
            found[name][open_[name]] = kl
            certain[name].add(open_[name])


def worth_layers(
    found: Mapping[Setting, Estimate], taken: Setting | None, wish: LossWish, layers: int
) -> list[Setting]:
    """Settings of fewer bits than the one that is taken that might do with a few layers in 16 bits.

    They are those of the least KL: where all layers share the loss, no few of them mend it.
    """
    if wish.bits is not None:
        return []
    one_layer = (16 - 4) / layers
    most = 16.0 if taken is None else taken.bits
    able = [one for one in found if one.format.apart and not one.exact and one != taken and one.bits + one_layer < most]
    return sorted(able, key=lambda one: found[one].value)[:CLOSE]


def carriers(losses: Mapping[int, float]) -> list[tuple[int, ...]]:
    """The layers that carry the loss, as the 1, 2, 4, ... worst of those that were coded alone, each set ascending.

    Parameters
    ----------
    losses : mapping of int to float
        KL of each layer that was coded alone.
    """
    worst = sorted(losses, key=lambda layer: -losses[layer])
    most = max(1, len(losses) // MOST_EXACT)
    counts = [count for count in (1, 2, 4, 8, 16, 32) if count <= most]
    return [tuple(sorted(worst[:count])) for count in counts]


def bits_per_value(coded: float, exact: int, layers: int) -> float:
    """Of a cache some of whose layers are in 16 bits."""
    return (coded * (layers - exact) + 16.0 * exact) / layers


def stored_bytes(setting: Setting, values: Sequence[int]) -> float:
    """Bytes of a cache, of which each layer holds so many values of K and V."""
    layers = len(values)
    coded = coded_layers(setting, layers)
    width = (setting.bits * layers - 16.0 * (layers - len(coded))) / len(coded)
    return sum(each * (width if layer in coded else 16.0) for layer, each in enumerate(values)) / 8


def nearest(found: Mapping[Setting, Estimate]) -> Setting | None:
    """The setting of the least upper end."""
    return min(found, key=lambda one: found[one].high, default=None)


def unique(settings: Iterable[Setting], layers: int) -> dict[tuple, Setting]:
    """Settings that code the same in the same layers, once each."""
    kept: dict[tuple, Setting] = {}
    for one in settings:
        kept.setdefault(identity(one, layers), one)
    return kept


def identity(setting: Setting, layers: int) -> tuple[str, tuple[int, ...]]:
    """By what a setting is measured: its recipe, and the layers that are coded."""
    return setting.format.recipe.recipe_id, coded_layers(setting, layers)


def coded_layers(setting: Setting, layers: int) -> tuple[int, ...]:
    """The layers that are coded."""
    exact: Sequence[int] = (*setting.exact, *setting.format.left_alone(layers))
    return tuple(layer for layer in range(layers) if layer not in exact)
