"""What decides the last bits of K and V beside the model's weights, as the `made` of a manifest says it.

Two contexts that differ in none of it hold the same bits; of others that is not known. Whoever goes on from one of
those has K and V that are right, and that no cold run may have.
"""

from __future__ import annotations

from collections.abc import Mapping

COMPUTED = "computed"  # the name under which `made` says how the tokens went through the model
PRODUCTS = "products"  # how products in bfloat16 are computed; see `kvlab.engines.products`
NUMERICS = ("engine", "attention", "device", "threads", "order", COMPUTED, PRODUCTS, "torch")
"""Names in `made`; the engine's own version, under the engine's name, is one more."""
PREFILL = "prefill"  # many tokens a forward
DECODED = "prefill, decode"  # one token a forward for some of them, or for what is not known to be prefilled
UNSAID = {"order": "logical", COMPUTED: PREFILL, PRODUCTS: "torch's"}  # what a manifest means that does not speak of it
THEN = ", then "


def differing(was: Mapping[str, str], here: Mapping[str, str]) -> tuple[str, ...]:
    """The names under which a snapshot says otherwise than whoever reads it; what one alone says differs too.

    Parameters
    ----------
    was : mapping
        `made` of the snapshot.
    here : mapping
        That of the engine that goes on from it.
    """
    runs = here.get("engine", "").split(THEN)[-1]
    names = (*NUMERICS, runs) if runs else NUMERICS
    return tuple(name for name in names if _value_of(was, name) != _value_of(here, name))


def mixed(was: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """`made` of what an engine computes after such a snapshot: both where they differ, each value once.

    Parameters
    ----------
    was, here : mapping
        See `differing`; `here` may be mixed already.
    """
    return dict(here) | {name: _joined(_value_of(was, name), _value_of(here, name)) for name in differing(was, here)}


def _value_of(made: Mapping[str, str], name: str) -> str:
    return made.get(name, UNSAID.get(name, "unknown"))


def _joined(was: str, here: str) -> str:
    """The snapshot's values before the engine's; one that the engine has met before stays where it is."""
    ours = here.split(THEN)
    return THEN.join([*(value for value in was.split(THEN) if value not in ours), *ours])
