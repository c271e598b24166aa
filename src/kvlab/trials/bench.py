"""Formats of engines and kvlab's own codecs on a running model, measured on windows of one's text. Imports torch."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from types import SimpleNamespace

import numpy as np
import torch

from kvlab.advice import choice
from kvlab.advice.choice import Setting
from kvlab.advice.serving import CacheFormat, OwnFormat
from kvlab.advice.verdicts import bound, verdict
from kvlab.cache.pages.token_bytes import rows_of
from kvlab.calibration.fitting import CalibrationText
from kvlab.calibration.load import Calibrated
from kvlab.calibration.needs import needs_calibration
from kvlab.codecs.base import Site
from kvlab.codecs.int import IntStream
from kvlab.codecs.registry import build
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.errors import CodecNotActive, Fault, UserError
from kvlab.core.model import ModelInfo, load_tokenizer
from kvlab.core.origin import told_of
from kvlab.core.recipe import Recipe
from kvlab.core.records import SAME, sha256, versions
from kvlab.engines.base import Engine
from kvlab.engines.registry import start
from kvlab.measure import quick_run
from kvlab.measure.coding import STREAMS
from kvlab.measure.places import ABLE, codec_of
from kvlab.text.excerpts import read_text, refuse_overlap, windows_of
from kvlab.trials.advised import SettingCost, SettingRow
from kvlab.witness.plain import PlainModel

SAMPLE = 512  # tokens by which a format's bytes are counted
SOUNDING = 2  # windows on which layers are coded alone
FINISHED = "snapshot"
CONTROLS = {
    "one bit": Recipe(k=IntStream(bits=1), v=IntStream(bits=1), rotary="after"),
    "16 bits": Recipe(k=IdentityStream(), v=IdentityStream(), rotary="after"),
}
"""What has to be found broken, and what has to be found equal, before anything else is believed."""


@dataclass
class FormatBench:
    """A running model, the windows that choose and those that confirm; what was measured on each.

    Parameters
    ----------
    plain : callable or None
        Gives the model by which a witness computes a window again; None for no witness.
    disclosure : str or None
        What has to be said of the weights.
    fitted : Calibrated or None
        What kvlab's own codecs read, fitted to other text.
    fitted_to : str
        That text, in a line.
    controls : dict
        By protocol the KL of each of `CONTROLS`.
    testimonies : list of dict
        What was computed a second time.
    heard : dict
        See `quick_run.score`.
    """

    engine: Engine
    context: int
    choosing: np.ndarray
    confirming: np.ndarray
    plain: Callable[[], PlainModel] | None
    disclosure: str | None = None
    fitted: Calibrated | None = None
    fitted_to: str = ""
    controls: dict[str, dict[str, float]] = field(default_factory=dict)
    testimonies: list[dict] = field(default_factory=list)
    heard: dict[tuple[str, str], float] = field(default_factory=dict)
    _found: dict[tuple, SettingCost] = field(default_factory=dict)

    @classmethod
    def started(
        cls, args: SimpleNamespace, info: ModelInfo, choosing: np.ndarray, confirming: np.ndarray
    ) -> FormatBench:
        """With the model that transformers has loaded."""
        plain, disclosure = None if args.no_witness else cache(partial(PlainModel, info.path)), told_of(info.path)
        engine = start("hf", info, args.dtype, max_tokens=choosing.shape[1])
        return cls(engine, args.context, choosing, confirming, plain, disclosure)

    def fit(self, args: SimpleNamespace, formats: Iterable[CacheFormat]) -> None:
        """Fit what kvlab's own codecs among formats read, as `kvlab calibrate` does, to text that is not scored.

        Raises
        ------
        CorpusError
            That text and the windows have a run of tokens in common.
        """
        recipes = [one.recipe for one in formats if isinstance(one, OwnFormat)]
        recipes = [one for one in recipes if needs_calibration(one.k) or needs_calibration(one.v)]
        if not recipes:
            return
        text = read_text(args.calib_text) if args.calib_text else None
        source = CalibrationText.read(self.engine.info, args.calib_text, text, self.context, args.calib_windows)
        refuse_overlap(np.concatenate([self.choosing, self.confirming]), source.windows, (str(args.text), source.name))
        self.fitted, self.fitted_to = source.fit(self.engine, recipes), source.about(self.engine)

    def control(self, protocols: Iterable[str]) -> None:
        """Measure `CONTROLS` on the window of most kinds of tokens: they have to be found broken, and equal.

        Raises
        ------
        CodecNotActive
            One bit of K and V is not found broken: then no verdict here says much.
        Fault
            16 bits against themselves are not equal.
        """
        varied = quick_run.most_varied(self.choosing, self.context)
        for protocol in protocols:
            codecs = [quick_run.NamedCodec(name, recipe, None, protocol) for name, recipe in CONTROLS.items()]
            scored = quick_run.score(
                self.engine,
                self.choosing[varied : varied + 1],
                self.context,
                codecs,
                title="controls",
                heard=self.heard,
            )
            worst, same = (float(one.tokens["kl"].mean()) for one in scored)
            if not worst >= bound("noticeable"):
                raise CodecNotActive(
                    f"the control failed: one bit of K and of V costs KL {worst:.1e} nats per token ({protocol}),"
                    f" and a broken cache costs {bound('noticeable')} or more: what is coded does not reach attention,"
                    " or the predictions hardly hang on it; give another text or longer windows",
                    code="not-active.control",
                )
            if not same <= SAME[self.engine.dtype]:
                raise Fault(
                    f"the control failed: 16 bits against themselves cost KL {same:.1e} nats per token ({protocol});"
                    f" allowed: {SAME[self.engine.dtype]:.0e}, rounding",
                    code="fault.floor",
                )
            self.controls[protocol] = {"one_bit": worst, "same": same}

    @property
    def tested(self) -> int:
        """How many settings were measured, which may be chosen among."""
        return len({key[0] for key in self._found if key != quick_run.ROUNDING})

    @property
    def layers(self) -> int:
        """Of the model."""
        return self.engine.info.n_layers

    def with_floor(
        self, settings: Iterable[Setting], protocol: str, look: quick_run.FirstLook | None = None
    ) -> tuple[SettingCost, dict[Setting, SettingCost]]:
        """What rounding K and V to bfloat16 costs on the windows that choose, and each setting there."""
        rounding = quick_run.rounding(self.engine.dtype)
        found = self.measure(dict.fromkeys(settings, protocol), title="formats", beside=rounding, look=look)
        return self._found[rounding.label], found

    def measure(
        self,
        asked: Mapping[Setting, str],
        confirming: bool = False,
        title: str = "",
        beside: quick_run.NamedCodec | None = None,
        look: quick_run.FirstLook | None = None,
    ) -> dict[Setting, SettingCost]:
        """Settings, each by its protocol, on one half of the windows; what is known is not measured again."""
        keys = {one: (choice.identity(one, self.layers), way, confirming) for one, way in asked.items()}
        due = {key: one for one, key in keys.items() if key not in self._found}
        codecs = {
            key: quick_run.NamedCodec(
                one.name, one.format.recipe, self.read_by(one), asked[one], choice.coded_layers(one, self.layers)
            )
            for key, one in due.items()
        }
        if beside:
            codecs = {beside.label: beside} | codecs
        if codecs:
            windows = self.confirming if confirming else self.choosing
            codings = [*codecs.values()]
            scored = quick_run.score(
                self.engine, windows, self.context, codings, self.plain, title=title, heard=self.heard, look=look
            )
            self._found |= {key: SettingCost.of(one) for key, one in zip(codecs, scored, strict=True)}
            self.testimonies += [one.witnessed.model_dump(mode="json") for one in scored if one.witnessed]
        return {one: self._found[key] for one, key in keys.items()}

    def read_by(self, setting: Setting) -> Calibrated | None:
        """What was fitted, for a codec of kvlab's; formats of engines read nothing of it."""
        return self.fitted if isinstance(setting.format, OwnFormat) else None

    def losses(self, settings: Sequence[Setting]) -> dict[Setting, dict[int, float]]:
        """KL of each layer that each setting codes, coded alone, on a few of the windows that choose.

        These choose and are never reported; nothing of them is computed a second time.
        """
        alone = [(one, layer) for one in settings for layer in choice.coded_layers(one, self.layers)]
        codecs = [
            quick_run.NamedCodec(f"{one.name} {layer}", one.format.recipe, None, FINISHED, (layer,))
            for one, layer in alone
        ]
        scored = quick_run.score(
            self.engine, self.choosing[:SOUNDING], self.context, codecs, title="layers", heard=self.heard
        )
        found: dict[Setting, dict[int, float]] = {one: {} for one in settings}
        for (one, layer), cost in zip(alone, scored, strict=True):
            found[one][layer] = float(cost.tokens["kl"].mean())
        return found


