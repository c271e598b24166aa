"""An engine of vLLM in a process of its own, for tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from kvlab.kvstore.vllm.settings import transfer_config
from kvstore.vllm.user import ANSWER

HERE = Path(__file__).parent
SRC = HERE.parents[2] / "src"
SETTINGS = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Engine:
    """Start it, ask it, close it."""

    def __init__(self, model: Path, folder: Path, connector: dict, processes: bool = False, **settings):
        self.folder = folder
        own = {"transfer": transfer_config(folder, **connector), "dtype": "float32", **settings}
        environment = os.environ | SETTINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes))}
        environment["PYTHONPATH"] = os.pathsep.join([str(SRC), str(SRC.parent / "tests")])
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "user.py"), str(model), json.dumps(own)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.started = None

    def answer(self) -> dict:
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise AssertionError(f"the engine ended with code {self._process.wait()}")

    def ask(self, do: str, **wish) -> dict:
        if self.started is None:
            self.started = self.answer()
        assert self.started == {}, self.started
        self._process.stdin.write(json.dumps({"do": do, **wish}) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def generate(self, *prompts: list[int], **wish) -> dict:
        return self.ask("generate", prompts=prompts, **wish)

    def cold(self, *prompts: list[int], **wish) -> dict:
        """Without any snapshot."""
        return self.generate(*prompts, asks={"restore": False, "save": False}, **wish)

    def empty(self) -> None:
        """Take all snapshots away."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def files(self) -> list[Path]:
        return sorted(self.folder.iterdir()) if self.folder.is_dir() else []

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
