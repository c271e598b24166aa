import inspect
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from gate.sentinels import fields_of, sentinel, value_of
from kvlab.core import parent_watch
from kvlab.core.recipe import RECIPE_VARIABLE
from kvlab.gate import catalogue
from kvlab.gate.catalogue import (
    BY_NAME,
    COLUMNS,
    DECLARED,
    RowError,
    checked_row,
    config_schema,
    environment,
    flags,
    from_config,
    groupable,
    read_config,
    row_schema,
    sql_columns,
)
from kvlab.gate.catalogue.columns import DeclaredFields, RowFields
from kvlab.gate.catalogue.declaration import PREFIX
from kvlab.gate.catalogue.values import checked
from kvlab.gate.reasons import CONFIG_REASONS, EVIDENCE_REASONS, REASONS, REGISTRY_REASONS, ROW_REASONS, Reason
from tiers import examples

SRC = Path(__file__).parents[2] / "src"
STATED = [column for column in COLUMNS if column.group in DECLARED]
PUBLISHED = [
    "mechanism",
    "mechanism_variant",
    "compression_method",
    "compression_scope",
    "compression_ratio",
    "compression_overhead_ms",
    "decompression_overhead_ms",
    "quality_eval_id",
    "quality_eval_status",
    "quality_delta_summary",
    "draft_model_id",
    "speculative_acceptance_rate",
    "speculative_wasted_tokens",
    "mechanism_notes",
]


def said(*words):
    """What flags declare, as typer reads them."""
    found = {}

    def verb(**values):
        found.update(catalogue.from_flags(values))

    verb.__signature__ = inspect.Signature(flags())
    app = typer.Typer(add_completion=False)
    app.command()(verb)
    typer.main.get_command(app).main(words, standalone_mode=False)
    return found


def refusal(function, *arguments):
    with pytest.raises(RowError) as caught:
        function(*arguments)
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


# --------------------------------------------------------------------------------- one catalogue


def test_columns_are_sound():
    assert len(BY_NAME) == len(COLUMNS)
    for column in COLUMNS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", column.name)
        assert column.kind in (str, int, float) and column.text
        assert (column.low is None and column.high is None) or column.kind in (int, float)
        assert not column.choices or column.kind is str
        assert not column.joined or column.choices
    assert [column.name for column in COLUMNS[:14]] == PUBLISHED
    assert {column.name for column in COLUMNS if column.group == "mechanism"} == set(PUBLISHED)


def test_every_layer_has_the_same_fields():
    names, stated = list(BY_NAME), [column.name for column in STATED]
    assert list(row_schema()["properties"]) == [*names, "evidence", "mechanism_eval_validation"]
    assert [name for name, _ in sql_columns()] == names
    assert list(checked_row({"mechanism": None})) == names
    assert list(RowFields.model_fields) == names and list(DeclaredFields.model_fields) == stated
    assert [key.replace("-", "_") for key in config_schema()["properties"]] == stated
    assert [flag.name for flag in flags()] == stated
    assert set(groupable()) < set(names) and set(PUBLISHED[:4]) < set(groupable())
    assert len({column.env for column in STATED}) == len(stated)


def test_the_variables_that_steer_this_project_declare_no_field():
    steering = parent_watch.RUN, parent_watch.TURN, RECIPE_VARIABLE, "KVLAB_GPUS"
    assert environment(dict.fromkeys(steering, "7")) == {}
    assert not any(name.startswith(PREFIX) for name in steering)


def test_database_takes_the_columns():
    types = dict(sql_columns())
    assert [types[name] for name in ("compression_ratio", "speculative_wasted_tokens", "mechanism")] == [
        "REAL",
        "INTEGER",
        "TEXT",
    ]
    assert sum(types[name] == "REAL" for name in PUBLISHED) == 4


