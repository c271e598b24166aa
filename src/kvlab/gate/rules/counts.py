"""What evidence counted, held against what can be counted of so many items: forged numbers that agree in a row do not.

Only of evidence of this project's own evals, whose items are passes over a context, each of which is stored once. Of
another harness's requests nobody knows how often a text was asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from kvlab.core.testimony import LEAST, Pool
from kvlab.gate.cases import DTYPE_BITS, Case
from kvlab.gate.evidence import Evidence
from kvlab.gate.evidence.faults import NO_CODEC, OWN_HARNESS
from kvlab.gate.reasons import Reason
from kvlab.gate.registry import Eval

STEPWISE = "served"  # the protocol under which a codec may be called for each token
MOST_EXACT = 512 + 16  # tokens that coded pages let a request read exact: recent ones, and the first


def impossible(case: Case) -> Iterator[Reason]:
    """Fires, bytes and values are those of so many items, and the pieces are of one cache."""
    pieces = [(piece, case.context.registry.eval(piece.quality_eval_id)) for piece in case.evidence]
    own = [(piece, entry) for piece, entry in pieces if entry and entry.harness == OWN_HARNESS and not piece.imported]
    for piece, entry in own:
        if piece.quality_eval_id not in piece.evals:
            said = f"are {', '.join(piece.evals)}, and this is {piece.quality_eval_id}"
            yield Reason(code="evidence_apart", field="evals", said=said)
        for field, said in _impossible(piece, entry):
            yield Reason(code="evidence_counts", field=f"observed.{field}", said=f"{said}, in {piece.quality_eval_id}")
    if len(pools := {piece.observed.pool for piece, _ in own}) > 1:
        said = f"is {' and '.join(sorted(map(str, pools)))} in evidence of one row"
        yield Reason(code="evidence_apart", field="observed.pool", said=said)


def _impossible(piece: Evidence, entry: Eval) -> Iterator[tuple[str, str]]:
    """What cannot have been counted: a field and what is wrong with it."""
    seen, protocol = piece.observed, piece.identity.protocol
    numbers = {measure.n for part in (piece.metrics, piece.baseline, piece.paired) for measure in part.values()}
    if len(numbers) != 1:
        yield "items", f"are {' and '.join(map(str, sorted(numbers)))} by its metrics"
        return
    (items,) = numbers
    if not (items and piece.identity.context_tokens):
        yield "items", f"are {items} of contexts of {piece.identity.context_tokens} tokens"
        return
    coded = seen.codec not in NO_CODEC
    if coded and (seen.fires < items or (protocol != STEPWISE and seen.fires % items)):
        yield "fires", f"is {seen.fires} over {items} items, each of which is coded as often as any other"
    if coded and seen.bits and 8 * seen.kv_bytes < LEAST * seen.bits * seen.kv_values:
        yield "kv_bytes", f"is {seen.kv_bytes} for {seen.kv_values} values, whose codes alone take {seen.bits:g} bits"
    each = _values_of_a_token(piece, entry, items)
    if each is not None and (each < 2 or each != int(each)):
        yield "kv_values", f"is {seen.kv_values}, or {each:g} for each token that {items} items store"
    if seen.pool is not None:
        yield from _pages(piece, entry, seen.pool, items)


def _values_of_a_token(piece: Evidence, entry: Eval, items: int) -> float | None:
    """K and V elements of a token; None where the number of tokens that were stored is not known."""
    tokens = items * piece.identity.context_tokens
    return piece.observed.kv_values / tokens if piece.observed.span == "context" and not entry.own_contexts else None


def _pages(piece: Evidence, entry: Eval, pool: Pool, items: int) -> Iterator[tuple[str, str]]:
    """Bytes are those of the tokens' places in blocks and of each item's exact tokens, which are whole tokens."""
    seen, bits = piece.observed, DTYPE_BITS.get(piece.identity.dtype)
    if not pool.block_tokens or not pool.block_values or pool.block_values % pool.block_tokens:
        yield "pool", f"says that a block of {pool.block_tokens} tokens stands for {pool.block_values} values"
        return
    each = pool.block_values // pool.block_tokens
    tokens = seen.kv_values / each
    context = tokens if entry.own_contexts else items * piece.identity.context_tokens
    other = {"context": tokens != context, "window": tokens < context + (0 if entry.own_contexts else items)}
    if tokens != int(tokens) or other.get(seen.span):
        yield "kv_values", f"is {seen.kv_values}, which {each} values a token make {tokens:g} tokens of {items} items"
    due = seen.kv_values * pool.block_bytes // pool.block_values + items * pool.exact_bytes
    if seen.kv_bytes != due:
        yield "kv_bytes", f"is {seen.kv_bytes}; blocks and exact tokens of {items} items take {due}"
    if seen.bits and 8 * pool.block_bytes < LEAST * seen.bits * pool.block_values:
        yield "pool.block_bytes", f"is {pool.block_bytes}, less than {seen.bits:g} bits for {pool.block_values} values"
    if bool(pool.exact_bytes) != bool(pool.exact_requests):
        yield "pool.exact_requests", f"is {pool.exact_requests}, beside {pool.exact_bytes} exact bytes a request"
    whole = bits and each * bits // 8
    if whole and pool.exact_bytes and (pool.exact_bytes % whole or pool.exact_bytes > MOST_EXACT * whole):
        yield "pool.exact_bytes", f"is {pool.exact_bytes}; an exact token takes {whole}, and {MOST_EXACT} are the most"
    if pool.exact_bytes and seen.codec in NO_CODEC:
        yield "pool.exact_bytes", f"is {pool.exact_bytes}, and no codec ran beside which tokens could be exact"


def others_of(cases: Iterable[Case]) -> list[tuple[Reason, ...]]:
    """Of each row what the rows beside it say otherwise: a model has one number of values of a token.

    Most rows of a model decide; where as many say one as another, all are named.
    """
    cases = list(cases)
    found = [{(p.identity.model_hash, each) for p in case.evidence if (each := _each(case, p))} for case in cases]
    votes = Counter(one for several in found for one in several)
    most = {weights: max(n for (of, _), n in votes.items() if of == weights) for weights, _ in votes}
    right = {one for one, n in votes.items() if n == most[one[0]]}
    sure = {weights: sum(of == weights for of, _ in right) == 1 for weights in most}
    return [
        tuple(
            Reason(
                code="evidence_counts",
                field="observed.kv_values",
                said=f"are {each:g} for each token; other rows of these weights have another number",
            )
            for weights, each in sorted(several)
            if (weights, each) not in right or not sure[weights]
        )
        for several in found
    ]


def _each(case: Case, piece: Evidence) -> float | None:
    """Values of a token by one piece of evidence."""
    if (pool := piece.observed.pool) is not None and pool.block_tokens:
        return pool.block_values / pool.block_tokens
    entry, numbers = case.context.registry.eval(piece.quality_eval_id), {m.n for m in piece.metrics.values()}
    if entry is None or entry.harness != OWN_HARNESS or piece.imported or len(numbers) != 1:
        return None
    if 0 in (*numbers, piece.identity.context_tokens):
        return None
    return _values_of_a_token(piece, entry, *numbers)
