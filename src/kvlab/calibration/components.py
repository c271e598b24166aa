"""The components of K and V: mean, covariance and KLT per layer and group of KV heads, for every codec that needs them.

K is fitted in the metric of the scores, V in that of the attention's output (see `codecs.shared.metric`), both in units
of what their errors were seen to cost (`calibration.losses`). Nothing here depends on a rate: tables are made from the
stored quantiles when a codec is built. Mean, covariance, axes and variances come from the moments of all calibration
windows, quantiles from the sample that was kept.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from kvlab.calibration.capture import Captured, WindowStatistics
from kvlab.calibration.facts import header_facts
from kvlab.calibration.metrics import Angles, ErrorMetrics, rotary_angles
from kvlab.calibration.moments import STREAMS
from kvlab.calibration.sigma import load_whiteners, read_sidecar
from kvlab.codecs.shared import components as klt
from kvlab.codecs.shared.components import TINY, Components
from kvlab.codecs.shared.metric import ridged
from kvlab.codecs.shared.moments import Moments
from kvlab.codecs.shared.turning import RUN, over_positions, turned_about, turned_moments
from kvlab.codecs.shared.whitening import Whitener
from kvlab.core import memory
from kvlab.core.errors import CalibrationMismatch, CapabilityError, NonFinite
from kvlab.core.model import resolve
from kvlab.core.params import Params
from kvlab.core.records import atomic, file_hash, forget, to_header, write_json

FIELDS = tuple(field.name for field in fields(Components))
TURNED = "turned"  # in names of tensors: K after its rotary embedding, as `Fitting.turned` fits it


def fit_components(params: Params, capture_path: Path, sigma_path: Path, out: Path) -> None:
    """Fit the components of every layer and stream on the calibration contexts.

    Writes ``layer_{l}_{k|v|turned}_{mean,sink,covariance,forward,inverse,variance,sketch}``, float32, as `Components`
    describes them; ``turned`` (`Fitting.turned`) where the rotary embedding turns whole heads. The ``.json`` beside
    it holds the diagnostics of each group of heads.

    Raises
    ------
    CalibrationMismatch
        Capture and Sigma_q belong to another model, or not to each other.
    NonFinite
        A fitted tensor holds NaN or infinity.
    """
    torch.set_num_threads(params.jobs.threads)
    memory.keep_freed()
    info = resolve(params.model)
    captured = Captured(capture_path, info.model_hash)
    whiteners = load_whiteners(sigma_path, info.model_hash)
    refuse_another_capture(captured, sigma_path)
    fitting = Fitting(captured, whiteners, ErrorMetrics(info, captured.context), params.calibration.ridge)
    tensors, diagnostics = {}, []
    for layer in tqdm(range(info.n_layers), desc="components", unit="layer"):
        for stream in STREAMS:
            components = fitting.components(layer, stream)
            tensors |= named(components, layer, stream)
            diagnostics += describe(components, layer, stream)
        if fitting.turns_whole_heads(layer):
            tensors |= named(fitting.turned(layer), layer, TURNED)
    identity = captured.identity | {"sigma_hash": file_hash(sigma_path)}
    forget(out)
    with atomic(out) as temporary:
        save_file(tensors, temporary, metadata=to_header(identity))
    sidecar = identity | {
        "model_path": params.model.path,
        "num_layers": info.n_layers,
        "num_kv_heads": info.n_kv_heads,
        "head_dim": info.head_dim,
        "n_windows": captured.n_windows,
        "context": captured.context,
        "n_tokens": captured.n_windows * captured.context,
        **captured.sample_facts,
        "diagnostics": diagnostics,
    }
    write_json(Path(out).with_suffix(".json"), sidecar)


def refuse_another_capture(captured: Captured, sigma_path: Path) -> None:
    """`CalibrationMismatch` when Sigma_q was fitted on other windows, or on another engine, than were captured."""
    sidecar = read_sidecar(sigma_path)
    if (sidecar["corpus_hash"], sidecar["calibration_source"]) != (
        captured.metadata["corpus_hash"],
        captured.metadata["engine"],
    ):
        raise CalibrationMismatch(
            f"{captured.path} is not the capture that {sigma_path} was fitted on", code="calibration.other-capture"
        )


@dataclass(frozen=True)
class Fitting:
    """What the components of a model are fitted on.

    Parameters
    ----------
    observed : Observed
        Moments and a sample.
    whiteners : dict of int to Whitener
        Sigma_q by layer.
    metrics : ErrorMetrics
        Of the model, at the context's length.
    ridge : float
        ``calibration.ridge``.
    """

    observed: WindowStatistics
    whiteners: dict[int, Whitener]
    metrics: ErrorMetrics
    ridge: float

    def sample(self, layer: int, stream: str) -> Tensor:
        """K or V of the windows that were kept, float32 [heads, sampled windows, context - 1, head_dim].

        Without first tokens, of which the moments know nothing either.
        """
        return self.observed.layer(layer, stream).transpose(0, 1)[:, :, 1:].contiguous()

    def metric(self, layer: int, stream: str) -> Tensor:
        """What errors are weighed by, ridged and in nats, float64 [heads, head_dim, head_dim]."""
        sigma = ridged_sigma(self.whiteners[layer])
        form = ridged(self.metrics.k(layer, sigma) if stream == "k" else self.metrics.v(layer), self.ridge)
        return self._in_nats(layer, stream, form, self.observed.moments(layer, stream))

    def _in_nats(self, layer: int, stream: str, form: Tensor, coded: Moments) -> Tensor:
        """A form that costs of each head what was measured, were errors in proportion to values of these moments."""
        seen, power = (
            moments.pooled()[2].diagonal(dim1=-2, dim2=-1).reshape(len(form), -1)
            for moments in (self.observed.moments(layer, stream), coded)
        )
        cost = (self.observed.loss(layer, stream) * seen).sum(-1)
        told = (form.diagonal(dim1=-2, dim2=-1) * power).sum(-1)
        return form * (cost / told.clamp(min=TINY)).clamp(min=TINY)[:, None, None]

    def components(self, layer: int, stream: str) -> Components:
        """Those of one layer's K or V."""
        moments, sink = self.observed.moments(layer, stream), self.observed.first(layer, stream)
        return klt.fit_moments(moments, self.sample(layer, stream), self.metric(layer, stream), sink)

    def turned(self, layer: int) -> Components:
        """Those of one layer's K after its rotary embedding, less its mean by position (`codecs.shared.turning`).

        K before its rotary embedding is taken to be alike at all positions. Its moments, and what its errors are
        weighed by, are averaged over the turns of one run; each head's errors cost what they cost before.

        Raises
        ------
        CapabilityError
            The rotary embedding turns a part of the head only.
        """
        moments, sample = self.observed.moments(layer, "k"), self.sample(layer, "k")
        cos, sin = self.run[layer]
        if not self.turns_whole_heads(layer):
            raise CapabilityError(
                f"the rotary embedding turns {2 * cos.shape[1]} of {sample.shape[-1]} dimensions of a head, and rotary:"
                " after turns whole heads; give rotary: before",
                code="capability.partial-rope",
            )
        _, mean, _ = moments.pooled()
        mean = mean.reshape(len(sample), -1)
        coded = turned_moments(moments, len(sample), cos, sin)
        form = over_positions(self.metrics.k(layer, ridged_sigma(self.whiteners[layer])), 1, cos, sin)
        metric = self._in_nats(layer, "k", ridged(form, self.ridge), coded)
        tokens = sample.shape[-2]  # without the first one; windows shorter than a run are spread over it
        own = torch.arange(1, tokens + 1) * -(-RUN // (tokens + 1)) % RUN
        turned = turned_about(sample, mean.to(sample), cos[own], sin[own])
        return klt.fit_moments(coded, turned, metric, self.observed.first(layer, "k"))

    def turns_whole_heads(self, layer: int) -> bool:
        """Whether the rotary embedding of a layer turns every dimension of a head."""
        return 2 * self.run[layer][0].shape[1] == self.metrics.info.head_dim

    @cached_property
    def run(self) -> list[Angles]:
        """By layer, cos and sin of a run's positions, without what some embeddings scale attention by."""
        turns = rotary_angles(self.metrics.info, RUN)
        return [(cos / torch.hypot(cos, sin), sin / torch.hypot(cos, sin)) for cos, sin in turns]


def ridged_sigma(whitener: Whitener) -> Tensor:
    """The ridged Sigma_q of each head, float64 [heads, head_dim, head_dim]."""
    chol = whitener.chol.double()
    return chol @ chol.mT


def named(components: Components, layer: int, stream: str) -> dict[str, Tensor]:
    """The tensors of one stream under their names in the file.

    Raises
    ------
    NonFinite
        One of them holds NaN or infinity.
    """
    found = {f"layer_{layer}_{stream}_{name}": getattr(components, name).float().contiguous() for name in FIELDS}
    for name, tensor in found.items():
        if not torch.isfinite(tensor).all():
            raise NonFinite(f"components: {name} holds NaN or infinity; use more calibration windows")
    return found


def describe(components: Components, layer: int, stream: str) -> list[dict]:
    """Diagnostics of each group of heads.

    `coding_gain_db` is the ratio of the arithmetic to the geometric mean of the components' variances (Jayant
    and Noll, Digital Coding of Waveforms, 1984): what allocating bits to them gains over equal bits. `condition`
    is the ratio of the largest to the smallest.
    """
    variance = components.variance.double().clamp_min(1e-30)
    gain = 10 * (variance.mean(-1).log10() - variance.log10().mean(-1))
    condition = variance.amax(-1) / variance.amin(-1)
    heads = len(components.mean) // len(variance)
    return [
        {
            "layer": layer,
            "stream": stream,
            "kv_heads": [group * heads, (group + 1) * heads - 1],
            "coding_gain_db": float(gain[group]),
            "condition": float(condition[group]),
        }
        for group in range(len(variance))
    ]


def load_components(path: Path, identity: dict[str, str]) -> dict[str, dict[int, Components]]:
    """Stream, or `TURNED` where the file has it -> layer -> Components, from what `fit_components` wrote.

    Parameters
    ----------
    identity : dict of str to str
        What the header must say: of which model, windows, engine and Sigma_q.

    Raises
    ------
    CalibrationMismatch
        The file is missing, no such file, or of another identity; names what differs.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata, names = file.metadata(), list(file.keys())
            # copies: what the file gives is mapped, all of it as long as a part is held, and would change with it
            tensors = {name: file.get_tensor(name).clone() for name in names}
    except (OSError, SafetensorError) as error:
        raise CalibrationMismatch(
            f"cannot read components {path}: {error}; run `kvlab step components`", code="calibration.unreadable"
        ) from None
    header = header_facts(metadata, path, dict.fromkeys(identity, str), "components")
    for name, expected in identity.items():
        if header.get(name) != expected:
            raise CalibrationMismatch(
                f"{path} was fitted for {name} {header.get(name)}, this is {expected};"
                " run `kvlab step components` again",
                code="calibration.other-fit",
            )
    n_layers = sum(name.endswith("_k_mean") for name in tensors)
    streams = (*STREAMS, TURNED) if f"layer_0_{TURNED}_mean" in tensors else STREAMS
    due = {f"layer_{n}_{stream}_{name}" for n in range(n_layers) for stream in streams for name in FIELDS}
    if missing := sorted(due - set(tensors)) or (not due and ["layer_0_k_mean"]):
        raise CalibrationMismatch(
            f"{path} has no {missing[0]}; run `kvlab step components`", code="calibration.incomplete"
        )
    return {
        stream: {
            layer: Components(**{name: tensors[f"layer_{layer}_{stream}_{name}"] for name in FIELDS})
            for layer in range(n_layers)
        }
        for stream in streams
    }
