"""Two ways to spend bytes on favoured layers, each beside uniform spending of as many: boundary layers, bits by layer.

Which layers an arm favours is a `LayerChoice`, made on the calibration split by `studies.mitigations.search`. The
studied codec's bytes come in steps, so its arms stand against a curve of uniform recipes; `klt` takes any rate, so
its arms take the same bytes: what favoured layers get, the others give.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvlab.codecs.block.studied import coded_layers, studied_recipe
from kvlab.codecs.klt import KltStream
from kvlab.core.codec_settings import Frozen
from kvlab.core.errors import StaleResult
from kvlab.core.params import Params
from kvlab.core.recipe import IDENTITY, Cell, DType, Engine, LayerRecipe, Protocol, Recipe, digest
from kvlab.core.records import Provenance
from kvlab_pipeline.studies.mitigations.params import rises
from kvlab_pipeline.studies.record import read_record

READS = ("windows", "engines", "gap", "mitigations")  # of params.yaml, beside what every codec reads

FEWEST_BITS, MOST_BITS = 0.5, 8.0  # of klt: what an arm cannot leave its other layers it cannot afford
EQUAL_BYTES = 0.005  # relative: arms of klt whose bytes differ by more may not be compared
UNIFORM = "uniform"  # how the names of the points of the curve begin
VALUE_BITS = {"float32": 32, "bfloat16": 16}
MOST_BLOCK_BITS = 8  # of the studied codec; at these no layer's K can get one bit more
JUDGING = {"windows", "protocols"}  # of `mitigations`: they say how a choice is judged and decide no search


class LayerChoice(Frozen):
    """Layers that the calibration split speaks for.

    Parameters
    ----------
    greedy, extended : tuple of int
        Boundary layers of the studied codec within the budget: found from nothing, and from those of params.yaml.
    hot : tuple of int
        Layers whose K gets one bit more.
    klt_boundary, klt_hot : tuple of int
        The same for `klt`, paid for by the other layers; empty where they cannot pay for any.
    moved : tuple of int
        Boundary layers found like `greedy`, but no more of them than params.yaml names: as many, for the same
        bytes, unless `greedy` found fewer.
    """

    greedy: tuple[int, ...]
    extended: tuple[int, ...]
    hot: tuple[int, ...]
    klt_boundary: tuple[int, ...]
    klt_hot: tuple[int, ...]
    moved: tuple[int, ...] = ()

    @classmethod
    def none(cls) -> LayerChoice:
        """No layer is favoured by any arm."""
        return cls(greedy=(), extended=(), hot=(), klt_boundary=(), klt_hot=())


class Step(Frozen):
    """What the calibration split shows for some favoured layers: mean KL, and bits per value of the whole cache."""

    layers: tuple[int, ...]
    kl: float
    bits_per_value: float


class ChoiceRecord(Frozen):
    """A choice, how it was made, and on what.

    The last step of a search is what it chose. The first is what it started from: the studied recipe without
    boundary layers (`greedy`, `moved`) or with those of params.yaml (`extended`, `hot`), and uniform `klt`.

    Parameters
    ----------
    windows : int
        Of the calibration split, all of which were looked at.
    budget : float
        Bits per value of the whole cache that boundary layers were allowed to bring it to.
    search_id : str
        `search_id` of the parameters that the searches were made under.
    """

    provenance: Provenance
    engine: Engine
    dtype: DType
    protocol: Protocol
    windows: int
    budget: float
    search_id: str
    choice: LayerChoice
    searches: dict[str, tuple[Step, ...]]


@dataclass(frozen=True)
class Mitigation:
    """A way to spend: what is coded, and how."""

    name: str
    layers: tuple[int, ...]
    recipe: Recipe
    exceptions: tuple[LayerRecipe, ...] = ()


def arms(params: Params, choice: LayerChoice) -> list[Mitigation]:
    """All arms. Two of them may be one cell: two searches can find the same layers, or those of params.yaml.

    Raises
    ------
    StaleResult
        The choice is none under these parameters.
    """
    refuse_stale(params, choice)
    everything = tuple(range(params.model.n_layers))
    return [
        *uniform(params),
        bounded(params, "moved", choice.moved),
        bounded(params, "greedy", choice.greedy),
        bounded(params, "extended", choice.extended),
        hot(params, choice.hot),
        Mitigation("klt uniform", everything, klt_recipe(params, params.mitigations.klt_bits)),
        klt_bounded(params, choice.klt_boundary),
        klt_hot(params, choice.klt_hot),
    ]


def search_id(params: Params) -> str:
    """Identity of all parameters that decide which layers the searches find, on one model, corpus and Sigma_q."""
    deciding = {
        "mitigations": params.mitigations.model_dump(mode="json", exclude=JUDGING),
        "calibration": params.calibration.model_dump(mode="json", include={"origin", "codebooks"}),
        "codec": params.codec.model_dump(mode="json"),
        "bits": [params.bits, params.v_bits],
        "dtype": params.gap.dtype,
        "layers": params.model.n_layers,
        "windows": params.windows.calib,
    }
    return digest(deciding)


def current(params: Params, record: ChoiceRecord) -> LayerChoice:
    """The choice of a record; `StaleResult` unless it was made as these parameters say."""
    expected = {
        "engine": params.calibration.origin,
        "dtype": params.gap.dtype,
        "windows": params.windows.calib,
        "budget": params.mitigations.budget,
    }
    for name, value in expected.items():
        if getattr(record, name) != value:
            raise StaleResult(
                f"the choice of layers was made with {name} {getattr(record, name)}, these parameters say {value};"
                " run `kvlab step choose` again",
                code="stale.other-choice",
            )
    if record.search_id != search_id(params):
        raise StaleResult(
            f"the choice of layers was made under other parameters ({record.search_id}) than these"
            f" ({search_id(params)}): bits, codec, calibration or mitigations; run `kvlab step choose` again",
            code="stale.other-choice",
        )
    refuse_stale(params, record.choice)
    return record.choice


def refuse_stale(params: Params, choice: LayerChoice) -> None:
    """`StaleResult` for layers that this model has not, and for what `klt` cannot pay at these bits."""
    unknown = {i for layers in choice.model_dump().values() for i in layers} - set(range(params.model.n_layers))
    boundary, hot_layers = len(choice.klt_boundary), len(choice.klt_hot)
    if unknown or not klt_affords_boundary(params, boundary) or not klt_affords_hot(params, hot_layers):
        named = f"names layer {min(unknown)} of {params.model.n_layers}" if unknown else "takes more bytes than it may"
        raise StaleResult(
            f"the choice of layers {named}: it was made under other parameters; run `kvlab step choose` again",
            code="stale.no-layer" if unknown else "stale.too-many-bytes",
        )


def uniform(params: Params) -> list[Mitigation]:
    """The points of the curve: the studied recipe, and the same layers at more bits or at fewer.

    A point that has more bits for K and fewer for V than the studied recipe, or the reverse, is left out: it spends
    otherwise, and it could take as many bytes.
    """
    studied = (params.bits, params.v_bits)
    bits = dict.fromkeys([studied, *(p for p in params.mitigations.uniform if rises(studied, p) or rises(p, studied))])
    return [Mitigation(f"{UNIFORM} {k}/{v}", coded_layers(params), uniform_recipe(params, k, v)) for k, v in bits]


def favoured(choice: LayerChoice, name: str) -> tuple[int, ...]:
    """The layers that the arm of this name favours; none for the uniform ones."""
    return getattr(choice, name.replace(" ", "_"), ())


def uniform_recipe(params: Params, bits: int, v_bits: int) -> Recipe:
    """The studied recipe at other bits."""
    return studied_recipe(params.model_copy(update={"bits": bits, "v_bits": v_bits}))


def bounded(params: Params, name: str, uncoded: tuple[int, ...]) -> Mitigation:
    """The studied recipe with other boundary layers."""
    return Mitigation(name, tuple(i for i in range(params.model.n_layers) if i not in uncoded), studied_recipe(params))


def hot(params: Params, layers: tuple[int, ...]) -> Mitigation:
    """The studied recipe with one bit more for K on some layers; as it is where K has all the bits there are."""
    special = uniform_recipe(params, params.bits + 1, params.v_bits) if affords_hot(params) else None
    return Mitigation(
        "hot", coded_layers(params), studied_recipe(params), exceptions(layers, special) if special else ()
    )


def affords_hot(params: Params) -> bool:
    """Whether the studied codec's K can get one bit more."""
    return params.bits < MOST_BLOCK_BITS


