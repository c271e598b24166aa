import json
import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from gate.sentinels import fields_of, sentinel, value_of
from kvlab.core.errors import StorageError
from kvlab.gate.catalogue import row_schema
from kvlab.gate.catalogue.columns import BY_NAME, COLUMNS
from kvlab.gate.catalogue.kinds import MOST_CHARACTERS
from kvlab.gate.catalogue.rows import PUBLISHED_NAMES, PUBLISHED_UNREAD, checked_row, read_rows, row_id
from kvlab.gate.catalogue.strict import read_json
from kvlab.gate.catalogue.values import RowError
from kvlab.gate.reasons import CONFIG_REASONS
from refusals import refused
from tiers import examples

# not refused: whoever shows or stores them escapes or binds them
HARMLESS = [
    "'; DROP TABLE rows; --",
    '" OR 1=1',
    "| a | **b** | <script>alert(1)</script>",
    "[x](javascript:alert(1)) `code` {{ 7 * 7 }} {% raw %}",
    "../../etc/passwd",
    "=HYPERLINK(1)",
    "%s %(x)s {0} $HOME $(id)",
    "naïve 漢字 😀",
    "-" * MOST_CHARACTERS,
]
HARMFUL = [
    ("a\x00b", "value_control_character"),
    ("a\nb", "value_control_character"),
    ("a\r\n| forged | cell |", "value_control_character"),
    ("\x1b[31mred", "value_control_character"),
    ("a\x85b", "value_control_character"),
    ("a\u2028b", "value_control_character"),
    ("supported\u202edetroppus", "value_control_character"),
    ("\ud800", "value_control_character"),
    (" a", "value_outer_space"),
    ("a\u00a0", "value_outer_space"),
    ("-" * (MOST_CHARACTERS + 1), "value_too_long"),
]
TEXTS = [column.name for column in COLUMNS if column.kind is str and not column.choices]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("rows") / "rows.json"


def refusal(function, *arguments):
    with pytest.raises(RowError) as caught:
        function(*arguments)
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


def codes(error):
    return [reason.code for reason in error.reasons]


# ------------------------------------------------------------------------------------ round trips


@examples(60)
@given(st.lists(fields_of(COLUMNS).map(checked_row), max_size=3))
def test_rows_to_json_and_back(file, rows):
    file.write_text(json.dumps(rows))
    read = [row.values for row in read_rows(file)]
    assert read == rows and json.dumps(read) == json.dumps(rows)
    assert [checked_row(row) for row in read] == read


OWN_STYLE = st.fixed_dictionaries(
    {},
    optional={c.name: st.sampled_from([None, ""]) | value_of(c) for c in COLUMNS}
    | {"evidence": st.sampled_from([None, [], [{"metrics": {}}]])}
    | {"mechanism_eval_validation": st.sampled_from([None, {}, {"issues": []}])},
)
ROW_SCHEMA = Draft202012Validator(row_schema())


@examples(60)
@given(OWN_STYLE)
def test_the_schema_takes_every_row_of_our_style_that_is_read(file, entry):
    file.write_text(json.dumps(entry))
    assert len(read_rows(file)) == 1
    ROW_SCHEMA.validate(entry)


@pytest.mark.parametrize(
    "entry",
    [
        {"evidence": {}},
        {"evidence": [7]},
        {"mechanism_eval_validation": []},
        {"kl": "x"},
        {"mechanism": "baseline+"},
        {"support_status": "Supported"},
        {"model": " m"},
        {"fires": -1},
        {"mechansim": "baseline"},
    ],
)
def test_the_schema_refuses_what_is_refused(file, entry):
    file.write_text(json.dumps(entry))
    refusal(read_rows, file)
    assert not ROW_SCHEMA.is_valid(entry)


def test_one_object_is_one_row(file):
    file.write_text('{"mechanism": "baseline", "kl": 0}')
    (row,) = read_rows(file)
    assert row.values == checked_row({"mechanism": "baseline", "kl": 0.0})
    assert type(row.values["kl"]) is float and row.evidence == () and row.embedded is None
    assert row.source == f"{file} row 1"
    file.write_text("[]")
    assert read_rows(file) == []


def test_a_row_id_names_a_configuration():
    base = {column.name: sentinel(column) for column in COLUMNS} | {"row_id": None}
    name = checked_row(base)["row_id"]
    assert name == row_id(base) == checked_row(dict(reversed(base.items())))["row_id"]
    for column in COLUMNS:
        other = row_id(base | {column.name: "other"})
        assert (other != name) == column.keyed, column.name
    assert checked_row({"row_id": "mine"})["row_id"] == "mine"


# -------------------------------------------------------------------------------- published style


def test_published_rows_are_read_under_our_names(file):
    published = {
        "framework": "vllm",
        "hw": "h100",
        "infmax_model_prefix": "dsr1",
        "result_filename": "isb1_x",
        "context_pressure_status": "ok",
        "spec_decoding": "none",
        "kv_cache_dtype": "fp8",
        "mechanism_eval_validation": {"mechanism_eval_registered": True, "issues": []},
        "evidence": [{"evidence_id": "e"}],
    }
    file.write_text(json.dumps([{}, published]))
    empty, row = read_rows(file)
    found = {name: value for name, value in row.values.items() if value is not None and name != "row_id"}
    assert found == {
        "engine": "vllm",
        "device": "h100",
        "model": "dsr1",
        "run": "isb1_x",
        "spec_decoding": "none",
        "kv_cache_dtype": "fp8",
    }
    assert row.embedded == published["mechanism_eval_validation"] and row.evidence == ({"evidence_id": "e"},)
    assert "mechanism" not in row.values and "mechanism" not in empty.values
    assert row.source.endswith("row 2")


