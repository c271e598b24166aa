"""Faults in the engines: another model, dtype, attention or library than the label says."""

from __future__ import annotations

import torch

from validation.audit.plant import HF, VLLM, Changes, Plants

PLANTS = Plants()


@PLANTS.fault("the vLLM job runs on transformers", VLLM)
def _impostor(changes: Changes) -> None:
    from kvlab.engines import registry
    from kvlab.engines.hf.engine import HFEngine

    class Impostor(HFEngine):
        name = "vllm"

        def __init__(self, info, dtype, _attention, max_tokens):
            super().__init__(info, dtype, "eager", max_tokens)

    start = registry.start

    def started(name, info, dtype, attention=None, **named):
        return Impostor(info, dtype, attention, 0) if name == "vllm" else start(name, info, dtype, attention, **named)

    changes.put(registry, "start", started)


@PLANTS.fault("the transformers job runs on vLLM")
def _other_impostor(changes: Changes) -> None:
    from kvlab.engines import registry

    start = registry.start

    def started(name, info, dtype, attention=None, **named):
        made = start("vllm", info, dtype, "default", **named)
        made.name = "hf"
        return made

    changes.put(registry, "start", started)


def loaded(change):
    """What plants a change of the model that transformers has just loaded for the engine."""

    def apply(changes: Changes) -> None:
        from kvlab.engines.hf.engine import HFEngine

        def made(begin):
            def planted(self, *given):
                begin(self, *given)
                with torch.no_grad():
                    change(self)

            return planted

        changes.around(HFEngine, "__init__", made)

    return apply


def _to_bfloat16(engine) -> None:
    engine.model.to(torch.bfloat16)


def _rounded_weights(engine) -> None:
    engine.model.to(torch.bfloat16).to(torch.float32)


def _to_eager(engine) -> None:
    engine.model.set_attn_implementation("eager")


def _no_k_bias(engine) -> None:
    engine.model.model.layers[2].self_attn.k_proj.bias.zero_()


def _lost_layer(engine) -> None:
    engine.model.model.layers[3].mlp.down_proj.weight.zero_()


def _other_theta(engine) -> None:
    engine.model.model.rotary_emb.inv_freq.mul_(0.999)


def _other_scale(engine) -> None:
    engine.model.model.layers[1].self_attn.scaling *= 1.01


LOADED = {
    "float32 cells run in bfloat16": _to_bfloat16,
    "weights rounded to bfloat16 under the label float32": _rounded_weights,
    "sdpa run as eager": _to_eager,
    "a bias of K lost": _no_k_bias,
    "a layer's MLP lost": _lost_layer,
    "rotary angles a thousandth too small": _other_theta,
    "attention's scale one per cent too large in one layer": _other_scale,
}
for name, change in LOADED.items():
    PLANTS.fault(name)(loaded(change))


@PLANTS.fault("float32 cells run in bfloat16, on vLLM", VLLM)
def _vllm_bfloat16(changes: Changes) -> None:
    from kvlab.engines.vllm import engine as vllm

    changes.around(vllm, "Loaded", lambda made: lambda info, _dtype, *rest: made(info, "bfloat16", *rest))


def scored(change):
    """What plants a change of every engine's logits."""

    def made(score):
        def planted(self, *given, **named):
            return change(score(self, *given, **named))

        return planted

    return made


LOGITS = {
    "reference and alternative logits both one place late": lambda x: x.roll(1, dims=0),
    "logits at another temperature": lambda x: 0.9 * x,
    "logits of two tokens exchanged": lambda x: torch.cat([x[:, 1:2], x[:, :1], x[:, 2:]], dim=1),
    "logits rounded to bfloat16": lambda x: x.bfloat16().float(),
}


def on_logits(change, engine: str):
    """The same on one engine."""

    def apply(changes: Changes) -> None:
        if engine == "hf":
            from kvlab.engines.hf.engine import HFEngine

            for name in ("score", "score_over"):
                changes.around(HFEngine, name, scored(change))
        if engine == "vllm":
            from kvlab.engines.vllm.engine import VLLMEngine

            changes.around(VLLMEngine, "_words", scored(change))

    return apply


for name, change in LOGITS.items():
    PLANTS.fault(f"{name}, on transformers", HF)(on_logits(change, "hf"))
    PLANTS.fault(f"{name}, on vLLM", VLLM)(on_logits(change, "vllm"))


@PLANTS.fault("attention that sees the future")
def _future(changes: Changes) -> None:
    from transformers.models.qwen2 import modeling_qwen2

    changes.put(modeling_qwen2, "create_causal_mask", lambda *_given, **_named: None)


@PLANTS.fault("a clean pass of another window as reference")
def _other_window(changes: Changes) -> None:
    from kvlab.measure.scoring import WindowRun

    held = []

    def made(begin):
        def planted(self):
            begin(self)
            held.append(self.reference)
            self.reference = held[0]

        return planted

    changes.around(WindowRun, "__post_init__", made)


@PLANTS.fault("the first window's tokens scored as every window")
def _one_window(changes: Changes) -> None:
    from kvlab.measure import windows

    def made(listed):
        def planted(held, text):
            from dataclasses import replace

            found = listed(held, text)
            return [replace(one, ids=found[0].ids) for one in found]

        return planted

    changes.around(windows, "windows_of", made)
