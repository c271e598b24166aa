"""The docstring corpus and the training of the reference model, on miniature packages and sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlab.core.errors import CorpusError, ModelError, ParamsError
from kvlab.text import docstrings as corpus
from refusals import refused

MODEL = Path(__file__).parents[3] / "models" / "reference"
PROSE = "It explains at length what happens when the values are given, and what happens when they are not. " * 3
TINY = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with three documented functions."""
    write_package(tmp_path, "1.0+cpu", [f"Topic {word} is first. {PROSE}" for word in ("ants", "bees", "cows")])
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write_package(site: Path, version: str, texts: list[str]) -> None:
    root = site / "toylib"
    root.mkdir(exist_ok=True)
    functions = "\n\n".join(f'def f{at}():\n    """{text}\n\n    More.\n    """' for at, text in enumerate(texts))
    (root / "__init__.py").write_text(functions + "\n\ndef short():\n    '''Too short.'''\n")
    (root / "version.py").write_text(f'"""{"Written by a build. " * 20}"""\n')
    info = site / "toylib-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toylib\nVersion: {version}\n")


def record(folder: Path) -> Path:
    path = folder / "corpus.json"
    path.write_text(json.dumps(corpus.describe(corpus.extract(["toylib"]), ["toylib"])))
    return path


@pytest.mark.nightly
def test_extraction_is_deterministic_and_takes_long_written_docstrings_once(package):
    documents = corpus.extract(["toylib"])
    assert documents == corpus.extract(["toylib"]) == corpus.extract(["toylib", "toylib"])
    assert [document.text.split()[1] for document in documents] == ["ants", "bees", "cows"]
    assert all(document.text.endswith("\n\nMore.") for document in documents)


@pytest.mark.nightly
def test_torch_doc_calls_are_read(tmp_path, monkeypatch):
    write_package(tmp_path, "1.0", [])
    monkeypatch.syspath_prepend(tmp_path)
    call = f'add_docstr(toylib.abs, r"""\nabs(x): {PROSE}\n    {{x}}\n""".format(**common))\n'
    (tmp_path / "toylib" / "_toylib_docs.py").write_text(call)
    (found,) = corpus.extract(["toylib"])
    assert found.text.startswith("abs(x): It explains")


@pytest.mark.nightly
def test_generated_private_and_gpu_files_of_torch_are_left_out():
    kept = {"nn/modules/linear.py", "_torch_docs.py", "optim/adamw.py"}
    dropped = {"version.py", "_inductor/ir.py", "cuda/memory.py", "nn/_private/x.py", "testing/a.py"}
    assert {name for name in kept | dropped if corpus._is_wanted("torch", name.split("/"))} == kept


@pytest.mark.nightly
def test_splits_are_disjoint_complete_and_keep_near_duplicates_together():
    texts = [f"Subject {word * 3} opens {word}. {PROSE}" for word in words(400)]
    texts += [f"Configure a [`{name}Model`] with {PROSE} {name}" for name in ("Llama", "Qwen2", "GPTNeoX")]
    documents = as_documents(texts)
    sides = corpus.split(documents)
    hashes = [document.sha256 for side in sides.values() for document in side]
    assert len(hashes) == len(set(hashes)) == len(documents)
    assert 0.8 < len(sides["train"]) / len(documents) < 0.97
    assert sides == corpus.split(documents[::-1])
    assert sum(any("Configure" in document.text for document in side) for side in sides.values()) == 1


@pytest.mark.nightly
def test_a_changed_document_changes_the_hash():
    documents = as_documents(["one", "two"])
    assert corpus.corpus_hash(documents) != corpus.corpus_hash(as_documents(["one", "twp"]))
    assert corpus.corpus_hash(documents) != corpus.corpus_hash(documents[::-1])
    assert corpus.corpus_hash(as_documents(["ab", "c"])) != corpus.corpus_hash(as_documents(["a", "bc"]))


@pytest.mark.nightly
def test_the_recorded_corpus_is_accepted(package, tmp_path):
    sides = corpus.load_checked(record(tmp_path))
    assert sum(map(len, sides.values())) == 3


@pytest.mark.nightly
def test_a_local_version_tag_is_not_part_of_the_version(package):
    assert corpus.installed_version("toylib") == "1.0"


@pytest.mark.nightly
def test_another_version_is_named(package, tmp_path):
    expected = record(tmp_path)
    write_package(package, "1.1", [f"Topic dogs is first. {PROSE}"])
    with pytest.raises(CorpusError) as caught:
        corpus.load_checked(expected)
    assert all(part in str(caught.value) for part in ("toylib 1.1", "1.0"))
    assert "\n" not in str(caught.value)


@pytest.mark.nightly
def test_other_text_under_the_same_version_is_named(package, tmp_path):
    expected = record(tmp_path)
    write_package(package, "1.0", [f"Topic dogs is first. {PROSE}"])
    with pytest.raises(CorpusError) as caught:
        corpus.load_checked(expected)
    assert "toylib 1.0 " in str(caught.value)


