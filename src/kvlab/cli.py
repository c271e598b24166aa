"""The command line: one verb per step of the pipeline, its flags, and how it ends. What it does is in `verbs`."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from kvlab import lifeline
from kvlab.errors import KvlabError, nearest, suggestion
from kvlab.flags import MODEL, PARAMS, Flag, path, word
from kvlab.verbs import evals, gate, kvstore, pipeline, snapshot

OVERVIEW = """\
kvlab measures what compressing an LLM's KV cache costs, on which engine, and why.

The pipeline, in order (snakemake runs it: `snakemake results/gap/FINDINGS.md`):

  corpus      text -> fixed token windows, calibration and test kept apart
  needles     facts planted in texts of their own, and questions that ask for them
  capture     pre-rotary Q, K, V of the calibration windows, from one engine
  sigma       Sigma_q and its Cholesky factor, per layer and KV head
  codebooks   Lloyd-Max tables on the variable that the quantiser really sees
  components  mean, covariance and KLT of K and V, per layer and KV head
  baseline    codec off: an engine, dtype and attention against the fp32 truth
  choose      which layers to favour, from the calibration split alone
  measure     a batch of cells of one study on one engine
  residual    the codec's own error on each engine's capture
  mechanisms  what the gate judges: each codec, and an engine's own cache dtypes, on text and on needles
  metrics     tables -> estimates with intervals; refuses what may not be compared
  compare     several models' estimates beside one another, with intervals of their differences
  verdict     estimates -> verdicts, and whether numbers may be published
  report      estimates and verdicts -> FINDINGS.md with its figures, and report.html

Beside it:

  params      check params.yaml and print it resolved, with the recipe ids
  recipe      write the file that encode, decode and the drop-ins read
  encode      the cache of a captured window as a coded stream
  inspect     check a coded stream and say what is in it
  decode      a coded stream as safetensors
  bench       every codec's speed, size, error and KL -> BENCH.md
  planted     values that are known, and whether the pipeline finds them -> REPORT.md
  published   a published study's result files, analysed again -> REPORT.md
  reference   train the embedded reference model again
  eval        a task of lm-evaluation-harness, plain and coded -> evidence for the gate
  gate        which rows may claim what: `kvlab gate rows` and `report` in the pipeline, check, query and more
  snapshot    the KV cache of a context as a file: save, inspect, verify, restore, diff
  kvstore     studies of the paged cache and its snapshots: restore, policy, bitplanes, placement

Every verb but gate and snapshot reads `--params`: params.yaml, or a JSON object of just the top-level keys it may use.
Exit codes: 0 done; 2 the input is wrong, one line says how to mend it; 1 the run is wrong, or the gate fails.
"""

EXAMPLES = """\
examples:
  kvlab params                              check params.yaml, print the recipe ids
  kvlab params --preset quick --yaml        a small run's parameters
  snakemake results/gap/FINDINGS.md         everything, in order, nothing twice
