import datetime
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvlab
from kvlab.gate import registry
from kvlab.gate.catalogue.columns import TIERS
from kvlab.gate.catalogue.rows import EVIDENCE, Row
from kvlab.gate.check import EXIT_CODES, check
from kvlab.gate.evidence import parse
from kvlab.gate.render import to_json
from kvlab.gate.rules import CRITERIA, FALSEHOODS, PUBLISHED, WAIVABLE, Context
from kvlab.gate.waivers import Waiver
from tiers import examples
from validation.gate.corruptions import TODAY, as_row, valid_case
from validation.gate.published_rules import RECORD, RULES, published_record, published_verdict

CASE = valid_case()
REGISTERED, STATUS, COMPLETED, DRAFT = PUBLISHED


def context(margin=None, **rest):
    """The valid case's; a margin of kl below its .002 in [.001, .003] makes its word `open` or `beyond`."""
    evals = valid_case()["evals"]
    if margin is not None:
        evals["evals"][1]["metrics"][0]["margin"] = margin
    return Context(registry.parse(CASE["mechanisms"], evals), CASE["current"], **({"today": TODAY} | rest))


CONTEXT, TIGHT = context(), context(margin=0.0005)


def row(name, evidence=True, **changes):
    """A row of the valid case with fields changed; `...` takes one out."""
    found = as_row(CASE["rows"][name])
    values = {key: value for key, value in (found.values | changes).items() if value is not ...}
    return replace(found, values=values, evidence=found.evidence if evidence else ())


def claim(given, where=CONTEXT):
    return check([given], where).claims[0]


# ------------------------------------------------------------------------- the decision table

NOT_SHOWN = {"evidence": False, "quality_eval_id": None, "quality_eval_status": None}
TYPED = ("pending", "failed", "not_required", None)
WITHOUT = (("draft_model_id", "draft_missing"), ("speculative_acceptance_rate", "acceptance_missing"))


class Line(NamedTuple):
    """A row; what the published rules say of it, and what the gate says."""

    name: str
    row: Row
    published: tuple[str, ...] | None  # rules that it fails; None when it is not looked at
    word: str
    codes: tuple[str, ...] = ()
    badge: str | None = None
    where: Context = CONTEXT


def without_a_mechanism():
    yield Line("key absent, lossless", row("baseline", mechanism=...), None, "not_applicable", badge="not judged")
    coded = row("baseline", mechanism=..., kv_cache_dtype="fp8")
    yield Line("key absent, lossy", coded, None, "fail", ("undeclared_dtype",))


def of_the_baseline():
    yield Line("baseline, lossless", row("baseline"), (), "pass", badge="not required")
    yield Line("baseline, lossy", row("baseline", kv_cache_dtype="fp8"), (), "fail", ("undeclared_dtype",))
    for tier in TIERS:
        odd = row("baseline", mechanism_variant="odd", support_status=tier)
        yield Line(f"baseline, odd variant, {tier}", odd, (), "fail", ("baseline_variant",))


def of_compression_in_preview():
    for status in (None, "pending"):
        given = row("preview", quality_eval_status=status)
        yield Line(f"compression, preview, {status}", given, (), "pass", ("quality_open",), "unverified")
        given = row("preview", evidence=False, quality_eval_status=status)
        yield Line(f"compression, nothing shown, {status}", given, (), "fail", ("evidence_missing",), "unverified")
    given = row("fp8", support_status="reviewed_preview", quality_eval_status="failed")
    yield Line("compression, preview, lost", given, (), "fail", ("quality_beyond",), "failed evaluation", TIGHT)
    given = row("fp8", support_status="too_lossy", quality_eval_status="failed")
    yield Line("compression, too lossy, lost", given, (), "pass", ("quality_beyond",), "failed evaluation", TIGHT)


def of_compression_with_support():
    for status, named in itertools.product(TYPED, ("needle", None)):
        given = row("fp8", evidence=False, quality_eval_status=status, quality_eval_id=named)
        yield Line(f"compression, {status}, {named}", given, (COMPLETED,), "fail", ("evidence_missing",), "unverified")
    given = row("fp8", quality_eval_status="failed")
    yield Line("compression, failed", given, (COMPLETED,), "fail", ("quality_beyond",), "failed evaluation", TIGHT)
    given = row("fp8", quality_eval_id="invented")
    yield Line("compression, id unregistered", given, (COMPLETED,), "fail", ("eval_unregistered",))
    lacking = ("evidence_missing", "status_overstated")
    yield Line("compression, no id", row("fp8", quality_eval_id=None), (COMPLETED,), "fail", lacking)
    yield Line("compression, only typed", row("fp8", evidence=False), (), "fail", lacking, "unverified")
    lost = ("quality_beyond", "status_overstated")
    yield Line("compression, beyond", row("fp8"), (), "fail", lost, "failed evaluation", TIGHT)
    yield Line("compression, within", row("fp8"), (), "pass", badge="verified")


