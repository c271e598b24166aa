"""What each verb of `kvlab snapshot` does, and its flags. Heavy imports happen inside the verbs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from kvlab.cli import snapshot_inputs as inputs
from kvlab.cli.commands import Verbs
from kvlab.cli.flags import (
    CHECKING,
    DTYPES,
    JSON,
    SIGNING,
    WROTE,
    cached,
    choice,
    model_folder,
    number,
    path,
    place,
    recipe,
    switch,
    whole,
    word,
)
from kvlab.cli.given import key_of
from kvlab.cli.snapshot_inputs import CHUNK_TOKENS, DTYPE
from kvlab.core.errors import SnapshotRefused, StorageError, UserError
from kvlab.core.filekind import SNAPSHOT_ENDING
from kvlab.core.output_paths import refuse_no_file
from kvlab.output.terminal import as_json, printable

SNAPSHOT = Verbs(
    """\
The KV cache of a context as a file: save, inspect, verify, restore, diff.

Prefill once, ask many times (docs/snapshots.md).""",
    ends="""
Exit codes: 0 done, whole, the same; 1 damaged, another model's, different, or the warm run is not the cold one; 2 the
input is wrong, or a file cannot be judged.""",
)
MODES = ("auto", "consume", "recompute", "verify")  # as in `kvstore.restore`
POLICIES = ("lru", "qk", "oracle", "random", "sign_bit")  # as in `kvstore.residency`
UNJUDGED = ("unreadable", "not_a_snapshot", "unknown_version", "published_layout", "codec", "calibration")
"""Codes of `verify` that say nothing of damage: there is nothing to judge, or nothing to judge it by."""

Model = Annotated[Path, model_folder()]
Text = Annotated[Path | None, path("the prompt, UTF-8")]
Tokens = Annotated[Path | None, path("or its ids, a JSON list")]
ChunkTokens = Annotated[int | None, number(f"tokens of a chunk; default: the snapshot's, or {CHUNK_TOKENS}")]
Dtype = Annotated[str | None, choice(f"of the model, its K and V; default: the snapshot's, or {DTYPE}", DTYPES)]
PoolTokens = Annotated[int | None, number("tokens that the pool holds; default: all there will be")]
Policy = Annotated[str, choice("who stays in a smaller pool; default: lru", POLICIES)]
Salt = Annotated[str, word("what else keeps contexts apart, as a tenant")]
Decoder = Annotated[Path | None, recipe(f"{WROTE}, for a payload whose codec reads a calibration")]
Key = Annotated[Path | None, CHECKING]
File = Annotated[Path, place("a snapshot")]
Json = Annotated[bool, JSON]


@SNAPSHOT.verb
def save_verb(
    out: Annotated[
        Path,
        place("the snapshot, as context.kvs; replaced in one step when there is one", read=cached(SNAPSHOT_ENDING)),
    ],
    *,
    model: Model,
    text: Text = None,
    tokens: Tokens = None,
    chunk_tokens: ChunkTokens = None,
    dtype: Dtype = None,
    pool_tokens: PoolTokens = None,
    policy: Policy = "lru",
    salt: Salt = "",
    recipe: Annotated[Path | None, recipe(f"{WROTE}; default: K and V as they are")] = None,
    key: Annotated[Path | None, SIGNING] = None,
    bits: Annotated[float | None, number("of a recipe of archive, others than its own", float)] = None,
    upto: Annotated[int | None, number("save no more than the first N tokens")] = None,
    evidence: Annotated[
        list[Path],
        path("the gate's evidence of what a lossy recipe costs, as `kvlab eval` writes it", metavar="FILE ..."),
    ] = (),
) -> None:
    """Prefill a text with a model, chunk by chunk, and write the KV cache of its whole chunks.

    K and V are stored as they are, or coded by --recipe; a lossy payload is restored from only if it names evidence of
    the gate, or by whoever asks for it unproven. Evidence has to be of this recipe and this model; what it says of
    them is judged by `kvlab gate check`.
    """
    refuse_no_file(out)
    key, info, chunk = key_of(key), inputs.info_of(model), inputs.or_default(chunk_tokens, CHUNK_TOKENS)
    inputs.pool_of(pool_tokens, chunk, chunk)  # what is wrong with either is told before torch is loaded
    ids = inputs.tokens_of(text, tokens, info)
    if upto is not None and not 0 < upto <= len(ids):
        raise UserError(f"--upto is {upto}; the prompt has 1 to {len(ids)} tokens to save")
    if (held := inputs.or_default(upto, len(ids))) < chunk:
        raise UserError(
            f"{held} tokens do not fill one chunk of {chunk}, and a snapshot of them would restore nothing; take more"
            " tokens, or a smaller --chunk-tokens"
        )

    from kvlab.kvstore.hf.run import PagedRun

    config, ready = inputs.pool_of(pool_tokens, chunk, len(ids)), inputs.recipe_of(recipe, info, bits)
    proofs = inputs.evidence_ids(evidence, ready, info)
    loaded = _model(info, dtype or DTYPE)
    run = PagedRun(loaded, config, policy, salt=salt)
    run.extend(ids)
    coder = _coder(ready, loaded, chunk, len(ids))
    saved = run.save(out, upto=upto, coder=coder, evidence=proofs, key=key)
    length = saved.manifest.length
    print(
        f"{saved.path}: {length} of {len(ids)} tokens in {length // chunk} chunks, {saved.nbytes} bytes, digest"
        f" {saved.digest}"
    )


@SNAPSHOT.verb
def inspect_verb(file: File, json: Json = False) -> None:
    """Say what a snapshot holds and whose it is, without reading its K and V.

    Header, manifest, index, tokens and token chain are checked; for the payload there is `kvlab snapshot verify`. A
    file of the published KVFLASH1 layout is named as one.
    """
    inputs.refuse_missing(file)

    from kvlab.kvstore.snapshot import describe, read

    if describe.is_published(file):
        data, lines = describe.published_data(file), describe.published_lines(file)
    else:
        with read.open(file) as snapshot:
            data, lines = describe.as_data(snapshot), list(describe.as_lines(snapshot))
    print(as_json(data) if json else "\n".join(map(printable, lines)))


@SNAPSHOT.verb
def verify_verb(
    files: Annotated[list[Path], place("snapshots")],
    model: Annotated[Path | None, model_folder("of a model; also whether they are of it, coded chunks decoded")] = None,
    recipe: Decoder = None,
    key: Key = None,
    json: Json = False,
) -> int:
    """Read snapshots to their last byte and name every damage.

    Exit code 0 when all are what was written; 1 when one is damaged, or of another model than --model; else 2 when one
    cannot be judged: it is missing, is no snapshot, is of another version, or has no checksums, as the published
    KVFLASH1 layout. With --model each coded chunk is decoded as well, where --recipe names the calibration that takes.
    With --key one that is not signed with it is refused.
    """
    key, info = key_of(key), inputs.info_of(model) if model else None
    ready = inputs.recipe_of(recipe, info) if info else None
    found = {str(file): _damages(file, info, ready, key) for file in files}
    if json:
        rows = {
            file: {"whole": not reasons, "reasons": [reason._asdict() for reason in reasons]}
            for file, reasons in found.items()
        }
        print(as_json(rows))
    else:
        for file, reasons in found.items():
            lines = [printable(f"{reason.message} [{reason.code}]") for reason in reasons] or ["whole"]
            print("\n".join(f"{file}: {line}" for line in lines))
    codes = {reason.code for reasons in found.values() for reason in reasons}
    return 1 if codes - set(UNJUDGED) else 2 * bool(codes)


def _damages(file: Path, info, ready, key) -> list:
    """Everything that is wrong with one file; nothing of it keeps the next one from being looked at."""
    from kvlab.kvstore.snapshot.reasons import Code, SnapshotReason

    try:
        inputs.refuse_missing(file)

        from kvlab.kvstore.snapshot import read

        with read.open(file, key) as snapshot:
            return _verified(snapshot, info, ready)
    except SnapshotRefused as error:
        return list(error.reasons)
    except StorageError as error:
        return [SnapshotReason(Code.UNREADABLE, str(error))]


def _verified(snapshot, info, ready) -> list:
    """What is wrong with an open snapshot; its chunks are decoded when they are coded and a model is given."""
    from kvlab.kvstore.snapshot.reasons import Code, SnapshotReason

    codec = snapshot.manifest.identity.codec
    strange = inputs.strangeness(snapshot.manifest.identity, info) if info else []
    if info is None or strange or codec is None:
        return [*strange, *snapshot.verify()]
    try:
        return snapshot.verify(_decoder(snapshot, info, ready))
    except SnapshotRefused as error:  # the recipe that was given is another
        return [*error.reasons, *snapshot.verify()]
    except StorageError:
        raise
    except UserError as error:
        code = Code.CODEC if codec.calibration_hash is None else Code.CALIBRATION
        return [SnapshotReason(code, f"the payload cannot be decoded by what was given: {error}"), *snapshot.verify()]


@SNAPSHOT.verb
def restore_verb(
    files: Annotated[list[Path], place("snapshots to choose from, or folders of them")] = (),
    *,
    model: Model,
    text: Text = None,
    tokens: Tokens = None,
    chunk_tokens: ChunkTokens = None,
    dtype: Dtype = None,
    pool_tokens: PoolTokens = None,
    policy: Policy = "lru",
    salt: Salt = "",
    recipe: Decoder = None,
    key: Key = None,
    mode: Annotated[str, choice("default: auto", MODES)] = "auto",
    decode: Annotated[int, number("tokens of the answer, greedily; default: 16", whole(0))] = 16,
    unproven: Annotated[bool, switch("use a lossy payload that names no evidence", "--unproven")] = False,
    json: Json = False,
) -> int:
    """Answer a prompt, taking from snapshots what they hold of it, and say what was used.

    auto takes the snapshot with the longest usable prefix, or computes everything and says why; consume does the
    same or fails; recompute reads none; verify does both and compares them. Its exit code is 1 when the tokens differ,
    or, of a payload that gives back the bits and was made as this run makes them, any bit of a logit or a resident
    chunk; 2 when nothing was restored that could be compared.
    """
    key, info = key_of(key), inputs.info_of(model)
    if chunk_tokens is not None:
        inputs.pool_of(pool_tokens, chunk_tokens, chunk_tokens)
    if mode == "consume" and files:
        inputs.refuse_missing(*files)

    from kvlab.kvstore.hf.warm import files as files_of
    from kvlab.kvstore.restore import restore

    found = [file for given in files for file in files_of(given)]
    ids = inputs.tokens_of(text, tokens, info)
    chunk, dtype = inputs.settings_of(found, info, ids, chunk_tokens, dtype, salt, key)
    config = inputs.pool_of(pool_tokens, chunk, len(ids) + decode)
    ready = inputs.recipe_of(recipe, info)
    loaded = _model(info, dtype)
    done = restore(
        loaded,
        ids,
        found,
        config,
        policy,
        mode=mode,
        coder=_coder(ready, loaded, chunk, info.max_positions),
        unproven=unproven,
        salt=salt,
        decode=max(1, decode),
        key=key,
    )
    answer = done.run.decode(decode).tokens if decode else ()
    said = _text(loaded.info, answer)
    if json:
        print(as_json(report_data(done, answer, said)))
    else:
        print("\n".join(report_lines(done.report, len(ids), said)))
    return verified(done.report) if mode == "verify" else 0


@SNAPSHOT.verb
def diff_verb(file_a: File, file_b: Annotated[Path, place("another")], json: Json = False) -> int:
    """Hold one snapshot against another: identity, shared tokens, stored bits chunk by chunk, ledger.

    Exit code 0 when they hold the same bytes of the same context, 1 when they differ. What wrote them does not count.
    """
    for file in (file_a, file_b):
        inputs.refuse_missing(file)

    from kvlab.kvstore.snapshot import read
    from kvlab.kvstore.snapshot.compare import compare

    with read.open(file_a) as first, read.open(file_b) as second:
        found = compare(first, second)
    print(as_json(diff_data(found)) if json else "\n".join(map(printable, diff_lines(found))))
    return int(not found.same)


# --------------------------------------------------------------------------------- what verbs need


def _model(info, dtype: str):
    """The model, loaded without a word: what a verb says are its own lines."""
    from transformers.utils import logging

    from kvlab.kvstore.hf.model import PagedModel

    logging.disable_progress_bar()
    return PagedModel.load(info, dtype=dtype)


def _text(info, tokens) -> str:
    from kvlab.core.model import load_tokenizer

    return load_tokenizer(info).decode(list(tokens)) if tokens else ""


def _coder(ready, model, chunk_tokens: int, tokens: int):
    """The coder of a prepared recipe for contexts of so many tokens; None without one."""
    from kvlab.kvstore.snapshot.payload import recipe_coder

    if ready is None:
        return None
    geometry, turns = model.geometry(chunk_tokens), model.turns(tokens)
    return recipe_coder(geometry, ready.recipe, ready.calibration, ready.layers, turns=turns)


def _decoder(snapshot, info, ready):
    """What decodes a coded payload, its codec as it says itself or as a recipe file does."""
    from kvlab.kvstore.snapshot.payload import coder_for

    own = snapshot.manifest.identity
    model = _model(info, own.geometry.dtype)
    return _coder(ready, model, own.geometry.chunk_tokens, snapshot.length) or coder_for(
        own, None, model.turns(snapshot.length)
    )


# What the verbs of `kvlab snapshot` say: lines for people, data for programs.


def report_data(done, answer: Sequence[int], text: str) -> dict:
    """What `restore` did, for programs; the digest tells whether two runs gave the same logits, bit for bit."""
    from kvlab.kvstore.hf.equality import logits_digest

    report = dataclasses.asdict(done.report)
    report["reasons"] = [reason._asdict() for reason in done.report.reasons]
    return report | {
        "snapshot": report["snapshot"] and str(report["snapshot"]),
        "tokens": list(answer),
        "text": text,
        "logits_sha256": logits_digest(done.logits.detach()),
        "resident": list(done.run.pager.resident),
    }


def report_lines(report, tokens: int, text: str) -> Iterable[str]:
    """The same for people."""
    if report.consumed:
        took = f"{_ms(report.load_ms)}, {report.bytes_read} bytes read"
        yield f"restored {report.prefix_len} of {tokens} tokens of {report.snapshot} in {took}"
    else:
        yield f"restored nothing of {tokens} tokens"
        yield from (printable(f"because {reason.message} [{reason.code}]") for reason in report.reasons)
    yield f"prefilled {report.tokens_prefilled} tokens in {_ms(report.prefill_ms)}"
    if report.from_keys is not None:
        scored = f"{report.from_keys} from keys, {report.from_seed} from the ledger, {report.missing} missing"
        yield f"scored chunks: {scored}"
    if report.lossless is False:
        yield "the payload is lossy: K and V are not those of the model, and the answer may be another"
    if report.other_numerics:
        yield f"made with another {', '.join(report.other_numerics)}: the last bits may differ"
    if said := report.comparison:
        yield from _compared(said)
    if text:
        yield f"answer: {printable(text)}"


def _ms(value: float | None) -> str:
    return "unknown time" if value is None else f"{value:.1f} ms"


def _compared(said) -> Iterable[str]:
    same = "the same tokens" if said.tokens_equal else f"other tokens from number {said.first_divergence} on"
    apart = f"logits up to {said.max_abs_dlogit:.3g} apart" if said.max_abs_dlogit else "the same logits"
    yield f"cold and warm, compared at {said.steps} tokens: {same}, {apart}"
    if not said.tokens_equal and said.margin_at_divergence is not None:
        yield f"the cold run's two best tokens were {said.margin_at_divergence:.3g} apart there"
    yield f"resident chunks: {'the same' if said.residency_equal else 'different'}"


def verified(report) -> int:
    """The exit code of a comparison: 0 when the warm run is the cold one as far as that is promised.

    Bits and residency are promised of a payload that gives back the bits, made as this run makes them; of any other
    the tokens decide. 2 when nothing was compared.
    """
    said = report.comparison
    if said is None:
        return 2
    promised = report.lossless and not report.other_numerics
    other_bits = said.max_abs_dlogit != 0 or not said.residency_equal
    return int(not said.tokens_equal or bool(promised and other_bits))


def diff_data(found) -> dict:
    """How two snapshots differ, for programs."""
    data = dataclasses.asdict(found) | {"same": found.same}
    return data | {"identity": [reason._asdict() for reason in found.identity]}


def diff_lines(found) -> Iterable[str]:
    """The same for people."""
    yield "the same" if found.same else "different"
    yield f"tokens: {found.shared_tokens} shared of {found.lengths[0]} and {found.lengths[1]}"
    yield from (f"identity: {reason.message} [{reason.code}]" for reason in found.identity)
    yield f"payload: {len(found.chunks)} of {found.compared_chunks} compared chunks differ"
    for chunk in found.chunks:
        share = "stored otherwise" if chunk.bits is None else f"{chunk.bits} of {chunk.of_bits} bits"
        yield f"chunk {chunk.number}: {share}"
    if found.ledger:
        yield f"ledger: differs on chunks {', '.join(map(str, found.ledger))}"
    yield from (f"note: {note}" for note in found.notes)
