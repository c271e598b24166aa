"""The engines' files against the engines' own code, where it is installed, and against what formats take."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvlab.advice.serving import DEVICES, EXACT, OwnFormat
from kvlab.advice.serving_engines import SERVING
from kvlab.core.model import resolve_folder
from kvlab.trials.bench import bits_of

FORMATS = [(engine, one) for engine in SERVING.values() for one in engine.formats]
BITS = {  # of heads of 64, as docs/codecs.md says
    "q8_0": 8.5, "q4_0": 4.5, "q5_1": 6, "iq4_nl": 4.5, "q8_0/q4_0": 6.5, "f16/q4_0": 10.25, "fp8_e4m3": 8,
    "int4_per_token_head": 4.5, "int8_per_token_head": 8.5, "turboquant_k8v4": 6.25, "turboquant_3bit_nc": 3.375,
    "nvfp4": 4.5, "ultraquant_4bit": 4.25, "quanto-int2": 2.5,
}  # fmt: skip


@pytest.mark.parametrize(("engine", "one"), FORMATS, ids=[f"{e.name}-{f.name}" for e, f in FORMATS])
def test_every_format_is_a_recipe_and_a_line(engine, one, tiny_model):
    info = resolve_folder(tiny_model)
    assert (one.recipe.placement == "pre_rope") == isinstance(one, OwnFormat) and {*one.devices} <= {*DEVICES}
    assert isinstance(one, OwnFormat) or 2 < bits_of(one.recipe, info) <= 16
    line = engine.told("MODEL", one, (0, 2) if engine.skipped else ())
    assert "MODEL" in line and (one.option or one.name) in line and "{" not in line.replace("{" + one.option + "}", "")
    assert ("--kv-cache-dtype-skip-layers 0 2" in line) == (bool(engine.skipped) and not isinstance(one, OwnFormat))
    assert one.apart <= bool(engine.skipped) and engine.sources and engine.unmeasured and engine.held


def test_bits_are_those_of_the_formats_without_headers(tmp_path):
    import tiny

    info = resolve_folder(tiny.write_model(tmp_path / "model", "llama", head_dim=64, num_hidden_layers=1))
    found = {one.name: bits_of(one.recipe, info) for _, one in FORMATS if one.name in BITS}
    assert found == pytest.approx(BITS)


def test_what_an_engine_cannot_take_is_refused():
    vllm, llama = SERVING["vllm"], SERVING["llama.cpp"]
    by_name = {one.name: one for one in vllm.formats}
    assert vllm.refused(by_name["fp8_e4m3-cpu"], "cpu", 28, 64) is None
    assert "48" in vllm.refused(by_name["fp8_e4m3-cpu"], "cpu", 28, 48)
    assert "cpu" in vllm.refused(by_name["int4_per_token_head"], "cpu", 28, 64)
    assert "32" in llama.refused(llama.formats[0], "metal", 28, 80)
    assert "all 4 layers" in vllm.refused(by_name["turboquant_3bit_nc"], "cuda", 4, 64)
    assert by_name["turboquant_3bit_nc"].left_alone(28) == (0, 1, 26, 27)
    assert by_name["turboquant_3bit_nc"].left_alone(3) == (0, 2) and by_name["nvfp4"].left_alone(28) == ()


def test_keys_may_stay_in_16_bits_while_values_do_not():
    (mixed,) = [one for one in SERVING["llama.cpp"].formats if one.k == EXACT]
    assert mixed.recipe.k.codec == "identity" and mixed.recipe.v.codec == "ggml"


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_takes_what_is_said_of_it():
    """Read as text: importing vLLM takes seconds."""
    root = Path(find_spec("vllm").origin).parent
    known = {*re.findall(r'"(\w+)"', (root / "config/cache.py").read_text().partition("CacheDType = Literal[")[2])}
    backends = {
        file.stem: {*re.findall(r'"(\w+)"', found[1])}
        for file in (root / "v1/attention/backends").glob("*.py")
        if (found := re.search(r"supported_kv_cache_dtypes[^=]*= \[(.*?)\]", file.read_text(), re.DOTALL))
    }
    for one in (one for one in SERVING["vllm"].formats if not isinstance(one, OwnFormat)):
        option = one.option or one.name
        assert option in known, option
        on_cpu = option in backends["cpu_attn"]
        assert ("cpu" in one.devices) <= on_cpu, option
        if "cuda" in one.devices:
            assert any(option in backends[name] for name in ("triton_attn", "flashinfer", "turboquant_attn")), option
    arguments = (root / "engine/arg_utils.py").read_text()
    assert "--kv-cache-dtype-skip-layers" in arguments and 'startswith("turboquant_")' in arguments