def klt_bits(params: Params, bits: float) -> tuple[float, float]:
    """Bits of K and of V whose mean is `bits`; relative to it as far apart as `bits` and `v_bits` of params.yaml."""
    room = max(min(bits - FEWEST_BITS, MOST_BITS - bits), 0.0)
    apart = (params.bits - params.v_bits) / 2 * bits / params.mitigations.klt_bits
    apart = min(max(apart, -room), room)
    return bits + apart, bits - apart


def klt_recipe(params: Params, bits: float, more: float = 0.0) -> Recipe:
    """`klt` at `bits` per value of K and V together; K gets `more` on top."""
    k, v = klt_bits(params, bits)
    return Recipe(k=KltStream(bits=k + more), v=KltStream(bits=v))


def klt_left(params: Params, uncoded: int) -> float:
    """Bits per value that `uncoded` layers leave the others at the same bytes; negative when they take too much."""
    n, each = params.model.n_layers, VALUE_BITS[params.gap.dtype]
    return (n * params.mitigations.klt_bits - each * uncoded) / (n - uncoded)


def klt_affords_boundary(params: Params, count: int) -> bool:
    """Whether the other layers can pay for `count` uncoded ones."""
    return count == 0 or (count < params.model.n_layers and klt_left(params, count) >= FEWEST_BITS)