def text_windows(args: SimpleNamespace, info: ModelInfo, texts: Sequence[str]) -> np.ndarray:
    """The windows of texts."""
    length, tokenizer = args.context + args.eval, load_tokenizer(info)
    return windows_of(texts, tokenizer, length, args.windows, str(args.text), args.context, args.exactly)


def bits_of(recipe: Recipe, info: ModelInfo) -> float:
    """Bits per value of K and V as an engine holds them: codes and scales, no headers of files."""
    bits = []
    for stream in STREAMS:
        own = getattr(recipe, stream)
        if own.codec == "identity":
            bits.append(16.0)
            continue
        x = torch.randn(info.n_kv_heads, SAMPLE, info.head_dim, generator=torch.Generator().manual_seed(0))
        encoded = build(own).encode(x, Site(0, 0, stream))
        size = sum(array.nbytes for array in chain(encoded.shared, *encoded.blocks))
        bits.append(8 * size / x.numel())
    return sum(bits) / len(bits)


def own_bits_of(recipe: Recipe, info: ModelInfo, fitted: Calibrated | None) -> float:
    """The same of one of kvlab's codecs: the bytes of a token's rows in all layers; tables are not counted."""
    rows = [
        rows_of(codec_of(recipe, stream, fitted), Site(0, layer, stream), info.n_kv_heads, info.head_dim).bytes
        for stream in STREAMS
        for layer in range(info.n_layers)
    ]
    return 8 * sum(rows) / info.values_per_token


