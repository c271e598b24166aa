"""`kvlab step VERB`: what the rules of the workflow call, and single jobs of it. Heavy imports are inside the verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from kvlab.cli.commands import FromFlags, Verbs
from kvlab.cli.flags import (
    FITTED,
    CaptureFile,
    CodebooksFile,
    ComponentsFile,
    MetricsFile,
    NeedlesFile,
    Out,
    SigmaFile,
    WindowsFile,
    choice,
    path,
    place,
    result,
    several,
    word,
)
from kvlab.cli.given import OfFitted, OfParams, fitted_of, tier
from kvlab.core.errors import UserError

STEPS = Verbs(
    "The steps of the pipeline, as the workflow's rules call them; all: `make findings`.",
    ends="""
Exit codes: 0 done; 2 the input is wrong, one line says how to mend it; 1 the run is wrong.""",
)
STUDIES = ("restore", "policy", "tradeoffs", "bitplanes", "placement")

Texts = Annotated[Path | None, path("what `kvlab step texts` wrote; without, the corpus is read again")]
Engine = Annotated[str, word("hf or vllm")]
ASKED = "what `kvlab step asked` wrote"
ArchiveFile = Annotated[Path | None, path(FITTED["archive"], metavar="[FILE]")]
Code = Annotated[str, word("digest of the code that measures; evidence of other code is stale")]
CHOICE = "what `kvlab step choose` wrote; needed by the mitigations"
Choice = Annotated[Path | None, path(CHOICE)]
ChoiceIfAny = Annotated[Path | None, path(CHOICE, metavar="[FILE]")]
Store = Annotated[Path | None, result("folder of what was measured before; without one everything is measured")]
IfCoded = Annotated[Any, FromFlags(fitted_of)]


def _with_archive(sigma: SigmaFile, components: ComponentsFile, archive: ArchiveFile = None):
    """The calibration of every codec that has a file."""
    from kvlab.calibration.load import FittedFiles

    return FittedFiles(sigma, components=components, archive=archive)


WithArchive = Annotated[Any, FromFlags(_with_archive)]


def _by_origin(**given: list[Path]) -> dict:
    """The calibrations of several engines' captures, by engine."""
    from kvlab.calibration.load import by_origin

    if any(given.values()) and not given["sigma"]:
        raise UserError("--codebooks, --components, --rotated and --archive belong to a Sigma_q; name it with --sigma")
    return by_origin(*given.values())


# one of each fitted file for every engine whose capture calibrates a cell
ByOrigin = Annotated[dict, FromFlags(_by_origin, lambda: several(FITTED))]
ByOriginIfAny = Annotated[dict, FromFlags(_by_origin, lambda: several(FITTED, "[FILE ...]"))]


def _choice(params, file: Path | None):
    from kvlab_pipeline.studies.mitigations.plan import current, read_choice

    return current(params, read_choice(file)) if file else None


@STEPS.runs("kvlab.text.corpus:write_texts")
def texts_verb(params: OfParams, out: Out) -> None:
    """Read the documents of the corpus, for whatever model."""


@STEPS.runs("kvlab.text.corpus:build")
def corpus_verb(params: OfParams, out: Out, texts: Texts = None) -> None:
    """Cut the corpus into fixed token windows, calibration and test kept apart."""


@STEPS.verb
def needles_verb(params: OfParams, out: Out, texts: Texts = None) -> None:
    """Plant facts in texts of their own, and questions that ask for them; beside it RULER's texts."""
    from kvlab.text import needles, ruler

    needles.build(params, out, texts)
    ruler.build(params, out.with_name("ruler.parquet"))


@STEPS.runs("kvlab.calibration.asked:write_asked")
def asked_verb(
    *,
    codecs: Annotated[list[str], word("their names; none: nothing is asked for", metavar="[CODEC ...]")] = (),
    out: Out,
) -> None:
    """Say which codecs of whole caches are asked for: what capture and archive do for them."""


@STEPS.runs("kvlab.calibration.capture:capture")
def capture_verb(
    params: OfParams,
    engine: Engine,
    windows: WindowsFile,
    out: Out,
    asked_for: Annotated[Path | None, path(f"{ASKED}; without, no codec of whole caches is")] = None,
) -> None:
    """Capture pre-rotary Q, K and V of the calibration windows, from one engine."""


