"""The numbers of README and docs: generated from a run, and checkable without it.

`update` keeps them in step: blocks between two markers each, in README.md and in docs/studies.md,
``docs/headline.json`` (the numbers that the blocks print) and ``docs/headline.svg`` (the figure, also drawn from them).
`check` renders the committed JSON again and says what differs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvlab.core.errors import StorageError
from kvlab.core.records import atomic, file_hash, read_json, write_json, write_text
from kvlab.output import format as fmt
from kvlab.output.rendering import listing
from kvlab_pipeline.rendering import parts as tables
from kvlab_pipeline.rendering.templates import render
from kvlab_pipeline.rendering.withheld import undecided, withheld_because, without_cross_engine
from kvlab_pipeline.report import figures, models
from kvlab_pipeline.report.readme_parts import codecs_block, codecs_of, seconds_block, seconds_of
from kvlab_pipeline.studies.factors import chapter as factors

HEADLINE = "headline"
BEGIN, END = "<!-- headline:begin -->", "<!-- headline:end -->"
PARTS: dict[str, Callable[[dict], str]] = {"codecs": codecs_block, "seconds": seconds_block}
"""Further blocks, on the page that has their markers."""
STUDIES_PAGE = "docs/studies.md"
NUMBERS, PICTURE = "docs/headline.json", "docs/headline.svg"
IDENTITY = ("model", "corpus", "disclosure", "model_hash", "corpus_hash", "calibration", "device")


def update(
    readme: Path,
    metrics: dict,
    verdict: dict,
    figure: Path | None = None,
    comparison: dict | None = None,
    claims: dict | None = None,
    benchmarks: Path | None = None,
) -> None:
    """Replace the blocks of README and docs, and write ``docs/headline.json`` and ``docs/headline.svg``.

    Parameters
    ----------
    readme : Path
        A file with the markers of the headline; ``docs/`` is beside it.
    metrics, verdict : dict
        ``metrics.json`` and ``verdict.json``.
    figure : Path, optional
        The SVG to copy (``figures/gap_shapley.svg``); drawn anew from the metrics when not given.
    comparison : dict, optional
        ``comparison.json``; where it is of several models, the headline says what holds across them.
    claims : dict, optional
        ``claims.json`` of the gate, for the table of codecs.
    benchmarks : Path, optional
        The folder of Snakemake's benchmarks, for the table of seconds.

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
    text, slug = read(readme), metrics["identity"].get("slug")
    split(text, readme)
    headline = select(metrics, verdict) | {"across": models.across_of(comparison, slug)}
    headline["codecs"] = codecs_of(claims, metrics)
    headline["seconds"] = benchmarks and seconds_of(benchmarks, slug)
    picture = place_picture(headline, figure, readme.parent / PICTURE)
    headline["figure_hash"] = file_hash(picture) if picture else None
    write_json(readme.parent / NUMBERS, headline)
    for page in pages(readme):
        text = read(page)
        for name, content in blocks(headline).items():
            if marks(name)[0] in text:
                before, _, after = split(text, page, name)
                text = f"{before}{marks(name)[0]}\n{content}{marks(name)[1]}{after}"
        write_text(page, text)


def check(readme: Path) -> list[str]:
    """What on the pages is not what ``docs/headline.json`` generates; empty when all is."""
    readme = Path(readme)
    headline = read_json(readme.parent / NUMBERS)
    split(read(readme), readme)
    problems = [
        f"the {name} block of {page.name} is not what {NUMBERS} generates"
        for page in pages(readme)
        for text in [read(page)]
        for name, content in blocks(headline).items()
        if marks(name)[0] in text and split(text, page, name)[1].strip() != content.strip()
    ]
    picture, wanted = readme.parent / PICTURE, headline["figure_hash"]
    if wanted and not picture.is_file():
        problems.append(f"{PICTURE} is missing")
    elif wanted and file_hash(picture) != wanted:
        problems.append(f"{PICTURE} is not the figure that {NUMBERS} names")
    return problems


def pages(readme: Path) -> list[Path]:
    """The pages with blocks: README, and where it is there the one of the studies."""
    return [page for page in (readme, readme.parent / STUDIES_PAGE) if page == readme or page.is_file()]


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
    if not agreement:
        return None
    kept = ("cross_kl", "jitter_kl", "jitters")
    codec = {protocol: {name: one.get(name, 0) for name in kept} for protocol, one in agreement["codec"].items()}
    return {name: agreement[name] for name in ("state", "windows_needed")} | {"codec": codec}


def blocks(headline: dict) -> dict[str, str]:
    """The Markdown between each pair of markers, from the content of ``docs/headline.json``."""
    found = {HEADLINE: block(headline)}
    return found | {name: made(headline[name]) for name, made in PARTS.items() if headline.get(name)}


def block(headline: dict) -> str:
    """The Markdown of the headline itself."""
    gap, agreement = headline["gap"], undecided(headline)
    measure = gap and gap["measures"]["kl"]
    kl = measure and tables.resolution(measure["gap"]) | {
        "gap": fmt.estimate(measure["gap"]),
        "rises": measure["gap"]["value"] > 0,
        "shares": listing([share(one) for one in factors.shares(measure, bool(agreement))]),
        "level": fmt.percent(headline["confidence"]),
    }
    return render(
        "headline.md.j2",
        withheld=headline["withheld"],
        across=headline.get("across") and models.across_context(headline["across"]),
        kernels=factors.kernels(headline["identity"], gap),
        undecided=bool(agreement),
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


def share(one: dict) -> str:
    """A factor's part of the gap in words."""
    return f"`{one['factor']}` {one['share']} ({one['of_gap']}; {tables.reading(one)})"


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


def marks(name: str) -> tuple[str, str]:
    """The lines before and after a block."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def split(text: str, readme: Path, name: str = HEADLINE) -> tuple[str, str, str]:
    """The text before a block, the block without its markers, the text after it."""
    begin, end = marks(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise StorageError(
            f"{readme} has no place for the {name}; put the lines {begin} and {end} where it belongs, once",
            code="storage.no-markers",
        )
    before, _, rest = text.partition(begin)
    found, _, after = rest.partition(end)
    return before, found, after
