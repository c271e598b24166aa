"""`kvlab measure` and `kvlab calibrate` on the tiny model: what they print and write, and that both agree."""

from __future__ import annotations

import functools
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvlab
import tiny
from kvlab.cache.files.calibration import load_calibration, read_header
from kvlab.calibration.calibrate import calibrate
from kvlab.cli import checked, costs, measure, measuring
from kvlab.cli import main as cli
from kvlab.codecs.base import Site
from kvlab.codecs.registry import build
from kvlab.core.errors import CorpusError
from kvlab.core.model import resolve_folder
from kvlab.core.recipe import Cell
from kvlab.measure import places, quick_run
from kvlab.stats import kl_scale
from kvlab.stats.bootstrap import Estimate
from kvlab.text.excerpts import refuse_overlap, windows_of
from refusals import refused, refused_line


@pytest.fixture
def run(tiny_model, texts, line):
    """Exit code, stdout and stderr of `kvlab measure MODEL` on small windows."""

    def verb(*words) -> tuple[int, str, str]:
        small = ("--context", 64, "--eval", 32, "--windows", 4)
        return line("measure", tiny_model, "--text", texts[0], *small, *words)

    return verb


def found(path) -> dict:
    """What --json wrote."""
    return json.loads(path.read_text())


@pytest.fixture
def calibrated(tiny_model, texts, tmp_path):
    """klt at 4 bits, calibrated on six windows of the other text."""
    out = tmp_path / "klt4.kv"
    words = ("--model", tiny_model, "--text", texts[1], "--context", 64, "--windows", 6, "--out", out)
    cli.main([str(word) for word in ("calibrate", *words)])
    return out


def test_a_codecs_file_is_described_and_checked(calibrated, line, tmp_path):
    code, said, err = line("inspect", "--stream", calibrated)
    assert code == 0 and "encodes and decodes" in said and "K: klt at 4 bits, before its rotary embedding" in said, err
    assert "calibrated on 384 tokens" in said and "exact" not in said and "coded layers" not in said
    changed = bytearray(calibrated.read_bytes())
    changed[-1] ^= 1  # of a tensor: the header comes first
    (tmp_path / "changed.kv").write_bytes(changed)
    refused_line(line("inspect", "--stream", tmp_path / "changed.kv"), "damaged: tensor")


def test_codecs_are_measured_beside_one_another(run, texts, tmp_path):
    out = tmp_path / "found.json"
    code, said, err = run("--bits", 2, 4, "--against", "int", "--calib-text", texts[1], "--json", out)
    assert code == 0, err
    found = json.loads(out.read_text())
    rounding, *rows = found["rows"]
    assert [(row["codec"], row["bits"]) for row in rows] == [("klt", 2), ("klt", 4), ("int", 2), ("int", 4)]
    kl = {(row["codec"], row["bits"]): row["kl"]["value"] for row in rows}
    assert 0 < rounding["kl"]["value"] < min(kl.values())
    assert kl["klt", 4] < kl["klt", 2] and kl["int", 4] < kl["int", 2]
    assert all(row["bits"] < row["bits_per_value"] < row["bits"] + 2 for row in rows)  # headers and scales are counted
    assert all(row["kl"]["low"] <= row["kl"]["value"] <= row["kl"]["high"] for row in rows)
    for pair in found["differences"]:
        assert pair["kl"]["value"] == pytest.approx(kl["klt", pair["bits"]] - kl["int", pair["bits"]])
    assert [pair["bits"] for pair in found["differences"]] == [2, 4]
    assert "klt - int" in said and "calibrated on" in said and str(texts[1]) in said
    assert found["windows"] == 4 and found["context"] == 64
    assert len(found["witnessed"]) == 2 and "computed a second time, by other code, and agrees" in said


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_what_is_computed_in_is_what_weights_are_of_where_torch_is_quick_in_it(name, slow, monkeypatch):
    monkeypatch.setattr(checked, "lacks_bfloat16", lambda: slow)
    monkeypatch.setattr(checked, "_on_a_gpu", lambda: False)
    used = {own: checked.dtype_of(None, {name: own}) for own in ("float32", "bfloat16", "float16", None)}
    assert used.pop("bfloat16") == ("float32" if slow else "bfloat16") and set(used.values()) == {"float32"}
    assert checked.dtype_of("bfloat16", {name: "float32"}) == "bfloat16"
    monkeypatch.setattr(checked, "_on_a_gpu", lambda: True)
    assert checked.dtype_of(None, {name: "bfloat16"}) == "bfloat16"


