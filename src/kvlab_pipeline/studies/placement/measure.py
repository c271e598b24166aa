"""The same texts with their chunks in blocks in many orders: read in logical order, and as the blocks lie.

Two runs over the same tokens may not agree to the bit: by rounding, or by a bug at the seam. Attention that sums the
same numbers in another order rounds otherwise, and where two tokens are as good as tied the other one may come out.
That is no bug, and it is the excuse of every bug. What tells them apart is known beforehand: the lead that the
reference run's token had, against how far such rounding moves logits at all. The latter has to be measured on other
runs than those that are judged, for of a run's own largest difference every flip is within reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from kvlab.codecs.shared.seeding import generator
from kvlab.core.errors import CapabilityError, Fault, ParamsError
from kvlab.core.model import check_window, resolve
from kvlab.core.params import Params
from kvlab.core.records import forget, write_json
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.paging.geometry import same_bits
from kvlab.text import corpus
from kvlab_pipeline.jobs.measure import provenance
from kvlab_pipeline.studies.kvstore_params import PlacementStudy
from kvlab_pipeline.studies.placement.record import Logical, Margins, PlacementRecord, PlantedControl, RunVerdict

SEED = 0
TIES = 10  # orders in which the constructed tie is read
FACTOR = 4.0  # times the noise that was seen: two runs may each be off by it, and it was seen a few times only
EDGES = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of leads, in logits
APART = 1e-6  # standard deviation of what two tied rows of the output projection differ by


class Text(NamedTuple):
    """A context, and the reference run's logits: after every token of it, then after each decoded one."""

    ids: list[int]
    reference: Tensor


