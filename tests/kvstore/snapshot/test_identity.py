"""A snapshot of anything else is refused, and each difference by its own name."""

from __future__ import annotations

import pytest

import tiny
from kvlab.codecs.hadamard import HadamardStream
from kvlab.codecs.int import IntStream
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.errors import ModelError
from kvlab.core.model import resolve
from kvlab.core.params import Model
from kvlab.core.recipe import Recipe
from kvlab.kvstore.paging.geometry import Geometry
from kvlab.kvstore.snapshot.identity import CodecIdentity, differences, identity_of, rope_of
from kvlab.kvstore.snapshot.reasons import Code
from kvstore.snapshot import making
from kvstore.snapshot.making import CHUNKS, GEOMETRY
from refusals import refused

LENGTH = CHUNKS * GEOMETRY.chunk_tokens
RECIPE = Recipe(k=HadamardStream(bits=4), v=IntStream(bits=4, group=8))


def codec(recipe: Recipe = RECIPE, **changes) -> CodecIdentity:
    fields = {"layers": (0, 1), "placement": "post_rope", "calibration_hash": None}
    return CodecIdentity(recipe_id=recipe.recipe_id, recipe=recipe, **fields | changes)


def layout(**changes) -> Geometry:
    return Geometry(**vars(GEOMETRY) | changes)


OTHERS = {
    "model": (Code.MODEL, {"model_hash": "ffff456789abcdef"}),
    "config": (Code.CONFIG, {"config_hash": "ffff456789ab"}),
    "tokenizer": (Code.TOKENIZER, {"tokenizer_hash": "ffff76543210"}),
    "rope theta": (Code.ROPE, {"rope": {"rope_theta": 500000.0, "rope_type": "default"}}),
    "rope type": (Code.ROPE, {"rope": {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0}}),
    "salt": (Code.SALT, {"salt": "adapter"}),
    "dtype": (Code.DTYPE, {"geometry": layout(dtype="bfloat16")}),
    "layers": (Code.LAYOUT, {"geometry": layout(layers=3)}),
    "heads": (Code.LAYOUT, {"geometry": layout(kv_heads=1)}),
    "head_dim": (Code.LAYOUT, {"geometry": layout(head_dim=16)}),
    "chunk": (Code.LAYOUT, {"geometry": layout(chunk_tokens=64)}),
    "coded": (Code.CODEC, {"codec": codec()}),
}


def test_its_own_identity_is_no_reason(snapshot):
    assert snapshot.check(making.identity()) == []
    assert snapshot.check(making.identity(), making.tokens(LENGTH + 5)) == []


@pytest.mark.parametrize("name", OTHERS)
def test_one_other_thing_is_one_reason(snapshot, name):
    code, changes = OTHERS[name]
    expected = making.identity().model_copy(update=changes)
    (reason,) = snapshot.check(expected, making.tokens(LENGTH))
    assert reason.code == code and "\n" not in reason.message
    (back,) = differences(expected, making.identity())
    assert back.code == code


def test_everything_that_differs_is_said(snapshot):
    changes = {k: v for _, fields in OTHERS.values() for k, v in fields.items()}
    changes["geometry"] = layout(dtype="float16", layers=9)
    found = snapshot.check(making.identity().model_copy(update=changes), [1, 2, 3, 4])
    wanted = {Code.MODEL, Code.CONFIG, Code.TOKENIZER, Code.ROPE, Code.SALT, Code.DTYPE, Code.LAYOUT, Code.CODEC}
    assert {reason.code for reason in found} == {*wanted, Code.PREFIX}


def test_the_message_names_both_sides(snapshot):
    found = snapshot.check(making.identity(rope={"rope_theta": 500000.0, "rope_type": "default"}))
    assert "10000.0" in found[0].message and "500000.0" in found[0].message


@pytest.mark.parametrize("prompt", [[], [1, 2, 3], [1, 2, 3, 4], [4095, *making.tokens(LENGTH)]])
def test_another_prefix(snapshot, prompt):
    assert [reason.code for reason in snapshot.check(making.identity(), prompt)] == [Code.PREFIX]


def test_a_prefix_in_common_is_no_reason(snapshot):
    assert snapshot.check(making.identity(), [*making.tokens(GEOMETRY.chunk_tokens), 1, 1, 1]) == []