@pytest.mark.parametrize(("asked", "used"), [((), "bfloat16"), (("--dtype", "float32"), "float32")])
def test_what_is_computed_in_is_said(tiny_model, texts, line, tmp_path, monkeypatch, asked, used):
    monkeypatch.setattr(checked, "lacks_bfloat16", lambda: False)
    folder, out = shutil.copytree(tiny_model, tmp_path / "model"), tmp_path / "found.json"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({name: x for name, x in config.items() if "dtype" not in name} | {"dtype": "bfloat16"})
    )
    small = ("--context", 64, "--eval", 32, "--windows", 2, "--no-witness", "--json", out)
    code, said, err = line("measure", folder, "--text", texts[0], "--codec", "kivi", *small, *asked)
    assert code == 0 and found(out)["dtype"] == used and f" hf, {used}, snapshot" in said, err


def test_the_witness_can_be_left_out_and_that_is_said(run, tmp_path):
    out = tmp_path / "found.json"
    code, said, err = run("--codec", "kivi", "--no-witness", "--json", out)
    assert code == 0 and "nothing was computed a second time" in said, err
    assert json.loads(out.read_text())["witnessed"] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_answer_ends_the_command(run, dtype, monkeypatch):
    from kvlab.measure.scoring import WindowRun

    honest = WindowRun._scored

    def halved(self, *given):
        logits = honest(self, *given)
        return (logits + self.reference) / 2

    monkeypatch.setattr(WindowRun, "_scored", halved)
    code, said, err = run("--codec", "kivi", "--bits", 2, "--dtype", dtype)
    assert code != 0 and said == "" and "witness" in err.splitlines()[-1]


@pytest.mark.full
@pytest.mark.parametrize(
    ("flag", "words"),
    [("--windows", ("--codec", "kivi", "--windows", 999)), ("--calib-windows", ("--calib-windows", 999))],
)
def test_more_windows_than_there_are_are_refused_and_counted(line, tiny_model, tmp_path, flag, words):
    """Of texts that have few; with as many as are named it runs."""
    scored, fitted = (tiny.write_text(tmp_path / f"{seed}.txt", 8, seed) for seed in (0, 1))
    small = ("--context", 64, "--eval", 32, "--windows", 2)
    run = functools.partial(line, "measure", tiny_model, "--text", scored, "--calib-text", fitted, *small)
    code, said, err = run(*words)
    told = re.search(rf"{flag} 999: \S+ has \d+ tokens, which are (\d+) windows of (96|64); give {flag} (\d+),", err)
    assert (code, said) == (2, "") and told and told[1] == told[3] != "999", err
    assert run(*words[:-1], told[1], "--no-witness")[0] == 0


@pytest.mark.full
def test_fewer_windows_than_usual_are_told(tiny_model, tmp_path, texts, line):
    short, out = tiny.write_text(tmp_path / "short.txt", 4), tmp_path / "found.json"
    words = ("--text", short, "--context", 64, "--eval", 32, "--calib-text", tiny.write_text(tmp_path / "c.txt", 8, 1))
    _, said, _ = line("measure", tiny_model, *words, "--no-witness", "--json", out)
    found = json.loads(out.read_text())
    assert 2 <= found["windows"] < found["windows_wanted"] == 8
    assert f"short.txt, all that it has (of a longer text: {found['windows_wanted']})" in said
    assert "all that it has (of a longer text: 32)" in said


@pytest.mark.full
def test_what_is_not_read_is_told(run, texts, calibrated):
    _, said, _ = run("--codec", "kivi", "--calib-text", texts[1], "--no-witness")
    assert f"--calib-text {texts[1]} is not read" in said
    _, said, _ = run("--codec", "oscar", "--calibration", calibrated, "--calib-text", texts[1], "--no-witness")
    assert f"{calibrated} is not read: it does not hold what these codecs read" in said
    code, _, err = run("--codec", "fp8", "--bits", 2)
    assert code == 2 and "fp8 has no choice of bits" in err
    assert run("--codec", "fp8", "kivi", "--bits", 2, "--no-witness")[0] == 0


