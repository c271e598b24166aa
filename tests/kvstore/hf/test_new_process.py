"""A process that has never seen the context goes on from its snapshot as the one that saved it, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import kvlab
from kvlab.core.model import load_tokenizer, resolve
from kvlab.core.params import Model
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.hf.run import PagedRun
from kvlab.kvstore.paging.config import PagerConfig
from kvstore.hf.prompts import POLICIES, prompt, run_after

pytestmark = pytest.mark.nightly

ELSEWHERE = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from kvlab.kvstore.paging.config import PagerConfig
from kvlab.kvstore.hf.model import PagedModel
from kvlab.kvstore.restore import restore
from kvlab.core.model import resolve
from kvlab.core.params import Model

out, threads = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(threads)
for name, job in json.loads((out / "jobs.json").read_text()).items():
    model = PagedModel.load(resolve(Model(**job["model"])), job["dtype"])
    logits, reports = {}, []
    for number, one in enumerate(job["prompts"]):
        warm = restore(model, one["tokens"], Path(one["snapshot"]), PagerConfig(**job["config"]), one["policy"],
                       mode="consume", every=job["every"])
        decoded = warm.run.decode(job["decode"])
        logits[str(number)] = torch.cat([warm.logits[None], decoded.logits])
        reports.append([warm.report.prefix_len, list(decoded.tokens), list(warm.run.pager.resident)])
    save_file(logits, out / f"{name}.safetensors")
    (out / f"{name}.json").write_text(json.dumps(reports))
"""


@dataclass(frozen=True)
class Conversation:
    """A context that was saved, the prompt that goes on from it, and how much of that is to be reused."""

    old: list[int]
    tokens: list[int]
    due: int
    policy: str


@dataclass(frozen=True)
class Job:
    """Conversations with one model over one pool."""

    model: PagedModel
    config: PagerConfig
    conversations: list[Conversation]
    every: int
    decode: int

    def prepare(self, folder: Path, name: str) -> dict:
        """Save every context; what the other process has to know."""
        prompts = []
        for number, one in enumerate(self.conversations):
            path = folder / f"{name}-{number}.kv"
            run_after(one.old, self.model, self.config, one.policy, every=self.every).save(path)
            prompts.append({"tokens": one.tokens, "policy": one.policy, "snapshot": str(path)})
        info = self.model.info
        return {
            "model": {"path": str(info.path), "n_layers": info.n_layers},
            "dtype": self.model.dtype,
            "config": asdict(self.config),
            "prompts": prompts,
            "every": self.every,
            "decode": self.decode,
        }

    def check(self, folder: Path, name: str) -> None:
        """Hold what the other process wrote against cold runs in this one."""
        logits = load_file(folder / f"{name}.safetensors")
        reports = json.loads((folder / f"{name}.json").read_text())
        for number, one in enumerate(self.conversations):
            cold = PagedRun(self.model, self.config, one.policy, every=self.every)
            first, decoded = cold.extend(one.tokens), cold.decode(self.decode)
            assert reports[number] == [one.due, list(decoded.tokens), list(cold.pager.resident)]
            if self.model.dtype == "float32":
                assert torch.equal(logits[str(number)], torch.cat([first[None], decoded.logits]))


def conversations(count: int, shortest: int = 40) -> list[Conversation]:
    """Of several lengths, with every policy."""
    old = [prompt(shortest + 3 * seed, seed) for seed in range(count)]
    return [
        Conversation(tokens, tokens + prompt(20, seed + 50), len(tokens) // 8 * 8, POLICIES[seed % 5])
        for seed, tokens in enumerate(old)
    ]


def text(root: Path, model: PagedModel) -> list[Conversation]:
    """Text that the reference model can read; 448 of 500 tokens are not computed again."""
    ids = load_tokenizer(model.info)(" ".join((root / "README.md").read_text().split())).input_ids
    places = {"lru": 0, "qk": 150, "oracle": 300}
    return [Conversation(ids[at : at + 470], ids[at : at + 500], 448, policy) for policy, at in places.items()]


@pytest.fixture(scope="module")
def jobs(root, model, halved) -> dict[str, Job]:
    roomy = PagerConfig(pool_tokens=256, chunk_tokens=8)
    small = PagerConfig(pool_tokens=40, chunk_tokens=8, sink_chunks=1, tail_chunks=1)
    reference = PagedModel.load(resolve(Model(path=str(root / "models/reference"), n_layers=6)))
    return {
        "twenty": Job(model, roomy, conversations(20), every=8, decode=64),
        "evicted": Job(model, small, conversations(5, shortest=90), every=8, decode=32),
        "bfloat16": Job(halved, roomy, conversations(5), every=8, decode=64),
        "reference": Job(reference, PagerConfig(pool_tokens=640), text(root, reference), every=64, decode=16),
    }


@pytest.fixture(scope="module")
def elsewhere(jobs, tmp_path_factory) -> Path:
    """The folder in which another process, one for all jobs, has left its logits."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "jobs.json").write_text(json.dumps({name: job.prepare(folder, name) for name, job in jobs.items()}))
    source = {"PYTHONPATH": str(Path(kvlab.__file__).parents[1])}
    command = [sys.executable, "-c", ELSEWHERE, str(folder), str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | source)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", ["twenty", "evicted", "bfloat16", "reference"])
def test_the_other_process_is_the_cold_run_here(jobs, elsewhere, name):
    """20 prompts of 64 tokens; a pool that holds a part of the context; bfloat16; trained weights and real text."""
    jobs[name].check(elsewhere, name)
