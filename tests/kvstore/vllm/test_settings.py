from __future__ import annotations

import json

import pytest

from kvlab.core.errors import ParamsError, UnknownName
from kvlab.kvstore.vllm.settings import ConnectorSettings, Wish, transfer_config
from refusals import refused_in_one_line


def test_what_the_configuration_says_is_what_the_connector_reads(tmp_path):
    given = transfer_config(tmp_path, chunk_tokens=32, save="answer", salt="x")
    assert json.loads(json.dumps(given)) == given
    assert ConnectorSettings.read(given["kv_connector_extra_config"]) == ConnectorSettings(
        str(tmp_path), 32, "x", save="answer"
    )
    assert given["kv_load_failure_policy"] == "recompute" and given["kv_role"] == "kv_both"


@pytest.mark.parametrize(
    ("extra", "error", "code", "data"),
    [
        ({}, ParamsError, "params.no-folder", ["folder"]),
        ({"folder": "f", "chunk_token": 4}, UnknownName, None, ["chunk_token", "chunk_tokens"]),
        ({"folder": "f", "save": "always"}, UnknownName, None, ["always", "answer, never, prompt"]),
        ({"folder": "f", "chunk_tokens": 0}, ParamsError, None, ["chunk_tokens is 0"]),
        ({"folder": "f", "chunk_tokens": 1 << 20}, ParamsError, "params.chunk-too-long", [1 << 20, 65536]),
        ({"folder": "f", "restore": "no"}, ParamsError, "params.kind", ["restore", "no", "bool"]),
        ({"folder": 3}, ParamsError, "params.kind", ["folder", 3, "str"]),
        ({"folder": "f", "recipe": 3}, ParamsError, "params.kind", ["recipe", 3, "str"]),
        ({"folder": "f", "unproven": "yes"}, ParamsError, "params.kind", ["unproven", "yes", "bool"]),
        ({"folder": "f", "bits": 2}, ParamsError, "params.bits", [2, "recipe"]),
        ({"folder": "f", "bits": "2", "recipe": "r"}, ParamsError, "params.bits", ["'2'"]),
    ],
)
def test_wrong_settings_are_refused_in_one_line(extra, error, code, data):
    with refused_in_one_line(error, code, *data):
        ConnectorSettings.read(extra)


@pytest.mark.parametrize(
    ("params", "wish"),
    [
        (None, Wish(True, True)),
        ({}, Wish(True, True)),
        ({"kvlab": None}, Wish(True, True)),
        ({"kvlab": "no"}, Wish(True, True)),
        ({"kvlab": {"restore": False}}, Wish(False, True)),
        ({"kvlab": {"save": False, "restore": 0}}, Wish(True, False)),
        ({"other": {"save": False}}, Wish(True, True)),
    ],
)
def test_a_request_switches_off_what_it_does_not_want(params, wish):
    assert Wish.of(params) == wish