@pytest.mark.parametrize(
    "code, other",
    [
        (Code.CODEC, codec(Recipe(k=HadamardStream(bits=3), v=RECIPE.v))),
        (Code.CODEC, codec(layers=(0,))),
        (Code.CODEC, codec(placement="pre_rope")),
        (Code.CALIBRATION, codec(calibration_hash="f" * 16)),
        (Code.CODEC, None),
    ],
)
def test_a_payload_coded_otherwise(code, other):
    found = differences(making.identity(codec=codec()), making.identity(codec=other))
    assert [reason.code for reason in found] == [code]


def test_lossless_is_what_gives_back_the_bits():
    assert codec(Recipe(k=IdentityStream(), v=IdentityStream())).lossless
    assert codec(layers=()).lossless
    assert not codec(Recipe(k=IdentityStream(), v=RECIPE.v)).lossless


def test_a_recipe_under_anothers_id_is_none():
    with pytest.raises(ValueError, match="is not that of the recipe"):
        CodecIdentity(recipe_id="0" * 12, recipe=RECIPE, layers=(0,), placement="pre_rope", calibration_hash=None)


# -- the identity of a model's folder


@pytest.fixture
def model(tmp_path, root):
    """A copy of the reference model's small files, with weights of a few bytes."""
    source = root / "models" / "reference"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def of(folder, **settings):
    return identity_of(resolve(Model(path=str(folder), n_layers=6), loads=False), "bfloat16", **settings)


def codes(ours, theirs) -> set[Code]:
    return {reason.code for reason in differences(ours, theirs)}


def test_a_models_identity_is_its_own(model):
    assert of(model) == of(model)
    assert of(model).geometry == Geometry(6, 2, 64, "bfloat16", 64)
    assert of(model).rope == {"rope_theta": 10000.0, "rope_type": "default"}


def test_each_file_of_a_model_counts(model):
    before = of(model)
    (model / "model.safetensors").write_bytes(b"weighty")
    assert codes(before, of(model)) == {Code.MODEL}
    before = of(model)
    (model / "tokenizer.json").write_text("{}")
    assert codes(before, of(model)) == {Code.TOKENIZER}
    before = of(model)
    (model / "added_tokens.json").write_text("{}")
    assert codes(before, of(model)) == {Code.TOKENIZER}
    before = of(model)
    tiny.edit(model / "config.json", rms_norm_eps=1e-5)
    assert codes(before, of(model)) == {Code.MODEL, Code.CONFIG}
    before = of(model)
    tiny.edit(model / "config.json", rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    assert codes(before, of(model)) == {Code.MODEL, Code.ROPE}
    before = of(model)
    tiny.edit(model / "config.json", transformers_version="0.0")
    assert codes(before, of(model)) == {Code.MODEL}, "its bytes are others, nothing else is"


def test_an_override_of_the_running_engine_counts(model):
    running = {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert codes(of(model), of(model, rope=rope_of(running))) == {Code.ROPE}


def test_a_model_whose_tokenizer_is_not_known_has_no_identity(model):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    with refused(ModelError, "model.no-tokenizer", model):
        of(model)


def test_a_config_that_holds_no_numbers_has_no_identity(model):
    tiny.edit(model / "config.json", initializer_range=float("nan"))
    with refused(ModelError, "model.config-not-finite", "config.json"):
        of(model)


SPELLINGS = [
    {"rope_theta": 5e5},
    {"rope_theta": 5e5, "rope_scaling": None},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    {"rope_theta": 5e5, "rope_parameters": {"type": "default"}},
]


@pytest.mark.parametrize("config", SPELLINGS)
def test_all_spellings_of_one_rope_are_one(config):
    assert rope_of(config | {"max_position_embeddings": 4096}) == {"rope_theta": 5e5, "rope_type": "default"}


def test_a_scaled_rope_says_from_where():
    scaled = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    ours, theirs = (rope_of(scaled | {"max_position_embeddings": n}) for n in (2048, 4096))
    assert ours != theirs and ours["rope_type"] == "linear"
    assert rope_of({"partial_rotary_factor": 0.5}) != rope_of({})


def test_transformers_reads_the_same_rope():
    from transformers import LlamaConfig, Qwen2Config

    for kind in (LlamaConfig, Qwen2Config):
        assert rope_of(kind(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}).to_dict()) == rope_of(
            SPELLINGS[0]
        )
        assert rope_of(kind().to_dict()) == rope_of({})
        linear = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "max_position_embeddings": 2048}
        assert rope_of(kind.from_dict(linear).to_dict()) == rope_of(linear)
