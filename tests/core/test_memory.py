"""Memory that is kept is not asked for again; page faults are counted, which no other process disturbs."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNT = """
import ctypes, resource, sys
import torch
from kvlab.core import memory
if sys.argv[1] == "kept":
    memory.keep_freed()
else:  # as glibc begins; by itself it may raise that, sooner or later
    ctypes.CDLL(None).mallopt(memory.M_MMAP_THRESHOLD, 128 * 2**10)
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


HOLES = """
import sys
import psutil, torch
from kvlab.core import memory
memory.keep_freed()
kept = [torch.ones(2**16) for _ in range(1200)]  # 256 KiB each, 300 MiB in all
kept[::2] = [None] * len(kept[::2])  # a hole of 256 KiB after each
if sys.argv[1] == "given back":
    memory.give_back()
print(psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_holes_between_tensors_that_stay_are_given_back():
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", HOLES, how], capture_output=True, text=True, check=True).stdout)
        for how in ("kept", "given back")
    )
    assert kept - given_back > 100 * 2**20
