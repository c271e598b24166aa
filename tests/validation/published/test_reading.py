"""Files are recognised by their fields; what is not usable is named, never skipped."""

import json
import math

import pytest

from kvlab.core.errors import StorageError, UserError
from refusals import refused
from tests.validation.published import making
from validation.published.families import NOT_READ, READ, REFUSED, UNKNOWN, read_folder

pytestmark = pytest.mark.full


def one(folder, data, name="x.json"):
    making.write(folder, name, data)
    return next(source for source in read_folder(folder) if source.file == name)


@pytest.mark.parametrize("family", making.FAMILIES)
def test_every_family_is_recognised_by_its_fields(tmp_path, family):
    source = one(tmp_path, making.FAMILIES[family]())
    assert (source.status, source.family) == (READ, family)


@pytest.mark.parametrize("n", [1, 2, 8, 33])
@pytest.mark.parametrize("make", [making.vllm, making.hf, making.qwen3, making.rigorous, making.engines, making.noise])
def test_other_numbers_of_passages_work(tmp_path, make, n):
    contents = one(tmp_path, make(n=n)).contents
    assert {len(cell.windows) for cell in contents.cells} == {n}


def test_a_window_holds_what_the_file_says(tmp_path):
    data = making.vllm()
    cell = one(tmp_path, data).contents.cells[0]
    given, window = data["per_passage"][2], cell.windows[2]
    assert (window.window, window.n_tokens, window.coded_bytes) == (2, 64, given["codec_total_compressed_bytes"])
    assert window.delta_nll == pytest.approx(math.log(given["metrics"]["ppl_alt"] / given["metrics"]["ppl_ref"]))
    assert window.change == given["metrics"]["ppl_delta_rel"]


def test_what_a_file_does_not_record_is_none(tmp_path):
    facts = one(tmp_path, making.hf()).contents.cells[0].facts
    assert (facts.engine, facts.protocol, facts.variance_ratio) == ("hf", "snapshot", 1.0)
    assert facts.boundary_layers == tuple(making.BOUNDARY)
    assert {facts.bits_v, facts.block_size, facts.whitening, facts.codebook_k, facts.outlier_threshold} == {None}
    assert set(facts.inferred) == {"engine", "protocol"}


def test_snapshot_and_in_forward_are_told_by_the_recipe(tmp_path):
    protocols = [one(tmp_path, make()).contents.cells[0].facts.protocol for make in (making.snapshot, making.vllm)]
    assert protocols == ["snapshot", "in_forward"]


def test_the_two_pass_harness_scores_one_token_less(tmp_path):
    assert {window.n_tokens for window in one(tmp_path, making.hf()).contents.cells[0].windows} == {63}


def test_calibration_that_was_switched_off_is_not_believed(tmp_path):
    cell = one(tmp_path, making.qwen3()).contents.cells[0]
    assert (cell.facts.whitening, cell.facts.calibration) == ("none", None)
    coded = making.N_LAYERS - len(making.BOUNDARY)
    assert [window.coded_bytes for window in cell.windows] == [2 * coded * (100 + i) for i in range(4)]


def test_bits_of_channels_are_per_coordinate(tmp_path):
    cells = one(tmp_path, making.rigorous()).contents.cells
    assert [(cell.facts.bits_k, cell.facts.bits_v) for cell in cells] == [(16, 16), (4.5, 16), (4.25, 4.25)]
    assert [cell.role for cell in cells] == ["identity", "codec", "codec"]


def test_failed_rows_are_counted(tmp_path):
    data = making.rigorous(n=4)
    data["per_passage"].append({"passage": 4, "channel": "tq_b4_KV", "fatal": "out of memory"})
    assert one(tmp_path, data).contents.notes == ("1 rows that the harness marked as failed",)


