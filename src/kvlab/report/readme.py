"""The README's headline: generated from numbers, and checkable without the run that made them.

`update` keeps three files in step: the block in README.md between two markers, ``docs/headline.json``
(the few numbers that the block prints) and ``docs/headline.svg`` (the figure, also drawn from them).
`check` renders the committed JSON again and says what differs.
"""

from __future__ import annotations

from pathlib import Path

from kvlab.base.errors import StorageError
from kvlab.base.records import atomic, file_hash, read_json, write_json, write_text
from kvlab.pages import format as fmt
from kvlab.pages import parts as tables
from kvlab.pages.basis import Basis
from kvlab.pages.rendering import render
from kvlab.pages.withheld import settling, undecided, withheld_because, without_cross_engine
from kvlab.report import figures, models
from kvlab.studies.factors import tables as factors

BEGIN, END = "<!-- headline:begin -->", "<!-- headline:end -->"
NUMBERS, PICTURE = "docs/headline.json", "docs/headline.svg"
IDENTITY = ("model", "corpus", "disclosure", "model_hash", "corpus_hash", "calibration", "device")


def update(
    readme: Path, metrics: dict, verdict: dict, figure: Path | None = None, comparison: dict | None = None
) -> None:
    """Replace the README's headline block and write ``docs/headline.json`` and ``docs/headline.svg``.

    Parameters
    ----------
    readme : Path
        A file with both marker lines; ``docs/`` is beside it.
    metrics, verdict : dict
        ``metrics.json`` and ``verdict.json``.
    figure : Path, optional
        The SVG to copy (``figures/gap_shapley.svg``); drawn anew from the metrics when not given.
    comparison : dict, optional
        ``comparison.json``; where it is of several models, the headline says what holds across them.

    Raises
    ------
    UserError
        When the comparison is none, or of other models.
    StorageError
        When the README or the figure cannot be read, or a marker is missing; nothing is written then.
    NonFinite
        When the metrics hold NaN or infinity.
    """
    readme = Path(readme)
    fmt.refuse_non_finite(metrics, "metrics")
    fmt.refuse_non_finite(verdict, "verdict")
    fmt.refuse_non_finite(comparison, "comparison")
    before, _, after = split(read(readme), readme)
    headline = select(metrics, verdict) | {"across": models.across_of(comparison, metrics["identity"].get("slug"))}
    picture = place_picture(headline, figure, readme.parent / PICTURE)
    headline["figure_hash"] = file_hash(picture) if picture else None
    write_json(readme.parent / NUMBERS, headline)
    write_text(readme, f"{before}{BEGIN}\n{block(headline)}{END}{after}")


def check(readme: Path) -> list[str]:
    """What in the README's headline is not what ``docs/headline.json`` generates; empty when all is."""
    readme = Path(readme)
    headline = read_json(readme.parent / NUMBERS)
    _, found, _ = split(read(readme), readme)
    problems = []
    if found.strip() != block(headline).strip():
        problems.append(f"the headline block of {readme.name} is not what {NUMBERS} generates")
    picture, wanted = readme.parent / PICTURE, headline["figure_hash"]
    if wanted and not picture.is_file():
        problems.append(f"{PICTURE} is missing")
    elif wanted and file_hash(picture) != wanted:
        problems.append(f"{PICTURE} is not the figure that {NUMBERS} names")
    return problems


def select(metrics: dict, verdict: dict) -> dict:
    """The part of the metrics that the headline prints."""
    withheld = withheld_because(metrics, verdict)
    gap = (without_cross_engine(metrics) if withheld else metrics).get("gap")
    if gap and "kl" not in gap["measures"]:
        gap = None
    if gap:
        gap = {name: gap[name] for name in ("factors", "low", "high")} | {
            "measures": {"kl": {name: gap["measures"]["kl"][name] for name in ("low", "high", "gap", "parts")}}
        }
    return {
        "withheld": None if gap else withheld,
        "agreement": gap and agreement_of(metrics),
        "gap": gap,
        "confidence": metrics["sizes"]["confidence"],
        "identity": {name: metrics["identity"].get(name) for name in IDENTITY},
        "publishable": verdict["publishable"],
    }


def agreement_of(metrics: dict) -> dict | None:
    """Whether the engines agree, as the headline's figure and table read it."""
    agreement = metrics.get("agreement")
    return agreement and {name: agreement[name] for name in ("state", "windows_needed")}


def block(headline: dict) -> str:
    """The Markdown between the markers, from the content of ``docs/headline.json``."""
    gap, agreement = headline["gap"], undecided(headline)
    kl = factors.measure_context(gap["measures"]["kl"], Basis(headline["confidence"]), bool(agreement)) if gap else None
    return render(
        "headline.md.j2",
        withheld=headline["withheld"],
        across=headline.get("across") and models.across_context(headline["across"]),
        kernels=factors.kernels(headline["identity"], gap),
        undecided=agreement and settling(agreement),
        kl=kl,
        low=f"({factors.corner(gap['low'])})" if gap else None,
        high=f"({factors.corner(gap['high'])})" if gap else None,
        unit=tables.KL_UNIT,
        model=headline["identity"]["model"],
        corpus=headline["identity"]["corpus"],
        disclosure=headline["identity"].get("disclosure"),
        publishable=headline["publishable"],
        figure=PICTURE if headline["figure_hash"] else None,
    )


def place_picture(headline: dict, figure: Path | None, place: Path) -> Path | None:
    """Copy or draw the headline's figure; without a decomposition an older one is taken away."""
    if not headline["gap"]:
        place.unlink(missing_ok=True)
        return None
    if figure is None:
        with atomic(place) as temporary:
            figures.picture("gap_shapley", figures.FIGURES["gap_shapley"].table(headline), temporary)
        return place
    try:
        content = Path(figure).read_bytes()
    except OSError as error:
        raise StorageError(f"cannot read {figure}: {error.strerror}") from None
    with atomic(place) as temporary:
        temporary.write_bytes(content)
    return place


def read(readme: Path) -> str:
    """The README's text."""
    try:
        return readme.read_text()
    except OSError as error:
        raise StorageError(f"cannot read {readme}: {error.strerror}") from None


def split(text: str, readme: Path) -> tuple[str, str, str]:
    """The text before the block, the block without its markers, the text after it."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise StorageError(
            f"{readme} has no place for the headline; put the lines {BEGIN} and {END} where it belongs, once"
        )
    before, _, rest = text.partition(BEGIN)
    found, _, after = rest.partition(END)
    return before, found, after