def test_a_folder_may_be_the_one_that_one_stands_in(line, tiny_model, texts, monkeypatch):
    monkeypatch.chdir(tiny_model)
    small = ("--codec", "kivi", "--context", 64, "--eval", 32, "--windows", 2, "--no-witness")
    assert "kivi" in line("measure", ".", "--text", texts[0], *small)[1]


@pytest.mark.full
def test_a_stored_calibration_gives_what_a_fresh_one_does(run, texts, calibrated, tmp_path):
    stored, fresh = tmp_path / "stored.json", tmp_path / "fresh.json"
    code, said, err = run("--bits", 2, 4, "--calibration", calibrated, "--json", stored)
    assert code == 0 and str(calibrated) in said, err
    assert run("--bits", 2, 4, "--calib-text", texts[1], "--calib-windows", 6, "--json", fresh)[0] == 0
    timed = {"tokens_per_second"}
    rows = [
        [{k: v for k, v in row.items() if k not in timed} for row in found(path)["rows"]] for path in (stored, fresh)
    ]
    assert rows[0] == rows[1]


def test_the_scored_text_is_not_calibrated_on(run, texts):
    code, said, err = run("--calib-text", texts[0])
    assert (code, said) == (2, "") and "must not have been calibrated on" in err.splitlines()[-1]


def test_a_calibration_of_another_model_is_refused(line, calibrated, tmp_path, texts):
    other = tiny.write_model(tmp_path / "other", seed=1)
    words = (other, "--text", texts[0], "--context", 64, "--eval", 32, "--calibration", calibrated)
    code, _, err = line("measure", *words)
    assert code == 2 and "was calibrated for model" in err


def test_a_codec_that_is_not_calibrated_needs_no_text(run, tiny_model, tmp_path, capsys):
    code, said, err = run("--codec", "kivi", "fp8")
    assert code == 0 and "calibrated" not in said, err
    assert [line.split()[0] for line in said.splitlines()[5:8]] == ["rounding", "kivi", "fp8"]
    out = tmp_path / "kivi4.kv"
    cli.main(["calibrate", "--model", str(tiny_model), "--codec", "kivi", "--out", str(out)])
    assert "nothing was fitted" in capsys.readouterr().out and out.is_file()


@pytest.mark.full
def test_formats_of_engines_have_a_row_each_and_the_models_biases_no_text(run, tiny_model, tmp_path, capsys):
    """Whatever --bits says; K is coded before its rotary embedding in one row and after it in the next."""
    names = ["int", "q8_0", "q4_0", "q4_0+bias", "int8_per_token_head", "quanto-int4"]
    code, said, err = run("--codec", *names, "--bits", 2, 4, "--json", tmp_path / "found.json")
    assert code == 0 and "calibrated on" not in said and "no text was read" in said, err
    rows = {(row["codec"], row["bits"]): row for row in found(tmp_path / "found.json")["rows"][1:]}
    assert list(rows) == [("int", 2), ("int", 4), *((name, None) for name in names[1:])]
    kl = {codec: row["kl"]["value"] for (codec, _), row in rows.items()}
    assert kl["q8_0"] < kl["q4_0"] / 10 and kl["q4_0+bias"] < kl["q4_0"]  # the biases are half of these K and V
    assert 4.5 < rows["q4_0", None]["bits_per_value"] < 4.9 and 8.5 < rows["q8_0", None]["bits_per_value"] < 8.9
    out = tmp_path / "q4_0.kv"
    cli.main(["calibrate", "--model", str(tiny_model), "--codec", "q4_0+bias", "--out", str(out)])
    assert "no text was needed" in capsys.readouterr().out and out.is_file()


@pytest.mark.full
def test_wush_reads_a_calibration_and_runs_in_a_cache(run, texts, tmp_path, tiny_model):
    code, said, err = run("--codec", "wush", "--bits", 2, "--calib-text", texts[1], "--json", tmp_path / "found.json")
    assert code == 0 and "calibrated on" in said, err
    (row,) = found(tmp_path / "found.json")["rows"][1:]
    assert row["codec"] == "wush" and 2.4 < row["bits_per_value"] < 3 and "Cache" in said
    words = ("--model", tiny_model, "--text", texts[1], "--context", 64, "--windows", 6, "--codec", "wush", "--bits", 2)
    files = [tmp_path / name for name in ("whole.kv", "decoder.kv")]
    cli.main([str(word) for word in ("calibrate", *words, "--out", files[0], "--decoder", files[1])])
    info, chosen = resolve_folder(tiny_model), read_header(files[0]).recipe.k
    codecs = [build(chosen, load_calibration(path, info).stream(chosen, "k")) for path in files]
    x = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(0))
    encoded = codecs[0].encode(x, Site(0, 1, "k"))
    assert torch.equal(codecs[0].decode(encoded), codecs[1].decode(encoded))


