"""The study of residency policies as a page prints it. Torch-free."""

from __future__ import annotations

from kvlab.output.format import DASH, percent
from kvlab_pipeline.rendering import tables as cols
from kvlab_pipeline.rendering.tables import TitledTable
from kvlab_pipeline.studies.policy.record import FORESIGHT, PolicyArm, PolicyRecord, Prefill, Third

TITLE = "Which chunks a bounded pool should keep"
ABOUT = """\
A fact is planted in a text, and the text's K and V lie in a pool that holds a part of them. What leaves the pool is
kept in host memory and can come back. A question about the fact follows, token by token, and the answer is decoded
greedily; it counts as found when every token of it is right. The residency policy says which chunks are in the pool
when the next token is computed. Beside the needles, each table says how much of the attention lay on what was in the
pool: of the attention that the question's and the answer's tokens pay where the whole context has room, the mean over
layers and query heads, each against its own KV head."""

NAMES = {None: "everything in the pool", FORESIGHT: "foresight"}
PREFILLS: dict[Prefill, tuple[str, str]] = {
    "bounded": (
        "Prefilled through the pool",
        "The context itself went through the pool, so that tokens after an evicted chunk were computed without it: "
        "memory is bounded from the first token to the last.",
    ),
    "restored": (
        "Restored into the pool",
        "The context was computed in whole and restored into the pool from a snapshot: every chunk is as it should be, "
        "and the policy alone decides what is at hand. `foresight` is no policy that could be had: before each token, "
        "the pool is chosen by the attention that this token paid where everything had room.",
    ),
}


def tables(record: PolicyRecord) -> list[TitledTable]:
    """Needles and mass by policy and pool, differences to the reference policy, and needles by depth."""
    held = [prefill for prefill in PREFILLS if any(arm.against for arm in of(record, prefill))]
    return [
        *(recall(record, prefill) for prefill in PREFILLS),
        *(against(record, prefill) for prefill in held),
        depths(record),
    ]


def recall(record: PolicyRecord, prefill: Prefill) -> TitledTable:
    """Needles found, attention kept, and how much moved."""
    settings = record.settings
    title, text = PREFILLS[prefill]
    text += (
        f" {len(record.depths)} needles in contexts of {record.context} tokens, {record.dtype}; chunks of "
        f"{settings.chunk_tokens} tokens, of which the last one stays in any case, as do {settings.sink_chunks} at the "
        f"beginning and {settings.tail_chunks} before the last; the pool is chosen anew after "
        f"{often(settings.every)}. Intervals ({percent(record.confidence)}) are over needles."
    )
    columns = {
        "pool": share,
        "chunks": cols.number("blocks"),
        "policy": name,
        "needles found, %": cols.percent("found"),
        "planted line in the pool, %": cols.percent("held"),
        "mass of the question's tokens, %": cols.percent("question"),
        "of the answer's, %": cols.percent("answer"),
        "chunks that came back": cols.number("page_ins"),
    }
    return TitledTable(title, text, columns, [record.arm(None, None, "bounded"), *of(record, prefill)])


def against(record: PolicyRecord, prefill: Prefill) -> TitledTable:
    """Paired differences."""
    text = "Points more than `lru` in the same pool, needle by needle. An interval that holds 0 tells nothing apart."
    columns = {
        "pool": share,
        "policy": name,
        "needles found": cols.percent("against.found", signed=True),
        "mass of the question's tokens": cols.percent("against.question", signed=True),
        "of the answer's": cols.percent("against.answer", signed=True),
    }
    arms = [arm for arm in of(record, prefill) if arm.against is not None]
    return TitledTable(f"Against `lru`: {PREFILLS[prefill][0].lower()}", text, columns, arms)


def depths(record: PolicyRecord) -> TitledTable:
    """Needles by the third of the context that they stand in."""
    everything = record.arm(None, None, "bounded")
    text = "Needles found, out of those planted in each third of the context."
    columns = {
        "pool": share,
        "prefill": lambda arm: DASH if arm.policy is None else arm.prefill,
        "policy": name,
    }
    for at, third in enumerate(everything.thirds):
        columns[f"{percent(third.low, 0)} to {percent(third.high, 0)}"] = lambda arm, at=at: found_of(arm.thirds[at])
    arms = [everything, *of(record, "bounded"), *of(record, "restored")]
    return TitledTable("By the depth of the needle", text, columns, arms)


def found_of(third: Third) -> str:
    """How many of the needles of a third were found."""
    return f"{third.found} of {third.items}"


def of(record: PolicyRecord, prefill: Prefill) -> list[PolicyArm]:
    """The arms with a policy, prefilled in one way."""
    return [arm for arm in record.arms if arm.policy is not None and arm.prefill == prefill]


def name(arm: PolicyArm) -> str:
    """A policy as it is read."""
    return NAMES.get(arm.policy) or f"`{arm.policy}`"


def share(arm: PolicyArm) -> str:
    """The size of a pool."""
    return "all" if arm.pool is None else percent(arm.pool)


def often(every: int) -> str:
    """How often the pool is chosen."""
    return "every forward" if every == 1 else f"each forward that reaches or passes a multiple of {every} tokens"