def test_an_unknown_file_is_named_with_the_nearest_family(tmp_path):
    data = making.engines()
    for row in data["per_passage"]:
        del row["ppl_vllm"]
    source = one(tmp_path, data)
    assert source.status == UNKNOWN
    assert "engines without a codec (phase 1)" in source.why and "per_passage[].ppl_vllm" in source.why


@pytest.mark.parametrize("data", [{}, [], [1, 2], 3, None, "text", {"per_passage": []}, {"per_passage": 4}])
def test_odd_json_is_unknown_and_does_not_stop_the_rest(tmp_path, data):
    making.write(tmp_path, "good.json", making.vllm())
    assert one(tmp_path, data).status == UNKNOWN


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "12", None, True, 0.0, -3.0, 0.5, 1e300])
def test_a_perplexity_that_is_none_refuses_the_file_and_says_where(tmp_path, value):
    data = making.vllm()
    data["per_passage"][2]["metrics"]["ppl_alt"] = value
    source = one(tmp_path, data)
    assert source.status == REFUSED and not source.contents.cells
    assert "per_passage[2].metrics.ppl_alt" in source.why


def test_a_missing_number_in_a_later_passage_is_found(tmp_path):
    data = making.hf()
    del data["per_passage"][3]["metrics"]["ppl_ref"]
    assert "per_passage[3].metrics.ppl_ref is missing" in one(tmp_path, data).why


def test_a_channel_that_names_a_passage_twice_is_refused(tmp_path):
    data = making.rigorous(n=4)
    data["per_passage"].append(dict(data["per_passage"][1]))
    assert "each passage once" in one(tmp_path, data).why


@pytest.mark.parametrize(
    ("make", "spoil"),
    [
        (making.vllm, lambda data: data.update(boundary_skip_layers=7)),
        (making.vllm, lambda data: data["per_passage"].append("no object")),
        (making.vllm, lambda data: data["per_passage"][0]["metrics"].update(n_tokens=0)),
        (making.ablation, lambda data: data["cells"].update(other=None)),
        (making.hf, lambda data: data["per_passage"][0].update(stats=[1])),
        (making.single_layers, lambda data: data["per_layer"].append(dict(data["per_layer"][0]))),
        (making.codec_error, lambda data: data["per_layer"][1].pop("K_mse_ratio")),
    ],
)
def test_a_file_that_is_laid_out_otherwise_is_refused(tmp_path, make, spoil):
    data = make()
    spoil(data)
    source = one(tmp_path, data)
    assert source.status == REFUSED and source.why


@pytest.mark.parametrize("text", ["{", "", '{"a": 1} trailing', "\x00"])
def test_broken_json_stops_with_one_line_that_names_the_file(tmp_path, text):
    making.write(tmp_path, "good.json", making.vllm())
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(StorageError) as caught:
        read_folder(tmp_path)
    assert str(caught.value).startswith("bad.json ")
    assert "\n" not in str(caught.value) and str(tmp_path) not in str(caught.value)


def test_other_files_are_listed_as_not_read(tmp_path):
    making.write(tmp_path, "good.JSON", making.vllm())
    (tmp_path / "x.f32").write_bytes(b"1234")
    assert [source.status for source in read_folder(tmp_path)] == [READ, NOT_READ]


def test_files_come_in_the_order_of_their_names(every):
    names = [source.file for source in read_folder(every)]
    assert names == sorted(names) and len(names) > 15


@pytest.mark.parametrize("prepare", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_text("")])
def test_a_folder_without_json_is_named(tmp_path, prepare):
    folder = tmp_path / "nothing"
    prepare(folder)
    with refused(UserError, "user.no-published-files", folder):
        read_folder(folder)


def test_json_is_read_as_it_is_printed(tmp_path):
    """A number survives the file to its last bit: nothing is rounded on the way in."""
    data = json.loads(json.dumps(making.vllm()))
    assert one(tmp_path, data).contents.cells[0].windows[0].ppl_ref == making.references(4)[0]