"""


OUT = path("--out", "what is written (with companions of the same stem beside it)")
WINDOWS = path("--windows", "windows.safetensors of `kvlab corpus`")
NEEDLES = path("--needles", "needles.parquet of `kvlab needles`")
CAPTURE = path("--capture", "what `kvlab capture` wrote")
SIGMA = path("--sigma", "what `kvlab sigma` wrote")
CODEBOOKS = path("--codebooks", "what `kvlab codebooks` wrote")
RECIPE = path("--recipe", "what `kvlab recipe` wrote")
STREAM = path("--stream", "what `kvlab encode` wrote")
METRICS = path("--metrics", "what `kvlab metrics` wrote")
IF_CODED = [  # a run without a codec does without them
    path("--sigma", "what `kvlab sigma` wrote; needed by cells with a codec", required=False),
    path("--codebooks", "what `kvlab codebooks` wrote; needed by fitted tables", required=False),
    path("--components", "what `kvlab components` wrote; needed by klt, oscar and mean removal", required=False),
]
PER_ORIGIN = [  # one of each for every engine whose capture calibrates a cell
    path(flag, text, required=False, nargs="+")
    for flag, text in (
        ("--sigma", "what `kvlab sigma` wrote; needed by cells with a codec"),
        ("--codebooks", "what `kvlab codebooks` wrote for the study; needed by fitted tables"),
        ("--components", "what `kvlab components` wrote; needed by klt, oscar and mean removal"),
        ("--rotated", "what `kvlab sigma` wrote behind the rotary embedding; needed by post_rope cells"),
    )
]
CHOICE = path("--choice", "what `kvlab choose` wrote; needed by the mitigations", required=False)
STUDY_HELP = "factors, cells, layers, noise, mitigations or ladder"

VERBS: dict[Callable, list[Flag]] = {
    pipeline.params_verb: [
        word("--preset", "overlay workflow/presets/NAME.yaml", metavar="NAME"),
        word("--set", "change one leaf; may be repeated", metavar="KEY=VALUE", action="append"),
        word("--yaml", "nothing but YAML", action="store_true"),
        word("--json", "canonical JSON", action="store_true"),
    ],
    pipeline.reference_verb: [
        path("--out", "model folder, replaced when the run ends", default=Path("models/reference"), required=False),
        word("--tokens", "training tokens of text; default: 9 000 000", type=int, default=9_000_000),
        word("--max-minutes", "finish the schedule within this time", type=float),
        word("--resume", "continue a run that was killed", action="store_true"),
        word("--go-on", "take the model at --out as it is, and train it on copying alone", action="store_true"),
    ],
    pipeline.corpus_verb: [OUT],
    pipeline.needles_verb: [OUT],
    pipeline.capture_verb: [word("--engine", "hf or vllm", required=True), WINDOWS, OUT],
    pipeline.sigma_verb: [CAPTURE, OUT],
    pipeline.codebooks_verb: [
        word("--study", STUDY_HELP, required=True),
        *(CAPTURE, SIGMA),
        path("--rotated", "the Sigma_q behind the rotary embedding; needed by post_rope cells", required=False),
        OUT,
    ],
    pipeline.components_verb: [CAPTURE, SIGMA, OUT],
    pipeline.residual_verb: [CAPTURE, SIGMA, CODEBOOKS, OUT],
    pipeline.published_verb: [
        ("folder", {"type": Path, "metavar": "DIR", "help": "published result files, subfolders included"}),
        path("--metrics", "what `kvlab metrics` wrote: this project's own answer beside theirs", required=False),
        path("--out", "folder of REPORT.md and its tables"),
    ],
    pipeline.planted_verb: [WINDOWS, path("--out", "folder of REPORT.md and planted.json")],
    pipeline.baseline_verb: [
        word("--run", "a name that `kvlab params` lists under baseline", required=True),
        *(WINDOWS, *IF_CODED, OUT),
    ],
    pipeline.choose_verb: [WINDOWS, *PER_ORIGIN, OUT],
    pipeline.measure_verb: [
        word("--study", STUDY_HELP, required=True),
        word("--job", "a name that `kvlab params` lists under the study", required=True),
        CHOICE,
        *(WINDOWS, *PER_ORIGIN, OUT),
    ],
    pipeline.mechanisms_verb: [
        word("--engine", "hf or vllm", required=True),
        *(WINDOWS, NEEDLES, *PER_ORIGIN),
        word("--code", "digest of the code that measures; evidence of other code is stale", required=True),
        OUT,
    ],
    pipeline.metrics_verb: [
        path("--baseline", "json records of the baseline runs", nargs="+"),
        path("--jobs", "json records of the jobs of cells", nargs="+"),
        path("--codebooks", "what `kvlab codebooks` wrote", nargs="+"),
        path("--sigmas", "json sidecars of `kvlab sigma`", nargs="+"),
        path("--residual", "json records of `kvlab residual`", nargs="+"),
        path("--choice", "what `kvlab choose` wrote"),
        OUT,
    ],
    pipeline.compare_verb: [
        path("--metrics", "what `kvlab metrics` wrote for each model, the leading one first", nargs="+"),
        path("--out", "comparison.csv: a row per model and quantity"),
        path("--json", "the same for `kvlab report`", required=False),
        path("--summary", "also write a dozen headline scalars of each model here", required=False),
    ],
    pipeline.verdict_verb: [METRICS, OUT],
    pipeline.recipe_verb: [
        word("--codec", "a rung of the ladder, as `hadamard+center`, or `studied`; default: klt"),
        *IF_CODED,
        OUT,
    ],
    pipeline.encode_verb: [
        RECIPE,
        CAPTURE,
        word("--window", "number of the captured window", type=int, default=0),
        OUT,
    ],
    pipeline.decode_verb: [RECIPE, STREAM, OUT],
    pipeline.inspect_verb: [STREAM],
    pipeline.bench_verb: [
        path("--capture", "what `kvlab capture` wrote: K and V of the model are coded", required=False),
        path("--windows", "windows.safetensors of `kvlab corpus`: for the KL of other libraries", required=False),
        path("--ladder", "folder of the ladder study: for the KL of the codecs", required=False),
        path("--sigma", "a Sigma_q file: metric of the planted streams", required=False),
        path("--tensors", "folder of K_*.npy and V_*.npy: coded beside published numbers", required=False),
        word("--rounds", "repetitions of every timing", type=int, default=7),
        path("--out", "folder of BENCH.md, bench.json and figures/"),
    ],
    evals.eval_verb: evals.FLAGS,
    pipeline.report_verb: [
        METRICS,
        path("--verdict", "what `kvlab verdict` wrote"),
        path("--out", "FINDINGS.md; figures go into figures/ beside it", required=False),
        path("--html", "the same as one page with interactive figures", required=False),
        path("--comparison", "json of `kvlab compare`; needed by the pages of several models", required=False),
        path("--claims", "json of `kvlab gate report`: what may be claimed; its GATE.md is linked", required=False),
        path("--readme", "README whose headline block is brought up to date", required=False),
    ],
}
GROUPS = {
    "gate": (gate.ABOUT, gate.VERBS),
    "snapshot": (snapshot.ABOUT, snapshot.VERBS),
    "kvstore": (kvstore.ABOUT, kvstore.VERBS),
}


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = _Parser("kvlab", description=OVERVIEW, epilog=EXAMPLES)
    listed = _verbs(root)
    for function, flags in VERBS.items():
        _add(listed, function, [PARAMS, MODEL, *flags])
    for name, (about, grouped) in GROUPS.items():
        group = _verbs(listed.add_parser(name, description=about))
        for function, flags in grouped.items():
            _add(group, function, flags)
    return root


def _verbs(parent: argparse.ArgumentParser):
    return parent.add_subparsers(metavar="VERB", required=True, parser_class=_Parser)


def _add(listed, function: Callable, flags: Iterable[Flag]) -> None:
    verb = listed.add_parser(function.__name__.removesuffix("_verb"), description=inspect.getdoc(function))
    verb.set_defaults(step=function, asked=verb.prog)
    for flag in flags:
        if callable(flag):
            flag(verb)
        else:
            verb.add_argument(flag[0], **flag[1])


class _Parser(argparse.ArgumentParser):
    """Argparse that answers in one line and names the nearest verb or flag."""

    def __init__(self, *names, **options):
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(*names, formatter_class=layout, allow_abbrev=False, **options)

    def parse_known_args(self, args=None, namespace=None):
        """Refuse what is left over here, where the flags are known that it may have been meant for."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"{rest[0]!r} is not known{suggestion(rest[0], self._option_string_actions)}")
        return found, rest

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Refuse a word that is no choice, and say which it may have been meant for."""
        if action.choices is None or value in action.choices:
            return
        near, allowed = nearest(str(value), action.choices), ", ".join(map(str, action.choices))
        hint = f"did you mean {near!r}?" if near else f"allowed: {allowed}"
        if isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(None, f"verb {value!r} is not known; {hint}")
        raise argparse.ArgumentError(action, f"{value!r} is not known; {hint}")

    def error(self, message: str) -> None:
        """Leave with exit code 2 and one line."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)\n")


def main(arguments: list[str] | None = None) -> None:
    """Run one verb; errors become one line on stderr and an exit code."""
    args = parser().parse_args(arguments)
    try:
        lifeline.follow_run()
        if code := args.step(args):
            sys.exit(code)
    except KvlabError as error:
        _fail(f"{args.asked}: {error}", error.exit_code)
    except BrokenPipeError:  # `kvlab params | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        from kvlab.records import storage_error

        where = error.filename or getattr(args, "out", None) or "."
        _fail(f"{args.asked}: {storage_error(Path(where), error)}", 2)


def _fail(message: str, code: int) -> None:
    print(" ".join(message.split()), file=sys.stderr)
    sys.exit(code)
