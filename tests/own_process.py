"""Files of cases that need a process without what other tests leave in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def passed(*cases: Path, marks: str = "", **environment: str) -> None:
    """Run files of cases in a pytest of its own, those with such marks; all must pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, *map(str, cases)]
    environment = os.environ | environment
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment)
    assert ended.returncode == 0 and " passed" in ended.stdout, ended.stdout[-3000:] + ended.stderr[-1000:]