def at_every_tier():
    for tier in TIERS:
        given = row("preview", mechanism_variant="invented", support_status=tier, quality_eval_status=None)
        failed = (REGISTERED, COMPLETED) if tier == "supported" else (REGISTERED,)
        yield Line(f"compression, unregistered, {tier}", given, failed, "fail", ("variant_unregistered",))
    for name, tier in itertools.product(("baseline", "fp8", "mtp"), TIERS):
        failed = (STATUS, COMPLETED) if (name, tier) == ("fp8", "supported") else (STATUS,)
        given = row(name, quality_eval_status="done", support_status=tier)
        yield Line(f"{name}, done, {tier}", given, failed, "fail", ("value_unknown_word",))
    for tier, (field, code) in itertools.product(TIERS, WITHOUT):
        given = row("mtp", support_status=tier, **{field: None})
        yield Line(f"speculative, {code}, {tier}", given, (DRAFT,), "fail", (code,))


def of_speculation():
    yield Line("speculative, shown", row("mtp", speculative_acceptance_rate=0.0), (), "pass")
    high = row("mtp", speculative_acceptance_rate=1.2)
    yield Line("speculative, rate above 1", high, (), "fail", ("value_out_of_range",))
    unproven = ("lossless_unproven", "status_overstated")
    yield Line("speculative, not shown", row("mtp", evidence=False), (), "fail", unproven)


def of_spelling():
    misspelt, capital = row("fp8", mechanism="kv_quant"), row("baseline", mechanism="Baseline")
    yield Line("mechanism misspelt", misspelt, (REGISTERED,), "fail", ("value_unknown_word",))
    yield Line("mechanism in capitals", capital, (REGISTERED,), "fail", ("value_unknown_word",))
    blank = row("preview", support_status="supported ")
    yield Line("tier with a blank", blank, (), "fail", ("value_unknown_word",))


LINES = [
    *without_a_mechanism(),
    *of_the_baseline(),
    *of_compression_in_preview(),
    *of_compression_with_support(),
    *at_every_tier(),
    *of_speculation(),
    *of_spelling(),
]


@pytest.mark.parametrize("line", LINES, ids=[line.name for line in LINES])
def test_decision_table_as_published(line):
    record = published_record(line.row.values, list(CONTEXT.registry.mechanisms), list(CONTEXT.registry.evals))
    expected = (None, ()) if line.published is None else (not line.published, line.published)
    assert published_verdict(line.row.values | {RECORD: record}) == expected


@pytest.mark.parametrize("line", LINES, ids=[line.name for line in LINES])
def test_decision_table_as_corrected(line):
    found = claim(line.row, line.where)
    assert found.word == line.word and set(line.codes) <= found.codes
    assert line.badge in (None, found.badge)
    assert (found.failed_criteria == ()) == (line.word != "fail")


def test_published_names_are_kept():
    assert tuple(RULES) == PUBLISHED
    assert set(PUBLISHED) <= {criterion.name for criterion in CRITERIA}
    assert len({criterion.name for criterion in CRITERIA}) == len(CRITERIA)


# ------------------------------------------------------------------------- tiers


@pytest.mark.parametrize(
    ("given", "where", "earned"),
    [
        (row("int"), CONTEXT, "supported"),
        (row("int", support_status="gated"), CONTEXT, "gated"),  # never above the claim
        (row("int", **NOT_SHOWN), CONTEXT, "gated"),
        (row("preview"), CONTEXT, "reviewed_preview"),
        (row("fp8"), TIGHT, "gated"),  # says completed of a failed evaluation
        (row("fp8", quality_eval_status=None), TIGHT, "too_lossy"),
        (row("class", mechanism_notes=None), CONTEXT, "reviewed_preview"),
        (row("fp8", mechanism_variant="invented"), CONTEXT, "artifact_only"),
        (row("int", codec=None), CONTEXT, "unsupported"),
        (row("int", model="another"), CONTEXT, "unsupported"),  # borrowed evidence
        (row("baseline", mechanism=...), CONTEXT, None),
    ],
)
def test_the_tier_that_is_earned(given, where, earned):
    assert claim(given, where).earned == earned