@STEPS.runs("kvlab.calibration.sigma:fit_sigma")
def sigma_verb(params: OfParams, capture: CaptureFile, out: Out) -> None:
    """Fit Sigma_q and its Cholesky factor, per layer and KV head."""


@STEPS.runs("kvlab_pipeline.jobs.codebooks:fit_codebooks")
def codebooks_verb(
    params: OfParams,
    capture: CaptureFile,
    sigma: SigmaFile,
    *,
    rotated: Annotated[Path | None, path("the Sigma_q after the rotary embedding; needed by post_rope cells")] = None,
    out: Out,
) -> None:
    """Fit the Lloyd-Max tables on the variable that the quantiser really sees."""


@STEPS.runs("kvlab.calibration.components:fit_components")
def components_verb(params: OfParams, capture: CaptureFile, sigma: SigmaFile, out: Out) -> None:
    """Fit mean, covariance and KLT of K and V, per layer and KV head."""


@STEPS.runs("kvlab.calibration.archive_file:write_archive")
def archive_verb(
    params: OfParams, asked_for: Annotated[Path, path(ASKED)], capture: CaptureFile, sigma: SigmaFile, out: Out
) -> None:
    """Fit the codec of whole caches, from a capture that looked at layers together."""


@STEPS.runs("kvlab_pipeline.studies.baseline.measure:baseline")
def baseline_verb(
    params: OfParams,
    run: Annotated[str, word("a name that `kvlab params` lists under baseline")],
    windows: WindowsFile,
    fitted: IfCoded,
    out: Out,
) -> None:
    """Measure one run with the codec off: an engine, dtype and attention against the fp32 truth."""


@STEPS.runs("kvlab_pipeline.studies.mitigations.search:choose")
def choose_verb(params: OfParams, windows: WindowsFile, fitted: ByOrigin, out: Out, store: Store = None) -> None:
    """Choose on the calibration split alone which layers the mitigations favour."""


@STEPS.verb
def jobs_verb(
    params: OfParams,
    measure: Annotated[list[str], word("STUDY/JOB of each; `kvlab params` lists them", metavar="STUDY/JOB ...")],
    windows: WindowsFile,
    fitted: ByOriginIfAny,
    results: Annotated[Path, result("folder of results: each study writes STUDY/MODEL/JOB.parquet and .json there")],
    store: Store = None,
    choice: ChoiceIfAny = None,
    needles: Annotated[
        Path | None, path("needles.parquet of `kvlab step needles`; the mechanisms need it", metavar="[FILE]")
    ] = None,
    code: Annotated[
        str | None, word("digest of the code that measures the mechanisms; evidence of other code is stale")
    ] = None,
) -> None:
    """Measure jobs of any studies in one process, with one start of each engine."""
    from kvlab_pipeline.studies.measuring import measure_jobs

    chosen = _choice(params, choice)
    measure_jobs(
        params, measure, windows, fitted, results, choice=chosen, needles_path=needles, code=code, folder=store
    )


@STEPS.verb
def measure_verb(
    params: OfParams,
    study: Annotated[str, word("a study of cells, as `kvlab params` lists them")],
    job: Annotated[str, word("a name that `kvlab params` lists under the study")],
    windows: WindowsFile,
    fitted: ByOrigin,
    out: Out,
    choice: Choice = None,
) -> None:
    """Measure one job: the cells of one study on one engine."""
    from kvlab_pipeline.jobs.measure import measure

    measure(params, study, job, windows, fitted, out, _choice(params, choice))


@STEPS.verb
def residual_verb(params: OfParams, capture: CaptureFile, sigma: SigmaFile, codebooks: CodebooksFile, out: Out) -> None:
    """Code one engine's own capture and keep the codec's error."""
    from kvlab_pipeline.studies.residual.measure import residual

    residual(params, capture, fitted_of(sigma, codebooks), out)


@STEPS.runs("kvlab_pipeline.studies.ladder.facts:facts")
def ladder_verb(params: OfParams, windows: WindowsFile, fitted: WithArchive, out: Out) -> None:
    """Weigh the codecs' calibrations as files, and measure how much a transform can gain on this model."""