def test_published_names_lead_to_columns():
    assert set(PUBLISHED_NAMES.values()) < set(BY_NAME)
    assert not set(BY_NAME) & {*PUBLISHED_NAMES, *PUBLISHED_UNREAD}


@pytest.mark.parametrize("twice", [{"hw": "h100", "device": "cpu"}, {"gpu_type": "a", "hw": "a"}])
def test_a_field_under_two_names_is_refused(file, twice):
    file.write_text(json.dumps([twice]))
    error = refusal(read_rows, file)
    assert codes(error) == ["field_twice"] and error.reasons[0].field == "row 1, device"


# -------------------------------------------------------------------------------------- refusals


def test_every_complaint_names_row_and_field(file):
    rows = [{"kl": 1}, {"fires": 1.5, "support_status": "Supported"}, 7, {"hwx": 1}, {"evidence": {}}]
    file.write_text(json.dumps([*rows, {"mechanism_eval_validation": True}]))
    error = refusal(read_rows, file)
    assert {(reason.field, reason.code) for reason in error.reasons} == {
        ("row 2, fires", "value_kind"),
        ("row 2, support_status", "value_unknown_word"),
        ("row 3", "row_not_object"),
        ("row 4, 'hwx'", "field_unknown"),
        ("row 5, evidence", "value_kind"),
        ("row 6, mechanism_eval_validation", "value_kind"),
    }
    assert str(error).startswith(f"{file}: row 2, ") and str(error).endswith("; and 1 more")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('[{"kl": NaN}]', "value_not_finite"),
        ('[{"kl": Infinity}]', "value_not_finite"),
        ('[{"kl": -Infinity}]', "value_not_finite"),
        ('[{"kl": 1e999}]', "value_not_finite"),
        ('[{"evidence": [{"value": NaN}]}]', "value_not_finite"),
        ('[{"kl": 1, "kl": 2}]', "field_twice"),
        ('[{"evidence": [{"n": 1, "n": 2}]}]', "field_twice"),
        ('[{"kl": 1},]', "file_not_json"),
        ("", "file_not_json"),
        ("{'kl': 1}", "file_not_json"),
        ("[" * 100_000, "file_not_json"),
        ("[" + "9" * 5000 + "]", "file_not_json"),
        ('[{"kv_bytes": 9223372036854775808}]', "value_out_of_range"),
        ('[{"kl": 9007199254740993}]', "value_out_of_range"),
        ('[{"kv_bytes": true}]', "value_kind"),
        ('[{"kv_bytes": "12"}]', "value_kind"),
        ('[{"kl": false}]', "value_kind"),
        ('[{"run": ["a"]}]', "value_kind"),
        ('[{"top1_agreement": 1.0000001}]', "value_out_of_range"),
        ("null", "row_not_object"),
        ('"row"', "row_not_object"),
    ],
)
def test_a_wrong_file_is_one_line(file, text, code):
    file.write_text(text)
    error = refusal(read_rows, file)
    assert codes(error) == [code] and str(file) in str(error) and len(str(error)) < 400


def test_a_missing_file_is_one_line(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with refused(StorageError, None, path):
            read_json(path)


@examples(100)
@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(file, content):
    file.write_bytes(content)
    try:
        read_rows(file)
    except RowError as error:
        assert len(str(error).splitlines()) == 1


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@examples(200)
@given(st.dictionaries(st.sampled_from(list(BY_NAME)) | st.text(max_size=8) | st.integers(), ANYTHING, max_size=4))
def test_any_mapping_is_a_row_or_refused(mapping):
    try:
        row = checked_row(mapping)
    except RowError as error:
        assert len(str(error).splitlines()) == 1 and set(codes(error)) <= set(CONFIG_REASONS)
        assert all(reason.field for reason in error.reasons)
    else:
        json.dumps(row, allow_nan=False).encode()
        taken = {name: value for name, value in mapping.items() if value not in (None, "")}
        assert all(row[name] == value for name, value in taken.items())


# ------------------------------------------------------------------------------------- injection


@pytest.mark.parametrize("text", HARMLESS)
def test_texts_pass_as_plain_data(file, text):
    row = checked_row(dict.fromkeys(TEXTS, text))
    assert {row[name] for name in TEXTS} == {text}
    file.write_text(json.dumps(row))
    assert read_rows(file)[0].values == row
    database = sqlite3.connect(":memory:")
    assert database.execute("SELECT ?", (text,)).fetchone() == (text,)


@pytest.mark.parametrize(("text", "code"), HARMFUL)
def test_texts_that_break_a_line_are_refused(text, code):
    error = refusal(checked_row, dict.fromkeys(TEXTS, text))
    assert codes(error) == [code] * len(TEXTS) and len(str(error)) < 2000


@pytest.mark.parametrize(
    "name", ["run; DROP TABLE rows", "run--", 'kl" TEXT', "__class__", "", "Run", "run\n", 3, None]
)
def test_field_names_are_those_of_the_catalogue(name):
    assert codes(refusal(checked_row, {name: "x"})) == ["field_unknown"]
