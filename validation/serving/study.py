"""What a small cache buys in vLLM, and what it costs: every kind of cache under the same loads -> CAPACITY.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.core.errors import CapabilityError, UserError
from kvlab.core.machine import machine
from kvlab.core.origin import read_origin
from kvlab.core.records import versions, write_json
from validation.serving import page

GIB = 1 << 30
CONTEXT, SCORED, WINDOWS = 512, 128, 4
PROMPT, STEPS, BATCHES = 512, 7, (1, 8, 32)
SMALL = 4096  # tokens of bf16 that the small caches are as large as
DOCUMENT, DOCUMENTS, ANSWER = 800, 8, 4
CROWD, CROWD_PROMPT, CROWD_TOKENS = 10, 400, 120
UPSTREAM = ("turboquant_4bit_nc", "int4_per_token_head")  # of vLLM's own, what its CPU backend accepts without a word
LIMIT = 1800  # seconds for one engine


@dataclass(frozen=True)
class Arm:
    """A kind of cache: its name on the page, and what vLLM is told."""

    name: str
    cache: str


def study(model: Path, recipes: list[Path], out: Path, dtype: str = "bfloat16") -> None:
    """Measure and write ``CAPACITY.md`` and ``capacity.json`` into `out`.

    Raises
    ------
    UserError
        The model's text does not make as many tokens as the loads take.
    CapabilityError
        An engine that has to run does not.
    """
    arms = [Arm("bf16", "auto"), Arm("fp8_e4m3", "fp8_e4m3")]
    arms += [Arm(path.stem, str(Path(path).absolute())) for path in recipes]
    loads, found = made(model, dtype), {}
    with tempfile.TemporaryDirectory() as folder:
        for arm in [*arms, *(Arm(name, name) for name in UPSTREAM)]:
            upstream = arm.name in UPSTREAM
            big = {"bytes": GIB, "loads": ["quality"] if upstream else ["quality", "batches"], "prefix_caching": False}
            # Exact tokens of as many requests as run at once are part of the small cache.
            small = {"bytes": loads["small"], "loads": ["returning", "crowd"], "prefix_caching": True, "most": CROWD}
            found[arm.name] = run(arm, loads | big, Path(folder))
            if upstream:
                continue
            again = run(arm, loads | small, Path(folder))
            if refused := found[arm.name].get("refused") or again.get("refused"):
                raise CapabilityError(f"{arm.name}: {refused}")
            found[arm.name] |= {"small_tokens": again.pop("tokens")} | again
        quality(found, Path(folder))
    data = {
        "model": {"name": model.name, "disclosure": getattr(read_origin(model), "disclosure", None)},
        "machine": machine(),
        "versions": versions(),
        "load": os.getloadavg()[0],
        "dtype": dtype,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "settings": {
            **{
                "context": CONTEXT,
                "scored": SCORED,
                "windows": WINDOWS,
                "prompt": PROMPT,
                "small": SMALL,
                "steps": STEPS,
            },
            **{"document": DOCUMENT, "documents": DOCUMENTS, "answer": ANSWER},
            **{"crowd": CROWD, "crowd_prompt": CROWD_PROMPT, "crowd_tokens": CROWD_TOKENS},
        },
        "arms": found,
    }
    write_json(Path(out) / "capacity.json", data)
    page.write(data, out)


def made(model: Path, dtype: str) -> dict[str, Any]:
    """The loads, cut from an encyclopedia's articles; none of it calibrates."""
    from transformers import AutoConfig, AutoTokenizer

    from kvlab.text.encyclopedia import extract

    tokenizer, config = AutoTokenizer.from_pretrained(model), AutoConfig.from_pretrained(model)
    articles = [tokenizer(article.text)["input_ids"] for article in extract()]
    windows = [ids[: CONTEXT + SCORED] for ids in articles if len(ids) >= CONTEXT + SCORED][:WINDOWS]
    text = [token for ids in articles for token in ids]
    wanted = DOCUMENTS * DOCUMENT + max(BATCHES) * PROMPT + CROWD * CROWD_PROMPT
    if len(text) < wanted or len(windows) < WINDOWS:
        raise UserError(f"the encyclopedia makes {len(text)} tokens of this model; {wanted} are needed")
    cut = iter(range(0, len(text)))

    def take(count: int, length: int) -> list[list[int]]:
        return [[text[next(cut)] for _ in range(length)] for _ in range(count)]

    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 2
    return {
        **{"model": str(model), "dtype": dtype, "longest": 1200, "context": CONTEXT, "windows": windows},
        **{"prompts": take(max(BATCHES), PROMPT), "steps": STEPS, "batches": BATCHES, "small": SMALL * token},
        **{"documents": take(DOCUMENTS, DOCUMENT), "answer": ANSWER},
        **{"crowd": take(CROWD, CROWD_PROMPT), "crowd_tokens": CROWD_TOKENS},
    }


def run(arm: Arm, task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What one engine shows in a process of its own; why it does not start, where it does not."""
    path = folder / "task.json"
    path.write_text(json.dumps(task | {"cache": arm.cache, "logits": str(folder / f"{arm.name}.pt")}))
    done = subprocess.run(
        [sys.executable, "-m", "validation.serving.arm", path],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "KVLAB_"))},
    )
    for line in done.stdout.splitlines():
        if line.startswith("ANSWER "):
            return json.loads(line.removeprefix("ANSWER "))
    said = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line]
    return {"refused": said[-1].strip()[:200] if said else f"it ended with {done.returncode}"}


def quality(found: dict[str, Any], folder: Path) -> None:
    """KL of each arm from bf16's cache, nats per scored token; null where its logits are not finite."""
    import torch

    from kvlab.stats.divergences import token_record

    clean = torch.load(folder / "bf16.pt").flatten(0, 1)
    label = torch.zeros(len(clean), dtype=torch.int64)
    for name, answer in found.items():
        if "refused" in answer:
            continue
        logits = torch.load(folder / f"{name}.pt").flatten(0, 1)
        answer["kl"] = token_record(clean, logits, label)["kl"].mean().item() if logits.isfinite().all() else None
