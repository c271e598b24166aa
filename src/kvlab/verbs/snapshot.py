"""What each verb of `kvlab snapshot` does, and its flags. Heavy imports happen inside the verbs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvlab.errors import SnapshotRefused, UserError
from kvlab.flags import Flag, path, place, word
from kvlab.tables import as_json, printable

ABOUT = """\
The KV cache of a context in a file, and back: prefill once, ask many times (docs/kvstore.md).

  save        prefill a text and write its KV cache
  inspect     what a snapshot says of itself
  verify      whether a snapshot is the one that was written; every damage is named
  restore     answer a prompt, with what snapshots hold of it, and say what was used and why not
  diff        how two snapshots differ: identity, tokens, stored bits

Exit codes: 0 done, whole, the same; 1 damaged, different, or the warm run differs from the cold one; 2 the input is
wrong, or a file cannot be judged.
"""
DTYPES = ("float32", "bfloat16")  # in which transformers runs here
MODES = ("auto", "consume", "recompute", "verify")  # as in `kvstore.restore`
POLICIES = ("lru", "qk", "oracle", "random", "sign_bit")  # as in `kvstore.residency`
CHUNK_TOKENS, DTYPE = 64, "float32"
UNJUDGED = ("not_a_snapshot", "unknown_version", "published_layout")  # codes that say nothing of damage


def save_verb(args: argparse.Namespace) -> None:
    """Prefill a text with a model, chunk by chunk, and write the KV cache of its whole chunks.

    K and V are stored as they are, or coded by --recipe; a lossy payload is restored from only if it names its
    evidence, or by whoever asks for it unproven.
    """
    from kvlab.kvstore.hf.run import PagedRun

    info, chunk = _info(args.model), _given(args.chunk_tokens, CHUNK_TOKENS)
    tokens = _tokens(args, info)
    if args.upto is not None and not 0 < args.upto <= len(tokens):
        raise UserError(f"--upto is {args.upto}; the prompt has 1 to {len(tokens)} tokens to save")
    config, ready = _pool(args.pool_tokens, chunk, len(tokens)), _recipe(args.recipe, info)
    model = _model(info, args.dtype or DTYPE)
    run = PagedRun(model, config, args.policy, salt=args.salt)
    run.extend(tokens)
    saved = run.save(args.out, upto=args.upto, coder=_coder(ready, model, chunk, len(tokens)), evidence=args.evidence)
    length = saved.manifest.length
    print(
        f"{saved.path}: {length} of {len(tokens)} tokens in {length // chunk} chunks, {saved.nbytes} bytes, sha256"
        f" {saved.digest}"
    )


def inspect_verb(args: argparse.Namespace) -> None:
    """Say what a snapshot holds and whose it is, without reading its K and V.

    Header, manifest, index, tokens and token chain are checked; for the payload there is `kvlab snapshot verify`. A
    file of the published KVFLASH1 layout is named as one.
    """
    from kvlab.kvstore.snapshot import describe, read

    if describe.is_published(args.file):
        data, lines = describe.published_data(args.file), describe.published_lines(args.file)
    else:
        with read.open(args.file) as snapshot:
            data, lines = describe.as_data(snapshot), list(describe.as_lines(snapshot))
    print(as_json(data) if args.json else "\n".join(map(printable, lines)))


def verify_verb(args: argparse.Namespace) -> int:
    """Read snapshots to their last byte and name every damage.

    Exit code 0 when all are what was written; 1 when one is damaged; 2 when one is missing, is no snapshot, or has
    no checksums to be judged by, as the published KVFLASH1 layout. With --model each chunk is decoded as well.
    """
    found = {str(file): _damages(file, args) for file in args.files}
    if args.json:
        rows = {
            file: {"whole": not reasons, "reasons": [reason._asdict() for reason in reasons]}
            for file, reasons in found.items()
        }
        print(as_json(rows))
    else:
        for file, reasons in found.items():
            print("\n".join(f"{file}: {line}" for line in _said(reasons)))
    codes = {reason.code for reasons in found.values() for reason in reasons}
    return 1 if codes - set(UNJUDGED) else 2 * bool(codes)


def _damages(file: Path, args: argparse.Namespace) -> list:
    """Everything that is wrong with one file."""
    from kvlab.kvstore.snapshot import read

    try:
        snapshot = read.open(file)
    except SnapshotRefused as error:
        return list(error.reasons)
    with snapshot:
        coder = _decoder(snapshot, args.model, args.recipe) if args.model else None
        return snapshot.verify(coder)


def _said(reasons: Sequence) -> Iterable[str]:
    return [printable(f"{reason.message} [{reason.code}]") for reason in reasons] or ["whole"]


def restore_verb(args: argparse.Namespace) -> int:
    """Answer a prompt, taking from snapshots what they hold of it, and say what was used.

    auto takes the snapshot with the longest usable prefix, or computes everything and says why; consume does the
    same or fails; recompute reads none; verify does both and compares them (exit code 1 when they differ).
    """
    from kvlab.kvstore.restore import restore

    files = _candidates(args.files)
    chunk, dtype = _settings(args, files)
    info = _info(args.model)
    tokens = _tokens(args, info)
    config, ready = _pool(args.pool_tokens, chunk, len(tokens) + args.decode), _recipe(args.recipe, info)
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
    )
    answer = done.run.decode(args.decode).tokens if args.decode else ()
    text = _text(model.info, answer)
    print(as_json(_report(done, answer, text)) if args.json else "\n".join(_lines(done.report, len(tokens), text)))
    if args.mode != "verify":
        return 0
    return 2 if done.report.comparison is None else int(not done.report.comparison.tokens_equal)


def diff_verb(args: argparse.Namespace) -> int:
    """Hold one snapshot against another: identity, shared tokens, stored bits chunk by chunk, ledger.

    Exit code 0 when they hold the same bytes of the same context, 1 when they differ. What wrote them does not count.
    """
    from kvlab.kvstore.snapshot import read
    from kvlab.kvstore.snapshot.compare import compare

    with read.open(args.file_a) as first, read.open(args.file_b) as second:
        found = compare(first, second)
    print(as_json(_compared(found)) if args.json else "\n".join(map(printable, _differences(found))))
    return int(not found.same)


# --------------------------------------------------------------------------------- what verbs need


def _info(folder: Path):
    """A model's folder, its shape and its identity."""
    from kvlab.errors import ModelError
    from kvlab.model import resolve
    from kvlab.params import Model
    from kvlab.records import read_json

    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json; give a Hugging Face model directory")
    layers = read_json(folder / "config.json").get("num_hidden_layers")
    if not isinstance(layers, int):
        raise ModelError(f"{folder}/config.json names no num_hidden_layers; give a decoder-only text model")
    return resolve(Model(path=str(folder), n_layers=layers))


