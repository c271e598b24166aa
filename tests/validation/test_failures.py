"""What published_failures.md shows twice, or after recommended.md, is the same number in both places."""

from itertools import takewhile

from kvlab.core.records import read_json
from validation.measured import DOCS

MODELS = {
    "SmolLM2-135M": "smollm2",
    "Gemma-3-270M": "gemma",
    "Qwen2.5-Coder-0.5B": "qwen-0-5b",
    "Qwen2.5-Coder-1.5B": "qwen-1-5b",
}


def printed(name: str) -> dict[str, list[float]]:
    """KL with the ends of its interval by format, over a finished cache."""
    output = read_json(DOCS / f"measured/recommend-{name}.json")["output"]
    lines = [line.split() for line in takewhile(lambda line: not line.startswith("KL in nats"), output)]
    found = [(words, words.index("to")) for words in lines if words[2:] and "to" in words[4:6]]
    return {words[0]: [float(words[place]) for place in (at - 2, at - 1, at + 1)] for words, at in found}


def test_every_number_of_the_table_was_printed():
    table = read_json(DOCS / "measured/failures-models.json")
    shown = {name: printed(MODELS[name]) for name in table["headers"][2:]}
    assert table["rows"]
    for label, _, *values in table["rows"]:
        for model, value in zip(shown, values, strict=True):
            assert shown[model][label.strip("`")] == value, (label, model)


def test_what_stands_beside_published_figures_is_of_the_tables_above():
    known = [
        row[table["headers"].index(header)]
        for name, header in (("models", "Qwen2.5-Coder-1.5B"), ("repaired", "KL, 1.5B"))
        for table in [read_json(DOCS / f"measured/failures-{name}.json")]
        for row in table["rows"]
    ]
    beside = read_json(DOCS / "measured/failures-published.json")["rows"]
    assert beside and all(row[-1] in known for row in beside)
