"""The model card, generated from the numbers of the run."""

from __future__ import annotations

from validation.reference.copying import SPANS, TEXT

TEMPLATE = """\
---
language: en
library_name: transformers
pipeline_tag: text-generation
---

# kvlab reference model

A {parameters:,}-parameter Qwen2 language model trained from scratch on the docstrings of installed Python
packages, and then on copying. It exists so that kvlab's measurements run without a model hub; generated from
`run.json`.

## Intended use

Measuring what a KV-cache codec costs: perplexity and attention statistics on text the model knows well, and
whether what stands in its context can still be looked up there, which training on copying is for.
It has QKV bias, grouped-query attention and rotary positions, as the larger Qwen2 models have. It is
no assistant, it knows nothing but docstrings, and **absolute costs measured on it do not carry over to
large models**; orderings and failures may, and should be confirmed there.

## Model

| | |
|---|---|
| architecture | {architecture} |
| layers, hidden, MLP | {layers}, {hidden}, {mlp} |
| query heads, KV heads, head size | {heads}, {kv_heads}, {head_dim} |
| vocabulary | {vocabulary} byte-level BPE entries, learned on the train split |
| positions | {positions} accepted, up to {longest} trained |
| embeddings | tied |
| stored weights | bf16, {weight_bytes:,} bytes |

Documents are separated by `<|endoftext|>`; the tokenizer adds no special token on its own.

## Quality

| held-out test split | weights as trained, fp32 | stored bf16 weights, computed in fp32 |
|---|---|---|
| perplexity per token | {ppl:.3f} | {stored_ppl:.3f} |
| bits per byte | {bpb:.4f} | {stored_bpb:.4f} |

Over all {test_tokens:,} tokens of the test split, in windows of {window} tokens. Perplexity counts the
end-of-text tokens. Bits per byte is the whole loss, that of end-of-text tokens included, over the
{test_bytes:,} UTF-8 bytes of the documents.

## Training

{tokens:,} tokens ({epochs:.2f} passes over {stream:,}) in {steps:,} steps and {minutes:.0f} minutes on
{machine}.
AdamW, learning rate {rate} with warm-up and cosine decay, weight decay {decay} on matrices, gradient clipping
{clip}, bf16 autocast, seed {seed}. Rows of {row_lengths} tokens. This phase ended because {ended}.

Then {copied:,} tokens of lessons in copying, in {copied_steps:,} steps and {copied_minutes:.0f} minutes on
{copied_machine}:
rows of {copied_lengths} tokens, of which {text:.0%} are left as text, {spans:.0%} are spans of
random tokens and of text that return, and the others text in which made-up facts return. Learning rate
{copied_rate}, otherwise as before; this phase ended because {copied_ended}. The quality above is that of the end.

A rerun on the same corpus gives the same tokenizer, but not bit-identical weights.

## Data

{documents:,} docstrings, {bytes:,} bytes: train {train:,}, calibration {calib:,}, test {test:,} documents.
Corpus sha256 `{corpus_sha}`.

| package | version | docstrings | bytes |
|---|---|---|---|
{packages}

The split is by a hash of the first words of prose, so docstrings that differ only in a class name stay on
one side; copied passages deeper in a text can still occur on both sides. Only `.py` files are read, without
build-generated and GPU-specific folders. `corpus.json` holds the hashes, and a corpus that differs is
refused.

## Licence

The training text is the docstrings of the open-source packages named above, each under its own licence
(BSD, MIT or Apache-2.0). None of that text is stored here; the weights are released with kvlab.

## Files

| file | bytes | sha256 |
|---|---|---|
{files}
"""


def model_card(run: dict) -> str:
    """Fill the template.

    Parameters
    ----------
    run : dict
        The content of ``run.json``.

    Returns
    -------
    str
        The card in Markdown.
    """
    return TEMPLATE.format(**run["model"], **_training(run), **_quality(run), **_data(run["corpus"]))


def _quality(run: dict) -> dict:
    trained, stored = run["test"]["trained"], run["test"]["stored"]
    return {
        "ppl": trained["perplexity"],
        "bpb": trained["bits_per_byte"],
        "stored_ppl": stored["perplexity"],
        "stored_bpb": stored["bits_per_byte"],
        "test_tokens": trained["tokens"],
        "test_bytes": trained["bytes"],
        "window": run["test"]["window"],
    }


def _training(run: dict) -> dict:
    training, recipe, files = run["training"], run["recipe"], run["files"]
    copied, lessons = run["copying"]["training"], run["copying"]["recipe"]
    lengths = sorted({length for _, length in recipe["shapes"]})
    rows = (f"| {name} | {file['bytes']:,} | `{file['sha256']}` |" for name, file in files.items())
    return {
        "tokens": training["tokens"],
        "epochs": training["tokens"] / training["stream_tokens"],
        "stream": training["stream_tokens"],
        "steps": training["steps"],
        "minutes": training["seconds"] / 60,
        "machine": run["machine"],
        "ended": training["ended"],
        "rate": recipe["learning_rate"],
        "decay": recipe["weight_decay"],
        "clip": recipe["clip"],
        "seed": recipe["seed"],
        "row_lengths": ", ".join(map(str, lengths)),
        "copied": copied["tokens"],
        "copied_steps": copied["steps"],
        "copied_minutes": copied["seconds"] / 60,
        "copied_lengths": ", ".join(map(str, sorted({length for _, length in lessons["shapes"]}))),
        "copied_rate": lessons["learning_rate"],
        "copied_machine": run["copying"]["machine"],
        "copied_ended": copied["ended"],
        "text": TEXT,
        "spans": SPANS,
        "longest": lengths[-1],
        "weight_bytes": files["model.safetensors"]["bytes"],
        "files": "\n".join(rows),
    }


def _data(corpus: dict) -> dict:
    rows = (
        f"| {name} | {package['version']} | {package['documents']:,} | {package['bytes']:,} |"
        for name, package in corpus["packages"].items()
    )
    return {
        "documents": corpus["documents"],
        "bytes": corpus["bytes"],
        "corpus_sha": corpus["sha256"],
        "packages": "\n".join(rows),
        **{name: side["documents"] for name, side in corpus["splits"].items()},
    }