def _model(info, dtype: str):
    """The model, loaded without a word: what a verb says are its own lines."""
    from transformers.utils import logging

    from kvlab.kvstore.hf.model import PagedModel

    logging.disable_progress_bar()
    return PagedModel.load(info, dtype=dtype)


def _tokens(args: argparse.Namespace, info) -> list[int]:
    """The ids of --text or --tokens, in the model's vocabulary."""
    from kvlab.model import load_tokenizer
    from kvlab.records import read_json

    if (args.text is None) == (args.tokens is None):
        raise UserError("give the prompt once: --text FILE or --tokens FILE")
    if args.text is not None:
        try:
            text = args.text.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{args.text} is no UTF-8 text: {error.reason} at byte {error.start}") from None
        ids = load_tokenizer(info)(text)["input_ids"]
        if not ids:
            raise UserError(f"{args.text} holds no text")
        return ids
    ids = read_json(args.tokens)
    if not (isinstance(ids, list) and ids and all(type(token) is int for token in ids)):
        raise UserError(f"{args.tokens} is no JSON list of token ids")
    if wrong := [token for token in ids if not 0 <= token < info.vocab_size]:
        raise UserError(f"{args.tokens} holds token {wrong[0]}; the model has 0 to {info.vocab_size - 1}")
    return ids


def _text(info, tokens: Sequence[int]) -> str:
    from kvlab.model import load_tokenizer

    return load_tokenizer(info).decode(list(tokens)) if tokens else ""


