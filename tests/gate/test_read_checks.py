"""Mechanisms that are no codecs: a lossy one earns nothing without its evidence, and what it ran with is its name."""

from __future__ import annotations

import copy

import pytest

from kvlab.gate import registry
from kvlab.gate.catalogue.rows import EVIDENCE
from kvlab.gate.check import check
from kvlab.gate.evidence import parse
from kvlab.gate.rules import Context
from validation.gate.corruptions import TODAY, as_row, valid_case
from validation.gate.passing_case import PATTERN, VALUES

LATENT = {"mechanism": "kv_compression", "variant": "latent_lowrank", "method": "latent_lowrank"} | {
    "kind": "compression", "scope": "kv_cache", "lossless": False, "patterns": ["latent"],
    "kv_cache_dtypes": ["float32", "bfloat16", "float16"], "description": "fewer numbers of each token",
    "must_show": ["next_token_distribution", "retrieval"],
}  # fmt: skip


def earned(row: dict, *more: dict) -> tuple[str, set[str]]:
    """The tier that one row earns by itself, and the codes of all that is said of it."""
    case = valid_case()
    files = case["mechanisms"], case["evals"]
    files[0]["mechanisms"] += more
    context = Context(registry.parse(*files), case["current"], today=TODAY)
    (claim,) = check([as_row(row)], context, strict=True).claims
    return claim.earned, {reason.code for finding in claim.findings for reason in finding.reasons}


@pytest.fixture
def sparse():
    return copy.deepcopy(valid_case()["rows"]["sparse"])


def observe(row: dict, **seen) -> None:
    """Something else was observed, in all evidence of a row."""
    for piece in row[EVIDENCE]:
        piece["observed"] |= seen


def sealed(row: dict) -> dict:
    """The row, its evidence with the id of its content."""
    for piece in row[EVIDENCE]:
        piece["evidence_id"] = parse(piece).content_id()
    return row


def test_with_its_evidence_it_is_supported(sparse):
    assert earned(sparse) == ("supported", set())


def test_without_it_is_not_whatever_it_says_of_its_status(sparse):
    for status in ("completed", "not_required", None):
        row = sparse | {EVIDENCE: [], "quality_eval_status": status}
        tier, codes = earned({key: value for key, value in row.items() if value is not None})
        assert tier != "supported" and "evidence_missing" in codes


def test_evidence_of_other_settings_is_another_mechanisms(sparse):
    tier, codes = earned(sparse | {"pattern": "block_sparse:block=32,top_k=1"})
    assert tier == "unsupported" and codes >= {"evidence_other_pattern"}


def test_evidence_of_an_unpatterned_run_cannot_be_lent_to_one(sparse):
    sparse[EVIDENCE][0]["observed"]["pattern"] = None
    assert "evidence_other_pattern" in earned(sealed(sparse))[1]


def test_a_pattern_beside_a_codec_that_is_declared_alone_is_undeclared():
    row = copy.deepcopy(valid_case()["rows"]["int"]) | {"pattern": PATTERN}
    observe(row, pattern=PATTERN)
    tier, codes = earned(sealed(row))
    assert tier == "unsupported" and codes == {"undeclared_pattern"}


def test_full_is_no_pattern():
    row = copy.deepcopy(valid_case()["rows"]["int"]) | {"pattern": "full"}
    assert earned(row) == ("supported", set())
    observe(row, pattern="full")
    assert earned(sealed(row)) == ("supported", set())


@pytest.mark.parametrize("canary", [None, 0.0, 1e-9], ids=str)
def test_a_pattern_that_moves_nothing_did_not_run(sparse, canary):
    sparse[EVIDENCE][0]["observed"]["canary_kl"] = canary
    tier, codes = earned(sealed(sparse))
    assert tier != "supported" and "evidence_canary" in codes


def test_what_a_step_reads_is_what_the_evidence_counted(sparse):
    assert "evidence_contradicts_row" in earned(sparse | {"read_bytes": 1})[1]
    sparse[EVIDENCE][0]["observed"]["read_bytes"] = None
    assert "evidence_contradicts_row" in earned(sealed(sparse))[1]


def test_a_capacity_that_no_evidence_counted_is_contradicted():
    row = copy.deepcopy(valid_case()["rows"]["fp8"])
    assert "evidence_contradicts_row" in earned(row | {"capacity_tokens": 10**12, "cache_memory_bytes": 1})[1]


def test_blocks_that_leave_memory_empty_are_not_all_that_fit():
    row = copy.deepcopy(valid_case()["rows"]["baseline"]) | {EVIDENCE: []}
    pages = {"block_tokens": 1, "block_bytes": 1, "block_values": 1, "cache_blocks": 1, "capacity_tokens": 1}
    assert "capacity_other" in earned(row | pages | {"cache_memory_bytes": 2**40})[1]
    assert earned(row | pages | {"cache_memory_bytes": 1})[1] == {"baseline_unshown"}


def test_what_stores_less_is_held_to_its_stored_bytes_and_not_to_what_a_step_reads(sparse):
    latent = {"mechanism_variant": "latent_lowrank", "mechanism": "kv_compression", "compression_scope": "kv_cache"}
    latent |= {"pattern": "latent:rank=64", "kv_bytes": VALUES // 2}
    row = {key: value for key, value in (sparse | latent).items() if key != "read_bytes"}
    observe(row, pattern="latent:rank=64", kv_bytes=VALUES // 2)
    assert earned(sealed(row), LATENT) == ("supported", set())
    assert "nothing_saved" in earned(row | {"kv_bytes": 2 * VALUES}, LATENT)[1]


def test_every_mechanism_of_this_project_that_reads_or_keeps_less_is_lossy_and_names_its_patterns():
    entries = {one.variant: one for one in registry.load().mechanisms.values() if one.patterns}
    assert entries.keys() == {
        *("block_sparse", "chunk_summary", "dual_chunk", "layer_plan", "latent_lowrank", "eviction"),
    }
    assert not any(one.lossless or one.codecs for one in entries.values())


def test_self_speculation_names_its_drafter_and_how_much_was_accepted():
    row = copy.deepcopy(valid_case()["rows"]["mtp"])
    for name, code in (("draft_model_id", "draft_missing"), ("speculative_acceptance_rate", "acceptance_missing")):
        tier, codes = earned({key: value for key, value in row.items() if key != name})
        assert tier == "artifact_only" and code in codes