def setting_of(format: CacheFormat, bench: FormatBench, exact: tuple[int, ...] = ()) -> Setting:
    """A format for a model, with the bits that it then takes."""
    info = bench.engine.info
    own = isinstance(format, OwnFormat)
    bits = own_bits_of(format.recipe, info, bench.fitted) if own else bits_of(format.recipe, info)
    left = len({*exact, *format.left_alone(info.n_layers)})
    return Setting(format, exact, choice.bits_per_value(bits, left, info.n_layers))


def unable(format: CacheFormat, info: ModelInfo, fitted: Calibrated | None) -> str | None:
    """Why one of kvlab's codecs cannot run in its place with this model, by the check of that place; else None."""
    if isinstance(format, OwnFormat):
        try:
            ABLE[format.place](format.recipe, fitted, info)
            own_bits_of(format.recipe, info, fitted)
        except UserError as error:
            return str(error)
    return None


def setting_rows(
    bench: FormatBench,
    settings: Mapping[str, Sequence[Setting | None]],
    found: Mapping[Setting, SettingCost],
    floor: float,
    values: Sequence[int],
) -> tuple[SettingRow, ...]:
    """What was found by falling bits, each with the engines whose settings do the same."""
    keys = {name: {choice.identity(one, bench.layers) for one in of if one} for name, of in settings.items()}
    rows = []
    for key, setting in choice.unique(found, bench.layers).items():
        engines = tuple(name for name, has in keys.items() if key in has)
        size = choice.stored_bytes(setting, values)
        rows.append(SettingRow(setting, engines, found[setting], verdict(found[setting].kl, floor), size))
    return tuple(sorted(rows, key=lambda row: (-row.setting.bits, row.found.kl.value)))


def _values(info: ModelInfo, tokens: int) -> list[int]:
    """K and V elements that each layer holds of so many tokens; one with a window holds no more than that."""
    each = 2 * info.n_kv_heads * info.head_dim
    return [each * min(tokens, window or tokens) for window in info.windows]


def about(args: SimpleNamespace, bench: FormatBench, taken: str) -> tuple[str, ...]:
    """What was measured on what, in lines for people; `taken` says what the windows are for."""
    info, disclosure = bench.engine.info, bench.disclosure
    return (
        f"{args.model}: {info.n_layers} layers, {info.n_kv_heads} KV heads of {info.head_dim} dimensions;"
        f" transformers, {args.dtype}, {bench.engine.device}",
        *([disclosure] if disclosure else []),
        f"{len(bench.choosing) + len(bench.confirming)} windows of {args.context} coded and {args.eval} predicted"
        f" tokens of {args.text}: {taken}",
        "one window of each kind of codec is computed a second time, by other code"
        if bench.plain
        else "nothing is computed a second time, as --no-witness asks",
        *([f"kvlab's own codecs are {bench.fitted_to}"] if bench.fitted else []),
        *map(_controlled, bench.controls.items()),
    )


def _controlled(found: tuple[str, dict[str, float]]) -> str:
    """What the controls showed on a way, in a line."""
    protocol, kl = found
    where = "over a finished cache" if protocol == FINISHED else "as engines read them"
    return (
        f"controls {where}: one bit of K and V costs KL {kl['one_bit']:.2g} nats per token, 16 bits against themselves"
        f" {kl['same']:.1g}"
    )


def _fitted_by(args: SimpleNamespace) -> str:
    """What `kvlab calibrate` has to be told beside model, codec and bits to fit the same."""
    said = f" --context {args.context} --dtype {args.dtype}"
    return said + (f" --text {shlex.quote(str(args.calib_text))}" if args.calib_text else "")


def facts_of(args: SimpleNamespace, bench: FormatBench) -> dict:
    """The same for programs."""
    info = bench.engine.info
    return {
        "model": str(args.model),
        "model_hash": info.model_hash,
        "disclosure": bench.disclosure,
        "dtype": args.dtype,
        "device": bench.engine.device,
        "serving_device": args.device,
        "text": str(args.text),
        "text_hash": sha256(bench.choosing.tobytes() + bench.confirming.tobytes()),
        "windows": {"choose": len(bench.choosing), "confirm": len(bench.confirming)},
        "context": args.context,
        "eval": args.eval,
        "tokens": args.tokens or info.max_positions,
        "values": _values(info, args.tokens or info.max_positions),
        "controls": bench.controls,
        "calibrated": bench.fitted_to or None,
        "calibration": {name: getattr(bench.fitted, name, None) for name in ("corpus_hash", "sigma_hash")},
        "fitted": _fitted_by(args),
        "versions": versions(),
    }
