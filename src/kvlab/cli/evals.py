"""What `kvlab eval` does, and its flags. Heavy imports happen inside."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

from kvlab.cli.flags import ENGINES, WROTE, choice, number, path, recipe, result, switch, word
from kvlab.cli.given import DEFAULT_PARAMS, AnyModel, IfListed, bits_of, folder_of, params_of
from kvlab.cli.packages import reader_of_params
from kvlab.codecs.recipes import named_recipe
from kvlab.core.errors import MissingResult, ParamsError, UnknownName, UserError
from kvlab.core.paramfile import read_yaml
from kvlab.core.params import Model, Params
from kvlab.core.recipe import Recipe


def eval_verb(
    task: Annotated[str, word("id of a registered eval of lm-evaluation-harness (`kvlab gate registry`)")],
    engine: Annotated[str, choice("hf or vllm", ENGINES)],
    out: Annotated[Path, result("folder of evidence.json, row.json and the harness's results", metavar="DIR")],
    model: AnyModel = None,
    params: IfListed = DEFAULT_PARAMS,
    dtype: Annotated[
        str, choice("what the engine computes in; default: bfloat16", ("bfloat16", "float32"))
    ] = "bfloat16",
    recipe: Annotated[Path | None, recipe(WROTE)] = None,
    codec: Annotated[str | None, word("instead: a rung of the ladder, as `hadamard+center`, or `studied`")] = None,
    bits: Annotated[int | None, number("bits of --codec, of K and V; default: those of params.yaml, else 4")] = None,
    v_bits: Annotated[int | None, number("bits of V, if others")] = None,
    sigma: Annotated[Path | None, path("for --codec: what `kvlab step sigma` wrote")] = None,
    codebooks: Annotated[Path | None, path("for --codec: what `kvlab step codebooks` wrote")] = None,
    components: Annotated[Path | None, path("for --codec: what `kvlab step components` wrote")] = None,
    cache_dtype: Annotated[str | None, word("instead: what vLLM's own cache stores, as fp8_e4m3")] = None,
    context_tokens: Annotated[
        int | None, number("most tokens of an item with its answer; the length of RULER's texts")
    ] = None,
    limit: Annotated[int | None, number("items of each task; default: all")] = None,
    include_path: Annotated[Path | None, path("folder of further tasks in YAML", metavar="DIR")] = None,
    apply_chat_template: Annotated[
        bool, switch("put prompts into the model's chat template", "--apply-chat-template")
    ] = False,
    confirm_run_unsafe_code: Annotated[
        bool, switch("let a task run what the model wrote", "--confirm-run-unsafe-code")
    ] = False,
    claim: Annotated[str, word("tier that the row claims; default: supported")] = "supported",
    mechanisms: Annotated[Path | None, path("registry of mechanisms; default: the gate's own")] = None,
    evals: Annotated[Path | None, path("registry of evals; default: the gate's own")] = None,
) -> None:
    """Run a task of lm-evaluation-harness, plain and coded: evidence for the gate.

    Both sides answer the same items in one process. What is done to the cache is a recipe (--recipe, or --codec with
    --bits), or a dtype of vLLM's own cache (--cache-dtype). The folder --out gets evidence.json and row.json, for
    `kvlab gate check`, and the harness's own result of each side. See docs/eval.md.
    """
    args = SimpleNamespace(**locals())  # what was asked for, for the functions below

    from kvlab.core.engines import AUTO
    from kvlab.engines.capability import check_cache_dtype
    from kvlab.evals.tasks import harness_eval
    from kvlab.gate import registry

    if find_spec("lm_eval") is None:
        raise MissingResult("kvlab eval needs lm-evaluation-harness; install it: pip install lm-eval==0.4.13")
    for flag in ("limit", "context_tokens"):
        if (given := getattr(args, flag)) is not None and given < 2:
            raise ParamsError(f"--{flag.replace('_', '-')} is {given}; allowed: 2 and more")
    refuse_unlisted_claim(args.claim)
    model, params = _subject(args)
    known = registry.load(args.mechanisms, args.evals)
    harness_eval(known, args.task)
    refuse_two_things(args)
    check_cache_dtype(args.engine, args.cache_dtype or AUTO)
    recipe = _recipe(args, params)

    from kvlab.core.model import resolve
    from kvlab.core.origin import told_of
    from kvlab.evals.run import EvalRequest, run_eval

    asked = EvalRequest(
        quality_eval_id=args.task,
        engine=args.engine,
        dtype=args.dtype,
        recipe=recipe,
        cache_dtype=args.cache_dtype or AUTO,
        context_tokens=args.context_tokens,
        limit=args.limit,
        include=args.include_path,
        unsafe=args.confirm_run_unsafe_code,
        chat=args.apply_chat_template,
        claim=args.claim,
    )
    threads = params.jobs.threads if params else len(os.sched_getaffinity(0))
    info = resolve(model)
    outcome = run_eval(asked, info, known, args.out, threads)
    print("\n".join(filter(None, [told_of(info.path), *_lines(outcome, args.out)])))


def refuse_unlisted_claim(claim: str) -> None:
    """`UnknownName` for a tier that the gate does not know."""
    from kvlab.gate.catalogue import TIERS

    if claim not in TIERS:
        raise UnknownName("tier", claim, TIERS)


def _subject(args: SimpleNamespace) -> tuple[Model, Params | None]:
    """The model, and the parameters of its runs: one of params.yaml, or a folder, which needs no params.yaml."""
    model, bits = folder_of(args.model, args.params), (args.bits, args.v_bits)
    if model is None:
        params = params_of(args.params, args.model)
        return params.model, bits_of(params, *bits)
    params = _of_any_model(args.params)
    return model, params and bits_of(params.model_copy(update={"model": model}), *bits)


def _of_any_model(text_or_path: str) -> Params | None:
    """Parameters whose model does not matter; None where nobody named any and the folder has no params.yaml."""
    if text_or_path.strip().startswith("{"):
        return reader_of_params().read_params(text_or_path)
    if text_or_path == DEFAULT_PARAMS and not Path(text_or_path).exists():
        return None
    return next(iter(reader_of_params().by_model(read_yaml(Path(text_or_path))).values()))


def refuse_two_things(args: SimpleNamespace) -> None:
    """`UserError` unless one thing is to be done to the cache, and every flag belongs to it."""
    named = [flag for flag in ("recipe", "codec", "cache_dtype") if getattr(args, flag)]
    if len(named) != 1:
        shown = " and ".join(f"--{flag.replace('_', '-')}" for flag in named) or "none of them"
        raise UserError(f"name one thing to be done to the cache: --recipe, --codec or --cache-dtype; given: {shown}")
    for flag in ("bits", "sigma", "codebooks", "components"):
        if args.codec is None and getattr(args, flag):
            raise UserError(f"--{flag} belongs to --codec; leave it out beside --{named[0].replace('_', '-')}")


def _recipe(args: SimpleNamespace, params: Params | None) -> Path | None:
    """The recipe file that is run: as named, or written into --out from the flags; None for a cache dtype."""
    if args.codec is None:
        return args.recipe
    coded = _coded(args, params)  # first: a name that is none is refused before torch is loaded

    from kvlab.cache.files.recipe import CalibrationFiles, write_recipe_file

    files = None
    if args.sigma:
        files = CalibrationFiles(sigma=args.sigma, codebooks=args.codebooks, components=args.components)
    elif args.codebooks or args.components:
        raise UserError("--codebooks and --components belong to a Sigma_q; name it with --sigma")
    args.out.mkdir(parents=True, exist_ok=True)
    return write_recipe_file(args.out / "recipe.json", coded, calibration=files)


def _coded(args: SimpleNamespace, params: Params | None) -> Recipe:
    """The recipe of --codec: a rung of the ladder of params.yaml, or without one that of `kvlab.recipe`."""
    from kvlab.cli.checked import recipe_of
    from kvlab.codecs.recipes import STUDIED

    if params is not None:
        return named_recipe(args.codec, params=params)
    if args.codec == STUDIED:
        raise UserError(f"--codec {STUDIED} is described in params.yaml, and there is none; name another codec")
    return recipe_of(args.codec, args.bits, args.v_bits)


def _lines(outcome, out: Path) -> Iterator[str]:
    """What was found, in a line for each metric."""
    run, seen = outcome.run, outcome.run.seen
    for key, found in outcome.measures.items():
        change = found.paired
        yield (
            f"{run.entry.quality_eval_id}: {key} of {found.variant.n} items is {found.variant.value:.4g}, without"
            f" {found.baseline.value:.4g}; paired {change.value:+.4g} [{change.low:+.4g}, {change.high:+.4g}]"
        )
    fired = f"{run.declared.codec} fired {seen.fires} times" if run.declared.codec else f"cache of {run.kv_cache_dtype}"
    yield f"{fired}; {seen.bits_per_value:.4g} bits per value over {seen.kv_values} values"
    if outcome.cut:
        yield f"{outcome.cut} requests were too long and lost their beginning"
    yield f"next: {shlex.join(['kvlab', 'gate', 'check', f'{out}/row.json', '--evidence', f'{out}/evidence.json'])}"
