"""`kvlab step VERB`: what the rules of the workflow call, and single jobs of it. Heavy imports are inside the verbs."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from kvlab.cli.flags import (
    CAPTURE,
    IF_CODED,
    METRICS,
    NEEDLES,
    OUT,
    SIGMA,
    WINDOWS,
    Flag,
    path,
    place,
    result,
    with_settings,
    word,
)
from kvlab.cli.given import fitted_of, params_of, tier
from kvlab.core.errors import UserError
from kvlab_pipeline.cli import fitting_steps as fitting
from kvlab_pipeline.cli import study_steps

# The steps of the ladder beside its cells. Heavy imports are inside the verbs.

COMPONENTS = path("--components", "what `kvlab step components` wrote")
ARCHIVE = path("--archive", "what `kvlab step archive` wrote; needed by archive", required=False, nargs="?")
DOCUMENTS = path("--documents", "what `kvlab step corpus` kept; without, the corpus is read again", required=False)


def ladder_verb(args: argparse.Namespace) -> None:
    """Weigh the calibrations of the ladder's rungs as files, and measure the model's coding gain."""
    from kvlab.calibration.load import Fitted
    from kvlab_pipeline.studies.ladder.facts import facts

    fitted = Fitted(args.sigma, None, args.components, None, args.archive)
    facts(params_of(args), args.windows, fitted, args.out)


def ladder_further_verb(args: argparse.Namespace) -> None:
    """Score codecs at longer contexts, and klt fitted on parts of the calibration."""
    from kvlab.calibration.load import Fitted
    from kvlab_pipeline.studies.ladder.further import further

    further(params_of(args), args.windows, args.documents, Fitted(args.sigma, None, args.components, None), args.out)


def verbs(sigma) -> dict:
    """Both verbs with their flags."""
    shared = [WINDOWS, sigma, COMPONENTS]
    return {ladder_verb: [*shared, ARCHIVE, OUT], ladder_further_verb: [DOCUMENTS, *shared, OUT]}


ABOUT = """\
The steps of the pipeline, as the rules of the workflow call them (`make findings` runs them all).

  corpus      text -> fixed token windows, calibration and test kept apart
  needles     facts planted in texts of their own, and questions that ask for them; beside it RULER's texts
  asked       which codecs of whole caches are asked for: what capture and archive do for them
  capture     pre-rotary Q, K, V of the calibration windows, from one engine
  sigma       Sigma_q and its Cholesky factor, per layer and KV head
  codebooks   Lloyd-Max tables on the variable that the quantiser really sees
  components  mean, covariance and KLT of K and V, per layer and KV head
  archive     the codec of whole caches, from a capture that looked at layers together
  baseline    codec off: an engine, dtype and attention against the fp32 truth
  choose      which layers to favour, from the calibration split alone
  jobs        jobs of any studies in one process, with one start of each engine
  measure     the cells of one study on one engine
  residual    the codec's own error on each engine's capture
  ladder      what the codecs' calibrations weigh as files, and how much a transform can gain on this model
  ladder_further  codecs at longer contexts, and klt fitted on parts of the calibration
  mechanisms  what the gate judges: each codec, and an engine's own cache dtypes, on text and on needles
  metrics     tables -> estimates with intervals; refuses what may not be compared
  compare     several models' estimates beside one another, with intervals of their differences
  verdict     estimates -> verdicts, and whether numbers may be published
  report      estimates and verdicts -> FINDINGS.md with its figures, and report.html
  rows        rows and evidence for `kvlab gate`, out of what mechanisms measured

The KV store's studies (docs/kvstore.md):

  restore     cold against warm: identity, time, bytes, and what each codec makes of a snapshot
  policy      which chunks a bounded pool should keep: needles found, attention mass kept
  tradeoffs   codecs beside evictions, latents, sparse reading and self-speculation
  bitplanes   how well a few bits of each key rank what attention looks at
  placement   whether it matters in which block a chunk lies
  page        the page of one of these five from the records of all models, with its figure if it has one
{more}
Exit codes: 0 done; 2 the input is wrong, one line says how to mend it; 1 the run is wrong.
"""


def corpus_verb(args: argparse.Namespace) -> None:
    """Cut the corpus into windows."""
    from kvlab.text.corpus import build

    build(params_of(args), args.out, args.documents)


def needles_verb(args: argparse.Namespace) -> None:
    """Plant the facts that retrieval is measured on, and make RULER's texts beside them."""
    from kvlab.text import needles, ruler

    params = params_of(args)
    needles.build(params, args.out, args.documents)
    ruler.build(params, args.out.with_name("ruler.parquet"))


def _by_origin(args: argparse.Namespace) -> dict:
    from kvlab.calibration.load import by_origin

    given = [getattr(args, name) or [] for name in ("sigma", "codebooks", "components", "rotated", "archive")]
    if any(given) and not given[0]:
        raise UserError("--codebooks, --components, --rotated and --archive belong to a Sigma_q; name it with --sigma")
    return by_origin(*given)


def baseline_verb(args: argparse.Namespace) -> None:
    """Measure one run of the engine baseline."""
    from kvlab_pipeline.studies.baseline.measure import baseline

    baseline(params_of(args), args.run, args.windows, fitted_of(args), args.out)


