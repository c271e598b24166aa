"""What `kvlab gate import` does, and its flags. Heavy imports happen inside."""

from __future__ import annotations

import argparse

from kvlab.cli.flags import Flag, path, result, whole, word


def import_verb(args: argparse.Namespace) -> None:
    """Make evidence of two runs of lm-evaluation-harness that you made: plain, and with a compressed cache.

    Both with `--output_path DIR --log_samples`, on any of its engines, with the same tasks, items, prompts and
    arguments but for those that --differs names. Items are paired one by one. What the harness does not write, the
    bytes of the cache and whether a codec ran, is not made up: the evidence says that nobody looked, and may show that
    too much is lost, never that little is, so its row earns `reviewed_preview` at most (docs/gate.md). The folder --out
    gets evidence.json and row.json, for `kvlab gate check`.
    """
    from kvlab.base.records import write_json
    from kvlab.cli.evals import refuse_unlisted_claim
    from kvlab.evals.imported import imported
    from kvlab.gate import registry

    refuse_unlisted_claim(args.claim)
    known = registry.load(args.mechanisms, args.evals)
    asked = args.task, args.mechanism, args.plain, args.coded, args.differs, args.context_tokens, args.claim
    made = imported(known, *asked)
    write_json(args.out / "row.json", made.row)
    write_json(args.out / "evidence.json", made.evidence.model_dump(mode="json"))
    for key, found in made.measures.items():
        change = found.paired
        print(
            f"{args.task}: {key} of {found.variant.n} items is {found.variant.value:.4g}, without"
            f" {found.baseline.value:.4g}; paired {change.value:+.4g} [{change.low:+.4g}, {change.high:+.4g}]"
        )
    print(f"{made.evidence.imported.changed} answers differ; nobody saw the cache, so this can show a loss alone")
    print(f"next: kvlab gate check {args.out}/row.json --evidence {args.out}/evidence.json")


FLAGS: list[Flag] = [
    path("--plain", "folder or results file of lm_eval, of the model as it is"),
    path("--coded", "the same of the run with the compressed cache"),
    word("--task", "id of a registered eval of lm-evaluation-harness (`kvlab gate registry`)", required=True),
    word(
        "--mechanism",
        "what the second run did to its cache, as registered: kv_quantization/fp8_e4m3",
        metavar="NAME/VARIANT",
        required=True,
    ),
    word(
        "--differs",
        "arguments of the model (`--model_args`) that the second run was given otherwise, as kv_cache_dtype; none where"
        " the environment does it",
        metavar="ARGUMENT",
        nargs="+",
        default=[],
    ),
    word(
        "--context-tokens",
        "most tokens of an item with its answer, which lm_eval does not write down; the length of RULER's texts",
        type=whole(1),
        metavar="N",
        required=True,
    ),
    word("--claim", "tier that the row claims; default: gated", default="gated"),
    path("--mechanisms", "registry of mechanisms; default: the shipped one", required=False),
    path("--evals", "registry of evals; default: the shipped one", required=False),
    result("--out", "folder of evidence.json and row.json", metavar="DIR"),
]
