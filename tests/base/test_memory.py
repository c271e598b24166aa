"""Memory that is kept is not asked for again; page faults are counted, which no other process disturbs."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNT = """
import resource, sys
import torch
from kvlab.base import memory
if sys.argv[1] == "kept":
    memory.keep_freed()
def several():
    return [torch.ones(2**21) for _ in range(8)]  # 8 MiB each
several()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    several()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", COUNT, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_freed_memory_is_kept_for_the_next_tensor():
    assert 2 * faults("kept") < faults("given back")
