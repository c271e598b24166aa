"""What a config.json says of a model: every number by which it computes, and the tensors that it needs. JSON only.

transformers and vLLM read the same file by rules of their own, fill in what is missing, and fail late, or not at all,
on what a person has edited. What they would not read alike is refused here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvlab.core.errors import ModelError, nearest, suggestion
from kvlab.core.limits import MOST_LAYERS, shown

# Architectures whose projection modules the hooks know (engines/hooks.py). One name, one attention layout.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu")
DEFAULT_THETA = 10000.0
TRAINED = "original_max_position_embeddings"
ROPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", TRAINED),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", TRAINED),
    "longrope": ("short_factor", "long_factor", TRAINED),
    "proportional": ("factor",),
}
"""Kinds of rotary embedding, and what each must be told."""
LISTS = ("short_factor", "long_factor")  # a number for each pair of dimensions
NUMBERS = (
    *("factor", "low_freq_factor", "high_freq_factor", TRAINED, "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)
MISSING_KV_HEADS = {"MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32}  # as transformers says
VALUE = "model.config-value"  # code of a value that is none by itself
MISFIT = "model.config-misfit"  # code of one that does not go with the others, or with what is supported
MISSING_HEAD_DIM = {"Qwen3ForCausalLM": 128}


@dataclass(frozen=True)
class Decoder:
    """A model by its config.json.

    Parameters
    ----------
    hidden, inner : int
        Widths of the residual stream and of the MLP.
    tied : bool
        Whether the head is the embedding.
    qkv_bias, o_bias, mlp_bias, qk_norm : bool
        What its layers have.
    epsilon : float
        Of every RMS norm.
    activation : str
        Of the MLP, one of `ACTIVATIONS`.
    rope : dict
        `rope_of` the configuration.
    """

    architecture: str
    n_layers: int
    hidden: int
    inner: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    epsilon: float
    activation: str
    rope: dict

    @classmethod
    def read(cls, config: dict, path: Path) -> Decoder:
        """The model that the config.json of a folder describes.

        Raises
        ------
        ModelError
            A value is none that the model can have, or engines would take it otherwise than it is read here.
        """
        architecture = known_architecture(config, path)
        if slides(config, architecture):
            raise ModelError(
                f"{path} uses sliding-window attention, whose cache is not a whole prefix; not supported",
                code="model.sliding-window",
            )
        heads, hidden = _whole(config, "num_attention_heads", path), _whole(config, "hidden_size", path)
        bias = _switch(config, "attention_bias", path) and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
        found = cls(
            architecture=architecture,
            n_layers=_whole(config, "num_hidden_layers", path),
            hidden=hidden,
            inner=_whole(config, "intermediate_size", path),
            n_heads=heads,
            n_kv_heads=_kv_heads(config, architecture, path, heads),
            head_dim=_head_dim(config, architecture, path, hidden, heads),
            vocab_size=_whole(config, "vocab_size", path),
            max_positions=_whole(config, "max_position_embeddings", path),
            tied=_switch(config, "tie_word_embeddings", path),
            qkv_bias=bias or architecture == "Qwen2ForCausalLM",
            o_bias=bias,
            mlp_bias=_switch(config, "mlp_bias", path) and architecture == "LlamaForCausalLM",
            qk_norm=architecture == "Qwen3ForCausalLM",
            epsilon=_number(config, "rms_norm_eps", path, 1e-6),
            activation=_activation(config, path),
            rope=_rope(config, path),
        )
        found._refuse_misfits(config, path)
        return found

    def _refuse_misfits(self, config: dict, path: Path) -> None:
        """`ModelError` for numbers that do not go together."""
        where = f"in config.json of {path}"
        if self.n_layers > MOST_LAYERS:
            raise ModelError(
                f"num_hidden_layers {where} is {self.n_layers}; allowed: at most {MOST_LAYERS}", code=MISFIT
            )
        kinds = config.get("layer_types")
        if kinds is not None and kinds != ["full_attention"] * self.n_layers:
            raise ModelError(
                f"layer_types {where} is {shown(kinds)}; allowed: 'full_attention' for each of {self.n_layers} layers",
                code=MISFIT,
            )
        if self.n_heads % self.n_kv_heads:
            raise ModelError(
                f"num_key_value_heads {where} is {self.n_kv_heads}; allowed: what divides the {self.n_heads} of"
                " num_attention_heads",
                code=MISFIT,
            )
        if self.head_dim % 2:
            raise ModelError(
                f"head_dim {where} is {self.head_dim}; allowed: an even number, which can be rotated", code=MISFIT
            )
        pad = config.get("pad_token_id")
        if pad is not None and (type(pad) is not int or not -self.vocab_size <= pad < self.vocab_size):
            raise ModelError(f"pad_token_id {where} is {shown(pad)}; allowed: null, or below vocab_size", code=MISFIT)
        for name in LISTS:
            if self.rope["rope_type"] == "longrope" and len(self.rope[name]) != self.head_dim // 2:
                raise ModelError(
                    f"{name} of the rotary embedding {where} has {len(self.rope[name])} numbers; allowed:"
                    f" {self.head_dim // 2}, one for each pair of dimensions",
                    code=MISFIT,
                )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The tensors that it needs and their shapes, as all engines name them; the head only where it is its own."""
        found = {"model.embed_tokens.weight": (self.vocab_size, self.hidden), "model.norm.weight": (self.hidden,)}
        if not self.tied:
            found[HEAD] = (self.vocab_size, self.hidden)
        for layer in range(self.n_layers):
            found |= {f"model.layers.{layer}.{name}": shape for name, shape in self._of_layer().items()}
        return found

    def _of_layer(self) -> dict[str, tuple[int, ...]]:
        queries, keys = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        maps = {
            "self_attn.q_proj": (queries, self.hidden, self.qkv_bias),
            "self_attn.k_proj": (keys, self.hidden, self.qkv_bias),
            "self_attn.v_proj": (keys, self.hidden, self.qkv_bias),
            "self_attn.o_proj": (self.hidden, queries, self.o_bias),
            "mlp.gate_proj": (self.inner, self.hidden, self.mlp_bias),
            "mlp.up_proj": (self.inner, self.hidden, self.mlp_bias),
            "mlp.down_proj": (self.hidden, self.inner, self.mlp_bias),
        }
        found = {f"{name}.weight": (rows, columns) for name, (rows, columns, _) in maps.items()}
        found |= {f"{name}.bias": (rows,) for name, (rows, _, bias) in maps.items() if bias}
        found |= {f"{name}.weight": (self.hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        norms = ("q_norm", "k_norm") if self.qk_norm else ()
        return found | {f"self_attn.{name}.weight": (self.head_dim,) for name in norms}


HEAD = "lm_head.weight"


def known_architecture(config: dict, path: Path) -> str:
    """The architecture that a config.json names.

    Raises
    ------
    ModelError
        The hooks do not know it, its `model_type` is that of another one (transformers goes by the type, vLLM by the
        architecture), or it would load code of the model's own or weights from another place.
    """
    named = config.get("architectures")
    architecture = str(named[0] if isinstance(named, list) and named else "none")
    if architecture not in ARCHITECTURES:
        near = nearest(architecture, ARCHITECTURES)
        hint = f"; did you mean {near}?" if near else ""
        raise ModelError(
            f"architecture {architecture!r} is not supported; allowed: {', '.join(ARCHITECTURES)}{hint}",
            code="model.architecture",
        )
    kind, expected = config.get("model_type"), architecture.removesuffix("ForCausalLM").lower()
    if kind != expected:
        code = "; code that a model brings (auto_map) is never run" if "auto_map" in config else ""
        raise ModelError(
            f"model_type of {path} is {kind!r}; allowed for {architecture}: {expected!r}{code}", code="model.type"
        )
    if "transformers_weights" in config:
        raise ModelError(
            f"config.json of {path} has transformers_weights, a file that vLLM would not load; remove the key",
            code="model.other-weights",
        )
    return architecture


def slides(config: dict, architecture: str) -> bool:
    """Whether any layer attends to a window only.

    Mistral has no switch: its window counts whenever it is not null, and is 4096 where none is given.
    """
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and "sliding_attention" in kinds:
        return True
    always_on = architecture == "MistralForCausalLM"
    window = config.get("sliding_window", 4096 if always_on else None)
    return window is not None and bool(config.get("use_sliding_window", always_on))


def rope_of(config: Mapping) -> dict:
    """The rotary embedding that a configuration names, in the one form that all its spellings mean.

    Parameters
    ----------
    config : mapping
        config.json, or ``model.config.to_dict()``.
    """
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = found.pop("type", None)
    found.setdefault("rope_type", kind or "default")
    if "rope_theta" not in found:
        found["rope_theta"] = config.get("rope_theta") or DEFAULT_THETA
    if found["rope_type"] != "default":  # the scaled kinds begin from the length that the model was trained for
        found.setdefault(TRAINED, config.get("max_position_embeddings"))
    if config.get("partial_rotary_factor") is not None:
        found.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    return found


def _rope(config: dict, path: Path) -> dict:
    """`rope_of` a configuration that a person may have edited."""
    where = f"in config.json of {path}"
    given = {name: config[name] for name in ("rope_parameters", "rope_scaling") if config.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, dict):
            raise ModelError(
                f"{name} {where} is {shown(value)}; allowed: null, or a mapping with rope_type", code=VALUE
            )
        if layered := next((key for key, entry in value.items() if isinstance(entry, dict)), None):
            raise ModelError(
                f"{name} {where} has a mapping for {shown(layered)}; allowed: one for all layers", code=MISFIT
            )
    if len({shown(sorted(value.items())) for value in given.values() if value}) > 1:
        raise ModelError(
            f"rope_parameters and rope_scaling {where} say different things; remove one of them", code=MISFIT
        )
    if "rope_theta" in config:
        _number(config, "rope_theta", path)
    found = rope_of(config)
    kind = found["rope_type"]
    if not isinstance(kind, str) or kind not in ROPES:
        hint = suggestion(kind, ROPES) if isinstance(kind, str) else ""
        raise ModelError(f"rope_type {where} is {shown(kind)}; allowed: {', '.join(ROPES)}{hint}", code=VALUE)
    if TRAINED in ROPES[kind] and config.get(TRAINED) is not None:
        found[TRAINED] = config[TRAINED]  # it wins, see
    if kind == "proportional":
        found.setdefault("factor", 1.0)
    lacking = [name for name in ROPES[kind] if found.get(name) is None]  # transformers.modeling_rope_utils
    if lacking:
        raise ModelError(
            f"the rotary embedding {where} is {kind!r} and has no {lacking[0]}; give it a number",
            code="model.config-missing",
        )
    for name in ("rope_theta", *NUMBERS):
        if name == "rope_theta" or found.get(name) is not None:
            _number(found, name, path)
    for name in LISTS:
        if kind == "longrope" and not (isinstance(found[name], list) and all(map(_is_number, found[name]))):
            raise ModelError(
                f"{name} of the rotary embedding {where} is {shown(found[name])}; allowed: numbers", code=VALUE
            )
    if kind == "llama3" and found["low_freq_factor"] >= found["high_freq_factor"]:
        raise ModelError(
            f"low_freq_factor {where} is {found['low_freq_factor']}; allowed: below high_freq_factor", code=MISFIT
        )
    if found.get("partial_rotary_factor", 1) != 1:
        raise ModelError(
            f"partial_rotary_factor {where} is {shown(found['partial_rotary_factor'])}; allowed: 1, as these"
            " architectures rotate whole heads",
            code=MISFIT,
        )
    return found


def _whole(config: dict, key: str, path: Path, default: int | None = None) -> int:
    """A count that config.json holds; the default where it is missing or null."""
    found = config.get(key)
    found = default if found is None else found
    if type(found) is not int or found < 1:
        raise ModelError(
            f"{key} in config.json of {path} is {shown(found)}; allowed: a whole number from 1", code=VALUE
        )
    return found


def _number(config: dict, key: str, path: Path, default: float | None = None) -> float:
    """A number that config.json holds, above 0; the default where it is missing."""
    found = config.get(key, default)
    if not _is_number(found) or found <= 0:
        raise ModelError(f"{key} in config.json of {path} is {shown(found)}; allowed: a number above 0", code=VALUE)
    return found


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _switch(config: dict, key: str, path: Path) -> bool:
    """What config.json turns on; off where it is missing."""
    found = config.get(key, False)
    if type(found) is not bool:
        raise ModelError(f"{key} in config.json of {path} is {shown(found)}; allowed: true, false", code=VALUE)
    return found


def _activation(config: dict, path: Path) -> str:
    found = config.get("hidden_act", "silu")
    if found not in ACTIVATIONS:
        raise ModelError(
            f"hidden_act in config.json of {path} is {shown(found)}; allowed: {', '.join(ACTIVATIONS)}", code=VALUE
        )
    return found


def _kv_heads(config: dict, architecture: str, path: Path, heads: int) -> int:
    """Null is as many as there are heads; what transformers takes where nothing is said depends on the architecture."""
    missing = MISSING_KV_HEADS.get(architecture, heads) if "num_key_value_heads" not in config else heads
    return _whole(config, "num_key_value_heads", path, missing)


def _head_dim(config: dict, architecture: str, path: Path, hidden: int, heads: int) -> int:
    """The size of a head: as given, or what an equal share of the hidden size makes."""
    given = config.get("head_dim", MISSING_HEAD_DIM.get(architecture))
    takes_null = architecture in ("LlamaForCausalLM", "MistralForCausalLM")
    if "head_dim" in config and given is None and not takes_null:
        raise ModelError(
            f"head_dim in config.json of {path} is null, which engines read differently; remove the key, or give the"
            " size of a head",
            code="model.config-null",
        )
    if hidden % heads and (given is None or architecture == "LlamaForCausalLM"):
        raise ModelError(
            f"hidden_size in config.json of {path} is {hidden}; allowed: a multiple of the {heads} of"
            " num_attention_heads",
            code=MISFIT,
        )
    return hidden // heads if given is None else _whole(config, "head_dim", path, given)