@pytest.mark.nightly
def test_a_missing_package_and_an_unreadable_record_are_corpus_errors(tmp_path):
    with pytest.raises(CorpusError) as caught:
        corpus.extract(["no_such_package_here"])
    assert "no_such_package_here" in str(caught.value)
    for text in (None, "[]"):
        if text:
            (tmp_path / "corpus.json").write_text(text)
        with pytest.raises(CorpusError) as caught:
            corpus.load_checked(tmp_path / "corpus.json")
        assert str(tmp_path / "corpus.json") in str(caught.value)


@pytest.mark.nightly
def test_installed_torch_gives_the_recorded_docstrings():
    recorded = json.loads((MODEL / "corpus.json").read_text())["packages"]["torch"]
    if corpus.installed_version("torch") != recorded["version"]:
        pytest.skip("another torch is installed")
    found = corpus.extract(["torch"])  # the first package, so nothing was dropped as a repeat of another's
    assert (corpus.corpus_hash(found), len(found)) == (recorded["sha256"], recorded["documents"])


@pytest.mark.nightly
def test_a_short_run_writes_a_model_that_loads(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "reference"
    run_tiny(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reference"]
    run = json.loads((out / "run.json").read_text())
    assert run["training"]["steps"] == 3
    assert "tokens were spent" in (out / "README.md").read_text()
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("It explains.\n    x : int")["input_ids"]
    assert tokenizer.eos_token not in tokenizer.convert_ids_to_tokens(ids)
    assert tokenizer.decode(ids) == "It explains.\n    x : int"
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(out, dtype=dtype)
        assert torch.isfinite(model(torch.tensor([ids])).logits).all()


@pytest.mark.nightly
def test_a_killed_run_leaves_the_old_model_and_can_go_on(tmp_path, monkeypatch):
    out = tmp_path / "reference"
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"old")
    with monkeypatch.context() as patch:
        stop_at_step(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            run_tiny(out)
    assert [(path.name, path.read_bytes()) for path in out.iterdir()] == [("model.safetensors", b"old")]
    with refused(ModelError, "model.other-checkpoint"):
        run_tiny(out, resume=True, learning_rate=1e-4)
    run_tiny(out, resume=True)
    assert json.loads((out / "run.json").read_text())["training"]["steps"] == 3


@pytest.mark.nightly
def test_a_kill_between_the_two_renames_is_mended(tmp_path):
    from validation.reference import publish

    out, old = tmp_path / "reference", tmp_path / ".reference.old"
    old.mkdir()
    publish.restore(out)
    assert out.exists() and not old.exists()


@pytest.mark.nightly
def test_resuming_without_a_checkpoint_says_so(tmp_path):
    with refused(ModelError, "model.no-checkpoint"):
        run_tiny(tmp_path / "reference", resume=True)


@pytest.mark.nightly
def test_a_run_of_no_tokens_is_refused(tmp_path):
    from validation.reference import main_train

    with refused(ParamsError, "params.not-above-zero", 0):
        main_train(tmp_path / "reference", 0)


@pytest.mark.nightly
def test_the_schedule_ends_low_by_tokens_or_by_time():
    from validation.reference.optimise import Progress, TrainingRecipe, learning_rate, share_done

    recipe = TrainingRecipe(tokens=1000)
    assert share_done(recipe, Progress(1, 500, 60.0), max_minutes=None) == 0.5
    assert share_done(recipe, Progress(1, 500, 60.0), max_minutes=1.0) == 1.0
    rates = [learning_rate(recipe, done / 100) for done in range(101)]
    assert max(rates) == rates[2] == recipe.learning_rate
    assert rates[100] == pytest.approx(recipe.learning_rate * recipe.final_fraction)


@pytest.mark.nightly
def test_a_model_of_text_goes_on_with_copying_alone_and_only_once(tmp_path):
    out = tmp_path / "reference"
    run_tiny(out)
    whole = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({key: whole[key] for key in whole if key != "copying"}))
    run_tiny(out, copying_only=True)
    run = json.loads((out / "run.json").read_text())
    assert (run["training"], run["recipe"]) == (whole["training"], whole["recipe"])
    assert run["copying"]["training"]["tokens"] >= 10_000
    assert run["files"]["model.safetensors"] != whole["files"]["model.safetensors"]
    with refused(ModelError, "model.trained-already", out):
        run_tiny(out, copying_only=True)
    with refused(ModelError, "model.none-there", tmp_path / "none"):
        run_tiny(tmp_path / "none", copying_only=True)


@pytest.mark.nightly
def test_a_run_killed_while_it_copies_goes_on_there(tmp_path, monkeypatch):
    out = tmp_path / "reference"
    with monkeypatch.context() as patch:
        stop_at_step(patch, 4)  # the training on text has three steps
        with pytest.raises(KeyboardInterrupt):
            run_tiny(out)
    left = {path.name for path in (tmp_path / ".reference.partial").iterdir()}
    assert {"checkpoint-text.pt", "checkpoint-copying.pt"} <= left
    run_tiny(out, resume=True)
    assert json.loads((out / "run.json").read_text())["training"]["steps"] == 3


@pytest.mark.nightly
def test_rows_of_copying_are_drawn_anew_for_each_step_and_alike_for_each_run():
    import torch

    from validation.reference import copying

    stream = torch.arange(1, 5001, dtype=torch.int32) % 300
    inputs, targets = copying.batch(stream, 300, step=3, done=0.0, seed=0)
    assert inputs.shape == targets.shape == (8, 256)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(copying.batch(stream, 300, step=3, done=0.0, seed=0)[0], inputs)
    assert not torch.equal(copying.batch(stream, 300, step=3, done=0.0, seed=1)[0], inputs)
    assert copying.batch(stream, 300, step=4, done=0.9, seed=0)[0].shape == (1, 2304)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["spans", "facts"])
