"""Faults on the way of K and V: to the codec, through it, and back to attention."""

from __future__ import annotations

from dataclasses import replace

import torch

from validation.audit.plant import VLLM, Changes, Plants

PLANTS = Plants()


def coded(changed) -> object:
    """Around `Coder._code`: `changed` makes another decoded tensor of the one that was and of what was coded."""

    def made(code):
        def planted(self, x, site):
            found = code(self, x, site)
            return replace(found, tensor=changed(found.tensor, x, site))

        return planted

    return made


def at_coder(changed):
    """What plants a change of every decoded tensor."""

    def apply(changes: Changes) -> None:
        from kvlab.measure.coding import Coder

        changes.around(Coder, "_code", coded(changed))

    return apply


def last(site) -> bool:
    """Whether a tensor is of one layer that is coded."""
    return site.layer == 2


DECODED = {
    "heads swapped after decoding": lambda y, x, site: y.flip(0),
    "heads of one layer swapped after decoding": lambda y, x, site: y.flip(0) if last(site) else y,
    "half of the error undone": lambda y, x, site: (y + x.float()) / 2,
    "a tenth of the error undone": lambda y, x, site: 0.9 * y + 0.1 * x.float(),
    "tokens one place late": lambda y, x, site: y.roll(1, dims=1),
    "tokens of one layer one place late": lambda y, x, site: y.roll(1, dims=1) if last(site) else y,
    "first tokens left exact": lambda y, x, site: torch.cat([x[:, :4].float(), y[:, 4:]], dim=1),
    "the last token left exact": lambda y, x, site: torch.cat([y[:, :-1], x[:, -1:].float()], dim=1),
    "codec's answer thrown away": lambda y, x, site: x.float(),
    "codec's answer for V thrown away": lambda y, x, site: x.float() if site.stream == "v" else y,
    "codec's answer for one layer thrown away": lambda y, x, site: x.float() if last(site) else y,
    "dimensions of K in reversed order": lambda y, x, site: y.flip(2) if site.stream == "k" else y,
    "decoded values one per cent too small": lambda y, x, site: 0.99 * y,
    "decoded values of one layer rounded to bfloat16": lambda y, x, site: y.bfloat16().float() if last(site) else y,
}
for name, changed in DECODED.items():
    PLANTS.fault(name)(at_coder(changed))
for name in ("heads swapped after decoding", "half of the error undone", "codec's answer for one layer thrown away"):
    PLANTS.fault(f"{name}, on vLLM", VLLM)(at_coder(DECODED[name]))


@PLANTS.on_both("V decoded as K")
def _v_as_k(changes: Changes) -> None:
    from kvlab.measure.coding import CodedContext

    def made(begin):
        def planted(self, *given):
            begin(self, *given)
            for layer, part in list(self):
                if part == "v":
                    self[layer, part] = self[layer, "k"]

        return planted

    changes.around(CodedContext, "__init__", made)


@PLANTS.on_both("snapshot put at the wrong tokens")
def _rolled(changes: Changes) -> None:
    from kvlab.measure.coding import CodedContext

    def made(begin):
        def planted(self, *given):
            begin(self, *given)
            for place in list(self):
                self[place] = self[place].roll(1, dims=1)

        return planted

    changes.around(CodedContext, "__init__", made)


def ignored(layers):
    """What plants hooks that drop the tap's answer in some layers."""

    def apply(changes: Changes) -> None:
        from kvlab.engines import hooks
        from kvlab.engines.hf import engine  # noqa: F401 (loaded, so that the change reaches it)
        from kvlab.engines.vllm import process  # noqa: F401 (likewise)

        def made(through):
            def planted(tap, layer, part, flat, *shape):
                answer = through(tap, layer, part, flat, *shape)
                return flat if layer in layers else answer

            return planted

        changes.around(hooks, "through", made)

    return apply


PLANTS.on_both("tap's answer ignored in one layer")(ignored((2,)))
PLANTS.on_both("tap's answer ignored in most layers")(ignored((1, 2, 3)))


@PLANTS.on_both("scored tokens coded too")
def _too_many(changes: Changes) -> None:
    from kvlab.measure.coding import InForward

    def made(begin):
        def planted(self, coder, window, tokens, clean=None):
            begin(self, coder, window, tokens + 16, clean)

        return planted

    changes.around(InForward, "__init__", made)


@PLANTS.on_both("one token of the context not coded")
def _too_few(changes: Changes) -> None:
    from kvlab.measure.coding import InForward

    def made(begin):
        def planted(self, coder, window, tokens, clean=None):
            begin(self, coder, window, tokens - 1, clean)

        return planted

    changes.around(InForward, "__init__", made)


