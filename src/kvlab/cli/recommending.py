"""What `kvlab recommend` and `kvlab check` run once their inputs are checked. Imports torch."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from types import SimpleNamespace

import numpy as np
import torch

from kvlab.advice import choice
from kvlab.advice.choice import LossWish, Setting
from kvlab.advice.serving import CacheFormat, OwnFormat, ServingEngine
from kvlab.advice.verdicts import answer, bound, verdict
from kvlab.cache.hf.codec_tables import resident_bytes
from kvlab.cache.pages.token_bytes import rows_of
from kvlab.calibration.load import Calibrated
from kvlab.calibration.needs import needs_calibration
from kvlab.cli.advised import Advice, EngineLine, SettingCost, SettingRow
from kvlab.cli.calibrate import MOST as MOST_CALIB
from kvlab.cli.checked import info_of
from kvlab.cli.costs import ABLE, codec_of
from kvlab.cli.fitting import CalibrationText
from kvlab.cli.flags import most_windows
from kvlab.codecs.base import Site
from kvlab.codecs.int import IntStream
from kvlab.codecs.registry import build
from kvlab.core.codec_settings import IdentityStream
from kvlab.core.errors import CapabilityError, CodecNotActive, CorpusError, Fault, UserError
from kvlab.core.model import ModelInfo, load_tokenizer
from kvlab.core.origin import told_of
from kvlab.core.recipe import Recipe
from kvlab.core.records import SAME, sha256, versions
from kvlab.engines.base import Engine
from kvlab.engines.registry import start
from kvlab.measure import quick_run
from kvlab.measure.coding import STREAMS
from kvlab.stats.bootstrap import Estimate
from kvlab.text.excerpts import read_text, refuse_overlap, windows_of
from kvlab.witness.plain import PlainModel

SAMPLE = 512  # tokens by which a format's bytes are counted
SOUNDING = 2  # windows on which layers are coded alone
FEWEST = 4  # windows: two to choose by, two that confirm
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
    _heard: set[tuple[str, str]] = field(default_factory=set)
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
        source = CalibrationText.read(self.engine.info, args.calib_text, text, self.context, MOST_CALIB)
        refuse_overlap(np.concatenate([self.choosing, self.confirming]), source.windows, (str(args.text), source.name))
        self.fitted, self.fitted_to = source.fit(self.engine, recipes), source.about(self.engine)

    def control(self, protocols: Iterable[str]) -> None:
        """Measure `CONTROLS` on a few windows; those of `protocols` have to be found broken, and equal.

        Raises
        ------
        CodecNotActive
            One bit of K and V is not found broken: then no verdict here says much.
        Fault
            16 bits against themselves are not equal.
        """
        for protocol in protocols:
            codecs = [quick_run.NamedCodec(name, recipe, None, protocol) for name, recipe in CONTROLS.items()]
            scored = quick_run.score(
                self.engine, self.choosing[:SOUNDING], self.context, codecs, title="controls", heard=self._heard
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
    def layers(self) -> int:
        """Of the model."""
        return self.engine.info.n_layers

    def with_floor(self, settings: Iterable[Setting], protocol: str) -> tuple[SettingCost, dict[Setting, SettingCost]]:
        """What rounding K and V to bfloat16 costs on the windows that choose, and each setting there."""
        rounding = quick_run.rounding(self.engine.dtype)
        found = self.measure(dict.fromkeys(settings, protocol), title="formats", beside=rounding)
        return self._found[rounding.label], found

    def measure(
        self,
        asked: Mapping[Setting, str],
        confirming: bool = False,
        title: str = "",
        beside: quick_run.NamedCodec | None = None,
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
            scored = quick_run.score(
                self.engine, windows, self.context, [*codecs.values()], self.plain, title=title, heard=self._heard
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
            self.engine, self.choosing[:SOUNDING], self.context, codecs, title="layers", heard=self._heard
        )
        found: dict[Setting, dict[int, float]] = {one: {} for one in settings}
        for (one, layer), cost in zip(alone, scored, strict=True):
            found[one][layer] = float(cost.tokens["kl"].mean())
        return found


def recommended(
    args: SimpleNamespace, engines: Sequence[ServingEngine], wish: LossWish, text: str, told: Callable[[Advice], None]
) -> Advice:
    """Measure the formats of engines on one half of the windows, choose, and confirm on the other half.

    Parameters
    ----------
    args : SimpleNamespace
        What `kvlab recommend` was asked for, by the names of its parameters.
    engines : sequence of ServingEngine
    wish : LossWish
    text : str
        What is scored.
    told : callable
        Is given what is known once all formats are measured, before lines are.

    Raises
    ------
    CorpusError
        The text has fewer than four windows.
    CapabilityError
        The engines have no format for such a model on such a device.
    """
    info = info_of(args.model)
    windows = _halves(args, info, text)
    refused = {engine.name: _refused(engine, args.device, info) for engine in engines}
    able = {engine.name: [one for one in engine.formats if one.name not in refused[engine.name]] for engine in engines}
    if not any(able.values()):
        why = next(iter(next(iter(refused.values())).values()))
        raise CapabilityError(f"no format can be taken: {why}", code="capability.no-format")
    bench = FormatBench.started(args, info, windows[0::2], windows[1::2])
    try:
        bench.control(dict.fromkeys([FINISHED, *(engine.as_read for engine in engines)]))
        bench.fit(args, chain.from_iterable(able.values()))
        for name, formats in able.items():
            refused[name] |= {one.name: why for one in formats if (why := _unable(one, info, bench.fitted))}
        settings = {
            name: [setting_of(one, bench) for one in formats if one.name not in refused[name]]
            for name, formats in able.items()
        }
        every = choice.unique(chain.from_iterable(settings.values()), info.n_layers)
        floor, finished = bench.with_floor(every.values(), FINISHED)
        facts = _facts(args, bench)
        rows = _rows(bench, settings, finished, floor.kl.value, facts["values"])
        advice = Advice(facts, _about(args, bench), floor, rows)
        told(advice)
        lines, served = _lines(bench, engines, settings, wish, floor.kl.value, refused)
        chosen = {line.engine.name: [*settings[line.engine.name], line.setting] for line in lines}
        return replace(
            advice,
            facts=facts | {"witnessed": bench.testimonies},
            served=_rows(bench, chosen, served, floor.kl.value, facts["values"]),
            lines=lines,
        )
    finally:
        bench.engine.close()


def checked(args: SimpleNamespace, engine: ServingEngine, format: CacheFormat, texts: Sequence[str]) -> Advice:
    """Measure one format as an engine reads it; parameters and what is raised as of `recommended`.

    `texts` are documents that are joined.
    """
    info = info_of(args.model)
    if why := engine.refused(format, args.device, info.n_layers, info.head_dim):
        raise CapabilityError(f"format {format.name!r} cannot be taken: {why}", code="capability.no-format")
    windows = _windows(args, info, texts)
    bench = FormatBench.started(args, info, windows, windows[:0])
    try:
        bench.control([engine.as_read])
        bench.fit(args, [format])
        if why := _unable(format, info, bench.fitted):
            raise CapabilityError(f"format {format.name!r} cannot be taken: {why}", code="capability.no-format")
        setting = setting_of(format, bench, tuple(args.exact))
        floor, found = bench.with_floor([setting], engine.as_read)
        facts = _facts(args, bench) | {"witnessed": bench.testimonies}
        rows = _rows(bench, {engine.name: [setting]}, found, floor.kl.value, facts["values"])
        return Advice(facts, _about(args, bench), floor, (), rows)
    finally:
        bench.engine.close()


def _windows(args: SimpleNamespace, info: ModelInfo, texts: Sequence[str]) -> np.ndarray:
    """The windows of texts."""
    length = args.context + args.eval
    most, exactly = most_windows(args.windows, "--windows")
    return windows_of(texts, load_tokenizer(info), length, most, str(args.text), args.context, exactly)


def _halves(args: SimpleNamespace, info: ModelInfo, text: str) -> np.ndarray:
    """The windows of the text, of which every second one confirms."""
    windows, length = _windows(args, info, [text]), args.context + args.eval
    if len(windows) < FEWEST:
        raise CorpusError(
            f"{args.text} has {len(windows)} windows of {length} tokens; at least {FEWEST} are needed, two to choose by"
            " and two that confirm: give a longer text or smaller windows"
        )
    return windows


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


def _refused(engine: ServingEngine, device: str, info: ModelInfo) -> dict[str, str]:
    return {
        one.name: why for one in engine.formats if (why := engine.refused(one, device, info.n_layers, info.head_dim))
    }


def _unable(format: CacheFormat, info: ModelInfo, fitted: Calibrated | None) -> str | None:
    """Why one of kvlab's codecs cannot run in its place with this model, by the check of that place; else None."""
    if isinstance(format, OwnFormat):
        try:
            ABLE[format.place](format.recipe, fitted, info)
            own_bits_of(format.recipe, info, fitted)
        except UserError as error:
            return str(error)
    return None