def klt_affords_hot(params: Params, count: int) -> bool:
    """Whether K of the other layers can pay for one bit more on `count` layers."""
    if not 0 < count < params.model.n_layers:
        return count == 0
    k, _ = klt_bits(params, params.mitigations.klt_bits)
    return k + 1 <= MOST_BITS and k - klt_given(params, count) >= FEWEST_BITS


def klt_given(params: Params, count: int) -> float:
    """Bits of K that each other layer gives for one bit more on `count` layers."""
    return count / (params.model.n_layers - count)


def klt_bounded(params: Params, uncoded: tuple[int, ...]) -> Mitigation:
    """`klt` with uncoded layers, which the others pay for."""
    layers = tuple(i for i in range(params.model.n_layers) if i not in uncoded)
    return Mitigation("klt boundary", layers, klt_recipe(params, klt_left(params, len(uncoded))))


def klt_hot(params: Params, layers: tuple[int, ...]) -> Mitigation:
    """`klt` with one bit more for K on some layers, which K of the others pays for."""
    bits = params.mitigations.klt_bits
    special = exceptions(layers, klt_recipe(params, bits, more=1.0)) if layers else ()
    less = klt_given(params, len(layers))
    return Mitigation("klt hot", tuple(range(params.model.n_layers)), klt_recipe(params, bits, more=-less), special)


def exceptions(layers: tuple[int, ...], recipe: Recipe) -> tuple[LayerRecipe, ...]:
    """What some layers have to themselves."""
    return (LayerRecipe(layers=layers, recipe=recipe),) if layers else ()


def cells(params: Params, engine: str, choice: LayerChoice) -> list[Cell]:
    """Every arm on one engine, under each of the protocols, with the identity cell as the floor."""
    everything = tuple(range(params.model.n_layers))
    return [
        cell_of(arm, params, engine, protocol, params.mitigations.windows)
        for protocol in params.mitigations.protocols
        for arm in (Mitigation("identity", everything, IDENTITY), *arms(params, choice))
    ]


def cell_of(arm: Mitigation, params: Params, engine: str, protocol: str, windows: int, text: str = "test") -> Cell:
    """An arm as a cell."""
    return Cell(
        study="mitigations",
        label=arm.name,
        engine=engine,
        dtype=params.gap.dtype,
        protocol=protocol,
        origin=params.calibration.origin,
        stream="kv",
        layers=arm.layers,
        windows=windows,
        text=text,
        recipe=arm.recipe,
        exceptions=arm.exceptions,
    )


def read_choice(path: Path) -> ChoiceRecord:
    """What `kvlab step choose` wrote; `StorageError` for anything else."""
    return read_record(path, ChoiceRecord, "choose")
