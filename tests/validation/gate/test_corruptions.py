import copy

import pytest

from goldens import made
from kvlab.gate.reasons import REASONS
from validation.gate.corruptions import (
    ABSENT,
    MUTATIONS,
    Mutation,
    judged,
    published_passes,
    valid_case,
)

pytestmark = pytest.mark.full  # judged by `validation`; each rule has its own tests in tests/gate

# What is found in whole files or takes two fields, and what depends on the day: see the tests of their readers.
ELSEWHERE = {
    "part_absent",
    "file_not_json",
    "file_not_yaml",
    "registry_unreadable",
    "row_not_object",
    "waiver_expired",
    "record_other",
    "replay_other",
}


def test_nothing_is_wrong_with_the_valid_case():
    found = judged(valid_case())
    assert found.passes and found.codes == set()
    assert published_passes(valid_case())


def test_every_corruption_is_found_by_its_own_code(lines):
    assert [line["name"] for line in lines if not line["detected"]] == []
    assert len(lines) >= 100
    assert {line["where"] for line in lines} == {"config", "row", "registry", "evidence", "current"}
    assert len({line["name"] for line in lines}) == len(lines)
    assert lines == made.kept("mutations")


def test_most_of_them_pass_the_published_rules(lines):
    refused = {line["code"] for line in lines if not line["published_would_pass"]}
    assert refused == {
        "value_not_a_number",  # of an acceptance rate: coerced to none
        "variants_uneven",
        "baseline_combined",
        "variant_unregistered",
        "draft_missing",
        "acceptance_missing",
        "registry_shape",  # nothing is registered any more
        "duplicate_mechanism",  # the pair that it was is not
        "unknown_mechanism",
        "duplicate_eval",
    }


def test_every_code_has_a_corruption_that_shows_it():
    assert {mutation.code for mutation in MUTATIONS} | ELSEWHERE == set(REASONS)


def test_a_corruption_changes_one_field():
    for mutation in MUTATIONS:
        differing = different(valid_case(), mutation.applied())
        if mutation.where == "evidence":
            differing = {path for path in differing if path[-1] != "evidence_id"} or differing
        place = mutation.path[:-1]
        assert differing and all(path[: len(place)] == place for path in differing), mutation.name
        changed = len({path[: len(mutation.path)] for path in differing})
        assert changed == (2 if "spelt" in mutation.name else 1), mutation.name


def different(a, b, path=()):
    """Paths at which two trees differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        return set().union(*(different(a.get(key), b.get(key), (*path, key)) for key in {*a, *b}))
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return set().union(*(different(x, y, (*path, n)) for n, (x, y) in enumerate(zip(a, b, strict=True))))
    return set() if a == b and type(a) is type(b) else {path}


def test_cases_share_nothing():
    first, second = valid_case(), valid_case()
    kept = copy.deepcopy(second)
    first["rows"]["fp8"]["evidence"][0]["metrics"].clear()
    first["mechanisms"]["mechanisms"][0].clear()
    assert second == kept


def test_a_corruption_says_what_it_is():
    assert (
        Mutation("tier_missing", ("rows", "fp8", "support_status"), ABSENT).name == "rows.fp8.support_status taken out"
    )
    long = Mutation("value_too_long", ("config", "mechanism-notes"), "x" * 5000)
    assert len(long.name) < 80 and long.where == "config" and long.field == "config.mechanism-notes"


def test_an_unsealed_change_is_tampering_whatever_was_changed():
    change = ("rows", "fp8", "evidence", 0, "observed", "cache_class")
    tampered = judged(Mutation("evidence_tampered", change, "Other", sealed=False).applied())
    assert not tampered.passes and "evidence_tampered" in tampered.codes
    forged = judged(Mutation("evidence_contradicts_row", change, "Other").applied())
    assert not forged.passes and "evidence_tampered" not in forged.codes
