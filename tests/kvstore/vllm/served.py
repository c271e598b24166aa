"""Engines of vLLM in processes of their own, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from kvlab.kvstore.vllm.settings import transfer_config

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


class Nursery:
    """Where engines come from, see `nursery.py`."""

    def __init__(self, folder: Path):
        self._door = folder / "door"
        path = os.pathsep.join([str(SRC), str(SRC.parent / "tests")])
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "nursery.py"), str(self._door)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | SETTINGS | {"PYTHONPATH": path},
        )
        self._open = False

    def line(self) -> socket.socket:
        """To a new process."""
        while not self._open:
            said = self._process.stdout.readline()
            assert said, f"it ended with code {self._process.wait()}"
            self._open = said == "open\n"
        line = socket.socket(socket.AF_UNIX)
        line.connect(str(self._door))
        return line

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


class Engine:
    """Start it, ask it, close it."""

    def __init__(
        self, nursery: Nursery, model: Path, folder: Path, connector: dict, processes: bool = False, **settings
    ):
        self.folder = folder
        own = {"transfer": transfer_config(folder, **connector), "dtype": "float32", **settings}
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes))}
        self._socket = nursery.line()
        self._line = self._socket.makefile("rw", buffering=1)
        self._say({"model": str(model), "settings": own, "environment": environment})
        self._pid = self.answer()["pid"]
        self.started = None

    def answer(self) -> dict:
        line = self._line.readline()
        assert line, "the engine has ended"
        return json.loads(line)

    def _say(self, what: dict) -> None:
        self._line.write(json.dumps(what) + "\n")
        self._line.flush()

    def ask(self, do: str, **wish) -> dict:
        if self.started is None:
            self.started = self.answer()
        assert self.started == {}, self.started
        self._say({"do": do, **wish})
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
        self._socket.shutdown(socket.SHUT_WR)
        self._socket.settimeout(60)
        try:
            while self._socket.recv(1 << 16):
                pass
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._line.close()
        self._socket.close()