def _lines(
    bench: FormatBench,
    engines: Sequence[ServingEngine],
    settings: Mapping[str, Sequence[Setting]],
    wish: LossWish,
    floor: float,
    refused: Mapping[str, dict[str, str]],
) -> tuple[tuple[EngineLine, ...], dict[Setting, SettingCost]]:
    """Choose for each engine, look for layers that carry the loss, confirm; and all candidates as they are read."""
    ways, served = {engine.name: engine.as_read for engine in engines}, {}
    kl = {
        name: {one: found.kl for one, found in bench.measure(dict.fromkeys(each, FINISHED)).items()}
        for name, each in settings.items()
    }

    def as_read(open_: Mapping[str, Setting]) -> dict[str, Estimate]:
        """As their engines read them, on the windows that choose."""
        served.update(bench.measure({one: ways[name] for name, one in open_.items()}, title="as engines read them"))
        return {name: served[one].kl for name, one in open_.items()}

    taken = choice.settled(kl, as_read, wish, floor)
    losses = _layers_apart(bench, kl, taken, wish)
    if any(losses.values()):
        taken = choice.settled(kl, as_read, wish, floor)
    sure = {one: ways[name] for name, one in taken.items() if one}
    confirmed = bench.measure(sure, confirming=True, title="confirming")
    lines = []
    for engine in engines:
        one = taken[engine.name]
        found = confirmed.get(one)
        holds = "no" if found is None else "yes" if wish.bits is not None else answer(found.kl, wish.loss, floor)
        near = None if one else choice.nearest(kl[engine.name])
        fitted = bench.read_by(one) if one else None
        tables = resident_bytes(one.format.recipe, fitted, bench.engine.info) if fitted else 0
        lines.append(EngineLine(engine, one, found, holds, near, refused[engine.name], losses[engine.name], tables))
    return tuple(lines), served


