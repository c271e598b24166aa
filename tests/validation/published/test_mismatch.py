"""Recipes are compared field by field, whatever the field."""

import pytest

from tests.validation.published import making
from validation.published import mismatch
from validation.published.families import read_folder

pytestmark = pytest.mark.full


def compared(folder, *files):
    for index, data in enumerate(files):
        making.write(folder, f"{index}.json", data)
    return mismatch.comparisons([cell for source in read_folder(folder) for cell in source.contents.cells])


def verdicts(comparison):
    return {one.name: one.verdict for one in comparison.fields}


SAME = {"variance_ratio": 0.95}  # what makes the invented HF file agree with the invented vLLM one


def test_the_planted_mismatch_is_found_and_is_the_only_one(tmp_path):
    (found,) = compared(tmp_path, making.hf(), making.vllm())
    assert [(one.name, list(one.a), list(one.b)) for one in found.named("differs")] == [
        ("variance_ratio", [1.0], [0.95])
    ]
    assert (found.a.engine, found.a.protocol, found.b.engine, found.b.protocol) == (
        "hf",
        "snapshot",
        "vllm",
        "in_forward",
    )


def test_equal_recipes_raise_none(tmp_path):
    (found,) = compared(tmp_path, making.hf(**SAME), making.vllm())
    assert found.named("differs") == []
    assert {one.name for one in found.named("equal")} == {
        "variance_ratio",
        "bits_k",
        "pca",
        "share_basis_v",
        "boundary_layers",
    }


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"bit_width": 4}, "bits_k"),
        ({"pca_method": "exact"}, "pca"),
        ({"share_basis_v": False}, "share_basis_v"),
        ({"block_size": 64}, "block_size"),
        ({"bit_width_v": 4}, "bits_v"),
        ({"outlier_threshold": 3.0}, "outlier_threshold"),
        ({"rsvd_target_rank_factor": 0.25}, "rank_fraction"),
    ],
)
def test_any_recorded_field_that_differs_is_a_mismatch(tmp_path, change, name):
    (found,) = compared(tmp_path, making.hf(**SAME, **change), making.vllm())
    assert [one.name for one in found.named("differs")] == [name]


def test_a_boundary_seen_only_in_the_statistics_counts(tmp_path):
    (found,) = compared(tmp_path, making.hf(**SAME), making.vllm(boundary_skip_layers=[0]))
    assert [one.name for one in found.named("differs")] == ["boundary_layers"]


def test_what_one_side_does_not_record_is_named_apart(tmp_path):
    (found,) = compared(tmp_path, making.hf(), making.vllm())
    named = verdicts(found)
    assert {named[name] for name in ("bits_v", "block_size", "codebook_k", "skeleton", "whitening")} == {"not recorded"}


def test_a_stream_known_from_a_name_only_is_not_recorded(tmp_path):
    (found,) = compared(tmp_path, making.hf(), making.vllm(model_name="toy_k_only"))
    assert verdicts(found)["stream"] == "not recorded"


def test_a_side_with_both_values_overlaps(tmp_path):
    (found,) = compared(tmp_path, making.hf(), making.vllm(), making.vllm(seed=9, variance_ratio=1.0))
    assert verdicts(found)["variance_ratio"] == "overlaps" and not found.named("differs")


def test_protocols_of_one_engine_are_compared_too(tmp_path):
    (found,) = compared(tmp_path, making.vllm(), making.snapshot(bit_width_k=4))
    assert {found.a.protocol, found.b.protocol} == {"snapshot", "in_forward"}
    assert [one.name for one in found.named("differs")] == ["bits_k"]
    assert verdicts(found)["variance_ratio"] == "not recorded"


@pytest.mark.parametrize("change", [{"ctx_len": 1024}, {"n_eval": 65}])
def test_other_experiments_are_not_compared(tmp_path, change):
    assert compared(tmp_path, making.hf(**change), making.vllm()) == []


def test_two_models_are_never_one_experiment(tmp_path):
    found = compared(tmp_path, making.hf(model_path="a/x"), making.vllm(model_path="b/y"))
    assert found == []


def test_channels_are_compared_with_their_own_kind(tmp_path):
    found = compared(tmp_path, making.rigorous(), making.rigorous(mode="snapshot", seed=4))
    assert [one.claim for one in found] == ["channel v14_Q10_K", "channel tq_b4_KV"]
    assert all(not one.named("differs") for one in found)


def test_equal_recipes_with_different_numbers_are_named(tmp_path):
    for index, data in enumerate([making.vllm(), making.vllm(seed=4, model_name="toy_k_only"), making.hf()]):
        making.write(tmp_path, f"{index}.json", data)
    cells = [cell for source in read_folder(tmp_path) for cell in source.contents.cells]
    assert [[cell.name for cell in group] for group in mismatch.indistinct(cells)] == [["toy", "toy_k_only"]]
