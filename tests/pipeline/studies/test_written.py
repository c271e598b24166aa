"""What is written over a stored context: the same as by greedy decoding, and lost with the K that it hangs on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.core.errors import Fault
from kvlab.engines.base import Engine, until
from kvlab.measure.scoring import WindowRun
from kvlab.measure.windows import Window
from kvlab.text.ruler import Ruler, RulerItem
from kvlab_pipeline.studies.mechanisms import items, plan
from kvlab_pipeline.studies.mechanisms.plan import GREEDY_TOKENS
from kvlab_pipeline.studies.mechanisms.written import CHECKED, DRAFT, Answers, Greedy, agreement, prompt
from refusals import refused

CONTEXT = 40
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def ids(hf_engine):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(4, hf_engine.model.config.vocab_size, (CONTEXT + 6,), generator=generator).tolist()


@pytest.fixture
def run(hf_engine, ids):
    return WindowRun(hf_engine, ids, CONTEXT, 0)


def clean(run):
    return run.clean["pre_rope"].kept


def damaged(run, part="k", places=slice(None)):
    """The clean cache with one stream's values at some places replaced by noise."""
    generator = torch.Generator().manual_seed(0)
    broken = {key: x.clone() for key, x in clean(run).items()}
    for (_layer, stream), x in broken.items():
        if stream == part:
            x[:, places] = 20 * torch.randn(x[:, places].shape, generator=generator)
    return broken


def generated(engine, ids, tokens):
    """The oracle: transformers' own greedy decoding of the whole prompt."""
    asked = torch.tensor([ids])
    written = engine.model.generate(
        asked, max_new_tokens=tokens, do_sample=False, attention_mask=torch.ones_like(asked), eos_token_id=-1
    )
    return written[0, len(ids) :].tolist()


def test_what_is_written_over_a_clean_cache_is_what_generate_writes(run, hf_engine, ids):
    assert hf_engine.write_over(ids, clean(run), 12) == generated(hf_engine, ids, 12)


@pytest.mark.parametrize("right", range(13))
def test_a_draft_changes_nothing_however_much_of_it_is_right(run, hf_engine, ids, right):
    plain = hf_engine.write_over(ids, clean(run), 12)
    draft = plain[:right] + [(token + 1) % 100 for token in plain[right:]]
    assert hf_engine.write_over(ids, clean(run), 12, draft) == plain
    assert hf_engine.write_over(ids, clean(run), 12, plain[:right]) == plain


def test_an_answer_ends_before_the_token_that_stops_it(run, hf_engine, ids):
    plain = hf_engine.write_over(ids, clean(run), 12)
    stop = plain[5]
    first = plain.index(stop)
    assert hf_engine.write_over(ids, clean(run), 12, stop=[stop]) == plain[:first]
    assert hf_engine.write_over(ids, clean(run), 12, plain[:first], [stop]) == plain[:first]
    assert until([1, 2, 3], [9]) == [1, 2, 3] and until([1, 2, 3], [2]) == [1]


def test_an_engine_that_cannot_begin_there_refuses():
    with refused(Fault, "fault.no-writing", "toy"):
        Engine.write_over(SimpleNamespace(name="toy"), [1], {}, 1)


# ------------------------------------------------------------------------------------ greedy agreement


@given(TOKENS, st.data())
def test_agreement_counts_the_prefix_and_the_equal_ones(first, data):
    second = data.draw(st.lists(st.integers(0, 3), min_size=len(first), max_size=len(first)))
    found, n = agreement(first, second), len(first)
    prefix = next((i for i in range(n) if first[i] != second[i]), n)
    assert found == {"greedy_prefix": prefix / n, "greedy_same": sum(map(int.__eq__, first, second)) / n}
    assert agreement(first, first) == {"greedy_prefix": 1, "greedy_same": 1}


def checked(judge, run):
    run.kept[DRAFT] = judge.draft(run)
    run.kept[CHECKED] = judge.written(run, clean(run), "pre_rope")


def test_a_codec_that_changes_nothing_agrees_in_all_64_tokens(run):
    judge = Greedy(1)
    checked(judge, run)
    assert len(run.kept[DRAFT]) == GREEDY_TOKENS
    again = judge.written(run, {key: x.clone() for key, x in clean(run).items()}, "pre_rope")
    assert judge.scores(run, again) == {"greedy_prefix": 1, "greedy_same": 1}
    assert run.kept[DRAFT] == run.kept[CHECKED]  # in float32 one pass and 64 agree


def test_the_first_divergent_token_is_where_two_greedy_runs_part(run, hf_engine):
    judge = Greedy(1)
    checked(judge, run)
    broken = damaged(run, "v", slice(0, 8))
    free = hf_engine.write_over(prompt(run), broken, GREEDY_TOKENS)
    found = judge.scores(run, judge.written(run, broken, "pre_rope"))
    assert found["greedy_prefix"] == agreement(run.kept[CHECKED], free)["greedy_prefix"] < 1


# ------------------------------------------------------------------------------------------- answers


class Words:
    """A tokenizer whose every token is a word of its own."""

    eos_token_id = None

    def decode(self, ids):
        return " ".join(f"<{token}>" for token in ids)


@pytest.fixture
def asked(run, hf_engine, ids):
    """A question to which the untouched model has the answer: what it writes anyhow."""
    wanted = hf_engine.write_over(ids, clean(run), 3)
    item = RulerItem("vt", 128, 0, ids[:CONTEXT], ids[CONTEXT:], [f"<{token}>" for token in dict.fromkeys(wanted)])
    return Answers("ruler_vt", Ruler((item,), "hash"), Words())


def test_identity_scores_exactly_what_is_scored_without(run, asked):
    checked(asked, run)
    plain = asked.scores(run, run.kept[CHECKED])
    assert plain == {"vt": 1.0}
    assert asked.scores(run, asked.written(run, dict(clean(run)), "pre_rope")) == plain
    assert run.kept[DRAFT] == run.kept[CHECKED]


def test_a_cache_that_is_lost_loses_the_answer(run, asked):
    checked(asked, run)
    assert asked.scores(run, asked.written(run, damaged(run), "pre_rope"))["vt"] < 1


def test_items_are_windows_cut_where_the_question_begins(ids):
    item = RulerItem("niah_single", 64, 7, ids[:CONTEXT], ids[CONTEXT:], ["1"])
    found = items.tasks(Ruler((item,), "hash"))
    assert found.pop("ruler_niah_single") == [Window("ruler_niah_single", 7, tuple(ids), CONTEXT)]
    assert not any(found.values())


def test_only_an_engine_that_writes_is_asked_and_only_over_a_snapshot():
    there = dict.fromkeys(plan.METRICS, 3) | {"ruler_vt": 0}
    assert plan.scored_items(there, "hf", "snapshot") == {name: 3 for name in plan.METRICS if name != "ruler_vt"}
    for engine, protocol in (("hf", "in_forward"), ("vllm", "snapshot")):
        assert plan.scored_items(there, engine, protocol) == dict.fromkeys(plan.PASSED, 3)