@STEPS.runs("kvlab_pipeline.studies.ladder.further:further")
def ladder_further_verb(
    params: OfParams, windows: WindowsFile, *, texts: Texts = None, fitted: OfFitted, out: Out
) -> None:
    """Score codecs at longer contexts, and klt fitted on parts of the calibration."""


@STEPS.runs("kvlab_pipeline.studies.mechanisms.measure:mechanisms")
def mechanisms_verb(
    params: OfParams, engine: Engine, windows: WindowsFile, needles: NeedlesFile, fitted: ByOrigin, code: Code, out: Out
) -> None:
    """Measure what the gate judges: each codec, and an engine's own cache dtypes, on text and on needles."""


@STEPS.verb
def metrics_verb(
    params: OfParams,
    baseline: Annotated[list[Path], path("json records of the baseline runs", metavar="FILE ...")],
    jobs: Annotated[list[Path], path("json records of the jobs of cells", metavar="FILE ...")],
    codebooks: Annotated[list[Path], path("what `kvlab step codebooks` wrote", metavar="FILE ...")],
    sigmas: Annotated[list[Path], path("json sidecars of `kvlab step sigma`", metavar="FILE ...")],
    out: Out,
    residual: Annotated[list[Path], path("json records of `kvlab step residual`", metavar="[FILE ...]")] = (),
    choice: ChoiceIfAny = None,
    ladder: Annotated[
        Path | None, path("what `kvlab step ladder` wrote; needed by the ladder", metavar="[FILE]")
    ] = None,
    further: Annotated[Path | None, path("what `kvlab step ladder_further` wrote", metavar="[FILE]")] = None,
) -> None:
    """Turn tables into estimates with intervals; what may not be compared is refused."""
    from kvlab.core.records import write_json
    from kvlab_pipeline.cli.contracts import hold
    from kvlab_pipeline.report.metrics import build
    from kvlab_pipeline.report.schema import filed
    from kvlab_pipeline.studies.chapter import Sources

    made = filed(build(params, Sources(baseline, jobs, codebooks, sigmas, residual, choice, ladder, further)))
    hold("metrics", made, out)
    write_json(out, made)


@STEPS.verb
def compare_verb(
    metrics: Annotated[
        list[Path], path("what `kvlab step metrics` wrote for each model, the leading one first", metavar="FILE ...")
    ],
    out: Annotated[Path, result("comparison.csv: a row per model and quantity")],
    json: Annotated[Path | None, result("the same for `kvlab step report`")] = None,
    heads: Annotated[Path | None, result("also write a dozen headline scalars of each model here", "--summary")] = None,
) -> None:
    """Set models' estimates beside one another, with intervals of their differences."""
    from kvlab.core.records import write_json
    from kvlab_pipeline.report import comparison
    from kvlab_pipeline.report.digest import with_digest
    from kvlab_pipeline.report.summary import summary

    found = comparison.read(metrics)
    compared = comparison.build(found)
    headlines = {one["identity"]["slug"]: summary(one) for one in found}
    comparison.write_table(out, compared)
    if json:
        write_json(json, with_digest(compared))
    if heads:
        write_json(heads, headlines)


@STEPS.verb
def verdict_verb(params: OfParams, metrics: MetricsFile, out: Out) -> None:
    """Judge the estimates, and whether numbers may be published."""
    from kvlab.core.records import write_json
    from kvlab_pipeline.report.schema import load
    from kvlab_pipeline.report.verdict import judge

    write_json(out, judge(params, load(metrics)))