def test_status_and_judgements_come_from_evidence():
    found = claim(row("int", quality_eval_status=None))
    assert found.status == "completed" and {j.key for j in found.judgements} == {
        "kl",
        "top1_agreement",
        "needle_recall",
    }
    assert claim(row("int", **NOT_SHOWN)).status == "pending"


def test_of_a_malformed_row_only_its_fields_are_spoken_of():
    found = claim(row("fp8", context_tokens="many", quality_eval_status="done", mechansim="baseline"))
    assert found.failed_criteria == (CRITERIA[0].name, STATUS) and found.earned == "unsupported"
    assert found.codes == {"value_kind", "value_unknown_word", "field_unknown"}


def test_mechanisms_may_be_combined():
    both = {"mechanism": "kv_quantization+speculative_decoding", "mechanism_variant": "fp8_e4m3+mtp"}
    draft = {"draft_model_id": "draft", "speculative_acceptance_rate": 0.7, "spec_decoding": "mtp"}
    given = row("fp8", **both, **draft)
    seen = [piece | {"observed": piece["observed"] | {"spec_decoding": "mtp"}} for piece in given.evidence]
    seen = tuple(piece | {"evidence_id": parse(piece).content_id()} for piece in seen)
    assert claim(replace(given, evidence=seen)).word == "pass"
    assert "evidence_contradicts_row" in claim(given).codes  # whose engine did not speculate
    assert claim(row("fp8", **both)).codes == {"draft_missing", "acceptance_missing", "speculation_idle"}
    odd = claim(row("fp8", **(both | {"mechanism_variant": "fp8_e4m3+eagle3"}), **draft))
    assert odd.codes >= {"variant_unregistered"} and "'eagle3'" in str(odd.findings[0].reasons[0])


@pytest.mark.parametrize("status", [None, "pending", "completed", "not_required", "failed"])
@pytest.mark.parametrize("evidence", [True, False])
def test_without_a_mechanism_nothing_passes(status, evidence):
    given = row("mtp", mechanism=..., quality_eval_status=status, support_status="gated", evidence=evidence)
    plain = row("baseline", quality_eval_status=status, mechanism=None)
    quiet = replace(given, values=plain.values)
    for where in (CONTEXT, TIGHT):
        assert claim(given, where).word == "fail"  # speculated
        assert claim(replace(quiet, evidence=()), where).word == "not_applicable"


# ------------------------------------------------------------------------- verdict and waivers


def test_no_rows_is_no_pass():
    for rows, strict in itertools.product(([], [row("baseline", mechanism=...)]), (False, True)):
        report = check(rows, CONTEXT, strict)
        assert report.verdict == ("fail" if rows and strict else "cannot_judge")
        assert report.exit_code == EXIT_CODES[report.verdict] != 0


@pytest.mark.parametrize(("verdict", "code"), [("pass", 0), ("fail", 1), ("cannot_judge", 2)])
def test_exit_codes(verdict, code):
    rows = {"pass": [row("int")], "fail": [row("int"), row("int", fires=0)], "cannot_judge": []}[verdict]
    report = check(rows, CONTEXT)
    assert (report.verdict, report.exit_code) == (verdict, code)


def waiver(criterion=COMPLETED, expires=TODAY, row_id="int", owner="Ada"):
    return Waiver(row_id=row_id, criterion=criterion, owner=owner, expires=expires, why="measured next week")


def test_a_waiver_excuses_and_lifts_nothing():
    given = row("int", **NOT_SHOWN)
    report = check([given], context(waivers=(waiver(),)))
    found = report.claims[0]
    assert (found.word, found.earned, found.failed_criteria) == ("waived", "gated", ())
    assert found.findings[0].waiver.owner == "Ada" and report.verdict == "pass" and report.counts["waived"] == 1
    assert check([given], context(waivers=(waiver(),)), strict=True).verdict == "fail"


@pytest.mark.parametrize("other", [{"row_id": "fp8"}, {"criterion": "lossless is shown"}])
def test_a_waiver_of_something_else_excuses_nothing(other):
    assert claim(row("int", **NOT_SHOWN), context(waivers=(waiver(**other),))).word == "fail"


