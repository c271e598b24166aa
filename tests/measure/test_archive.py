"""`archive` on a real engine: fitted, measured, witnessed, stored, and refused where it cannot be."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch

from kvlab.cache.files.calibration import load_calibration, write_calibration
from kvlab.calibration.across import expected_attention
from kvlab.calibration.calibrate import calibrate
from kvlab.calibration.metrics import ErrorMetrics
from kvlab.codecs.archive.file import ArchiveHeader, dump, load, refuse_other
from kvlab.codecs.archive.tokens import FirstLayer
from kvlab.codecs.recipes import named_recipe
from kvlab.codecs.registry import build
from kvlab.codecs.stream.seal import Key
from kvlab.core.errors import CalibrationMismatch, CapabilityError, StreamError, UserError
from kvlab.core.model import resolve
from kvlab.core.params import Model
from kvlab.engines.registry import start
from kvlab.measure.cache_codecs import coder_of
from kvlab.measure.coding import CleanCapture
from kvlab.measure.quick_run import NamedCodec, score
from kvlab.witness.plain import PlainModel
from refusals import refused
from tiers import number
from tiny import CLASSES, write_model

CONTEXT = 64
RECIPE = named_recipe("archive", quality=700)


@pytest.fixture(scope="module")
def calibrated(hf_engine, calib_windows):
    windows = calib_windows.calib[:, :CONTEXT].tolist()
    return calibrate(hf_engine, windows, [RECIPE], corpus_hash=calib_windows.corpus_hash, sample=4)


@pytest.fixture(scope="module")
def window(calib_windows) -> list[int]:
    return calib_windows.test[0].tolist()


def cell_of(engine, recipe=RECIPE, protocol: str = "snapshot", **changes):
    from kvlab.measure.scoring import cell_of_all_layers

    cell = cell_of_all_layers("archive", engine, protocol, recipe)
    return cell.model_copy(update=changes)


@pytest.fixture(scope="module")
def coder(hf_engine, calibrated, window):
    """After one window was coded."""
    clean = CleanCapture(CONTEXT)
    hf_engine.score(window, CONTEXT, clean)
    found = coder_of(cell_of(hf_engine), calibrated)
    found.begin(clean, window[:CONTEXT], 0)
    return found


@pytest.mark.parametrize("kind", sorted(CLASSES))
def test_the_token_ids_say_what_the_first_layer_holds(tmp_path, kind):
    info = resolve(Model(path=str(write_model(tmp_path / kind, kind)), n_layers=3))
    engine, ids, clean = start("hf", info, "float32", max_tokens=32), list(range(3, 27)), CleanCapture(24)
    engine.score([*ids, 1, 1], 24, clean)
    for stream, rows in zip("kv", FirstLayer(info).rows(ids), strict=True):
        due = clean.kept[0, stream].transpose(0, 1).flatten(1).double()
        assert float((rows - due).abs().max()) <= 2e-3 * float(due.abs().max())
    with refused(UserError, None, "token 320 ", "0..319"):
        FirstLayer(info).rows([1, 320])


def test_expected_attention_is_what_a_query_after_the_last_token_gives(hf_engine, window):
    """With the model's own next query as the one probe it is the square of the model's attention."""
    info, clean, queries = hf_engine.info, CleanCapture(CONTEXT), {}

    def tap(layer, part, x):
        clean(layer, part, x)
        if part == "q":
            queries[layer] = x[:, CONTEXT : CONTEXT + 1].clone()

    hf_engine.score(window, CONTEXT, tap)
    model = hf_engine.model
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager")
        weights = model(torch.tensor([window[: CONTEXT + 1]]), output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    angles = ErrorMetrics(info, CONTEXT + 1).angles
    for layer in range(info.n_layers):
        seen = weights[layer][0, :, -1, :CONTEXT]
        due = (seen / seen.sum(-1, keepdim=True)).square().sum(0)  # the query's own token is no part of the cache
        assert torch.allclose(
            expected_attention(queries[layer], clean.kept[layer, "k"], angles[layer], info.score_scale, None),
            due,
            atol=1e-5,
        )


@pytest.mark.full
def test_it_is_measured_and_witnessed(hf_engine, calibrated, calib_windows):
    subjects = [NamedCodec(f"archive {q}", named_recipe("archive", quality=q), calibrated) for q in (600, 900)]
    subjects += [NamedCodec("hadamard", named_recipe("hadamard", 4))]
    windows = np.asarray(calib_windows.test[:2])
    plain = cache(partial(PlainModel, hf_engine.info.path))
    coarse, fine, _ = score(hf_engine, windows, CONTEXT, subjects, plain)
    assert coarse.tokens["kl"].mean() > fine.tokens["kl"].mean()
    assert coarse.cost.coding.bits_per_value < fine.cost.coding.bits_per_value
    assert [one.witnessed is not None for one in (coarse, fine)] == [True, False]  # one of a family, the coarsest
    assert fine.cost.coding.fires == fine.cost.coding.expected_fires


def test_bits_count_the_whole_file(hf_engine, calibrated, calib_windows):
    recipe, windows = named_recipe("archive", 6.0), np.asarray(calib_windows.test[:2])
    (found,) = score(hf_engine, windows, CONTEXT, [NamedCodec("archive", recipe, calibrated)])
    assert found.cost.coding.bits_per_value == pytest.approx(6.0, rel=0.01)


def test_no_layer_below_is_there_inside_a_forward(hf_engine, calibrated):
    with refused(CapabilityError, "capability.snapshot-only", "'archive'", "snapshot"):
        coder_of(cell_of(hf_engine, protocol="in_forward"), calibrated)
    with refused(CapabilityError, "capability.all-layers", "'archive'"):
        coder_of(cell_of(hf_engine, layers=(1, 2)), calibrated)
    with refused(CapabilityError, "capability.whole-cache", "'archive'"):
        build(RECIPE.k)


def test_recipes_of_half_an_archive_are_refused():
    from pydantic import ValidationError

    from kvlab.codecs.archive import ArchiveStream
    from kvlab.codecs.fp8 import Fp8Stream
    from kvlab.core.recipe import Recipe

    archive = ArchiveStream(bits=2)
    with pytest.raises(ValidationError, match="K and V alike"):
        Recipe(k=archive, v=Fp8Stream())
    with pytest.raises(ValidationError, match="before the rotary embedding"):
        Recipe(k=archive, v=archive, rotary="after")
    for wrong in ({}, {"bits": 2, "quality": 700}):
        with pytest.raises(ValidationError, match="bits or quality, one of them"):
            ArchiveStream(**wrong)


# -------------------------------------------------------------------------------------------------------- the file


def test_a_file_comes_back_whole(coder, window):
    file = load(coder.stored)
    header, ids, body = file
    assert dump(body, header, ids) == coder.stored and list(ids) == window[:CONTEXT]
    assert ArchiveHeader.unpack(header.pack()) == header
    assert len(coder.stored) == body.nbytes + ArchiveHeader.overhead(header.layers, header.tokens, header.block)
    again = coder.decoded(coder.stored, window[:CONTEXT])
    assert all(torch.equal(x, coder._decoded[at]) for at, x in again.items())


def test_another_calibration_model_or_text_is_refused(coder, window):
    file = load(coder.stored)
    with refused(StreamError, "stream.other-tokens", "at 0"):
        coder.decoded(coder.stored, [window[0] + 1, *window[1:CONTEXT]])
    given = (file.header.calibration_hash, file.header.model_hash)
    with refused(StreamError, "stream.other-identity", "calibration_hash"):
        refuse_other(file, "0" * 16, given[1])
    with refused(StreamError, "stream.other-identity", "model_hash"):
        refuse_other(file, given[0], "0" * 16)


def test_damaged_files_are_refused(coder):
    """10,000 in the third tier: bytes changed, cut out, doubled, moved."""
    data, make = coder.stored, random.Random(0)
    for _ in range(number(10_000)):
        changed = bytearray(data)
        at, length = make.randrange(len(data)), make.choice((1, 1, 4, 32))
        match make.randrange(4):
            case 0:
                changed[at] ^= 1 << make.randrange(8)
            case 1:
                del changed[at : at + length]
            case 2:
                changed[at:at] = data[at : at + length]
            case _:
                changed = changed[:at]
        if bytes(changed) != data:
            with pytest.raises(StreamError):
                load(bytes(changed))


def test_records_of_two_files_make_no_third(hf_engine, calibrated, window):
    files = []
    for quality in (700, 760):
        clean = CleanCapture(CONTEXT)
        hf_engine.score(window, CONTEXT, clean)
        own = coder_of(cell_of(hf_engine, named_recipe("archive", quality=quality, block_size=16)), calibrated)
        own.begin(clean, window[:CONTEXT], 0)
        files.append(load(own.stored))
    (header, ids, one), (_, _, other) = files
    mixed = type(one)(one.quality, one.tokens, one.block, one.starts, (*one.records[:2], *other.records[2:]))
    forged = bytearray(dump(mixed, header, ids))
    forged[-68:] = dump(one, header, ids)[-68:]  # the seal of the first
    with refused(StreamError, "stream.root-digest"):
        load(bytes(forged))


def test_a_signature_is_of_its_key(coder):
    header, ids, body = load(coder.stored)
    mine, other = Key(b"a" * 32), Key(b"b" * 32)
    signed = dump(body, header, ids, mine)
    assert load(signed, mine).header == header
    with refused(StreamError, "stream.other-key"):
        load(signed, other)
    with refused(StreamError, "stream.unsigned"):
        load(coder.stored, mine)


# ------------------------------------------------------------------------------------------------ its calibration


def test_a_calibration_file_holds_it_and_a_decoder_s_half_decodes(tmp_path, hf_engine, calibrated, coder, window):
    info, ids = hf_engine.info, window[:CONTEXT]
    whole, half = tmp_path / "archive.kv", tmp_path / "decoder.kv"
    write_calibration(whole, RECIPE, calibrated, info)
    write_calibration(half, RECIPE, calibrated, info, decoder=True)
    clean = CleanCapture(CONTEXT)
    hf_engine.score(window, CONTEXT, clean)
    again = coder_of(cell_of(hf_engine), load_calibration(whole, info))
    again.begin(clean, ids, 0)
    assert again.stored == coder.stored
    reader = coder_of(cell_of(hf_engine), load_calibration(half, info))
    found = reader.decoded(coder.stored, ids)
    assert all(torch.equal(x, coder._decoded[at]) for at, x in found.items())
    with refused(CalibrationMismatch, "calibration.decoder-only"):
        reader.begin(clean, ids, 0)
    assert half.stat().st_size < whole.stat().st_size


def test_a_calibration_of_another_codec_holds_none(tmp_path, hf_engine, calibrated):
    bare = replace(calibrated, archive=None)
    with refused(CalibrationMismatch, "calibration.not-fitted", "archive"):
        write_calibration(tmp_path / "archive.kv", RECIPE, bare, hf_engine.info)
    with refused(CapabilityError, "capability.all-layers", "'archive'"):
        write_calibration(tmp_path / "archive.kv", RECIPE, calibrated, hf_engine.info, layers=[1])
    assert not list(tmp_path.iterdir())