@PLANTS.fault("K tapped after its rotary embedding, under the label before it")
def _other_side(changes: Changes) -> None:
    from kvlab.engines.hf.engine import HFEngine

    changes.around(
        HFEngine, "score", lambda score: lambda self, ids, first, tap=None, placement="pre_rope": score(
            self, ids, first, tap, "post_rope" if tap else placement
        )
    )  # fmt: skip


@PLANTS.fault("hooks one layer off")
def _other_layer(changes: Changes) -> None:
    from kvlab.engines.hf import engine as hf

    def made(places):
        def planted(model, info, tap):
            return places(model, info, lambda layer, part, x: tap((layer + 1) % info.n_layers, part, x))

        return planted

    changes.around(hf, "separate_projections", made)


@PLANTS.fault("snapshot scored over the clean cache")
def _over_clean(changes: Changes) -> None:
    from kvlab.engines.hf.engine import HFEngine

    held = {}

    def made(filled):
        def planted(self, cache, placement):
            held.setdefault("first", dict(cache))
            return filled(self, held["first"], placement)

        return planted

    changes.around(HFEngine, "filled", made)


@PLANTS.fault("K of a filled cache rotated one position late")
def _late_positions(changes: Changes) -> None:
    from kvlab.engines.hf.engine import HFEngine

    def made(rotation):
        def planted(self, tokens, layer):
            turn = rotation(self, tokens + 1, layer)
            return lambda k: turn(torch.cat([k[:, :, :1], k], dim=2))[:, :, 1:]

        return planted

    changes.around(HFEngine, "rotation", made)


@PLANTS.fault("the pass of a cell begins a layer late")
def _begins_late(changes: Changes) -> None:
    from kvlab.engines.hf.engine import HFEngine

    for name in ("score_from", "score_over_from"):
        changes.around(
            HFEngine, name, lambda score: lambda self, layer, *rest, **named: score(self, layer + 1, *rest, **named)
        )


@PLANTS.fault("tensors of the first window served on all others")
def _stale_memo(changes: Changes) -> None:
    from kvlab.measure.coding import Coder
    from kvlab.measure.subjects import Memos

    changes.put(Memos, "clear", lambda self: None)
    changes.around(Coder, "snapshot", lambda code: lambda self, x, site: code(self, x, replace(site, window=0)))


@PLANTS.fault("a bit more than the label says")
def _more_bits(changes: Changes) -> None:
    from kvlab.measure import coding

    def made(build):
        def planted(recipe, fitted=None):
            more = {"bits": recipe.bits + 1, "codebook": "gaussian"} if hasattr(recipe, "bits") else {}
            return build(recipe.model_copy(update=more), fitted)

        return planted

    changes.around(coding, "build", made)


@PLANTS.fault("tables ten per cent too wide")
def _wide_tables(changes: Changes) -> None:
    from kvlab.measure import coding

    def made(build):
        def planted(recipe, fitted=None):
            wide = fitted if fitted is None or fitted.centroids is None else replace(
                fitted, centroids=1.1 * fitted.centroids
            )  # fmt: skip
            return build(recipe, wide)

        return planted

    changes.around(coding, "build", made)


@PLANTS.fault("fires counted, nothing coded")
def _counted_only(changes: Changes) -> None:
    from kvlab.measure.coding import Coder

    for name in ("round_trip", "snapshot"):

        def made(code):
            def planted(self, x, site):
                code(self, x, site)
                return x

            return planted

        changes.around(Coder, name, made)


@PLANTS.fault("Sigma_q of another layer in chain and witness alike", beyond="the codec is a valid one, of another "
              "calibration; what it was given is named by digest, and is not what is wrong")  # fmt: skip
def _other_metric(changes: Changes) -> None:
    from kvlab.calibration.load import Calibrated

    def made(metric):
        def planted(self, placement):
            found = metric(self, placement)
            return {layer: found[(layer + 1) % len(found)] for layer in found}

        return planted

    changes.around(Calibrated, "metric", made)


@PLANTS.fault("a codec that decodes its own bytes one per cent too small, in chain and witness alike",
              beyond="witness and chain run the same codec, and ask it the same; `kvlab.codecs.testing` and each "
              "codec's own tests are what speaks for it")  # fmt: skip
def _poorer_codec(changes: Changes) -> None:
    from kvlab.codecs.block.codec import BlockCodec

    changes.around(BlockCodec, "decode", lambda decode: lambda self, encoded: 0.99 * decode(self, encoded))