def choose_verb(args: argparse.Namespace) -> None:
    """Choose on the calibration split which layers the mitigations favour."""
    from kvlab_pipeline.studies.mitigations.search import choose

    choose(params_of(args), args.windows, _by_origin(args), args.out, args.store)


def measure_verb(args: argparse.Namespace) -> None:
    """Measure one job of cells."""
    from kvlab_pipeline.jobs.measure import measure

    choice = _choice(args)
    measure(params_of(args), args.study, args.job, args.windows, _by_origin(args), args.out, choice)


def jobs_verb(args: argparse.Namespace) -> None:
    """Measure jobs of several studies in one process, with one start of each engine."""
    from kvlab_pipeline.studies.measuring import measure_jobs

    measure_jobs(
        params_of(args),
        args.measure,
        args.windows,
        _by_origin(args),
        args.results,
        choice=_choice(args),
        needles_path=args.needles,
        code=args.code,
        folder=args.store,
    )


def mechanisms_verb(args: argparse.Namespace) -> None:
    """Measure what the gate judges: every codec, and every dtype of an engine's own cache, on one engine."""
    from kvlab_pipeline.studies.mechanisms.measure import mechanisms

    mechanisms(params_of(args), args.engine, args.windows, args.needles, _by_origin(args), args.code, args.out)


def _choice(args: argparse.Namespace):
    from kvlab_pipeline.studies.mitigations.plan import current, read_choice

    return current(params_of(args), read_choice(args.choice)) if args.choice else None


def residual_verb(args: argparse.Namespace) -> None:
    """Code one engine's own capture and keep the codec's error."""
    from kvlab_pipeline.studies.residual.measure import residual

    residual(params_of(args), args.capture, fitted_of(args), args.out)


def metrics_verb(args: argparse.Namespace) -> None:
    """Turn tables into estimates."""
    from kvlab.core.records import write_json
    from kvlab_pipeline.cli.contracts import hold
    from kvlab_pipeline.report.metrics import build
    from kvlab_pipeline.studies.chapter import Sources

    sources = Sources(
        args.baseline, args.jobs, args.codebooks, args.sigmas, args.residual, args.choice, args.ladder, args.further
    )
    made = build(params_of(args), sources)
    hold("metrics", made, args.out)
    write_json(args.out, made)


def compare_verb(args: argparse.Namespace) -> None:
    """Set models beside one another: what each pays, and what each further one pays beside the first."""
    from kvlab.core.records import write_json
    from kvlab_pipeline.report import comparison
    from kvlab_pipeline.report.seal import sealed
    from kvlab_pipeline.report.summary import summary

    found = comparison.read(args.metrics)
    compared = comparison.build(found)
    headlines = {metrics["identity"]["slug"]: summary(metrics) for metrics in found}
    comparison.write_table(args.out, compared)
    if args.json:
        write_json(args.json, sealed(compared))
    if args.summary:
        write_json(args.summary, headlines)


def verdict_verb(args: argparse.Namespace) -> None:
    """Judge the estimates."""
    from kvlab.core.records import write_json
    from kvlab_pipeline.report.schema import load
    from kvlab_pipeline.report.verdict import judge

    write_json(args.out, judge(params_of(args), load(args.metrics)))


def report_verb(args: argparse.Namespace) -> None:
    """Write FINDINGS.md and its figures, or the README's headline."""
    from kvlab.core.records import read_json
    from kvlab_pipeline.report import findings, readme
    from kvlab_pipeline.report.comparison import read_comparison
    from kvlab_pipeline.report.schema import load
    from kvlab_pipeline.report.verdict import refuse_other_verdict

    metrics, verdict = load(args.metrics), read_json(args.verdict)
    refuse_other_verdict(params_of(args), metrics, verdict)
    comparison = read_comparison(args.comparison) if args.comparison else None
    if args.readme:
        claims = read_json(args.claims) if args.claims else None
        readme.update(args.readme, metrics, verdict, None, comparison, claims, args.benchmarks)
    if args.out:
        findings.write(params_of(args), metrics, verdict, args.out, args.html, comparison, args.claims)


def rows_verb(args: argparse.Namespace) -> None:
    """Rows with their evidence out of what `kvlab step mechanisms` measured of one model, and what is current now.

    Every piece of evidence is made of the tables of scores, item by item. What could not be measured becomes a row
    that claims nothing and says why.
    """
    from kvlab_mechanisms.ledger.contract import ContractBroken
    from kvlab_pipeline.cli.contracts import hold
    from kvlab_pipeline.gate_page.measured_rows import write

    rows = write(args.records, args.windows, args.needles, args.code, args.claim, args.out, args.current)
    try:
        hold("rows", rows, args.out)
    except ContractBroken:
        args.out.unlink()
        raise
    print(f"{args.out}: {len(rows)} rows")


# --------------------------------------------------------------------------------------- flags

