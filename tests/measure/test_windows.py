"""Codecs measured, and computed a second time, on models whose layers see a window of tokens alone."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest
import torch

import tiny
from kvlab.attention.named import mechanism
from kvlab.calibration.calibrate import calibrate
from kvlab.codecs.recipes import named_recipe
from kvlab.core.errors import CapabilityError
from kvlab.core.model import resolve_folder
from kvlab.engines.registry import start
from kvlab.measure.mechanism import mechanism_variant
from kvlab.measure.quick_run import NamedCodec, score
from kvlab.measure.variant import read_of
from kvlab.witness.plain import PlainModel
from refusals import refused

pytestmark = pytest.mark.engine
CONTEXT = 48
RECIPES = {
    "klt": named_recipe("klt", 3),
    "archive": named_recipe("archive", quality=800),
    "kivi": named_recipe("kivi", 4),
}


@pytest.fixture(scope="module", params=["gemma3", "mistral"])
def engine(request, tmp_path_factory):
    folder = tiny.write_model(tmp_path_factory.mktemp(request.param), request.param, **tiny.SLIDES[request.param])
    return start("hf", resolve_folder(folder), "float32", max_tokens=64)


@pytest.mark.full
@pytest.mark.parametrize("protocol", ["snapshot", "in_forward"])
def test_codecs_are_measured_and_witnessed(engine, protocol):
    """Codecs of single tensors under both protocols, `archive` of finished caches; all agree with plain arithmetic."""
    ids = torch.randint(0, 300, (8, 64), generator=torch.Generator().manual_seed(6))
    recipes = {name: one for name, one in RECIPES.items() if name != "archive" or protocol == "snapshot"}
    calibrated = calibrate(engine, ids[:6].tolist(), list(recipes.values()), corpus_hash="", sample=4)
    subjects = [NamedCodec(name, recipe, calibrated, protocol=protocol) for name, recipe in recipes.items()]
    plain = cache(partial(PlainModel, engine.info.path))
    found = score(engine, np.asarray(ids[6:]), CONTEXT, subjects, plain)
    assert len(found) >= len(recipes)
    for one in found:
        assert one.witnessed is not None and 0 < one.tokens["kl"].mean() < 1


def test_a_scored_token_reads_what_its_windows_hold(engine):
    """Counted token by token."""
    info, stored = engine.info, 100.0
    bytes_ = 0.0
    for window in info.windows:
        for at in range(CONTEXT, 64):
            first = max(0, at + 1 - (window or 64))
            bytes_ += max(0, CONTEXT - first) * stored + (at + 1 - max(first, CONTEXT)) * 2 * info.values_per_token
    assert read_of(stored, CONTEXT, 64, info) == pytest.approx(bytes_ / info.n_layers / (64 - CONTEXT))


@pytest.mark.parametrize("name", ["sinks:kept=8", "window"])
def test_what_chooses_among_all_tokens_is_refused(engine, name):
    with refused(CapabilityError, "capability.not-run", "window"):
        mechanism_variant(mechanism(name), engine, "snapshot")