@pytest.mark.full
def test_rivals_that_see_all_layers_are_measured_beside_archive(run, texts, tiny_model, tmp_path):
    out, stored = tmp_path / "found.json", tmp_path / "aquakv.kv"
    words = ("--codec", "aquakv-sink4", "kvtc-sink4", "oscar-paper", "--against", "archive", "--bits", 3)
    fit = ("--calib-text", texts[1], "--calib-windows", 6)
    code, said, err = run(*words, *fit, "--json", out)
    assert code == 0 and "aquakv-sink4 - archive" in said, err
    rows = {row["codec"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["archive"]["bits_per_value"] == pytest.approx(3, rel=0.01) and len(rows) == 5
    words = ("--model", tiny_model, "--text", texts[1], "--codec", "aquakv-sink4", "--bits", 3, "--context", 64)
    cli.main([str(word) for word in ("calibrate", *words, "--windows", 6, "--out", stored)])
    words = ("--codec", "aquakv-sink4", "--bits", 3, "--calibration", stored, "--json", out)
    assert run(*words)[0] == 0
    assert json.loads(out.read_text())["rows"][1]["kl"] == rows["aquakv-sink4"]["kl"]
    code, _, err = run("--codec", "kvtc-paper", "--protocol", "in_forward")
    assert code == 2 and "codes whole caches" in err


def test_calibrate_leaves_one_file_and_no_capture(calibrated):
    assert [path.name for path in calibrated.parent.iterdir()] == ["klt4.kv"]


def test_the_file_that_calibrate_writes_is_a_recipe_file(calibrated):
    from kvlab.cache.files.recipe import read_recipe_file

    file = read_recipe_file(calibrated)
    assert (file.recipe.k.codec, file.recipe.k.bits, file.layers) == ("klt", 4, None)


# ------------------------------------------------------------------------- what it takes, and which to take


@pytest.mark.full
def test_memory_speed_and_places_stand_beside_each_row(run, texts, tmp_path, tiny_model):
    out = tmp_path / "found.json"
    words = ("--codec", "klt", "kivi", "fp8", "kvtc-sink4", "--against", "archive", "--bits", 4)
    code, said, err = run(*words, "--calib-text", texts[1], "--calib-windows", 6, "--no-witness", "--json", out)
    assert code == 0, err
    rounding, *rows = found(out)["rows"]
    rows = {row["codec"]: row for row in rows}
    config = json.loads((tiny_model / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
    assert rounding["stored"] == 2 * values
    for key in ("table_bytes", "tokens_per_second", "places", "pays_from"):
        assert rounding[key] is None  # neither measured nor asked
    for row in rows.values():
        assert row["stored"] == pytest.approx(row["bits_per_value"] * values / 8) and row["tokens_per_second"] > 0
        saved = 2 * values - row["stored"]
        assert row["table_bytes"] <= saved * row["pays_from"] <= row["table_bytes"] + saved
    assert rows["kivi"]["table_bytes"] == rows["fp8"]["table_bytes"] == 0 < rows["klt"]["table_bytes"]
    assert rows["klt"]["places"] == ["Cache", "vLLM pages", "store"]
    assert rows["kivi"]["places"] == ["Cache", "store"]  # its groups are of several tokens
    assert rows["archive"]["places"] == ["store"] and rows["kvtc-sink4"]["places"] == []
    by_name = {line.split()[0]: line for line in said.splitlines() if re.match(r"\S+ +[4–] ", line)}
    assert by_name["archive"].endswith("store only") and by_name["kvtc-sink4"].endswith("nowhere yet")
    assert by_name["klt"].endswith("Cache, vLLM pages") and "MiB of 64 tokens" in said


FITTED = ("klt", "hadamard+center", "oscar")


@pytest.mark.full
@pytest.mark.parametrize("codec", ["klt", "kivi", "int", "hadamard+center", "fp8", "nf4", "d4", "oscar"])
def test_a_place_is_one_that_takes_the_codec(hf_engine, codec):
    """The column says what a Cache and vLLM's pages do themselves, codec by codec."""
    from transformers import AutoModelForCausalLM

    from kvlab import Cache
    from kvlab.cache.pages.token_bytes import rows_of
    from kvlab.cli.checked import recipe_of
    from kvlab.core.errors import UserError

    recipe, info = recipe_of(codec), hf_engine.info
    ids = torch.randint(1, 300, (6, 64), generator=torch.Generator().manual_seed(0)).tolist()
    fitted = calibrate(hf_engine, ids, [recipe], corpus_hash="c") if codec in FITTED else None
    said = places.places(recipe, fitted, info)
    model = AutoModelForCausalLM.from_pretrained(info.path)
    ids = torch.arange(1, 41)[None]
    try:
        with torch.inference_mode():
            model(ids, past_key_values=Cache(model, recipe, fitted))
    except UserError:
        assert places.CACHE not in said
    else:
        assert places.CACHE in said
    taken = []
    for stream in ("k", "v"):
        own = getattr(recipe, stream)
        try:
            built = build(own, fitted.stream(own, stream) if fitted else None)
            rows = rows_of(built, Site(1, 1, stream), info.n_kv_heads, info.head_dim)
            x = torch.randn(info.n_kv_heads, 5, info.head_dim, generator=torch.Generator().manual_seed(0))
            taken.append(torch.equal(rows.decode(rows.encode(x))[:, 2:], rows.decode(rows.encode(x[:, 2:]))))
        except UserError:
            taken.append(False)
    assert all(taken) == (places.PAGES in said)


def test_a_model_that_vllm_cannot_run_is_served_by_no_pages(hf_engine):
    from kvlab.cli.checked import recipe_of

    recipe = recipe_of("hadamard")
    assert places.PAGES in places.places(recipe, None, hf_engine.info)
    odd = replace(hf_engine.info, head_dim=48)
    assert places.PAGES not in places.places(recipe_of("int"), None, odd)


def test_ends_that_are_kept_exactly_run_where_a_token_has_a_place(hf_engine):
    """In pages at most so many."""
    of = {recent: kvlab.recipe("int", bits=4, sink=4, recent=recent) for recent in (0, 1024)}
    assert places.places(of[0], None, hf_engine.info) == (places.CACHE, places.PAGES, places.STORE)
    assert places.places(of[1024], None, hf_engine.info) == (places.CACHE, places.STORE)


def row(codec: str, bits: float, high: float, places: tuple | None) -> measuring.CostRow:
    """A row with what a pick looks at."""
    kl = Estimate(value=high / 2, low=0.0, high=high, n_windows=4, n_tokens=40, method="bca")
    return measuring.CostRow(codec, bits, codec, bits, kl, kl, "", bits, bits, 100, 5.0, places, 7)


BOTH, ONE, KEPT = ("Cache", "vLLM pages", "store"), ("Cache", "store"), ("store",)


@pytest.mark.parametrize(
    ("rows", "taken", "stored", "nearest"),
    [
        ([row("a", 4, 0.001, BOTH), row("b", 3, 0.01, ONE), row("c", 2, 0.011, BOTH)], 1, None, None),
        ([row("a", 4, 0.001, BOTH), row("b", 2, 0.001, KEPT)], 0, 1, None),
        ([row("a", 4, 0.001, BOTH), row("b", 5, 0.001, KEPT)], 0, None, None),  # it stores more
        ([row("a", 4, 0.001, BOTH), row("b", 2, 0.2, KEPT)], 0, None, None),  # and what loses more is not named
        ([row("a", 4, 0.4, BOTH), row("b", 3, 0.2, BOTH)], None, None, 1),
        ([row("a", 4, 0.4, KEPT), row("b", 3, 0.2, ())], None, None, None),
        ([row("a", 4, 0.4, BOTH), row("b", 3, 0.001, KEPT)], None, 1, 0),
        ([row("mechanism", 1, 0.0001, None), row("b", 3, 0.001, BOTH)], 1, None, None),
        ([row("a", 3, 0.002, BOTH), row("b", 3, 0.001, BOTH)], 1, None, None),  # of equal bits the one that loses less
    ],
)
def test_the_pick_is_the_fewest_bits_that_are_small_and_served(rows, taken, stored, nearest):
    found = costs.pick(rows)
    assert found == {"below": kl_scale.SMALL.kl, "taken": taken, "stored": stored, "nearest": nearest}
    facts = {"context": 64, "device": "cpu", "threads": 1, "protocol": "in_forward"}
    last = list(measure.as_lines(measuring.Measurement(facts, (), tuple(rows), ())))[-1]
    named = rows[taken if taken is not None else nearest] if (taken, nearest) != (None, None) else None
    assert last.startswith("pick: none" if taken is None else f"pick: {named.codec} {named.bits:g},")
    assert named is None or f"{named.codec} {named.bits:g}" in last
    assert stored is None or f"{rows[stored].codec} {rows[stored].bits:g}" in last


def test_speed_is_the_median_of_windows_after_the_first():
    assert costs.tokens_per_second(100, [9.0, 2.0, 4.0, 1.0]) == 50
    assert costs.tokens_per_second(100, [4.0]) == 25 and costs.tokens_per_second(100, [0.0, 0.0]) is None


def test_a_snapshot_s_figures_are_told_to_be_the_least(run, tmp_path):
    warning, out = "--protocol in_forward measures it", tmp_path / "found.json"
    small = ("--codec", "kivi", "--bits", 2, "--no-witness", "--json", out)
    assert warning in run(*small)[1]
    over = found(out)["rows"][1]["kl"]["value"]
    assert warning not in run(*small, "--protocol", "in_forward")[1]
    inside = found(out)
    assert inside["rows"][1]["kl"]["value"] > over and inside["rows"][1]["tokens_per_second"] > 0
    assert inside["pick"]["below"] == kl_scale.SMALL.kl


# --------------------------------------------------------------------------------------------- parts


def rounded(x: torch.Tensor) -> torch.Tensor:
    """`x` as the rounding row sees it."""
    subject = quick_run.rounding(str(x.dtype).removeprefix("torch."))
    cell = Cell(
        study="cells",
        label=subject.label,
        engine="hf",
        dtype="float32",
        protocol="snapshot",
        origin="hf",
        stream="kv",
        layers=(0,),
        windows=1,
        recipe=subject.recipe,
    )
    return quick_run.RoundingCoder(cell, None).round_trip(x, Site(0, 0, "k"))


def test_rounding_is_that_of_bfloat16():
    x = torch.randn(2, 256, 64, generator=torch.Generator().manual_seed(0))
    exact = rounded(x)
    assert torch.equal(exact, x.bfloat16().float())
    already = x.bfloat16()
    again = rounded(already)
    assert again.dtype == torch.bfloat16
    once, twice = (float((a.float() - b.float()).square().mean()) for a, b in ((exact, x), (again, already)))
    assert twice == pytest.approx(once, rel=0.1)  # the same variance as the rounding that it stands for


@given(st.floats(0, 10), st.floats(0, 10))
def test_a_larger_kl_never_has_a_smaller_word(a, b):
    words = [kl_scale.ROUNDING, *(f"{s.word}: less than {s.like}" for s in kl_scale.STEPS), kl_scale.BEYOND]
    low, high = (words.index(kl_scale.in_words(kl, rounding=1e-6)) for kl in sorted((a, b)))
    assert low <= high


@given(st.integers(2, 9), st.integers(2, 40), st.integers(4, 12))
def test_windows_are_spread_over_the_text_and_overlap_nowhere(most, available, length):
    class Tokenizer:
        eos_token_id = None

        def __call__(self, text, **_):
            ids = list(range(available * length)) if isinstance(text, list) else []
            return type("Ids", (), {"input_ids": [ids] if isinstance(text, list) else ids})

    rows = windows_of(["text"], Tokenizer(), length, most, "a text")
    assert rows.shape == (min(most, available), length)
    assert len(np.unique(rows)) == rows.size and (rows[:, 0] % length == 0).all()
    gaps = np.diff(rows[:, 0]) // length
    assert gaps.size == 0 or gaps.max() - gaps.min() <= 1


def test_a_shared_run_is_found_wherever_it_stands():
    scored = np.arange(1000, dtype=np.int32).reshape(2, 500)
    other = np.arange(5000, 6000, dtype=np.int32).reshape(2, 500)
    refuse_overlap(scored, other, ("a", "b"))
    other[1, 100:164] = scored[0, 300:364]
    with refused(CorpusError, None, "a and b", "1 runs of 64 tokens"):
        refuse_overlap(scored, other, ("a", "b"))
