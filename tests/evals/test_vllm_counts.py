"""What the plugin counted is what was asked of vLLM, or there is no number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvlab.cache.vllm_plugin import Status
from kvlab.core.errors import CapabilityError, CodecNotActive
from kvlab.core.model import resolve
from kvlab.evals.vllm import coded, refuse_own_pass
from refusals import refused

BEFORE = Status("r", "m", None, (0, 2), 4, 100, {"k": (4, 4), "v": (4, 4)}, {"k": 2.0, "v": 4.0})
NOW = replace(BEFORE, steps=10, tokens=300, fires={"k": (10, 10), "v": (10, 10)}, bits_per_value={"k": 2.5, "v": 4.0})


@pytest.fixture(scope="module")
def info(tiny_params):
    return resolve(tiny_params.model)  # 3 layers


def test_what_lies_between_two_answers_is_counted(info):
    seen = coded(BEFORE, NOW, 200, info, itemsize=4)
    assert (seen.fires, seen.expected_fires) == (6 * 4, 6 * 4)
    assert seen.kv_values == 200 * info.values_per_token
    token = info.n_kv_heads * info.head_dim  # values of one layer's K, or V
    written = ((2.5 * 300 - 2.0 * 100) + 4.0 * 200) * token * 2 / 8
    assert seen.kv_bytes == pytest.approx(written + 200 * token * 2 * 4, abs=1)  # one layer of three is left alone


def test_before_the_first_pass_there_are_no_bits(info):
    nothing = {"k": (0, 0), "v": (0, 0)}
    fresh = replace(BEFORE, steps=0, tokens=0, fires=nothing, bits_per_value={"k": None, "v": None})
    assert coded(fresh, BEFORE, 100, info, 2).fires == 16


@pytest.mark.parametrize(
    ("now", "asked"),
    [
        (BEFORE, 0),
        (replace(NOW, fires={"k": (10, 9), "v": (10, 10)}), 200),
        (replace(NOW, fires={"k": (10, 10), "v": (10, 11)}), 200),
        (NOW, 201),
    ],
    ids=["no pass", "one pass missed", "one too many", "past the codecs"],
)
def test_a_codec_that_did_not_see_everything_is_no_measurement(info, now, asked):
    with pytest.raises(CodecNotActive):
        coded(BEFORE, now, asked, info, 2)


def test_on_an_accelerator_only_written_answers_show_a_cache_of_fewer_bits():
    with refused(CapabilityError, "capability.reads-nothing", "fp8_e4m3", "a GPU"):
        refuse_own_pass("score", "fp8_e4m3", "a GPU")
    refuse_own_pass("write", "fp8_e4m3", "a GPU")
    refuse_own_pass("score", "auto", "a GPU")
