"""What a config.json says of a model: every number by which it computes, and the tensors that it needs. JSON only.

transformers and vLLM read the same file by rules of their own, fill in what is missing, and fail late, or not at all,
on what a person has edited. What they would not read alike is refused here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from kvlab.core.errors import ModelError, nearest, suggestion
from kvlab.core.limits import MOST_LAYERS, shown

# Architectures whose projection modules the hooks know (engines/hooks.py). One name, one attention layout.
ARCHITECTURES = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    GEMMA := "Gemma3ForCausalLM",
)
TYPES = {GEMMA: "gemma3_text"}  # `model_type`, where it is another word than the architecture
SWITCHED = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")  # whose windows count only where use_sliding_window is true
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_WINDOW, DEFAULT_FULL_BELOW, DEFAULT_FULL_EVERY = 4096, 28, 6  # as transformers says; the last is Gemma's
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
MISSING_KV_HEADS = {"MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32, GEMMA: 4}
VALUE = "model.config-value"  # code of a value that is none by itself
MISFIT = "model.config-misfit"  # code of one that does not go with the others, or with what is supported
MISSING_HEAD_DIM = {"Qwen3ForCausalLM": 128, GEMMA: 256}
GEMMA_THETAS = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}  # key of older files, and default


@dataclass(frozen=True)
class LayerAttention:
    """What one layer of a model does unlike another: the one place that says so of a config.json.

    Heads and their size are the same in all layers of the `ARCHITECTURES`.

    Parameters
    ----------
    window : int or None
        Last tokens that a token sees, itself among them; None for all.
    rope : dict
        Its rotary embedding, in the form of `rope_of`.
    """

    window: int | None
    rope: dict


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
    score_scale : float
        What scores of attention are multiplied by.
    layers : tuple of LayerAttention
        One for each layer.
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
    score_scale: float
    layers: tuple[LayerAttention, ...]

    @property
    def gemma(self) -> bool:
        """Whether it is computed as Gemma is.

        Embeddings are scaled by the root of their width, norms multiply by 1 + their weight, and there is one before
        and one after attention and MLP.
        """
        return self.architecture == GEMMA

    @classmethod
    def read(cls, config: dict, path: Path) -> Decoder:
        """The model that the config.json of a folder describes.

        Raises
        ------
        ModelError
            A value is none that the model can have, or engines would take it otherwise than it is read here.
        """
        architecture = known_architecture(config, path)
        heads, hidden = _whole(config, "num_attention_heads", path), _whole(config, "hidden_size", path)
        biased = ("LlamaForCausalLM", "Qwen3ForCausalLM", GEMMA)
        bias, n_layers = _switch(config, "attention_bias", path), _whole(config, "num_hidden_layers", path)
        bias, head_dim = bias and architecture in biased, _head_dim(config, architecture, path, hidden, heads)
        found = cls(
            architecture=architecture,
            n_layers=n_layers,
            hidden=hidden,
            inner=_whole(config, "intermediate_size", path),
            n_heads=heads,
            n_kv_heads=_kv_heads(config, architecture, path, heads),
            head_dim=head_dim,
            vocab_size=_whole(config, "vocab_size", path),
            max_positions=_whole(config, "max_position_embeddings", path),
            tied=_switch(config, "tie_word_embeddings", path, architecture == GEMMA),
            qkv_bias=bias or architecture == "Qwen2ForCausalLM",
            o_bias=bias,
            mlp_bias=_switch(config, "mlp_bias", path) and architecture == "LlamaForCausalLM",
            qk_norm=architecture in ("Qwen3ForCausalLM", GEMMA),
            epsilon=_number(config, "rms_norm_eps", path, 1e-6),
            activation=_activation(config, architecture, path),
            score_scale=_score_scale(config, architecture, path, head_dim),
            layers=_layers(config, architecture, path, n_layers),
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
        for rope, name in product((layer.rope for layer in self.layers), LISTS):
            if rope["rope_type"] == "longrope" and len(rope[name]) != self.head_dim // 2:
                raise ModelError(
                    f"{name} of the rotary embedding {where} has {len(rope[name])} numbers; allowed:"
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
        around = ("pre_feedforward_layernorm", "post_feedforward_layernorm") if self.gemma else ()
        norms = ("input_layernorm", "post_attention_layernorm", *around)
        found |= {f"{name}.weight": (self.hidden,) for name in norms}
        own = ("q_norm", "k_norm") if self.qk_norm else ()
        return found | {f"self_attn.{name}.weight": (self.head_dim,) for name in own}


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
    _refuse_other_attention(config, architecture, path)
    if architecture not in ARCHITECTURES:
        near = nearest(architecture, ARCHITECTURES)
        hint = f"; did you mean {near}?" if near else ""
        raise ModelError(
            f"architecture {architecture!r} is not supported; allowed: {', '.join(ARCHITECTURES)}{hint}",
            code="model.architecture",
        )
    kind = config.get("model_type")
    expected = TYPES.get(architecture, architecture.removesuffix("ForCausalLM").lower())
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


def _refuse_other_attention(config: dict, architecture: str, path: Path) -> None:
    """`ModelError` for models whose attention is another than softmax over K and V by heads, from the past alone."""
    capped = [name for name in ("attn_logit_softcapping", "final_logit_softcapping") if config.get(name) is not None]
    refused = {
        "model.latent-attention": (
            "kv_lora_rank" in config,
            "latent attention (MLA), whose cache has no K and V by head",
        ),
        "model.soft-cap": (
            bool(capped) or architecture.startswith("Gemma2"),
            f"soft caps on its logits, as Gemma 2 has them ({', '.join(capped) or 'by default'})",
        ),
        "model.attention-sinks": (
            architecture.startswith("GptOss"),
            "attention sinks, logits that it learnt for no token",
        ),
        "model.both-ways": (bool(config.get("use_bidirectional_attention")), "attention that looks ahead"),
    }
    for code, (has, what) in refused.items():
        if has:
            raise ModelError(f"{path} ({architecture}) has {what}; not supported", code=code)


def _layers(config: dict, architecture: str, path: Path, n_layers: int) -> tuple[LayerAttention, ...]:
    """How each layer attends; `ModelError` where engines would not read it alike."""
    kinds, where = _kinds(config, architecture, path, n_layers), f"in config.json of {path}"
    said = config.get("layer_types")
    if said is not None and said != kinds and not (architecture in (*SWITCHED, GEMMA) and _are_kinds(said, n_layers)):
        raise ModelError(
            f"layer_types {where} is {shown(said)}; allowed: {_allowed(architecture, kinds[0])} for each of {n_layers}"
            " layers",
            code=MISFIT,
        )
    kinds = kinds if said is None else said
    window = None
    if SLIDING in kinds:
        if architecture in SWITCHED and not _switch(config, "use_sliding_window", path):
            raise ModelError(
                f"layer_types {where} has {SLIDING!r}, and use_sliding_window is not true; let them say the same",
                code=MISFIT,
            )
        window = _window(config, path)
    ropes = _ropes(config, architecture, path)
    return tuple(LayerAttention(window if kind == SLIDING else None, ropes[kind]) for kind in kinds)


def _kinds(config: dict, architecture: str, path: Path, n_layers: int) -> list[str]:
    """Kinds of layers by their number where layer_types does not name them."""
    if architecture == GEMMA:
        key = "sliding_window_pattern"
        every = _whole(config, key, path, DEFAULT_FULL_EVERY)
        return [SLIDING if layer % every else FULL for layer in range(1, n_layers + 1)]
    if architecture == "MistralForCausalLM":
        return [SLIDING if config.get("sliding_window", DEFAULT_WINDOW) is not None else FULL] * n_layers
    slides = architecture in SWITCHED and _switch(config, "use_sliding_window", path)
    if slides and config.get("sliding_window", DEFAULT_WINDOW) is not None:
        full = config.get("max_window_layers", DEFAULT_FULL_BELOW)
        if type(full) is not int or full < 0:
            raise ModelError(
                f"max_window_layers in config.json of {path} is {shown(full)}; allowed: a whole number from 0",
                code=VALUE,
            )
        return [FULL if layer < full else SLIDING for layer in range(n_layers)]
    if architecture == "LlamaForCausalLM" and config.get("sliding_window"):
        raise ModelError(
            f"sliding_window in config.json of {path} is {shown(config['sliding_window'])}, which vLLM goes by and"
            f" transformers does not in a {architecture}; remove the key",
            code=MISFIT,
        )
    return [FULL] * n_layers


def _are_kinds(said: object, n_layers: int) -> bool:
    return isinstance(said, list) and len(said) == n_layers and all(kind in (FULL, SLIDING) for kind in said)


def _allowed(architecture: str, kind: str) -> str:
    return f"{FULL!r} or {SLIDING!r}" if architecture in (*SWITCHED, GEMMA) else repr(kind)


def _window(config: dict, path: Path) -> int:
    """Tokens that a layer with a window sees; engines read 0 and null there each in its own way."""
    found = config.get("sliding_window", DEFAULT_WINDOW)
    if type(found) is not int or found < 2:
        raise ModelError(
            f"sliding_window in config.json of {path} is {shown(found)}; allowed: a whole number from 2", code=VALUE
        )
    return found


def rope_of(config: Mapping) -> dict:
    """The rotary embedding that a configuration names, in the one form that all its spellings mean.

    Of a model that has one for each kind of layer, those by kind.

    Parameters
    ----------
    config : mapping
        config.json, or ``model.config.to_dict()``.
    """
    if config.get("model_type") != TYPES[GEMMA]:
        return _one_form(dict(config.get("rope_parameters") or config.get("rope_scaling") or {}), config)
    given, found = dict(config.get("rope_parameters") or {}), {}
    for kind, (key, default) in GEMMA_THETAS.items():
        scaling = dict(config.get("rope_scaling") or {}) if kind == FULL else {}
        plain = {"rope_type": "default", "rope_theta": config.get(key) or default}
        found[kind] = _one_form(plain | dict(given.get(kind) or {}) | scaling, config)
    return found


def rope_types(rope: Mapping) -> set[str]:
    """The kinds of what `rope_of` gave."""
    return {rope["rope_type"]} if "rope_type" in rope else {one["rope_type"] for one in rope.values()}


def _one_form(found: dict, config: Mapping) -> dict:
    """One rotary embedding in one form."""
    kind = found.pop("type", None)
    found.setdefault("rope_type", kind or "default")
    if "rope_theta" not in found:
        found["rope_theta"] = config.get("rope_theta") or DEFAULT_THETA
    if found["rope_type"] != "default":  # the scaled kinds begin from the length that the model was trained for
        found.setdefault(TRAINED, config.get("max_position_embeddings"))
    if config.get("partial_rotary_factor") is not None:
        found.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    return found


def _ropes(config: dict, architecture: str, path: Path) -> dict[str, dict]:
    """`rope_of` a configuration that a person may have edited, by kind of layer."""
    where = f"in config.json of {path}"
    given = {name: config[name] for name in ("rope_parameters", "rope_scaling") if config.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, dict):
            raise ModelError(
                f"{name} {where} is {shown(value)}; allowed: null, or a mapping with rope_type", code=VALUE
            )
        by_kind = architecture == GEMMA and name == "rope_parameters"
        wrong = [key for key, entry in value.items() if isinstance(entry, dict) != by_kind and entry is not None]
        wrong += [key for key in value if by_kind and key not in (FULL, SLIDING)]
        if wrong:
            allowed = f"one for {FULL!r} and one for {SLIDING!r}" if by_kind else "one for all layers"
            raise ModelError(
                f"{name} {where} has {shown(value[wrong[0]])} for {shown(wrong[0])}; allowed: {allowed}", code=MISFIT
            )
    if len(given) > 1 and (architecture == GEMMA or len({shown(sorted(v.items())) for v in given.values() if v}) > 1):
        raise ModelError(
            f"rope_parameters and rope_scaling {where} say different things; remove one of them", code=MISFIT
        )
    for key in ("rope_theta", "rope_local_base_freq"):
        if key in config:
            _number(config, key, path)
    found = rope_of(config)
    by_kind = found if architecture == GEMMA else {FULL: found, SLIDING: found}
    for rope in by_kind.values():
        _check_rope(rope, config, path)
    return by_kind


def _check_rope(found: dict, config: dict, path: Path) -> None:
    """`ModelError` for a rotary embedding that is none."""
    where, kind = f"in config.json of {path}", found["rope_type"]
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


def _switch(config: dict, key: str, path: Path, default: bool = False) -> bool:
    """What config.json turns on; the default where it is missing."""
    found = config.get(key, default)
    if type(found) is not bool:
        raise ModelError(f"{key} in config.json of {path} is {shown(found)}; allowed: true, false", code=VALUE)
    return found


def _activation(config: dict, architecture: str, path: Path) -> str:
    key, default = ("hidden_activation", "gelu_pytorch_tanh") if architecture == GEMMA else ("hidden_act", "silu")
    found = config.get(key, default)
    if found not in ACTIVATIONS:
        raise ModelError(
            f"{key} in config.json of {path} is {shown(found)}; allowed: {', '.join(ACTIVATIONS)}", code=VALUE
        )
    return found


def _score_scale(config: dict, architecture: str, path: Path, head_dim: int) -> float:
    """Gemma is told a size for it that need not be that of its heads."""
    return (_number(config, "query_pre_attn_scalar", path, 256) if architecture == GEMMA else head_dim) ** -0.5


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
    if hidden % heads and (given is None or architecture in ("LlamaForCausalLM", GEMMA)):
        raise ModelError(
            f"hidden_size in config.json of {path} is {hidden}; allowed: a multiple of the {heads} of"
            " num_attention_heads",
            code=MISFIT,
        )
    return hidden // heads if given is None else _whole(config, "head_dim", path, given)
