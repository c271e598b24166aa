"""Paging and snapshots of models whose layers see a window of tokens alone."""

from __future__ import annotations

import pytest
import torch

import tiny
from kvlab.calibration.calibrate import calibrate
from kvlab.codecs.recipes import named_recipe
from kvlab.core.model import resolve_folder
from kvlab.engines.registry import start
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.restore import restore
from kvlab.kvstore.snapshot.payload import CodedChunks
from kvstore import archiving
from kvstore.hf.prompts import prompt, run_after

pytestmark = [pytest.mark.engine, pytest.mark.full]  # snapshots, which FINDINGS.md does not need
OLD = prompt(96)
NEW = OLD + prompt(20, 3)


@pytest.fixture(scope="module", params=sorted(tiny.SLIDES))
def model(request, tmp_path_factory) -> PagedModel:
    folder = tiny.write_model(tmp_path_factory.mktemp(request.param), request.param, **tiny.SLIDES[request.param])
    return PagedModel.load(resolve_folder(folder))


def test_a_paged_run_computes_what_the_model_does(model, roomy):
    run = PagedRun(model, roomy)
    found = run.score(NEW)
    with torch.no_grad():
        due = model.model(torch.tensor([NEW])).logits[0]
    torch.testing.assert_close(found, due, rtol=1e-4, atol=1e-4)


def test_a_restored_run_goes_on_to_the_bit(model, roomy, tmp_path):
    path = run_after(OLD, model, roomy).save(tmp_path / "s").path
    found = restore(model, NEW, path, roomy, mode="verify")
    assert found.report.prefix_len == len(OLD) and torch.equal(found.run.logits, run_after(NEW, model, roomy).logits)


def test_k_is_coded_before_its_layers_own_rotary_embedding(model, roomy, tmp_path):
    """At 8 bits and as an archive of high quality; turned by another layer's embedding K would be far off."""
    engine = start("hf", model.info, "float32", max_tokens=64)
    windows = torch.randint(0, 300, (6, 64), generator=torch.Generator().manual_seed(6)).tolist()
    recipe = named_recipe("archive", quality=1000)
    archive = calibrate(engine, windows, [recipe], corpus_hash="", sample=4).archive
    turns, run = model.turns(256), run_after(OLD, model, roomy)
    coders = [
        CodedChunks(model.geometry(8), named_recipe("hadamard", 8), turns=turns),
        archiving.coder(archive, model, quality=1000),
    ]
    for number, coder in enumerate(coders):
        path = run.save(tmp_path / str(number), coder=coder).path
        found = restore(model, NEW, path, roomy, mode="consume", coder=coder, unproven=True).run
        exact = torch.stack([run.pager.payload(chunk) for chunk in range(12)])
        coded = torch.stack([found.pager.payload(chunk) for chunk in range(12)])
        assert 0 < (coded - exact).square().mean() < 1e-3 * exact.square().mean()
        kl = (run_after(NEW, model, roomy).logits.log_softmax(-1) - found.logits.log_softmax(-1)).abs().max()
        assert kl < 0.2