@STEPS.verb
def report_verb(
    params: OfParams,
    metrics: MetricsFile,
    verdict: Annotated[Path, path("what `kvlab step verdict` wrote")],
    out: Annotated[Path | None, result("FINDINGS.md; figures go into figures/ beside it")] = None,
    html: Annotated[Path | None, result("the same as one page with interactive figures")] = None,
    comparison: Annotated[
        Path | None, path("json of `kvlab step compare`; needed by the pages of several models")
    ] = None,
    claims: Annotated[
        Path | None, path("json of `kvlab gate report`: what may be claimed; its GATE.md is linked")
    ] = None,
    readme: Annotated[Path | None, path("README whose blocks, and those of docs, are brought up to date")] = None,
    benchmarks: Annotated[
        Path | None, path("folder of Snakemake's benchmarks, for the table of seconds in docs/studies.md")
    ] = None,
) -> None:
    """Write FINDINGS.md with its figures, and report.html; or the blocks of README and docs."""
    from kvlab.core.records import read_json
    from kvlab_pipeline.report import findings
    from kvlab_pipeline.report import readme as headline
    from kvlab_pipeline.report.comparison import read_comparison
    from kvlab_pipeline.report.schema import load
    from kvlab_pipeline.report.verdict import refuse_other_verdict

    estimates, judged = load(metrics), read_json(verdict)
    refuse_other_verdict(params, estimates, judged)
    compared = read_comparison(comparison) if comparison else None
    if readme:
        claimed = read_json(claims) if claims else None
        headline.update(readme, estimates, judged, None, compared, claimed, benchmarks)
    if out:
        findings.write(params, estimates, judged, out, html, compared, claims)


@STEPS.verb
def rows_verb(
    records: Annotated[list[Path], place("what `kvlab step mechanisms` wrote of one model, a file for each engine")],
    windows: WindowsFile,
    needles: NeedlesFile,
    code: Annotated[str, word("digest of the code that measures now")],
    claim: Annotated[str, word("tier that every measured row claims", read=tier)],
    out: Annotated[Path, result("the rows")],
    current: Annotated[Path, result("what their evidence must have been measured on")],
) -> None:
    """Make rows and evidence for `kvlab gate`, out of what mechanisms measured of one model.

    Every piece of evidence is made of the tables of scores, item by item. What could not be measured becomes a row
    that claims nothing and says why.
    """
    from kvlab_mechanisms.ledger.contract import ContractBroken
    from kvlab_pipeline.cli.contracts import hold
    from kvlab_pipeline.gate_page.measured_rows import write

    rows = write(records, windows, needles, code, claim, out, current)
    try:
        hold("rows", rows, out)
    except ContractBroken:
        out.unlink()
        raise
    print(f"{out}: {len(rows)} rows")


# The KV store's studies (docs/snapshots.md), each of which stands on a page of its own.


@STEPS.verb
def restore_verb(params: OfParams, windows: WindowsFile, fitted: WithArchive, out: Out) -> None:
    """Measure whether a restored context says the same to the bit, and what restoring it saves."""
    from kvlab_pipeline.studies.restore.measure import measure
    from kvlab_pipeline.studies.restore.record import RestoreSettings

    measure(params, RestoreSettings.of(params), windows, fitted, out)


@STEPS.runs("kvlab_pipeline.studies.policy.measure:measure")
def policy_verb(params: OfParams, needles: NeedlesFile, out: Out) -> None:
    """Measure how many needles are found, and how much attention mass is kept, in a pool that holds a part of them."""


@STEPS.runs("kvlab_pipeline.studies.tradeoffs.measure:measure")
def tradeoffs_verb(
    params: OfParams,
    windows: WindowsFile,
    texts: Annotated[Path, path("what `kvlab step texts` wrote")],
    fitted: OfFitted,
    out: Out,
) -> None:
    """Measure what codecs, evictions, latents, sparse reading and self-speculation cost and buy at equal bytes."""


@STEPS.runs("kvlab_pipeline.studies.bitplanes.measure:measure")
def bitplanes_verb(params: OfParams, windows: WindowsFile, out: Out) -> None:
    """Measure how well a few bits of each key rank what attention looks at."""


@STEPS.runs("kvlab_pipeline.studies.placement.measure:measure")
def placement_verb(params: OfParams, windows: WindowsFile, out: Out) -> None:
    """Measure what it changes when the blocks of the pool lie in another order."""


@STEPS.runs("kvlab_pipeline.studies.page:write")
def page_verb(
    study: Annotated[str, choice("whose records they are", STUDIES)],
    records: Annotated[list[Path], place("of the same study, one for each model")],
    out: Annotated[Path, result("the page, Markdown")],
) -> None:
    """Write the page of one of these five from the records of all models, with its figure if it has one."""
