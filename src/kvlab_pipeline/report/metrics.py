"""All numbers of the report, each with its interval: from result files to ``metrics.json``.

Nothing is measured here and nothing is worded. Every interval resamples the same windows, so cells that
are compared are paired; every comparison passes `gather.comparable` first. Each study's entries are made in
its own folder.
"""

from __future__ import annotations

from pathlib import Path

from kvlab.core.machine import machine
from kvlab.core.origin import told_of
from kvlab.core.params import Params
from kvlab.output.format import refuse_non_finite
from kvlab.stats.bootstrap import Bootstrap
from kvlab_pipeline.jobs import plan
from kvlab_pipeline.report.calibration import codebook_entries, read_codebooks, sigma_entries
from kvlab_pipeline.report.schema import OPTIONAL, by_part, checked, filed
from kvlab_pipeline.studies.chapter import ChapterInputs, Sources
from kvlab_pipeline.studies.gather import gather
from kvlab_pipeline.studies.measured import Results
from kvlab_pipeline.studies.mitigations.plan import read_choice
from kvlab_pipeline.studies.register import chapters


def build(params: Params, sources: Sources) -> dict:
    """All numbers, part by part, as `schema.load` reads them of ``metrics.json``; `schema.filed` is what is written.

    Parameters
    ----------
    params : Params
        Decides which cells there must be.
    sources : Sources

    Returns
    -------
    dict
        JSON-ready; every interval is an ``Estimate.to_json``. KL and NLL are in nats per token.

    Raises
    ------
    kvlab.core.errors.Fault, kvlab.core.errors.UserError
        Whatever `gather` refuses, and codebooks or sidecars of another model or recipe.
    """
    choice = read_choice(sources.choice).choice if sources.choice else None
    results = gather(params, sources.baseline, sources.jobs, choice)
    boot = Bootstrap(params.stats.resamples, params.stats.confidence, params.stats.seed)
    codebooks = read_codebooks(sources.codebooks, params, results)
    found = {
        "identity": identity_entry(params, results, codebooks),
        "settings": settings_entry(params),
        "sizes": {
            "context": params.windows.context,
            "eval": params.windows.eval,
            "windows": params.windows.test,
            "confidence": params.stats.confidence,
            "resamples": params.stats.resamples,
            "seed": params.stats.seed,
        },
        "codebooks": codebook_entries(codebooks, results),
        **sigma_entries(sources.sigmas, results, boot),
    }
    for study, chapter in chapters().items():
        asked = study not in OPTIONAL or study in plan.studies(params)
        made = chapter.entries(ChapterInputs(params, results, boot, sources)) if asked else dict.fromkeys(chapter.parts)
        found |= made
    refuse_non_finite(found, "metrics")
    return by_part(checked(filed(found), "what was measured"))


def identity_entry(params: Params, results: Results, codebooks: list[dict]) -> dict:
    """What every number was measured on, and the recipe of each recipe id.

    `model` is where the model was read from, `slug` the name of its folder of results.
    `calibration_corpus_hash` is the hash of the windows file that the calibration read; equal to
    `corpus_hash`, calibration and test are the two splits of one file, which are disjoint by its making.
    """
    recipes = {r.recipe_id: r.model_dump(mode="json") for m in results.cells for r in m.cell.recipes}
    corpus = params.corpus
    scored = [corpus.other if text == "other" else corpus.source for text in corpus.scored]
    return results.provenance.model_dump() | {
        "calibration_corpus_hash": codebooks[0]["corpus_hash"] if codebooks else None,
        "calibration_origin": params.calibration.origin,
        "machine": machine(),
        "recipes": recipes,
        "slug": params.model.slug,
        "model": params.model.path,
        "corpus": " and ".join(scored),
        "disclosure": disclosure(params),
    }


def disclosure(params: Params) -> str | None:
    """What has to be told of the model's weights wherever a number of it stands; None where there is nothing."""
    return told_of(Path(params.model.path))


def settings_entry(params: Params) -> dict:
    """All parameters that decide a number but the model, so that what two models are compared under can be checked.

    Layers are numbers of this model's layers, of which there are `n_layers`.
    """
    decisive = params.model_dump(mode="json", exclude={"model", "jobs", "verdict", "report"})
    return decisive | {"n_layers": params.model.n_layers}
