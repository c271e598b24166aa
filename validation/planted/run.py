"""The study of planted truth: every case on the model, the coverage, the report; a failure withholds success."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from kvlab.core.errors import Fault
from kvlab.core.model import resolve
from kvlab.core.params import Params
from kvlab.core.records import versions
from kvlab.engines.registry import start
from kvlab.stats.bootstrap import Bootstrap
from kvlab.text import corpus
from validation.planted import coverage, factorial, identity, noise, page, relabelled, rescaling, sources
from validation.planted.claims import Case, contained, recover, together
from validation.planted.ground import EXACT, Ground

SHOWN = 5  # failures that are named in the error's one line


def planted(params: Params, windows_path: Path, out: Path, repeats: int = coverage.REPEATS) -> None:
    """Measure everything that is planted and write ``REPORT.md`` and ``planted.json`` into the folder `out`.

    Reads `model`, `engines`, `stats` and `jobs` of the parameters. The factorial runs on all `engines` in both dtypes;
    the other cases on transformers in float32, whatever is measured elsewhere.

    Parameters
    ----------
    params : Params
    windows_path : Path
        What `kvlab step corpus` wrote.
    out : Path
        A folder.
    repeats : int
        Synthetic tables of each distribution and number of windows.

    Raises
    ------
    Fault
        A planted value lies outside its interval, too few lie in their plain ones, exchanged labels are not found
        out, or a coverage is outside its band. The report is written first.
    """
    torch.set_num_threads(params.jobs.threads)
    info = resolve(params.model)
    windows = corpus.load(windows_path, info.model_hash)
    boot = Bootstrap(params.stats.resamples, params.stats.confidence, params.stats.seed)
    with closing(start("hf", info, "float32", max_tokens=windows.test.shape[1])) as engine:
        ground = Ground.of(engine, windows)
        cases = [noise.case(ground), identity.case(ground), sources.case(), rescaling.case(ground)]
    with TemporaryDirectory() as folder:
        files = factorial.write_files(params, windows, Path(folder))
        cases = [factorial.case(files), *cases]
        controls = relabelled.controls(files, boot, [claim for case in cases for claim in case.claims])
    identities = {"model_hash": info.model_hash, "corpus_hash": windows.corpus_hash, "versions": versions()}
    ran = {"engines": list(files.params.engines), "dtypes": list(files.params.gap.dtypes)}
    data = identities | ran | sizes(ground) | summary(boot, cases)
    data |= {"controls": controls, "coverage": covered(repeats)}
    page.write(data, Path(out))
    refuse_missed(data)


def sizes(ground: Ground) -> dict:
    """How much was measured."""
    n = len(ground.test)
    evaluated = len(ground.test[0]) - ground.context
    return {"context": ground.context, "eval": evaluated, "windows": n, "exact_windows": min(EXACT, n)}


def summary(boot: Bootstrap, cases: Sequence[Case]) -> dict:
    """Every case's values, their intervals wide enough for all of them together."""
    claims = [claim for case in cases for claim in case.claims]
    paths = {id(claim): claim.path or case.path for case in cases for claim in case.claims}
    recovered = recover(boot, claims)
    found = {id(one.claim): one.to_json() | {"path": paths[id(one.claim)]} for one in recovered}
    plain = [(paths[id(one.claim)], one.alone) for one in recovered if one.claim.chance]
    return {
        "paths": contained(plain, boot.confidence),
        "confidence": boot.confidence,
        "joint_confidence": together(boot, claims).confidence,
        "resamples": boot.resamples,
        "cases": [
            {
                "name": case.name,
                "about": case.about,
                "facts": case.facts,
                "values": [found[id(claim)] for claim in case.claims],
            }
            for case in cases
        ],
    }


def covered(repeats: int) -> dict:
    """The coverage of every statistic, and what it was measured with."""
    return {
        "band": list(coverage.BAND),
        "repeats": repeats,
        "resamples": coverage.RESAMPLES,
        "tokens": coverage.TOKENS,
        "windows": coverage.MANY,
        "few": list(coverage.FEW),
        "shared": coverage.SHARED,
        "distributions": [distribution.to_json() for distribution in coverage.DISTRIBUTIONS],
        "entries": [entry | {"holds": coverage.holds(entry)} for entry in coverage.everything(repeats)],
    }


def missed(data: dict) -> list[str]:
    """What was not recovered, and what does not cover as it says, in words."""
    values = [
        f"{value['case']}: {value['name']}: planted {value['planted']:.6g}, found {value['estimate']['value']:.6g}"
        f" [{value['estimate']['low']:.6g}, {value['estimate']['high']:.6g}]"
        for case in data["cases"]
        for value in case["values"]
        if not value["holds"]
    ]
    few = [
        f"{way['path']}: {way['inside']} of {way['values']} planted values inside their plain intervals"
        for way in data["paths"]
        if not way["holds"]
    ]
    unseen = [
        f"exchanged labels of {one['factor']!r} were not found out" for one in data["controls"] if not one["holds"]
    ]
    wrong = [
        f"coverage of {entry['statistic']} ({entry['distribution']}, {entry['windows']} windows):"
        f" {entry['coverage']['value']:.3f}"
        for entry in data["coverage"]["entries"]
        if not entry["holds"]
    ]
    return values + few + unseen + wrong


def refuse_missed(data: dict) -> None:
    """`Fault` names what failed."""
    found = missed(data)
    if found:
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise Fault(
            f"{len(found)} planted truths were not recovered: {'; '.join(found[:SHOWN])}{more}",
            code="fault.not-recovered",
        )
