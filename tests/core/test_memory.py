"""Memory that is kept is not asked for again; page faults are counted, which no other process disturbs."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNT = """
import ctypes, resource
import psutil, torch
from kvlab.core import memory
def faults():
    several()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        several()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def several():
    return [torch.ones(2**21) for _ in range(8)]  # 8 MiB each
# as glibc begins; by itself it may raise that, sooner or later
ctypes.CDLL(None).mallopt(memory.M_MMAP_THRESHOLD, 128 * 2**10)
given_back = faults()
memory.keep_freed()
kept = faults()
tensors = [torch.ones(2**16) for _ in range(1200)]  # 256 KiB each, 300 MiB in all
tensors[::2] = [None] * len(tensors[::2])  # a hole of 256 KiB after each
before = psutil.Process().memory_info().rss
memory.give_back()
print(kept, given_back, before - psutil.Process().memory_info().rss)
"""


@pytest.mark.nightly
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_freed_memory_is_kept_for_the_next_tensor_and_holes_are_given_back():
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    kept, given_back, holes = map(int, done.stdout.split())
    assert 2 * kept < given_back
    assert holes > 100 * 2**20
