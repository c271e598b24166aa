"""What the verbs of `kvlab snapshot` are given, read and checked. Heavy imports happen inside the functions."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvlab.cli.flags import DTYPES
from kvlab.core.errors import SnapshotRefused, StorageError, UserError
from kvlab.core.output_paths import absence

CHUNK_TOKENS, DTYPE = 64, "float32"
HASHES = ("model_hash", "config_hash", "tokenizer_hash")


def info_of(folder: Path):
    """A model's folder, its shape and its identity."""
    from kvlab.core.model import resolve_folder

    return resolve_folder(folder)


def tokens_of(text: Path | None, tokens: Path | None, info) -> list[int]:
    """The ids of --text or --tokens, in the model's vocabulary."""
    from kvlab.core.model import load_tokenizer
    from kvlab.core.records import read_json

    if (text is None) == (tokens is None):
        raise UserError("give the prompt once: --text FILE or --tokens FILE")
    if text is not None:
        ids = load_tokenizer(info)(_text(text), verbose=False)["input_ids"]
        if not ids:
            raise UserError(f"{text} holds no text")
        return ids
    ids = read_json(tokens)
    if not (isinstance(ids, list) and ids and all(type(token) is int for token in ids)):
        raise UserError(f"{tokens} is no JSON list of token ids")
    if wrong := [token for token in ids if not 0 <= token < info.vocab_size]:
        raise UserError(f"{tokens} holds token {wrong[0]}; the model has 0 to {info.vocab_size - 1}")
    return ids


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except OSError as error:
        raise StorageError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is no UTF-8 text: {error.reason} at byte {error.start}") from None


def pool_of(pool_tokens: int | None, chunk_tokens: int, needed: int):
    """The pool that was asked for, or one from which nothing is ever evicted."""
    from kvlab.kvstore.paging.config import PagerConfig

    if pool_tokens is None:
        floor = PagerConfig(pool_tokens=chunk_tokens << 10, chunk_tokens=chunk_tokens).floor_tokens
        pool_tokens = max(floor, -(-needed // chunk_tokens) * chunk_tokens)
    return PagerConfig(pool_tokens=pool_tokens, chunk_tokens=chunk_tokens)


def refuse_missing(*files: Path) -> None:
    """`StorageError` where none of some files is there; in the words of what would open them."""
    reasons = [absence(file) for file in files]
    if all(reasons):
        why = os.strerror(errno.ENOENT) if reasons[0] == "no such file" else reasons[0]
        raise StorageError(f"cannot read {files[0]}: {why}")


def or_default(value: int | None, default: int) -> int:
    """What was asked for, 0 included: it is refused where it is used."""
    return default if value is None else value


def settings_of(
    files: Iterable[Path], info, tokens: Sequence[int], chunk_tokens: int | None, dtype: str | None, salt: str, key=None
) -> tuple[int, str]:
    """Chunk and dtype: as asked for, else those of the snapshot that could serve most of the prompt.

    Snapshots of other models do not count, nor those of a dtype in which nothing runs here, nor, with a key, those
    that are not signed with it; `restore` says why they were not used.
    """
    from kvlab.kvstore.snapshot.identity import identity_of

    ours, best, found = identity_of(info, DTYPE), None, (CHUNK_TOKENS, DTYPE)
    for snapshot in _opened(files, key):
        identity = snapshot.manifest.identity
        foreign = any(getattr(identity, name) != getattr(ours, name) for name in HASHES)
        if foreign or identity.geometry.dtype not in DTYPES:
            continue
        rank = *_matches(identity, chunk_tokens, dtype, salt), snapshot.usable_prefix(tokens)
        if best is None or rank > best:  # the first of equals
            best, found = rank, (identity.geometry.chunk_tokens, identity.geometry.dtype)
    return or_default(chunk_tokens, found[0]), dtype or found[1]


def _matches(identity, chunk_tokens: int | None, dtype: str | None, salt: str) -> tuple[bool, bool]:
    """Whether a snapshot has the salt, and the chunk and dtype, that were asked for."""
    own = identity.geometry
    salted = identity.salt == salt or identity.salt.startswith(f"{salt}[pool ")  # see `sameness.pool_salt`
    return salted, chunk_tokens in (None, own.chunk_tokens) and dtype in (None, own.dtype)


def _opened(files: Iterable[Path], key) -> Iterator:
    from kvlab.kvstore.snapshot import read

    for file in files:
        try:
            with read.open(file, key) as snapshot:
                yield snapshot
        except (SnapshotRefused, StorageError):
            continue


def strangeness(identity, info) -> list:
    """Every reason why a snapshot of this identity is not of a model, whatever its salt and its codec."""
    from kvlab.kvstore.snapshot.identity import differences, identity_of

    own = identity.geometry
    expected = identity_of(info, own.dtype, own.chunk_tokens, salt=identity.salt)
    return differences(identity, expected.coded(identity.codec))


def recipe_of(file: Path | None, info, bits: float | None = None):
    """A recipe file with the calibration that it names, checked against the model; None without a file.

    `bits` are others than the recipe's, of a codec of whole caches, whose calibration serves all of them.
    """
    from kvlab.cache.files.prepared import at_bits, prepared
    from kvlab.cache.files.recipe import read_recipe_file

    if file is None:
        if bits is not None:
            raise UserError("--bits goes with --recipe")
        return None
    return at_bits(prepared(read_recipe_file(file), info, whole=True), bits)


def evidence_ids(files: Iterable[Path], ready, info) -> list[str]:
    """The ids of evidence that was measured of this recipe on this model; `UserError` for any other.

    Whether what was lost is little enough is for `kvlab gate check` to say, which knows what an eval tolerates.
    """
    from kvlab.gate.evidence import record

    return [_evidence_id(file, record.read(file), ready, info) for file in files]


def _evidence_id(file: Path, found, ready, info) -> str:
    if ready is None:
        raise UserError("--evidence is of what a recipe costs; K and V are stored as they are without --recipe")
    if found.content_id() != found.evidence_id:
        raise UserError(f"{file} is not the evidence that was written: its content is not that of its evidence_id")
    said = (found.identity.recipe_id, found.identity.model_hash)
    if said != (needed := (ready.identity, info.model_hash)):
        raise UserError(
            f"{file} is evidence of recipe {said[0]} on model {said[1]}; the snapshot is of recipe {needed[0]} on model"
            f" {needed[1]}"
        )
    return found.evidence_id