def test_an_expired_waiver_is_named():
    late = context(waivers=(waiver(),), today=TODAY + datetime.timedelta(days=1))
    found = claim(row("int", **NOT_SHOWN), late)
    assert found.word == "fail" and "waiver_expired" in found.codes
    still = replace(late, waivers=(*late.waivers, waiver(expires=datetime.date(2030, 1, 1), owner="Bo")))
    found = claim(row("int", **NOT_SHOWN), still)
    assert found.word == "waived" and "waiver_expired" not in found.codes


def test_without_a_day_no_waiver_is_in_force():
    given = Context(CONTEXT.registry, CASE["current"], (waiver(expires=datetime.date(2100, 1, 1)),))
    assert claim(row("int", **NOT_SHOWN), given).word == "fail"


@pytest.mark.parametrize("name", [criterion.name for criterion in CRITERIA if criterion.hard])
def test_no_waiver_hides_a_hard_failure(name):
    everything = tuple(waiver(criterion.name) for criterion in CRITERIA)
    bad = row("int", codec="kivi", bits_per_value=1.0, model="another", mechanism_variant="invented")
    found = {finding.criterion: finding for finding in claim(bad, context(waivers=everything)).findings}
    assert name not in WAIVABLE and (name not in found or found[name].waiver is None)
    assert claim(bad, context(waivers=everything)).word == "fail"


# ------------------------------------------------------------------------- properties

CHANGES = [
    {},
    {"evidence": False},
    {"quality_eval_status": None},
    {"quality_eval_status": "completed"},
    {"quality_eval_status": "failed"},
    {"quality_eval_id": None},
    {"quality_eval_id": "kv_fidelity"},
    {"mechanism": None},
    {"mechanism": ...},
    {"mechanism_variant": "int"},
    {"mechanism_notes": None},
    {"code": "newer commit"},
    {"model": "another"},
    {"kl": 0.1},
    {"codec": None},
    {"fires": 0},
    {"kv_cache_dtype": None},
    {"kv_cache_dtype": "fp8"},
    {"spec_decoding": None},
    {"draft_model_id": None},
    {"context_band": "32k"},
    {"context_tokens": "many"},
    {"support_status": None},
    *({"support_status": tier} for tier in TIERS),
]
WAIVED = tuple(waiver(name, row_id=row_id) for name in WAIVABLE[:2] for row_id in ("int", "mtp"))
CONTEXTS = st.sampled_from([CONTEXT, TIGHT, context(waivers=WAIVED), context(margin=0.0025)])


@st.composite
def rows(draw):
    changes = {}
    for change in draw(st.lists(st.sampled_from(CHANGES), max_size=3)):
        changes |= change
    return row(draw(st.sampled_from(sorted(CASE["rows"]))), **changes)


@given(
    st.lists(rows(), max_size=5).flatmap(lambda r: st.tuples(st.just(r), st.permutations(r))), CONTEXTS, st.booleans()
)
@examples(60)
def test_the_order_of_rows_does_not_matter(given, where, strict):
    first, second = (to_json(check(ordered, where, strict)) for ordered in given)
    assert first == second


@given(st.lists(rows(), max_size=4), rows(), CONTEXTS, st.booleans())
@examples(100)
def test_a_passing_row_never_turns_pass_into_fail(given, added, where, strict):
    added = replace(added, evidence=())  # with evidence it is one more that is tested
    if check([added], where, strict).verdict == "pass" and check(given, where, strict).verdict == "pass":
        assert check([*given, added], where, strict).verdict == "pass"


JUDGED = ("fp8", "int", "pages", "class", "sparse", "evicted", "mtp")


def test_more_rows_that_are_tested_make_every_certification_dearer():
    together = check(map(as_row, CASE["rows"].values()), CONTEXT)
    adjusted = {found.row["row_id"]: found.adjusted_p for found in together.claims}
    assert together.tested == 9 and together.verdict == "pass" and adjusted["baseline"] is None
    assert max(adjusted[name] for name in JUDGED) <= together.alpha == 0.025 < adjusted["preview"]
    # as many as the next level of evidence is away; what is wrong with theirs does not take them out of the count
    lost = [row("fp8", row_id=f"lost{n}", quality_eval_status=None, kl=None, model_hash=f"older{n}") for n in range(5)]
    more = check([*map(as_row, CASE["rows"].values()), *lost], CONTEXT)
    found = {one.row["row_id"]: one for one in more.claims}
    assert more.tested == 14 and all(found[f"lost{n}"].p == 1 for n in range(5))
    for name in JUDGED[:-1]:
        assert found[name].adjusted_p > more.alpha and found[name].earned != "supported"
        assert "quality_family" in found[name].codes