def _layers_apart(
    bench: FormatBench,
    kl: Mapping[str, dict[Setting, Estimate]],
    taken: Mapping[str, Setting | None],
    wish: LossWish,
) -> dict[str, dict[str, dict[int, float]]]:
    """Losses by layer of formats that might do with a few layers in 16 bits; such settings are measured into `kl`."""
    close = {name: choice.worth_layers(kl[name], taken[name], wish, bench.layers) for name in kl}
    if not any(close.values()):
        return {name: {} for name in kl}
    losses = bench.losses([*dict.fromkeys(chain.from_iterable(close.values()))])
    for name, formats in close.items():
        sets = [setting_of(one.format, bench, exact) for one in formats for exact in choice.carriers(losses[one])]
        cheaper = [one for one in sets if taken[name] is None or one.bits < taken[name].bits]
        found = bench.measure(dict.fromkeys(cheaper, FINISHED), title="layers apart")
        kl[name].update({one: each.kl for one, each in found.items()})
    return {name: {one.name: losses[one] for one in formats} for name, formats in close.items()}


def _rows(
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


def _about(args: SimpleNamespace, bench: FormatBench) -> tuple[str, ...]:
    """What was measured on what, in lines for people."""
    info, disclosure = bench.engine.info, bench.disclosure
    halves = len(bench.choosing), len(bench.confirming)
    return (
        f"{args.model}: {info.n_layers} layers, {info.n_kv_heads} KV heads of {info.head_dim} dimensions;"
        f" transformers, {args.dtype}, {bench.engine.device}",
        *([disclosure] if disclosure else []),
        f"{sum(halves)} windows of {args.context} coded and {args.eval} predicted tokens of {args.text}"
        + (f": {halves[0]} choose, {halves[1]} confirm" if halves[1] else ""),
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


def _facts(args: SimpleNamespace, bench: FormatBench) -> dict:
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