CODEBOOKS = path("--codebooks", "what `kvlab step codebooks` wrote")
PER_ORIGIN = [  # one of each for every engine whose capture calibrates a cell
    path(flag, text, required=False, nargs="+")
    for flag, text in (
        ("--sigma", "what `kvlab step sigma` wrote; needed by cells with a codec"),
        ("--codebooks", "what `kvlab step codebooks` wrote; needed by fitted tables"),
        ("--components", "what `kvlab step components` wrote; needed by klt, oscar and mean removal"),
        ("--rotated", "what `kvlab step sigma` wrote after the rotary embedding; needed by post_rope cells"),
        ("--archive", "what `kvlab step archive` wrote; needed by archive"),
    )
]
CHOICE = path("--choice", "what `kvlab step choose` wrote; needed by the mitigations", required=False)
STORE = result("--store", "folder of what was measured before; without one everything is measured", required=False)
STUDY_HELP = "a study of cells, as `kvlab params` lists them"

OF_PARAMS: dict[Callable, list[Flag]] = {
    corpus_verb: [
        result("--documents", "keep the documents of the test split here, for `kvlab step needles`", required=False),
        OUT,
    ],
    needles_verb: [
        path("--documents", "what `kvlab step corpus` kept; without, the corpus is read again", required=False),
        OUT,
    ],
    residual_verb: [CAPTURE, SIGMA, CODEBOOKS, OUT],
    baseline_verb: [
        word("--run", "a name that `kvlab params` lists under baseline", required=True),
        *(WINDOWS, *IF_CODED, OUT),
    ],
    choose_verb: [WINDOWS, *PER_ORIGIN, STORE, OUT],
    jobs_verb: [
        word("--measure", "STUDY/JOB of each; `kvlab params` lists them", required=True, nargs="+"),
        *(WINDOWS, *(path(flag, told["help"], required=False, nargs="*") for flag, told in PER_ORIGIN), STORE),
        path("--choice", "what `kvlab step choose` wrote; needed by the mitigations", required=False, nargs="?"),
        path("--needles", "needles.parquet of `kvlab step needles`; the mechanisms need it", required=False, nargs="?"),
        word("--code", "digest of the code that measures the mechanisms; evidence of other code is stale"),
        result("--results", "folder of results: each study writes STUDY/MODEL/JOB.parquet and .json there"),
    ],
    measure_verb: [
        word("--study", STUDY_HELP, required=True),
        word("--job", "a name that `kvlab params` lists under the study", required=True),
        CHOICE,
        *(WINDOWS, *PER_ORIGIN, OUT),
    ],
    mechanisms_verb: [
        word("--engine", "hf or vllm", required=True),
        *(WINDOWS, NEEDLES, *PER_ORIGIN),
        word("--code", "digest of the code that measures; evidence of other code is stale", required=True),
        OUT,
    ],
    **fitting.OF_PARAMS,
    **verbs(SIGMA),
    metrics_verb: [
        path("--baseline", "json records of the baseline runs", nargs="+"),
        path("--jobs", "json records of the jobs of cells", nargs="+"),
        path("--codebooks", "what `kvlab step codebooks` wrote", nargs="+"),
        path("--sigmas", "json sidecars of `kvlab step sigma`", nargs="+"),
        path("--residual", "json records of `kvlab step residual`", nargs="+"),
        path("--choice", "what `kvlab step choose` wrote; needed by the mitigations", required=False, nargs="?"),
        path("--ladder", "what `kvlab step ladder` wrote; needed by the ladder", required=False, nargs="?"),
        path("--further", "what `kvlab step ladder_further` wrote", required=False, nargs="?"),
        OUT,
    ],
    verdict_verb: [METRICS, OUT],
    report_verb: [
        METRICS,
        path("--verdict", "what `kvlab step verdict` wrote"),
        result("--out", "FINDINGS.md; figures go into figures/ beside it", required=False),
        result("--html", "the same as one page with interactive figures", required=False),
        path("--comparison", "json of `kvlab step compare`; needed by the pages of several models", required=False),
        path("--claims", "json of `kvlab gate report`: what may be claimed; its GATE.md is linked", required=False),
        path("--readme", "README whose blocks are brought up to date", required=False),
        path(
            "--benchmarks", "folder of Snakemake's benchmarks; the README's table of seconds is of them", required=False
        ),
    ],
    **study_steps.OF_PARAMS,
}
VERBS: dict[Callable, list[Flag]] = (
    with_settings(OF_PARAMS)
    | fitting.VERBS
    | study_steps.VERBS
    | {
        compare_verb: [
            path("--metrics", "what `kvlab step metrics` wrote for each model, the leading one first", nargs="+"),
            result("--out", "comparison.csv: a row per model and quantity"),
            result("--json", "the same for `kvlab step report`", required=False),
            result("--summary", "also write a dozen headline scalars of each model here", required=False),
        ],
        rows_verb: [
            place("records", "what `kvlab step mechanisms` wrote of one model, a file for each engine", nargs="+"),
            *(WINDOWS, NEEDLES),
            word("--code", "digest of the code that measures now", required=True),
            word("--claim", "tier that every measured row claims", required=True, type=tier),
            result("--out", "the rows"),
            result("--current", "what their evidence must have been measured on"),
        ],
    }
)