def test_what_stood_in_a_row_of_copying_returns(kind):
    from itertools import pairwise
    from random import Random

    import torch

    from validation.reference.copying import RowDrawer

    stream = torch.arange(1, 100_001, dtype=torch.int32)  # no token twice, so what comes twice was brought back
    row = getattr(RowDrawer(stream, 4096, Random(0)), kind)(400)
    assert len(row) == 400
    pairs = list(pairwise(row))
    assert len(set(pairs)) < 0.9 * len(pairs)


@pytest.mark.nightly
def test_batches_continue_the_stream_and_start_again_at_its_end():
    import torch

    from validation.reference.stream import batch

    stream = torch.arange(10, dtype=torch.int32)
    inputs, targets = batch(stream, step=1, seen=7, shapes=((9, 9), (2, 3)))
    assert inputs.tolist() == [[7, 8, 9], [0, 1, 2]]
    assert targets.tolist() == [[8, 9, 0], [1, 2, 3]]


@pytest.mark.nightly
def test_the_score_does_not_depend_on_how_many_windows_are_taken_at_once():
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from validation.reference.evaluate import evaluate
    from validation.reference.tokenizer import train_tokenizer

    texts = [document.text for document in tiny_documents()[:5]]
    tokenizer = train_tokenizer(texts, TINY["vocab_size"], 64)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**TINY))
    scores = [evaluate(model, tokenizer, texts, window=32, rows=rows) for rows in (1, 4)]
    assert scores[0].perplexity == pytest.approx(scores[1].perplexity, rel=1e-5)
    assert scores[0].bytes == sum(len(text.encode()) for text in texts)
    with refused(CorpusError, "corpus.no-documents"):
        evaluate(model, tokenizer, [])


@pytest.mark.nightly
@pytest.mark.skipif(not (MODEL / "run.json").exists(), reason="the reference model is not built")
def test_the_stored_model_is_the_one_its_card_describes():
    from validation.reference import publish
    from validation.reference.card import model_card

    run = json.loads((MODEL / "run.json").read_text())
    found = publish.file_hashes(MODEL)
    assert {name: found[name] for name in run["files"]} == run["files"]
    assert sum(file["bytes"] for file in found.values()) < publish.MAX_BYTES
    assert (MODEL / "README.md").read_text() == model_card(run)
    assert run["corpus"] == json.loads((MODEL / "corpus.json").read_text())


def words(count: int) -> list[str]:
    letters = "bcdfghjklmnpqrstvwxyz"
    return [f"{letters[at % 21]}a{letters[at // 21 % 21]}ole" for at in range(count)]


def as_documents(texts: list[str]) -> list[corpus.Document]:
    return [corpus.Document(text, "toylib", corpus._sha256(text)) for text in texts]


def tiny_documents() -> list[corpus.Document]:
    return as_documents([f"Subject {word} opens. {PROSE}" for word in words(60)])


def tiny_description(documents: list[corpus.Document]) -> dict:
    sides = {name: {"documents": len(side)} for name, side in corpus.split(documents).items()}
    text = {"documents": len(documents), "bytes": 1, "sha256": corpus.corpus_hash(documents)}
    return text | {"splits": sides, "packages": {"toylib": text | {"version": "1.0"}}}


def run_tiny(out: Path, resume: bool = False, learning_rate: float = 1e-3, copying_only: bool = False) -> None:
    from validation.reference.build import build_from
    from validation.reference.optimise import TrainingRecipe

    documents = tiny_documents()
    recipe = TrainingRecipe(tokens=3 * 64, shapes=((2, 32),), learning_rate=learning_rate, compiled=False)
    lessons = TrainingRecipe(tokens=10_000, learning_rate=1e-3, compiled=False)
    build_from(
        documents, tiny_description(documents), TINY, recipe, lessons, out, resume=resume, copying_only=copying_only
    )


def stop_at_step(patch: pytest.MonkeyPatch, last: int) -> None:
    """Checkpoint after every step, and stop as an interrupt would."""
    from validation.reference import optimise

    def save_and_stop(self, model, optimiser, progress):
        self.save(model, optimiser, progress)
        if progress.step == last:
            raise KeyboardInterrupt

    patch.setattr(optimise.TrainingCheckpoint, "save_if_due", save_and_stop)
