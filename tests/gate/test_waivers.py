import datetime

import pytest

from kvlab.core.errors import StorageError, UserError
from kvlab.gate.waivers import Waiver, WaiverError, parse, read
from refusals import refused, refused_in_one_line

WAIVABLE = ("quality", "observation")
ENTRY = {"row_id": "0123", "criterion": "quality", "owner": "Ada", "expires": "2030-01-31", "why": "being measured"}
CONFIGURATION = {"model": "m", "engine": "hf", "mechanism": "kv_quantization", "variant": "int"}
BY_CONFIGURATION = {key: value for key, value in ENTRY.items() if key != "row_id"} | CONFIGURATION


def one(**changes):
    return parse([ENTRY | changes], WAIVABLE)[0]


def test_a_waiver_covers_its_row_and_its_criterion_only():
    waiver = one()
    assert waiver.covers({"row_id": "0123"}, "quality")
    assert not waiver.covers({"row_id": "0123"}, "observation")
    assert not waiver.covers({"row_id": "0124"}, "quality")
    assert not waiver.covers({}, "quality")


@pytest.mark.parametrize("other", [None, *("model", "engine", "mechanism", "mechanism_variant")])
def test_a_configuration_is_all_of_its_four_fields(other):
    (waiver,) = parse([BY_CONFIGURATION], WAIVABLE)
    values = {"model": "m", "engine": "hf", "mechanism": "kv_quantization", "mechanism_variant": "int"}
    if other:
        values[other] = "another"
    assert waiver.covers(values, "quality") == (other is None)


def test_the_last_day_is_included():
    waiver = one(expires=datetime.date(2030, 1, 31))
    assert not waiver.expired(datetime.date(2030, 1, 31))
    assert waiver.expired(datetime.date(2030, 2, 1))


@pytest.mark.parametrize(
    ("entry", "code", "data"),
    [
        ({k: v for k, v in ENTRY.items() if k != "owner"}, "value", "owner"),
        ({k: v for k, v in ENTRY.items() if k != "expires"}, "value", "expires"),
        ({k: v for k, v in ENTRY.items() if k != "why"}, "value", "why"),
        ({k: v for k, v in ENTRY.items() if k != "row_id"}, "value", "no row"),
        (ENTRY | CONFIGURATION, "value", "row_id and model"),
        ({k: v for k, v in BY_CONFIGURATION.items() if k != "variant"}, "value", "no row"),
        (ENTRY | {"owner": "  "}, "value", "owner is '  '"),
        (ENTRY | {"owner": 7}, "value", "owner is 7"),
        (ENTRY | {"expires": "soon"}, "value", "'soon'"),
        (ENTRY | {"expires": "2030-13-01"}, "value", "'2030-13-01'"),
        (ENTRY | {"expires": 2030}, "value", "2030 "),
        (ENTRY | {"expires": datetime.datetime(2030, 1, 31)}, "value", "2030-01-31"),
        (ENTRY | {"ownr": "Ada"}, "unknown-key", "'owner'"),
        (ENTRY | {"criterion": "qualty"}, "criterion", "'quality'"),
        ("everything", "no-mapping", "str"),
    ],
)
def test_who_says_too_little_is_refused_in_one_line(entry, code, data):
    with refused_in_one_line(WaiverError, f"waiver.{code}", "waiver 2", data):
        parse([ENTRY, entry], WAIVABLE)


def test_a_file_of_waivers(tmp_path):
    path = tmp_path / "waivers.yaml"
    path.write_text("- {row_id: '1', criterion: quality, owner: Ada, expires: 2030-01-31, why: measured next week}\n")
    (waiver,) = read(path, WAIVABLE)
    assert waiver == Waiver(row_id="1", criterion="quality", owner="Ada", expires="2030-01-31", why=waiver.why)
    path.write_text("# none\n")
    assert read(path, WAIVABLE) == ()


@pytest.mark.parametrize("text", ["[", "a: 1", "- 2024-13-45x: [", "\x00", "- {owner: Ada, owner: Bo}"])
def test_what_is_no_list_of_waivers_is_refused(tmp_path, text):
    path = tmp_path / "waivers.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read(path, WAIVABLE)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with refused(StorageError, None, tmp_path / "none.yaml"):
        read(tmp_path / "none.yaml", WAIVABLE)


def test_their_order_in_the_file_does_not_matter():
    entries = [ENTRY | {"row_id": str(n)} for n in range(5)]
    assert parse(entries, WAIVABLE) == parse(entries[::-1], WAIVABLE)
