"""What has to be told of a model's weights stands on both pages of the gate."""

from __future__ import annotations

from gate.planted_records import read_back
from gate.test_page import CONTEXT, objects
from kvlab_pipeline.gate_page import page

SAID = "The weights are 4-bit ones, dequantised."


def test_both_pages_say_it_of_the_models_that_they_hold(tmp_path):
    rows = read_back(tmp_path, objects())
    model = page.write(rows, CONTEXT, tmp_path / "GATE.md").rows[0].model
    page.write(rows, CONTEXT, tmp_path / "GATE.md", disclosures={model: SAID, "elsewhere": "Not here."})
    for name in ("GATE.md", "GATE-reasons.md"):
        text = (tmp_path / name).read_text()
        assert f"{model}: {SAID}" in text and "Not here." not in text
