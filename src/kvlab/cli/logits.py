"""`kvlab logits`: a model here against llama.cpp's, by the logits that it wrote. Heavy imports happen inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvlab.cli.flags import DTYPES, EVERYTHING, Most, choice, model_folder, path, window_count
from kvlab.cli.measure import in_digits
from kvlab.core.errors import ModelError
from kvlab.output.terminal import printable

MOST = Most(16)


def logits_verb(
    model: Annotated[Path, model_folder(argument=True)],
    *,
    base: Annotated[Path, path("what `llama-perplexity --kl-divergence-base FILE` wrote of the same model")],
    dtype: Annotated[str, choice("what is computed in here; default: float32", DTYPES)] = "float32",
    windows: Annotated[int, window_count("so many of its chunks, evenly spread", MOST)] = MOST,
    json: Annotated[Path | None, EVERYTHING] = None,
) -> None:
    """KL of a model here from the logits that llama.cpp wrote of the same text.

    It says how far the two references are apart, before anything is coded: weights of other bits, another tokenizer's
    first token, a rotary embedding that one of both does not know. KL, perplexity and the same top token are added up
    as `llama-perplexity --kl-divergence` adds them up, over the second half of each chunk.

      llama-perplexity -m model-f16.gguf -f notes.txt -c 512 --kl-divergence-base notes.kld
      kvlab logits models/reference --base notes.kld
    """
    from kvlab.cli import checked
    from kvlab.measure.base_logits import BaseLogits

    config = checked.config_of(model)
    checked.writable(json)
    found = BaseLogits.read(base)
    if found.vocabulary != config.get("vocab_size"):
        raise ModelError(
            f"{base} is of a vocabulary of {found.vocabulary} tokens, and {model} has {config.get('vocab_size')};"
            " give the logits of the same model",
            code="model.other-vocabulary",
        )
    checked.refuse_long(found.context, config)

    from kvlab.cli.comparing import compared

    seen = compared(model, found, dtype, windows)
    if json:
        from kvlab.core.records import write_json

        write_json(json, seen.data())
    kl = seen.kl
    print(
        f"KL {in_digits(kl.value)} nats per token from llama.cpp's logits to those here, 95 % {in_digits(kl.low)} to"
        f" {in_digits(kl.high)}; same top token {100 * seen.top1.value:.1f} %"
    )
    print(f"perplexity: llama.cpp {seen.perplexity[0]:.4f}, here {seen.perplexity[1]:.4f}")
    print("\n".join(map(printable, seen.about)))
