"""The biases of a model's K and V projections as means of K and V: known from its weights, whatever the text."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kvlab.calibration.load import Calibrated
from kvlab.calibration.metrics import model_skeleton, rotary_angles, weight_of
from kvlab.codecs.shared.metric import rotated
from kvlab.core.errors import CapabilityError
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import Placement
from kvlab.core.records import fingerprint
from kvlab.engines.hooks import attention_layers


def of_biases(info: ModelInfo, context: int, origin: str) -> Calibrated:
    """What codecs read whose `center` is ``bias`` and that read nothing else; raises as `projection_biases`."""
    biases = projection_biases(info, context)
    digest = fingerprint(*(bias.numpy() for by_layer in biases.values() for bias in by_layer.values()))
    none = {"whiteners": {}, "tables": {}, "corpus_hash": "", "sigma_hash": ""}
    return Calibrated(**none, origin=origin, calibration_hash=digest, biases=biases)


def projection_biases(info: ModelInfo, context: int) -> dict[tuple[Literal["k", "v"], Placement], dict[int, Tensor]]:
    """The biases by stream and placement, and by layer.

    Parameters
    ----------
    info : ModelInfo
        The model; nothing of its weights but the biases is read.
    context : int
        Tokens of a cache. K after its rotary embedding has its bias turned by every position; the mean over positions
        0 to `context` - 1 keeps what turns slowly.

    Returns
    -------
    dict
        float32 [kv_heads, head_dim]: K ``pre_rope`` and ``post_rope``, V ``pre_rope``.

    Raises
    ------
    CapabilityError
        The model's projections have no biases, or K is normalised after them.
    """
    skeleton = model_skeleton(info)
    angles = rotary_angles(info, context)
    names = {parameter: name for name, parameter in skeleton.named_parameters()}
    found = {("k", "pre_rope"): {}, ("k", "post_rope"): {}, ("v", "pre_rope"): {}}
    for layer, attention in enumerate(attention_layers(skeleton, info)):
        for stream in ("k", "v"):
            bias = getattr(getattr(attention, f"{stream}_proj", None), "bias", None)
            if bias is None or hasattr(attention, "k_norm"):
                raise CapabilityError(
                    f"the model has no bias that its {stream.upper()} is shifted by; take `center` without bias, which"
                    " is calibrated",
                    code="capability.no-bias",
                )
            found[stream, "pre_rope"][layer] = weight_of(info, names[bias]).float().view(-1, info.head_dim)
        cos, sin = (angle.double().mean(0) for angle in angles[layer])
        found["k", "post_rope"][layer] = rotated(found["k", "pre_rope"][layer].double(), cos, sin).float()
    return found
