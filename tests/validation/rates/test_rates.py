"""Curves of codecs: paired ratios, bits at equal KL, and who is held against whom."""

from __future__ import annotations

import json

import pytest

from kvlab.cli.checked import recipes_of
from kvlab.core.errors import UserError
from refusals import refused
from validation.rates import compare, page
from validation.rates.__main__ import named
from validation.rates.measure import measure

pytestmark = pytest.mark.full


def row(codec, nominal, bits, kl, text="other", tokens=(100, 100, 100, 100)):
    """A codec whose windows differ by a tenth either way."""
    sums = [kl * n * factor for n, factor in zip(tokens, (0.9, 1.1, 1.05, 0.95), strict=True)]
    same = [round(n * 0.9) for n in tokens]
    return {"text": text, "codec": codec, "nominal": nominal, "label": f"{codec} {nominal}", "bits": bits} | {
        "kl": sums,
        "same": same,
        "tokens": list(tokens),
        "documents": None,
    }


ROWS = [
    row("klt", 2, 2.0, 0.02),
    row("klt", 4, 4.0, 0.001),
    row("hadamard", 2, 2.26, 0.16),
    row("kivi", 2, 2.51, 0.1),
    row("archive", 1, 1.0, 0.04),
    row("archive", 2, 2.0, 0.0025),
    row("kvtc-paper", 2, 2.0, 0.01),
]


def test_ratios_are_paired():
    found = compare.ratio(ROWS[0], ROWS[2])
    assert found.value == pytest.approx(0.125) and found.high - found.low < 1e-9


def test_bits_at_a_level_lie_between_rows():
    assert compare.bits_at(ROWS, "archive", "other", 0.01) == pytest.approx(1.5)
    assert compare.bits_at(ROWS, "archive", "other", 0.04) == pytest.approx(1.0)
    assert compare.bits_at(ROWS, "archive", "other", 0.05) is None
    assert compare.bits_at(ROWS, "archive", "test", 0.01) is None


def test_who_is_held_against_whom():
    assert compare.best_served(ROWS, "other", 2)["codec"] == "kivi"  # kvtc cannot serve
    assert compare.best_served(ROWS, "other", 3) is None
    assert compare.within_bits(ROWS, "klt", "other", 2.26)["nominal"] == 2
    assert compare.within_bits(ROWS, "klt", "other", 1.9) is None


def test_the_page_says_ratios_and_bits_saved(tmp_path):
    one = {"model": "m", "disclosure": "Weights are made up.", "protocol": "snapshot", "context": 512, "eval": 128}
    page.write([one | {"calibration_tokens": 51200, "rows": ROWS}], tmp_path)
    text = (tmp_path / "RATES.md").read_text()
    assert "*Weights are made up.*" in text and (tmp_path / "figures" / "rates_m_snapshot.svg").is_file()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    served = next(line for line in lines if line[1:4] == ["2", "kivi 2", "2.51"])
    assert served[-1].startswith("0.2")
    kept = next(line for line in lines if line[1:3] == ["kvtc-paper 2", "2.00"])
    assert kept[-2:] == ["1.50", "25"]


def test_a_codec_may_have_bits_of_its_own():
    assert [one.label for one in named("archive=1,1.5", [2, 4])] == ["archive 1", "archive 1.5"]
    assert [one.label for one in named("klt", [2, 4])] == ["klt 2", "klt 4"]
    (grouped,) = named("kivi[group=32]=3", [2])
    assert grouped.label == "kivi (group 32) 3" and grouped.recipe.k.group == 32
    with refused(UserError, "user.codec-not-understood", "kivi[group]=3"):
        named("kivi[group]=3", [2])


def test_measured_on_a_model(tiny_model, tiny_windows):
    asked = [one for codec in ("hadamard", "archive") for one in recipes_of(codec, [2])]
    found = json.loads(json.dumps(measure(tiny_model, tiny_windows, asked, "snapshot", 2, texts=["test"])))
    assert [one["label"] for one in found["rows"]] == ["hadamard 2", "archive 2"]
    assert all(compare.kl(one).value > 0 and len(one["tokens"]) == 2 for one in found["rows"])
    assert found["rows"][1]["bits"] == pytest.approx(2, rel=0.03)
