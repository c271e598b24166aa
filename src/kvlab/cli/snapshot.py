"""What each verb of `kvlab snapshot` does, and its flags. Heavy imports happen inside the verbs."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvlab.cli import snapshot_inputs as inputs
from kvlab.cli.flags import Flag, cached, model_folder, path, place, recipe, word
from kvlab.cli.keys import CHECKING, SIGNING, key_of
from kvlab.cli.snapshot_inputs import CHUNK_TOKENS, DTYPE, DTYPES
from kvlab.core.errors import SnapshotRefused, StorageError, UserError
from kvlab.core.filekind import SNAPSHOT_ENDING
from kvlab.core.output_paths import refuse_no_file
from kvlab.output.terminal import as_json, printable

ABOUT = """\
The KV cache of a context in a file, and back: prefill once, ask many times (docs/kvstore.md).

  save        prefill a text and write its KV cache
  inspect     what a snapshot says of itself
  verify      whether a snapshot is the one that was written; every damage is named
  restore     answer a prompt, with what snapshots hold of it, and say what was used and why not
  diff        how two snapshots differ: identity, tokens, stored bits

Exit codes: 0 done, whole, the same; 1 damaged, another model's, different, or the warm run is not the cold one; 2 the
input is wrong, or a file cannot be judged.
"""
MODES = ("auto", "consume", "recompute", "verify")  # as in `kvstore.restore`
POLICIES = ("lru", "qk", "oracle", "random", "sign_bit")  # as in `kvstore.residency`
UNJUDGED = ("unreadable", "not_a_snapshot", "unknown_version", "published_layout", "codec", "calibration")
"""Codes of `verify` that say nothing of damage: there is nothing to judge, or nothing to judge it by."""


def save_verb(args: argparse.Namespace) -> None:
    """Prefill a text with a model, chunk by chunk, and write the KV cache of its whole chunks.

    K and V are stored as they are, or coded by --recipe; a lossy payload is restored from only if it names evidence of
    the gate, or by whoever asks for it unproven. Evidence has to be of this recipe and this model; what it says of
    them is judged by `kvlab gate check`.
    """
    refuse_no_file(args.out)
    key, info, chunk = key_of(args), inputs.info_of(args.model), inputs.given(args.chunk_tokens, CHUNK_TOKENS)
    inputs.pool_of(args.pool_tokens, chunk, chunk)  # what is wrong with either is told before torch is loaded
    tokens = inputs.tokens_of(args, info)
    if args.upto is not None and not 0 < args.upto <= len(tokens):
        raise UserError(f"--upto is {args.upto}; the prompt has 1 to {len(tokens)} tokens to save")
    if (held := inputs.given(args.upto, len(tokens))) < chunk:
        raise UserError(
            f"{held} tokens do not fill one chunk of {chunk}, and a snapshot of them would restore nothing; take more"
            " tokens, or a smaller --chunk-tokens"
        )

    from kvlab.kvstore.hf.run import PagedRun

    config, ready = inputs.pool_of(args.pool_tokens, chunk, len(tokens)), inputs.recipe_of(args.recipe, info, args.bits)
    evidence = inputs.evidence_ids(args.evidence, ready, info)
    model = _model(info, args.dtype or DTYPE)
    run = PagedRun(model, config, args.policy, salt=args.salt)
    run.extend(tokens)
    coder = _coder(ready, model, chunk, len(tokens))
    saved = run.save(args.out, upto=args.upto, coder=coder, evidence=evidence, key=key)
    length = saved.manifest.length
    print(
        f"{saved.path}: {length} of {len(tokens)} tokens in {length // chunk} chunks, {saved.nbytes} bytes, digest"
        f" {saved.digest}"
    )


def inspect_verb(args: argparse.Namespace) -> None:
    """Say what a snapshot holds and whose it is, without reading its K and V.

    Header, manifest, index, tokens and token chain are checked; for the payload there is `kvlab snapshot verify`. A
    file of the published KVFLASH1 layout is named as one.
    """
    inputs.refuse_missing(args.file)

    from kvlab.kvstore.snapshot import describe, read

    if describe.is_published(args.file):
        data, lines = describe.published_data(args.file), describe.published_lines(args.file)
    else:
        with read.open(args.file) as snapshot:
            data, lines = describe.as_data(snapshot), list(describe.as_lines(snapshot))
    print(as_json(data) if args.json else "\n".join(map(printable, lines)))


def verify_verb(args: argparse.Namespace) -> int:
    """Read snapshots to their last byte and name every damage.

    Exit code 0 when all are what was written; 1 when one is damaged, or of another model than --model; else 2 when one
    cannot be judged: it is missing, is no snapshot, is of another version, or has no checksums, as the published
    KVFLASH1 layout. With --model each coded chunk is decoded as well, where --recipe names the calibration that takes.
    With --key one that is not signed with it is refused.
    """
    key, info = key_of(args), inputs.info_of(args.model) if args.model else None
    ready = inputs.recipe_of(args.recipe, info) if info else None
    found = {str(file): _damages(file, info, ready, key) for file in args.files}
    if args.json:
        rows = {
            file: {"whole": not reasons, "reasons": [reason._asdict() for reason in reasons]}
            for file, reasons in found.items()
        }
        print(as_json(rows))
    else:
        for file, reasons in found.items():
            print("\n".join(f"{file}: {line}" for line in damages(reasons)))
    codes = {reason.code for reasons in found.values() for reason in reasons}
    return 1 if codes - set(UNJUDGED) else 2 * bool(codes)


def _damages(file: Path, info, ready, key) -> list:
    """Everything that is wrong with one file; nothing of it keeps the next one from being looked at."""
    from kvlab.kvstore.snapshot.reasons import Code, Reason

    try:
        inputs.refuse_missing(file)

        from kvlab.kvstore.snapshot import read

        with read.open(file, key) as snapshot:
            return _verified(snapshot, info, ready)
    except SnapshotRefused as error:
        return list(error.reasons)
    except StorageError as error:
        return [Reason(Code.UNREADABLE, str(error))]


def _verified(snapshot, info, ready) -> list:
    """What is wrong with an open snapshot; its chunks are decoded when they are coded and a model is given."""
    from kvlab.kvstore.snapshot.reasons import Code, Reason

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
        return [Reason(code, f"the payload cannot be decoded by what was given: {error}"), *snapshot.verify()]


def restore_verb(args: argparse.Namespace) -> int:
    """Answer a prompt, taking from snapshots what they hold of it, and say what was used.

    auto takes the snapshot with the longest usable prefix, or computes everything and says why; consume does the
    same or fails; recompute reads none; verify does both and compares them. Its exit code is 1 when the tokens differ,
    or, of a payload that gives back the bits and was made as this run makes them, any bit of a logit or a resident
    chunk; 2 when nothing was restored that could be compared.
    """
    key, info = key_of(args), inputs.info_of(args.model)
    if args.chunk_tokens is not None:
        inputs.pool_of(args.pool_tokens, args.chunk_tokens, args.chunk_tokens)
    if args.mode == "consume" and args.files:
        inputs.refuse_missing(*args.files)

    from kvlab.kvstore.hf.warm import files as files_of
    from kvlab.kvstore.restore import restore

    files = [file for given in args.files for file in files_of(given)]
    tokens = inputs.tokens_of(args, info)
    chunk, dtype = inputs.settings_of(args, files, info, tokens, key)
    config = inputs.pool_of(args.pool_tokens, chunk, len(tokens) + args.decode)
    ready = inputs.recipe_of(args.recipe, info)
    model = _model(info, dtype)
    done = restore(
        model,
        tokens,
        files,
        config,
        args.policy,
        mode=args.mode,
        coder=_coder(ready, model, chunk, info.max_positions),
        unproven=args.unproven,
        salt=args.salt,
        decode=max(1, args.decode),
        key=key,
    )
    answer = done.run.decode(args.decode).tokens if args.decode else ()
    text = _text(model.info, answer)
    if args.json:
        print(as_json(report_data(done, answer, text)))
    else:
        print("\n".join(report_lines(done.report, len(tokens), text)))
    return verified(done.report) if args.mode == "verify" else 0


def diff_verb(args: argparse.Namespace) -> int:
    """Hold one snapshot against another: identity, shared tokens, stored bits chunk by chunk, ledger.

    Exit code 0 when they hold the same bytes of the same context, 1 when they differ. What wrote them does not count.
    """
    for file in (args.file_a, args.file_b):
        inputs.refuse_missing(file)

    from kvlab.kvstore.snapshot import read
    from kvlab.kvstore.snapshot.compare import compare

    with read.open(args.file_a) as first, read.open(args.file_b) as second:
        found = compare(first, second)
    print(as_json(diff_data(found)) if args.json else "\n".join(map(printable, diff_lines(found))))
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
    geometry, turn = model.geometry(chunk_tokens), model.turn(tokens)
    return recipe_coder(geometry, ready.recipe, ready.calibration, ready.layers, turn=turn)


def _decoder(snapshot, info, ready):
    """What decodes a coded payload, its codec as it says itself or as a recipe file does."""
    from kvlab.kvstore.snapshot.payload import coder_for

    own = snapshot.manifest.identity
    model = _model(info, own.geometry.dtype)
    return _coder(ready, model, own.geometry.chunk_tokens, snapshot.length) or coder_for(
        own, None, model.turn(snapshot.length)
    )


# --------------------------------------------------------------------------------------- flags


def _count(text: str) -> int:
    """A whole number from 0."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a whole number of at least 0")
    return int(text)