def test_rows_that_are_left_out_of_the_file_are_tested_all_the_same():
    """What a run tried counts, whatever file its rows come in: who shows the best of nine has still tried nine."""
    together = {one.row["row_id"]: one.adjusted_p for one in check(map(as_row, CASE["rows"].values()), CONTEXT).claims}
    for name in JUDGED:
        found = claim(row(name))
        assert found.adjusted_p >= together[name] and found.adjusted_p == pytest.approx(9 * found.p)
        assert found.earned == "supported"


@given(rows(), CONTEXTS)
@examples(80)
def test_taking_a_rows_own_evidence_away_never_turns_fail_into_pass(given, where):
    with_evidence, without = claim(given, where), claim(replace(given, evidence=()), where)
    if not with_evidence.codes & FALSEHOODS and without.word in ("pass", "waived"):
        assert with_evidence.word != "fail" or with_evidence.codes & {"quantity_other", "quantity_unvouched"}


@pytest.mark.parametrize("where", [CONTEXT, TIGHT, context(margin=0.0025)], ids=["within", "beyond", "open"])
@pytest.mark.parametrize("name", ["fp8", "int", "class", "mtp"])
def test_nor_does_it_with_any_tier_and_any_status(name, where):
    given = [
        row(name, support_status=t, quality_eval_status=s) for t, s in itertools.product(TIERS, ("completed", *TYPED))
    ]
    passing = [one for one in given if claim(replace(one, evidence=()), where).word == "pass"]
    assert passing and all(claim(one, where).word == "pass" for one in passing)


@pytest.mark.parametrize("where", [CONTEXT, TIGHT, context(margin=0.0025)], ids=["within", "beyond", "open"])
@pytest.mark.parametrize("name", [*JUDGED, "preview"])
def test_dropping_evidence_never_raises_a_tier(name, where):
    """Any part of it: what a row earns with everything attached is the most that it can earn with less."""
    whole = row(name, quality_eval_status=None)
    most = TIERS.index(claim(whole, where).earned)
    for left in range(len(whole.evidence)):
        for some in itertools.combinations(whole.evidence, left):
            for cited in ("needle", "kv_fidelity", None):
                given = replace(whole, evidence=some, values=whole.values | {"quality_eval_id": cited})
                assert TIERS.index(claim(given, where).earned) >= most


@given(rows(), CONTEXTS)
@examples(80)
def test_a_lower_claim_never_adds_failures(given, where):
    tiers = [claim(replace(given, values=given.values | {"support_status": tier}), where) for tier in TIERS]
    for higher, lower in itertools.pairwise(tiers):
        assert set(lower.failed_criteria) <= set(higher.failed_criteria)
        assert not (higher.word in ("pass", "waived") and lower.word == "fail")
    for found in tiers:
        assert found.earned is None or TIERS.index(found.earned) >= TIERS.index(found.claimed)


@given(rows(), CONTEXTS)
@examples(100)
def test_whoever_passes_earns_the_claim(given, where):
    found = claim(given, where)
    assert found.word not in ("pass", "waived") or given.values["mechanism"]
    assert (found.word == "pass") == (
        found.earned == found.claimed and found.failed_criteria == () and found.status is not None
    )


def test_equal_arguments_give_equal_bytes_in_every_process():
    program = (
        "from kvlab.gate import registry; from kvlab.gate.check import check; from kvlab.gate.rules import Context\n"
        "from kvlab.gate.render import *\n"
        "from validation.gate.corruptions import MUTATIONS, TODAY, as_row\n"
        "case = [x for x in MUTATIONS if x.code == 'observed_dtype_other'][0].applied()\n"
        "context = Context(registry.parse(case['mechanisms'], case['evals']), case['current'], today=TODAY)\n"
        "report = check(map(as_row, case['rows'].values()), context)\n"
        "print(to_json(report), to_markdown(report), to_junit(report))"
    )
    source = str(Path(kvlab.__file__).parent.parent)
    said = [
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            check=True,
            env=os.environ | {"PYTHONPATH": source, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1] and b"observed_dtype_other" in said[0]


def test_check_takes_any_iterable_and_leaves_it_alone():
    given = row("fp8")
    before = (dict(given.values), given.evidence[0].copy())
    assert check(iter([given]), CONTEXT).verdict == "pass"
    assert (given.values, given.evidence[0]) == before
    assert isinstance(given, Row) and EVIDENCE not in given.values