def test_a_new_column_is_one_line(tmp_path):
    shutil.copytree(SRC / "kvlab" / "gate" / "catalogue", tmp_path / "catalogue")
    declared = tmp_path / "catalogue" / "columns.py"
    line = '    warm_calls: Whole | None = column("100% of its calls", unit="calls", low=0, groupable=True)\n'
    declared.write_text(declared.read_text().replace("\n\nclass MeasuredFields", f"{line}\n\nclass MeasuredFields"))
    program = """
import sys, kvlab.gate
kvlab.gate.__path__.insert(0, sys.argv[1])
from kvlab.gate import catalogue as c
flag = c.flags()[-1]
assert flag.name == "warm_calls" and "100%" in flag.annotation.__metadata__[0].help
assert flag.annotation.__metadata__[0].parser("7") == 7
assert c.from_config({"warm-calls": 7}) == c.environment({"KVLAB_ROW_WARM_CALLS": "7"}) == {"warm_calls": 7}
assert c.from_flags({"warm_calls": 0, "out": 1}) == {"warm_calls": 0}
assert c.checked_row({"warm_calls": 7})["warm_calls"] == 7
assert ("warm_calls", "INTEGER") in c.sql_columns() and "warm_calls" in c.groupable()
assert c.row_schema()["properties"]["warm_calls"]["anyOf"][0]["type"] == "integer"
assert "warm-calls" in c.config_schema()["properties"]
for wrong, code in ((-1, "value_out_of_range"), (True, "value_kind"), ("7", "value_kind"), (0.5, "value_kind")):
    try:
        c.checked_row({"warm_calls": wrong})
    except c.RowError as error:
        assert error.reasons[0].code == code
    else:
        raise SystemExit(f"{wrong!r} was taken")
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(SRC)})
    assert answer.returncode == 0, answer.stderr


def test_it_needs_nothing_heavy():
    program = "import sys, kvlab.gate.catalogue; print({'torch', 'polars', 'numpy'} & set(sys.modules))"
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": str(SRC)}
    )
    assert answer.stdout.strip() == "set()", answer.stderr


# -------------------------------------------------------------------------------------- sentinels


def test_sentinels_are_distinct():
    planted = [sentinel(column) for column in COLUMNS]
    assert len({str(value) for value in planted}) == len(planted)


def test_environment_and_flags_say_the_same():
    planted = {column.name: sentinel(column) for column in STATED}
    assert environment({column.env: str(planted[column.name]) for column in STATED}) == planted
    words = [word for column in STATED for word in (f"--{column.kebab}", str(planted[column.name]))]
    assert said(*words) == planted


def through_database(row):
    database = sqlite3.connect(":memory:")
    database.row_factory = sqlite3.Row
    database.execute(f"CREATE TABLE rows ({', '.join(f'{name} {kind}' for name, kind in sql_columns())})")
    database.execute(f"INSERT INTO rows ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", list(row.values()))
    return dict(database.execute("SELECT * FROM rows").fetchone())


# ------------------------------------------------------------------------------------ round trips


@examples(60)
@given(fields_of(STATED))
def test_configuration_to_row(values):
    kebab = {BY_NAME[name].kebab: value for name, value in values.items()}
    assert from_config(kebab) == from_config(values) == values
    row = checked_row(from_config(kebab))
    assert ("mechanism" in row) == ("mechanism" in values)
    assert {name: row[name] for name in values if name != "row_id"} == {
        n: v for n, v in values.items() if n != "row_id"
    }
    Draft202012Validator(config_schema()).validate(kebab)
    Draft202012Validator(row_schema()).validate(row)


@examples(60)
@given(fields_of(COLUMNS).map(checked_row))
def test_row_to_database_and_back(row):
    row = {"mechanism": None} | row
    assert through_database(row) == row


@examples(60)
@given(fields_of(STATED))
def test_environment_to_row(values):
    values = {name: value for name, value in values.items() if value is not None}
    told = {BY_NAME[name].env: str(value) for name, value in values.items()}
    found = environment(told | {"PATH": "/bin", "MODEL": "someone's", "RUN": "1", "MECHANISMS": "x"})
    assert found == values and checked_row(found) == checked_row(values)


ROW_SCHEMA = row_schema()


# what schemas and rules may differ in: a schema cannot tell 3.0 from 3, nor where a float stops being exact
@examples(300)
@given(
    st.sampled_from(COLUMNS).flatmap(
        lambda column: st.tuples(
            st.just(column),
            st.none() | st.booleans() | st.text(max_size=6) | st.integers() | st.floats(-3, 3) | value_of(column),
        )
    )
)
def test_schema_and_rule_agree(case):
    column, value = case
    found = checked(column, value)
    fits = Draft202012Validator(ROW_SCHEMA["properties"][column.name]).is_valid(value)
    if not isinstance(found, Reason):
        assert fits
    elif fits:
        assert isinstance(value, float) or abs(value) > 2**53


# -------------------------------------------------------------------------------------- presence


def test_absent_null_and_value_differ():
    assert from_config({}) == {} and "mechanism" not in checked_row({})
    assert from_config({"mechanism": None}) == {"mechanism": None} == from_config({"mechanism": ""})
    assert checked_row({"mechanism": None})["mechanism"] is None
    assert environment({"MECHANISM": "", "QUALITY_EVAL_ID": ""}) == environment({}) == {}
    assert said("--mechanism", "") == {}


def test_nothing_measured_can_be_declared():
    for name in ("kl", "kv_bytes", "codec", "kv_cache_dtype"):
        assert refusal(from_config, {name: 1}).reasons[0].code == "field_unknown"
        assert environment({BY_NAME[name].env: "1", name.upper(): "1"}) == {}
        assert name not in {flag.name for flag in flags()}


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("key", "near"),
    [("mechansim", "mechanism"), ("Mechanism", "mechanism"), ("support-statsu", "support_status"), ("engin", "engine")],
)
def test_misspelt_keys_name_the_nearest(key, near):
    error = refusal(from_config, {key: "x"})
    assert error.reasons[0].code == "field_unknown" and f"did you mean {near!r}?" in str(error)


def test_a_key_in_both_spellings_is_refused():
    error = refusal(from_config, {"model-hash": "a", "model_hash": "a"})
    assert [reason.code for reason in error.reasons] == ["field_twice"] and error.reasons[0].field == "model_hash"


def test_a_yaml_key_twice_is_refused(tmp_path):
    config = tmp_path / "claim.yaml"
    config.write_text("mechanism: baseline\nengine: hf\nmechanism: kv_quantization\n")
    assert refusal(read_config, config).reasons[0].code == "field_twice"
    config.write_text("mechanism: baseline\nengine: hf\ncompression-ratio: 5e-1\n")
    assert read_config(config) == {"mechanism": "baseline", "engine": "hf", "compression_ratio": 0.5}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[1, 2]", "row_not_object"),
        ("", "row_not_object"),
        ("a: [", "file_not_yaml"),
        ("mechanism: 2024-13-45", "file_not_yaml"),
        ("mechanism: &m baseline\nengine: *m", "file_not_yaml"),
        ("mechanism: " + "[" * 50_000, "file_not_yaml"),
        ("mechanism: !!set {a}", "file_not_yaml"),
        ("#" * (1 << 20), "file_not_yaml"),
        ("speculative-wasted-tokens: 017", "file_not_yaml"),
        ("compression-ratio: .nan", "value_not_finite"),
        ("compression-ratio: .inf", "value_not_finite"),
        ("compression-ratio: '0.5'", "value_kind"),
        ("speculative-wasted-tokens: 128.9", "value_kind"),
        ("speculative-wasted-tokens: yes", "value_kind"),
        ("mechanism-variant: 8", "value_kind"),
        ("mechanism-variant: {a: 1}", "value_kind"),
        ("mechanism-variant: 2024-01-01", "value_kind"),
        ('mechanism-notes: "a\\nb"', "value_control_character"),
        ("? [a, b]\n: 1", "file_not_yaml"),
        ("1: 2", "field_unknown"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, text, code):
    config = tmp_path / "claim.yaml"
    config.write_text(text)
    error = refusal(read_config, config)
    assert [reason.code for reason in error.reasons] == [code] and str(config) in str(error)


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [
        ("mechanism", "Baseline", "baseline"),
        ("mechanism", "baseline ", "baseline"),
        ("mechanism", "kv_quant", "kv_quantization"),
        ("mechanism", "kv_quantization+speculative", None),
        ("mechanism", "baseline+", None),
        ("support_status", "SUPPORTED", "supported"),
        ("quality_eval_status", "done", None),
        ("compression_scope", "KV_cache", "kv_cache"),
    ],
)
def test_words_are_taken_as_written_or_refused(name, value, near):
    error = refusal(from_config, {name: value})
    assert error.reasons[0].code == "value_unknown_word" and BY_NAME[name].choices[0] in str(error)
    assert near is None or f"did you mean {near!r}?" in str(error)


def test_mechanisms_may_be_combined():
    both = "kv_quantization+speculative_decoding"
    assert from_config({"mechanism": both}) == environment({"MECHANISM": both}) == {"mechanism": both}


def test_a_flag_is_refused_with_its_name():
    with pytest.raises(typer.BadParameter, match=r"is 4.0; allowed: a number from 0.0001 to 2") as refused:
        said("--compression-ratio", "4")
    assert "--compression-ratio" in refused.value.format_message()
    with pytest.raises(typer.BadParameter, match=r"did you mean 'supported'"):
        said("--support-status", "supportd")


# ------------------------------------------------------------------ beside what the published one did


def published(text, kind):
    """Coercion of the published study: what it cannot read is silently nothing, and whole numbers are cut off."""
    try:
        return int(float(text)) if kind is int else float(text)
    except (ValueError, OverflowError):
        return None


COERCED = [
    ("speculative_wasted_tokens", "128.9", 128, "value_not_whole"),
    ("speculative_wasted_tokens", "1e2", 100, "value_not_whole"),
    ("speculative_wasted_tokens", "-5", -5, "value_out_of_range"),
    ("speculative_wasted_tokens", "9" * 19, int(float("9" * 19)), "value_out_of_range"),
    ("speculative_wasted_tokens", "9" * 5000, None, "value_out_of_range"),
    ("speculative_wasted_tokens", "many", None, "value_not_a_number"),
    ("speculative_wasted_tokens", "1_000", 1000, "value_not_a_number"),
    ("compression_ratio", "about half", None, "value_not_a_number"),
    ("compression_ratio", "0,5", None, "value_not_a_number"),
    ("compression_ratio", " 0.5", 0.5, "value_not_a_number"),
    ("compression_ratio", "０.５", 0.5, "value_not_a_number"),
    ("compression_ratio", "0.5\n", 0.5, "value_not_a_number"),
    ("compression_ratio", "4", 4.0, "value_out_of_range"),
    ("compression_ratio", "-0.5", -0.5, "value_out_of_range"),
    ("speculative_acceptance_rate", "nan", "nan", "value_not_finite"),
    ("speculative_acceptance_rate", "-Infinity", float("-inf"), "value_not_finite"),
    ("speculative_acceptance_rate", "1e999", float("inf"), "value_not_finite"),
    ("speculative_acceptance_rate", "1.01", 1.01, "value_out_of_range"),
    ("speculative_acceptance_rate", "78", 78.0, "value_out_of_range"),
]


@pytest.mark.parametrize(("name", "text", "then", "code"), COERCED)
def test_what_was_coerced_is_refused(name, text, then, code):
    column = BY_NAME[name]
    before = published(text, column.kind)
    assert str(before) == then if then == "nan" else before == then
    error = refusal(environment, {column.env: text})
    assert [(reason.code, reason.field) for reason in error.reasons] == [(code, column.env)]


def test_bounds_are_inclusive_and_numbers_plain():
    told = {"SPECULATIVE_ACCEPTANCE_RATE": "0", "COMPRESSION_RATIO": "2", "SPECULATIVE_WASTED_TOKENS": "+12"}
    told |= {"COMPRESSION_OVERHEAD_MS": ".5e1", "DECOMPRESSION_OVERHEAD_MS": "100000000000000000000"}
    found = environment(told)
    assert found["speculative_acceptance_rate"] == 0 and found["compression_ratio"] == 2
    assert found["speculative_wasted_tokens"] == 12 and found["compression_overhead_ms"] == 5
    assert found["decompression_overhead_ms"] == 1e20


def test_codes_have_one_meaning():
    assert sum(map(len, (ROW_REASONS, CONFIG_REASONS, REGISTRY_REASONS, EVIDENCE_REASONS))) == len(REASONS)
    assert all(code.split("_")[0] in ("field", "value", "row", "file") for code in CONFIG_REASONS)