def _pool(pool_tokens: int | None, chunk_tokens: int, needed: int):
    """The pool that was asked for, or one from which nothing is ever evicted."""
    from kvlab.kvstore.paging.config import PagerConfig

    if pool_tokens is None:
        floor = PagerConfig(pool_tokens=chunk_tokens << 10, chunk_tokens=chunk_tokens).floor_tokens
        pool_tokens = max(floor, -(-needed // chunk_tokens) * chunk_tokens)
    return PagerConfig(pool_tokens=pool_tokens, chunk_tokens=chunk_tokens)


def _given(value: int | None, default: int) -> int:
    """What was asked for, 0 included: it is refused where it is used."""
    return default if value is None else value


def _candidates(paths: Iterable[Path]) -> list[Path]:
    """The files that were named, and those of folders; hidden ones are still being written."""
    found = []
    for given in paths:
        inside = sorted(given.iterdir()) if given.is_dir() else [given]
        found += [file for file in inside if not (given.is_dir() and (file.name.startswith(".") or file.is_dir()))]
    return found


def _settings(args: argparse.Namespace, files: Iterable[Path]) -> tuple[int, str]:
    """Chunk and dtype: as asked for, or those of the first snapshot that can be opened."""
    from kvlab.errors import StorageError
    from kvlab.kvstore.snapshot import read

    for file in files:
        try:
            with read.open(file) as snapshot:
                own = snapshot.geometry
                return _given(args.chunk_tokens, own.chunk_tokens), args.dtype or own.dtype
        except (SnapshotRefused, StorageError):
            continue  # `restore` says why it was not used
    return _given(args.chunk_tokens, CHUNK_TOKENS), args.dtype or DTYPE


def _recipe(file: Path | None, info):
    """A recipe file with the calibration that it names, checked against the model; None without a file."""
    from kvlab.dropins.prepared import prepared
    from kvlab.dropins.recipe_file import read_recipe_file

    return None if file is None else prepared(read_recipe_file(file), info)


def _coder(ready, model, chunk_tokens: int, tokens: int):
    """The coder of a prepared recipe for contexts of so many tokens; None without one."""
    from kvlab.kvstore.snapshot.payload import CodedChunks

    if ready is None:
        return None
    geometry, turn = model.geometry(chunk_tokens), model.turn(tokens)
    return CodedChunks(geometry, ready.recipe, ready.calibration, ready.layers, turn=turn)


def _decoder(snapshot, folder: Path, recipe: Path | None):
    """What decodes a snapshot's payload, its codec as it says itself or as a recipe file does."""
    from kvlab.kvstore.snapshot.payload import coder_for

    info, own = _info(folder), snapshot.manifest.identity
    ready, model = _recipe(recipe, info), _model(info, own.geometry.dtype)
    coder = _coder(ready, model, own.geometry.chunk_tokens, snapshot.length)
    return coder or coder_for(own, None, model.turn(snapshot.length))


# ------------------------------------------------------------------------------------ what is said


def _report(done, answer: Sequence[int], text: str) -> dict:
    """What `restore` did, for programs; the digest tells whether two runs gave the same logits, bit for bit."""
    import dataclasses
    import hashlib

    report = dataclasses.asdict(done.report)
    report["reasons"] = [reason._asdict() for reason in done.report.reasons]
    logits = done.logits.detach().float().cpu().contiguous().numpy()
    return report | {
        "snapshot": report["snapshot"] and str(report["snapshot"]),
        "tokens": list(answer),
        "text": text,
        "logits_sha256": hashlib.sha256(logits.tobytes()).hexdigest(),
        "resident": list(done.run.pager.resident),
    }


def _lines(report, tokens: int, text: str) -> Iterable[str]:
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
    if report.other_numerics:
        yield f"made with another {', '.join(report.other_numerics)}: the last bits may differ"
    if said := report.comparison:
        yield from _verified(said)
    if text:
        yield f"answer: {printable(text)}"


def _ms(value: float | None) -> str:
    return "unknown time" if value is None else f"{value:.1f} ms"


def _verified(said) -> Iterable[str]:
    same = "the same tokens" if said.tokens_equal else f"other tokens from number {said.first_divergence} on"
    apart = f"logits up to {said.max_abs_dlogit:.3g} apart" if said.max_abs_dlogit else "the same logits"
    yield f"cold and warm: {same}, {apart}"
    if not said.tokens_equal and said.margin_at_divergence is not None:
        yield f"the cold run's two best tokens were {said.margin_at_divergence:.3g} apart there"
    yield f"resident chunks: {'the same' if said.residency_equal else 'different'}"


def _compared(found) -> dict:
    import dataclasses

    data = dataclasses.asdict(found) | {"same": found.same}
    return data | {"identity": [reason._asdict() for reason in found.identity]}


def _differences(found) -> Iterable[str]:
    """What `diff` found, for people."""
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


# --------------------------------------------------------------------------------------- flags


def _count(text: str) -> int:
    """A whole number from 0."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    return int(text)


MODEL = path("--model", "folder of a Hugging Face model", metavar="DIR")
RECIPE = path("--recipe", "what `kvlab recipe` wrote; default: K and V as they are", required=False)
DECODER = path("--recipe", "what `kvlab recipe` wrote, for a payload whose codec reads a calibration", required=False)
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
        place("out", "the snapshot, replaced in one step when there is one"),
        *(MODEL, *PROMPT, *RUNNING, RECIPE),
        word("--upto", "save no more than the first N tokens", type=int, metavar="N"),
        word(
            "--evidence", "ids of the gate's evidence of what a lossy recipe costs", nargs="+", default=[], metavar="ID"
        ),
    ],
    inspect_verb: [place("file", "a snapshot"), JSON],
    verify_verb: [
        place("files", "snapshots", nargs="+"),
        path("--model", "also decode each chunk, for this model", required=False, metavar="DIR"),
        DECODER,
        JSON,
    ],
    restore_verb: [
        place("files", "snapshots to choose from, or folders of them", nargs="*"),
        *(MODEL, *PROMPT, *RUNNING, DECODER),
        word("--mode", "default: auto", choices=MODES, default="auto"),
        word("--decode", "tokens of the answer, greedily; default: 16", type=_count, default=16, metavar="N"),
        word("--unproven", "use a lossy payload that names no evidence", action="store_true"),
        JSON,
    ],
    diff_verb: [place("file_a", "a snapshot"), place("file_b", "another"), JSON],
}
