"""The ways in which a row's cache is coded, by protocol and stored tokens: rows of two of them are not compared.

What people serve stands first. A finished cache that is coded once and read once is what most papers measure; it costs
less, and stands after it.
"""

from __future__ import annotations

from kvlab.core.recipe import ENGINES

SERVED, INSIDE, READ = ("served", "window"), ("in_forward", "window"), ("in_forward", "context")
FINISHED = ("snapshot", "context")
TITLES = {
    SERVED: "As {engine} serves: kvlab.Cache",
    INSIDE: "As {engine} serves: every token coded as it comes",
    READ: "Attention in {engine} that reads less",
    FINISHED: "A finished cache, coded once and read once ({engine})",
}
NOTES = {
    SERVED: "The context is stored in one call; then token after token reads what was stored and is stored in its turn."
    " KL is of the first tokens after the context, which read coded K and V alone, their own apart. A codec of whole"
    " blocks, as kivi and fp8, keeps the tokens since the last block as they are, which its bits count.",
    INSIDE: "Prompt and answer alike: each token's K and V are coded in every layer before attention reads them. Where"
    " a variant's name ends in pages, vLLM's own cache holds the codec's bytes; with after in it, K is coded after its"
    " rotary embedding.",
    READ: "All of the cache is stored as it is.",
    FINISHED: "Nobody serves so: the scored tokens read each other's K and V as they were computed, and KL is their"
    " mean.",
}

Way = tuple[str | None, str | None]


def order(way: Way) -> int:
    """Its place on a page."""
    known = list(TITLES)
    return known.index(way) if way in known else len(known)


def title(way: Way, engine: str) -> str:
    """A way in words, on an engine."""
    told = TITLES.get(way) or " ".join(["{engine}", *filter(None, way)])
    return told.format(engine=ENGINES[engine].title if engine in ENGINES else engine)
