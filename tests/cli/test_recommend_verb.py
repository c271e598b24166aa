"""`kvlab recommend` and `kvlab check` on tiny models: planted faults are found, and wrong input is one line."""

from __future__ import annotations

import contextlib
import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from kvlab.advice.page import page
from kvlab.advice.serving_engines import SERVING
from kvlab.advice.verdicts import CLASSES, OPEN
from kvlab.cache.files.calibration import load_calibration
from kvlab.cache.files.recipe import read_recipe_file
from kvlab.cli import main as cli
from kvlab.codecs.recipes import named_recipe
from kvlab.core.model import resolve_folder
from kvlab.measure import quick_run
from kvlab.trials import bench
from refusals import refused_line

pytestmark = pytest.mark.full  # code that the chain does not run

SMALL = ("--context", 64, "--eval", 32, "--no-witness")
PLANTED = 1  # the layer whose keys have a channel that no grid bears


@pytest.fixture
def run(line):
    """Exit code, stdout and stderr of a line."""
    return line


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A model one layer of which attends sharply, with a channel of K that takes the step of all that share it."""
    folder = tiny.write_model(tmp_path_factory.mktemp("planted") / "model", num_hidden_layers=4)
    weights = load_file(folder / "model.safetensors")
    layer = f"model.layers.{PLANTED}.self_attn"
    bias = weights[f"{layer}.k_proj.bias"]
    bias[31], bias[63] = 400.0, -400.0  # of the slowest pair of either head: nearly the same in all tokens
    weights[f"{layer}.q_proj.weight"] *= 4
    weights[f"{layer}.q_proj.weight"].view(4, 32, -1)[:, [15, 31]] = 0  # so that no score hangs on that channel
    weights[f"{layer}.q_proj.bias"].zero_()
    weights[f"{layer}.o_proj.weight"] *= 3
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return tiny.write_text(tmp_path_factory.mktemp("text") / "scored.txt", 200)


@pytest.fixture(scope="module")
def found(planted, text, tmp_path_factory):
    """What is recommended for the planted model in all engines: the JSON, and what was printed."""
    out, said = tmp_path_factory.mktemp("found") / "found.json", io.StringIO()
    with contextlib.redirect_stdout(said):
        files = ("--json", out, "--html", out.with_suffix(".html"))
        words = ("recommend", planted, "--text", text, *SMALL, "--windows", 12, *files)
        cli.main([str(word) for word in words])
    return json.loads(out.read_text()), said.getvalue(), out.with_suffix(".html").read_text()


def line_of(found: dict, engine: str) -> dict:
    (line,) = [line for line in found["lines"] if line["engine"] == engine]
    return line


def test_the_planted_layer_is_found_and_left_in_16_bits(found):
    data, said, _ = found
    vllm = line_of(data, "vllm")
    assert vllm["losses"] and all(max(each, key=each.get) == str(PLANTED) for each in vllm["losses"].values())
    assert vllm["chosen"]["exact_layers"] == [PLANTED] and vllm["holds"] == "yes"
    assert f"--kv-cache-dtype-skip-layers {PLANTED}" in vllm["paste"] and vllm["paste"] in said
    whole = {row["format"]: row for row in data["finished"]}
    cheap = vllm["chosen"]["format"].partition(",")[0]
    assert whole[cheap]["kl"]["low"] > vllm["confirmed"]["kl"]["high"]  # the same format on all layers
    assert vllm["chosen"]["bits_per_value"] == pytest.approx((3 * whole[cheap]["bits_per_value"] + 16) / 4)


def test_a_format_that_the_planted_channel_breaks_is_not_recommended(found):
    data, *_ = found
    by_name = {row["format"]: row for row in data["finished"]}
    assert by_name["q4_0"]["verdict"] != "safe" and by_name["quanto-int2"]["verdict"] == "noticeable"
    assert line_of(data, "llama.cpp")["chosen"]["format"] == "f16/q4_0"  # no type of its K bears that channel
    for line in data["lines"]:
        if line["chosen"]:
            assert line["holds"] in ("yes", OPEN) and line["confirmed"]["windows"] == 6


def test_everything_is_told(found):
    data, said, _ = found
    on_cuda = {one.name for engine in SERVING.values() for one in engine.formats if "cuda" in one.devices}
    measured = {row["format"] for row in data["finished"]}
    ends = {name for name in on_cuda if name.startswith("turboquant")}  # leave all four layers in 16 bits
    own = {"klt-4", "klt-3", "klt-2", "hadamard-4"}
    assert measured == on_cuda - ends - {"fp8"}  # which is another's fp8_e4m3
    for row in data["finished"]:
        assert row["kl"]["low"] <= row["kl"]["value"] <= row["kl"]["high"]
        assert row["quantiles"]["median"] <= row["quantiles"]["99 %"] <= row["quantiles"]["99.9 %"]
        assert row["verdict"] in (*CLASSES, OPEN) and row["format"] in said
    assert 0 < data["floor"]["kl"]["value"] < 1e-4 and "rounding to bfloat16" in said
    assert all(line["paste"] in said and line["not_measured"] in said for line in data["lines"])
    assert line_of(data, "vllm")["refused"].keys() == {"fp8_e4m3-cpu", "fp8_e5m2-cpu", "ultraquant_4bit", *ends, *own}


@pytest.fixture(scope="module")
def own(tiny_model, text, tmp_path_factory):
    """What is recommended on a CPU, where vLLM's pages and kvlab.Cache take kvlab's own codecs: JSON and output."""
    out, said = tmp_path_factory.mktemp("own") / "found.json", io.StringIO()
    with contextlib.redirect_stdout(said):
        words = ("recommend", tiny_model, "--text", text, *SMALL, "--windows", 4, "--loss", "noticeable")
        cli.main([str(word) for word in (*words, "--engine", "vllm", "transformers", "--device", "cpu", "--json", out)])
    return json.loads(out.read_text()), said.getvalue()


def test_ones_own_codecs_are_candidates_where_an_engine_takes_them(own, found):
    rows = {row["format"]: row for row in own[0]["finished"]}
    assert rows["klt-4"]["engines"] == ["vllm", "transformers"] and "docstrings" in own[0]["calibrated"]
    assert rows["klt-4"]["kl"]["value"] < rows["klt-2"]["kl"]["value"] < rows["quanto-int2"]["kl"]["value"]
    assert 3.5 < rows["klt-4"]["bits_per_value"] < 4.5 and 1.5 < rows["klt-2"]["bits_per_value"] < 2.5
    on_cuda = {row["format"]: row["engines"] for row in found[0]["finished"]}
    assert on_cuda["klt-4"] == ["transformers"]  # the loops of vLLM's pages are for CPUs


def test_the_line_of_ones_own_codec_fits_what_was_measured(own, run, tmp_path, monkeypatch):
    line = line_of(own[0], "transformers")
    assert line["chosen"]["format"].startswith("klt") and line["paste"] in own[1] and line["table_bytes"] > 0
    monkeypatch.chdir(tmp_path)
    _, *words = line["paste"].partition("  #")[0].split()
    code, _, err = run(*words)
    assert code == 0, err
    (file,) = tmp_path.glob("*.kv")
    info = resolve_folder(Path(words[words.index("--model") + 1]))
    assert read_recipe_file(file).recipe.recipe_id == line["chosen"]["recipe_id"]
    fitted = load_calibration(file, info)
    assert own[0]["calibration"] == {"corpus_hash": fitted.corpus_hash, "sigma_hash": fitted.sigma_hash}


def test_what_is_scored_is_not_calibrated_on(tiny_model, text, run):
    words = ("--text", text, *SMALL, "--windows", 4)
    code, said, err = run("recommend", tiny_model, *words, "--engine", "transformers", "--calib-text", text)
    assert (code, said) == (2, "") and "must not have been calibrated on" in err
    refused_line(run("check", tiny_model, "--format", "klt-4", *SMALL), "--calib-text")


@pytest.mark.parametrize(
    ("control", "instead", "code"),
    [("one bit", named_recipe("int", 8), "not-active.control"), ("16 bits", named_recipe("int", 2), "fault.floor")],
)
def test_no_verdict_without_its_controls(control, instead, code, tiny_model, text, run, monkeypatch, tmp_path):
    monkeypatch.setitem(bench.CONTROLS, control, instead)
    out, seen = tmp_path / "out.json", []
    told = bench.FormatBench.control

    def noted(self, protocols):
        try:
            told(self, protocols)
        except Exception as error:
            seen.append(error.code)
            raise

    monkeypatch.setattr(bench.FormatBench, "control", noted)
    for words in (("recommend", "--engine", "llama.cpp"), ("check", "--format", "q8_0")):
        verb, *rest = words
        ended = run(verb, tiny_model, "--text", text, *rest, *SMALL, "--windows", 4, "--json", out)
        assert ended[:2] == (1, "") and "control failed" in ended[2] and not out.exists()
    assert seen == [code, code]


def test_the_controls_are_told(found):
    data, said, _ = found
    assert data["controls"].keys() == {"snapshot", "in_forward"}
    assert all(each["one_bit"] > 0.101913 and each["same"] < 1e-6 for each in data["controls"].values())
    assert said.count("controls ") == 2
    for line in data["lines"]:
        if line["chosen"]:
            assert sum(line["confirmed"]["by_confidence"].values()) > 0 and "99.9 % of tokens below" in said


def _other_metric(row):
    row["evidence"][0]["metrics"]["kl"]["value"] *= 0.9


def _typed_metric(row):
    row["kl"] /= 2


def _unmeasured(row):
    row["evidence"] = []


FALSE = {
    "evidence_tampered": _other_metric,
    "evidence_contradicts_row": _typed_metric,
    "evidence_other_model": lambda row: row.update(model="other"),
    "evidence_other_recipe": lambda row: row.update(recipe_id="0" * 12),
    "evidence_stale_model": lambda row: row.update(model_hash="0" * 12),
    "evidence_missing": _unmeasured,
}


def judged(run, rows, folder, *words):
    """The exit code of `kvlab gate check`, and by row the tier that it earns and codes of what is wrong with it."""
    (folder / "rows.json").write_text(json.dumps(rows))
    code, said, err = run("gate", "check", folder / "rows.json", "--format", "json", *words)
    assert code in (0, 1), err
    return code, [
        (claim["earned"], {reason["code"] for finding in claim["findings"] for reason in finding["reasons"]})
        for claim in json.loads(said)["claims"]
    ]


def test_the_gate_takes_what_was_confirmed(found, run, tmp_path):
    rows = found[0]["gate_rows"]
    told = {(row["row_id"].split("/", 2)[1], row["kl"], row["evidence"][0]["metrics"]["kl"]["n"]) for row in rows}
    lines = [line for line in found[0]["lines"] if line["chosen"]]
    assert len(rows) == len(lines)
    for line, row in zip(lines, rows, strict=True):
        assert row["kl"] == pytest.approx(line["confirmed"]["kl"]["value"]) and (line["engine"], row["kl"], 6) in told
        whole = row["recipe_id"] == line["chosen"]["recipe_id"]
        assert whole == (not line["chosen"]["exact_layers"] and "turboquant" not in line["chosen"]["format"])
        assert row["evidence"][0]["family"]["tested"] >= len(found[0]["finished"])
    code, claims = judged(run, found[0], tmp_path)
    assert code == 0 and all(earned == "gated" and "evidence_incomplete" in codes for earned, codes in claims)


@pytest.mark.parametrize("fault", FALSE)
def test_the_gate_refuses_what_was_not_measured_so(fault, found, run, tmp_path):
    row = json.loads(json.dumps(found[0]["gate_rows"][0]))
    FALSE[fault](row)
    code, [(earned, codes)] = judged(run, [row | {"support_status": "reviewed_preview"}], tmp_path)
    assert code == 1 and earned not in ("supported", "reviewed_preview") and fault in codes


def test_the_gate_refuses_what_is_of_older_code(found, run, tmp_path):
    row, now = found[0]["gate_rows"][0], tmp_path / "now.json"
    same = {name: row[name] for name in ("model_hash", "corpus_hash", "code")}
    for name in same:
        now.write_text(json.dumps({row["model"]: same | {name: "0" * 12}}))
        _, [(_, codes)] = judged(run, [row], tmp_path, "--current", now)
        assert f"evidence_stale_{name.removesuffix('_hash')}" in codes
    now.write_text(json.dumps({row["model"]: same}))
    _, [(_, codes)] = judged(run, [row], tmp_path, "--current", now)
    assert not any("stale" in code for code in codes)


class Elements(HTMLParser):
    """Every element that is opened and closed, what it asks for, and all text."""

    def __init__(self, text: str):
        super().__init__()
        self.stack, self.asked, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.asked += [value for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_needs_no_other_file_and_says_the_same(found):
    data, _, written = found
    seen = Elements(written)
    text = " ".join(seen.text)
    assert seen.stack == [] and seen.asked == [] and len(written) < 200_000
    assert all(row["format"] in text for row in [*data["finished"], *data["served"]])
    assert all(line["paste"] in text and line["not_measured"] in text for line in data["lines"])
    assert written.count("<circle") == len(data["finished"])
    assert written.count("<rect") == sum(len(one) for line in data["lines"] for one in line["losses"].values())


def test_no_name_of_a_model_is_taken_for_html(found):
    written = page(found[0] | {"model": "<script>&"}, "kvlab recommend '<script>'")
    assert "<script>" not in written and "&lt;script&gt;&amp;" in written


def test_what_was_confirmed_holds_on_another_text(found, planted, run, tmp_path):
    """Measured anew on text that chose nothing: inside the interval, and the answer is yes."""
    vllm = line_of(found[0], "vllm")
    other, out = tiny.write_text(tmp_path / "other.txt", 400, seed=7), tmp_path / "again.json"
    name, layers = vllm["chosen"]["format"].partition(",")[0], vllm["chosen"]["exact_layers"]
    again = ("--format", name, "--engine", "vllm", "--skip-layers", *layers, "--text", other, "--windows", 24)
    code, said, err = run("check", planted, *again, *SMALL, "--json", out)
    assert code == 0 and said.startswith("yes"), err
    anew, interval = json.loads(out.read_text())["kl"]["value"], vllm["confirmed"]["kl"]
    assert interval["low"] <= anew <= interval["high"]


def test_check_says_no_with_another_exit_code_and_cannot_tell_with_a_third(planted, text, run, tmp_path):
    out = tmp_path / "answer.json"
    few = ("--text", text, *SMALL, "--windows", 6, "--json", out)
    code, said, _ = run("check", planted, "--format", "quanto-int2", *few)
    assert (code, said.split(":")[0], json.loads(out.read_text())["answer"]) == (1, "no", "no")
    code, said, _ = run("check", planted, "--format", "q8_0", "--loss", "noticeable", *few)
    assert (code, said.split(":")[0]) == (0, "yes")
    out.unlink()
    refused_line(run("check", planted, "--format", "q9_0", *few), "q8_0")
    assert not out.exists()


def test_check_looks_at_all_windows_only_where_the_first_leave_it_open(planted, run, tmp_path):
    out, text = tmp_path / "answer.json", tiny.write_text(tmp_path / "long.txt", 400)
    words = ("--text", text, *SMALL, "--json", out)
    windows = {}
    for format, loss in (("quanto-int2", "small"), ("q8_0", "noticeable"), ("int4_per_token_head", "noticeable")):
        code, said, err = run("check", planted, "--format", format, "--loss", loss, *words)
        kl = json.loads(out.read_text())["kl"]
        windows[format] = kl["n_windows"]
        assert kl["confidence"] == {4: 0.99, 12: 0.96}[kl["n_windows"]] and f"{100 * kl['confidence']:.0f} %" in said
        answered = json.loads(out.read_text())["answer"]
        assert code == {"yes": 0, "no": 1, OPEN: 2}[answered] and (answered != OPEN or kl["n_windows"] == 12), err
    assert windows["q8_0"] == 4 and windows["int4_per_token_head"] == 12
    run("check", planted, "--format", "q8_0", *words, "--windows", 12)
    assert json.loads(out.read_text())["kl"]["confidence"] == 0.95  # who names a number has all of them measured


def test_check_needs_no_text(tiny_model, run):
    code, said, err = run("check", tiny_model, "--format", "q8_0", *SMALL, "--windows", 2)
    assert code == 0 and "docstrings" in said, err


def test_a_model_with_windows_works_as_typed(text, run, tmp_path):
    model = tiny.write_model(tmp_path / "model", "gemma3")
    code, said, err = run("recommend", model, "--text", text, *SMALL, "--windows", 4, "--engine", "transformers")
    assert code == 0 and "cache_implementation" in said, err


def test_a_wish_in_bits_is_kept(tiny_model, text, run, tmp_path):
    out = tmp_path / "found.json"
    wish = ("--engine", "llama.cpp", "--bits", 5, "--windows", 4, "--json", out)
    code, _, err = run("recommend", tiny_model, "--text", text, *SMALL, *wish)
    (line,) = json.loads(out.read_text())["lines"]
    assert code == 0 and line["chosen"]["bits_per_value"] <= 5, err


WRONG = [
    (("recommend", "--text", "TEXT", "--engine", "vlm"), "'vllm'"),
    (("recommend", "--text", "TEXT", "--loss", "tiny"), "safe, small, noticeable"),
    (("recommend", "--text", "TEXT", "--loss", "safe", "--bits", 4), "--bits 4"),
    (("recommend", "--text", "TEXT", "--bits", 99), "at most 16"),
    (("recommend", "--text", "TEXT", "--engine", "tensorrt-llm", "--device", "cpu"), "cuda, not on cpu"),
    (("recommend", "--text", "SHORT"), "too few"),
    (("recommend", "--text", "FEW"), "windows of 96"),
    (("recommend", "--text", "TEXT", "--windows", 3), "at least 4"),
    (("check", "--format", "q4_0", "--engine", "vllm"), "turboquant_4bit_nc"),
    (("check", "--format", "q4_0", "--skip-layers", 1), "leaves no layers out"),
    (("check", "--format", "nvfp4", "--skip-layers", 7), "0 to 2"),
    (("check", "--format", "nvfp4", "--device", "rocm"), "cuda, not on rocm"),
]


@pytest.mark.parametrize(("words", "named"), WRONG, ids=[" ".join(map(str, words)) for words, _ in WRONG])
def test_wrong_input_is_one_line(words, named, tiny_model, text, run, tmp_path):
    (tmp_path / "short").write_text("a few words")
    files = {"TEXT": text, "SHORT": tmp_path / "short", "FEW": tiny.write_text(tmp_path / "few", 1)}
    verb, *rest = words
    refused_line(run(verb, tiny_model, *(files.get(word, word) for word in rest), *SMALL), named)


def test_a_model_without_a_tokenizer_is_refused(text, run, tmp_path, capsys):
    model = tiny.write_model(tmp_path / "model")
    for path in model.glob("token*"):
        path.unlink()
    capsys.readouterr()  # how the model was written
    for verb, *rest in (("recommend",), ("check", "--format", "q8_0")):
        refused_line(run(verb, model, *rest, "--text", text, *SMALL), "tokenizer")


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "compressed-tensors", "bitsandbytes"])
def test_a_quantised_checkpoint_is_refused_by_its_method(method, text, run, tmp_path, capsys):
    model = tiny.write_model(tmp_path / "model")
    tiny.edit(model / "config.json", quantization_config={"quant_method": method})
    capsys.readouterr()  # how the model was written
    words = ("--text", text, *SMALL)
    for verb, *rest in (("recommend",), ("check", "--format", "q8_0"), ("measure", "--codec", "int")):
        refused_line(run(verb, model, *rest, *words), repr(method))


def test_a_model_that_hangs_on_no_context_is_refused_before_anything_is_measured(text, run, tmp_path, monkeypatch):
    """Its attention's output is left out, so no cache can move a prediction."""
    model = tiny.write_model(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    for name in weights:
        if name.endswith("o_proj.weight"):
            weights[name].zero_()
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    scored = []
    monkeypatch.setattr(quick_run.VariantSubject, "score", lambda self, run: scored.append(run.number))
    for words in (("recommend", "--engine", "llama.cpp"), ("check", "--format", "q8_0")):
        code, _, err = run(words[0], model, "--text", text, *words[1:], *SMALL, "--windows", 4)
        assert code == 1 and "one-bit codec" in err and scored == [], err


def test_the_chosen_format_is_computed_a_second_time(tiny_model, text, run, tmp_path):
    out, words = tmp_path / "found.json", [word for word in SMALL if word != "--no-witness"]
    words += ["--windows", 2, "--dtype", "float32"]
    run("check", tiny_model, "--format", "q4_0", "--text", text, *words, "--json", out)
    (seen,) = json.loads(out.read_text())["witnessed"]
    assert seen["alternative_kl"] < 1e-6 and torch.get_num_threads() >= 1