MODEL = model_folder("--model", required=True)
WROTE = "what `kvlab recipe` wrote, or `kvlab calibrate`"
RECIPE = path("--recipe", f"{WROTE}; default: K and V as they are", required=False, type=recipe(WROTE))
DECODER = path(
    "--recipe", f"{WROTE}, for a payload whose codec reads a calibration", required=False, type=recipe(WROTE)
)
PROMPT = [
    path("--text", "the prompt, UTF-8", required=False),
    path("--tokens", "or its ids, a JSON list", required=False),
]
RUNNING = [
    word("--chunk-tokens", f"tokens of a chunk; default: the snapshot's, or {CHUNK_TOKENS}", type=int, metavar="N"),
    word("--dtype", f"of the model, its K and V; default: the snapshot's, or {DTYPE}", choices=DTYPES),
    word("--pool-tokens", "tokens that the pool holds; default: all there will be", type=int, metavar="N"),
    word("--policy", "who stays in a smaller pool; default: lru", choices=POLICIES, default="lru"),
    word("--salt", "what else keeps contexts apart, as a tenant", default=""),
]
JSON = word("--json", "for programs", action="store_true")

VERBS: dict[Callable, list[Flag]] = {
    save_verb: [
        place(
            "out",
            "the snapshot, as context.kvs; replaced in one step when there is one",
            type=cached(SNAPSHOT_ENDING),
        ),
        *(MODEL, *PROMPT, *RUNNING, RECIPE, SIGNING),
        word("--bits", "of a recipe of archive, others than its own", type=float, metavar="N"),
        word("--upto", "save no more than the first N tokens", type=int, metavar="N"),
        path(
            "--evidence",
            "the gate's evidence of what a lossy recipe costs, as `kvlab eval` writes it",
            required=False,
            nargs="+",
            default=[],
        ),
    ],
    inspect_verb: [place("file", "a snapshot"), JSON],
    verify_verb: [
        place("files", "snapshots", nargs="+"),
        model_folder("--model", "of a model; also whether they are of it, coded chunks decoded"),
        DECODER,
        CHECKING,
        JSON,
    ],
    restore_verb: [
        place("files", "snapshots to choose from, or folders of them", nargs="*"),
        *(MODEL, *PROMPT, *RUNNING, DECODER, CHECKING),
        word("--mode", "default: auto", choices=MODES, default="auto"),
        word("--decode", "tokens of the answer, greedily; default: 16", type=_count, default=16, metavar="N"),
        word("--unproven", "use a lossy payload that names no evidence", action="store_true"),
        JSON,
    ],
    diff_verb: [place("file_a", "a snapshot"), place("file_b", "another"), JSON],
}


# What the verbs of `kvlab snapshot` say: lines for people, data for programs.


def damages(reasons: Sequence) -> Iterable[str]:
    """What `verify` found of one file."""
    return [printable(f"{reason.message} [{reason.code}]") for reason in reasons] or ["whole"]


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