class Runs:
    """Full runs of texts over a pool that holds everything.

    Parameters
    ----------
    model : PagedModel
    settings : PlacementStudy
    context : int
        Tokens of each text.
    """

    def __init__(self, model: PagedModel, settings: PlacementStudy, context: int):
        self.model, self.decode = model, settings.decode
        size = settings.chunk_tokens
        blocks = max(-(-(context + settings.decode) // size), PagerConfig(1 << 20, 1).floor_tokens)
        self.config = PagerConfig(blocks * size, size)

    def logits(self, ids: list[int], order: str = "logical", blocks: Sequence[int] | None = None) -> Tensor:
        """float32 [context + decode - 1, vocab]: the last row of the context is the first that is decoded from."""
        run = PagedRun(self.model, self.config, order=order, block_order=blocks)
        scored = run.score(ids)
        return torch.cat([scored, run.decode(self.decode).logits[1:]]).cpu()


def measure(params: Params, windows_path: Path, out: Path) -> None:
    """Run the first test windows' contexts and write the record; `params.kvstore.placement` says what is asked.

    Raises
    ------
    ParamsError
        More windows are asked for than there are.
    CapabilityError
        The model cannot be paged.
    """
    torch.set_num_threads(params.jobs.threads)
    settings, info = params.kvstore.placement, resolve(params.model)
    windows = corpus.load(windows_path, info.model_hash)
    if settings.windows > len(windows.test):
        raise ParamsError(
            f"{settings.windows} windows are asked for, and there are {len(windows.test)}",
            code="params.too-few-windows",
        )
    check_window(info, windows.context + settings.decode)
    forget(out)
    model = PagedModel.load(info, params.kvstore.dtype)
    runs = Runs(model, settings, windows.context)
    contexts = windows.test[: settings.windows, : windows.context].tolist()
    texts = [Text(ids, runs.logits(ids)) for ids in contexts]
    found = compared(runs, texts, orders(settings.orders, runs.config.blocks))
    record = PlacementRecord(
        provenance=provenance(info, windows, {}),
        settings=settings,
        dtype=params.kvstore.dtype,
        context=windows.context,
        blocks=runs.config.blocks,
        factor=FACTOR,
        least_margin=min(float(leads(text.reference).min()) for text in texts),
        controls=[tie(runs, texts[0], found["limit"]), shift(runs, texts, found["limit"])],
        **found,
    )
    write_json(out, record.model_dump(mode="json"))


def orders(count: int, blocks: int) -> list[list[int]]:
    """Random orders of the blocks."""
    chance = np.random.default_rng(SEED)
    return [chance.permutation(blocks).tolist() for _ in range(count)]


def compared(runs: Runs, texts: Sequence[Text], given: Sequence[Sequence[int]]) -> dict:
    """Every order on one of the texts, read both ways; the first half says how large the noise is."""
    half, noise = len(given) // 2, 0.0
    logical, slot, judged, led, flipped = [], [], [], [], []
    for number, order in enumerate(tqdm(given, desc="placement", unit="order")):
        text = texts[number % len(texts)]
        reference, fixed = text.reference, len(text.ids)
        for way, moved in (("logical", logical), ("slot", slot)):
            other = runs.logits(text.ids, way, order)
            moved.append((difference(reference, other, fixed), not same_bits(reference, other)))
        if number < half:
            noise = max(noise, slot[-1][0])
            continue
        judged.append(judge(reference, other, FACTOR * noise, fixed))
        flips_here = flips(reference, other)
        end = comparable(flips_here, fixed)
        led.append(leads(reference[:end]))
        flipped.append(flips_here[:end])
    return {
        "noise": noise,
        "limit": FACTOR * noise,
        "calibrated": half,
        "logical": counted(logical),
        "slot": counted(slot),
        "judged": judged,
        "margins": margins(torch.cat(led), torch.cat(flipped)),
    }


def counted(found: Sequence[tuple[float, bool]]) -> Logical:
    """Runs, those that differ, and the largest difference."""
    return Logical(
        runs=len(found),
        differing=sum(differs for _, differs in found),
        largest=max(moved for moved, _ in found),
    )


def tie(runs: Runs, text: Text, limit: float) -> PlantedControl:
    """A text's last token all but tied with one that the text does not hold, read as the blocks lie."""
    ids, fixed = text.ids, len(text.ids)
    with hidden_states(runs.model) as seen:
        PagedRun(runs.model, runs.config).score(ids)
    unused = sorted(set(range(runs.model.info.vocab_size)) - set(ids), reverse=True)
    with tied(runs.model, int(text.reference[fixed - 1].argmax()), seen[-1], unused):
        reference = PagedRun(runs.model, runs.config).score(ids).cpu()
        verdicts = []
        for order in orders(TIES, runs.config.blocks):
            run = PagedRun(runs.model, runs.config, order="slot", block_order=order)
            verdicts.append(judge(reference, run.score(ids).cpu(), limit, fixed))
    return control("tie", "near tie", verdicts)


def shift(runs: Runs, texts: Sequence[Text], limit: float) -> PlantedControl:
    """Each text with its second half's positions one too many."""
    verdicts = []
    for text in texts:
        with shifted(runs.model, len(text.ids) // 2):
            verdicts.append(judge(text.reference, runs.logits(text.ids), limit, len(text.ids)))
    return control("shift", "seam bug", verdicts)


def control(name: str, expected: str, verdicts: Sequence[RunVerdict]) -> PlantedControl:
    """What became of a control; runs in which nothing flipped are no evidence of anything."""
    flipped = [verdict for verdict in verdicts if verdict.flips]
    return PlantedControl(
        name=name,
        expected=expected,
        runs=len(verdicts),
        flipped=len(flipped),
        right=sum(verdict.kind == expected for verdict in flipped),
        lead=max((verdict.widest for verdict in flipped), default=None),
    )


# The verdict on two runs.


def judge(reference: Tensor, other: Tensor, limit: float, fixed: int) -> RunVerdict:
    """What to call the difference of two runs.

    A ``seam bug`` is a flip of a token that led by more than the limit, or a logit that is off by more than the limit
    at all; a ``near tie`` is any other flip.

    Parameters
    ----------
    reference, other : Tensor
        Logits [rows, vocab] after the same tokens.
    limit : float
        How far rounding moves logits, with a margin.
    fixed : int
        The first rows, which are after given tokens in both runs. The others were decoded: from the first flip on
        they are after other tokens, and are not compared.

    Raises
    ------
    Fault
        When the runs have not as many rows, or there are none.
    """
    if reference.shape != other.shape or not len(reference):
        raise Fault(
            f"{list(reference.shape)} logits cannot be held against {list(other.shape)}", code="fault.other-shape"
        )
    flipped = flips(reference, other)
    where = flipped[: comparable(flipped, fixed)].nonzero()[:, 0].tolist()
    led = leads(reference[where]).tolist() if where else []
    moved = difference(reference, other, fixed)
    bug = moved > limit or any(lead > limit for lead in led)
    return RunVerdict(
        kind="seam bug" if bug else "near tie" if where else "same",
        flips=len(where),
        first=where[0] if where else None,
        margin=led[0] if where else None,
        widest=max(led, default=None),
        largest=moved,
    )


def difference(reference: Tensor, other: Tensor, fixed: int) -> float:
    """The largest difference of a logit after the same tokens."""
    end = comparable(flips(reference, other), fixed)
    return float((reference[:end].double() - other[:end].double()).abs().max())


def flips(reference: Tensor, other: Tensor) -> Tensor:
    """bool [rows]: where the most likely token is another one."""
    return reference.argmax(-1) != other.argmax(-1)


def comparable(flipped: Tensor, fixed: int) -> int:
    """Rows after the same tokens: the fixed ones, and decoded ones up to the first flip, which is one of them."""
    free = flipped[fixed:].nonzero()[:, 0].tolist()
    return fixed + free[0] + 1 if free else len(flipped)


def leads(logits: Tensor) -> Tensor:
    """By how much the most likely token leads the next one, float64 [rows]."""
    top = logits.double().topk(2, dim=-1).values
    return top[:, 0] - top[:, 1]


def margins(led: Tensor, flipped: Tensor, edges: Sequence[float] = EDGES) -> list[Margins]:
    """Compared rows and their flips, both [rows], by the lead of the reference run; the last bin is open."""
    found = []
    for low, high in pairwise([*edges, None]):
        inside = (led >= low) & (led < (torch.inf if high is None else high))
        found.append(Margins(low=low, high=high, rows=int(inside.sum()), flips=int((inside & flipped).sum())))
    return found


# A near tie and a seam bug, made on purpose: what the verdict on them has to be is known.


@contextmanager
def tied(model: PagedModel, token: int, hidden: Tensor, unused: Sequence[int]) -> Iterator[int]:
    """While it lasts, another token's row of the output projection is all but that of `token`.

    They differ by numbers of `APART`, at right angles to what the projection was given: the two logits are equal there
    but for rounding. The other token must not be read by the model, for its embedding may be the same row.

    Parameters
    ----------
    model : PagedModel
    token : int
    hidden : Tensor
        [width], what the projection is given where the two shall be tied.
    unused : sequence of int
        Tokens, the first of which is taken.

    Yields
    ------
    int
        The other token.
    """
    weight, other = model.model.get_output_embeddings().weight.data, next(one for one in unused if one != token)
    before, x = weight[other].clone(), hidden.double().cpu()
    apart = APART * torch.randn(len(x), generator=generator("tie", token, other), dtype=torch.float64)
    apart -= x * (apart @ x) / (x @ x)
    weight[other] = (weight[token].double().cpu() + apart).to(weight)
    try:
        yield other
    finally:
        weight[other] = before


@contextmanager
def hidden_states(model: PagedModel) -> Iterator[list[Tensor]]:
    """While it lasts, what the output projection was given after the last token of each forward, [width] each."""
    kept: list[Tensor] = []
    handle = model.model.get_output_embeddings().register_forward_pre_hook(
        lambda _module, inputs: kept.append(inputs[0][0, -1].detach().clone())
    )
    try:
        yield kept
    finally:
        handle.remove()


@contextmanager
def shifted(model: PagedModel, seam: int, by: int = 1) -> Iterator[None]:
    """While it lasts, positions from `seam` on are one too many: what a restore off by one would do.

    Masks stay as they are. `CapabilityError` when the model is not told its positions.
    """

    def shift(_module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        places = kwargs.get("position_ids")
        if places is None:
            raise CapabilityError(
                "the model is not told its positions, so that none can be shifted", code="capability.no-positions"
            )
        return args, kwargs | {"position_ids": places + by * (places >= seam)}

    handle = model.model.base_model.register_forward_pre_hook(shift, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
