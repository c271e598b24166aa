"""The machine that something is measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
NEEDED = {"avx512bw", "amx_bf16"}  # of a processor of Intel's or AMD's; either will do


def machine() -> dict[str, str | int]:
    """The machine in words: processor family and what it lacks, cores, operating system. No names, no paths."""
    lacking = {"bfloat16": "no instructions"} if lacks_bfloat16() else {}
    return {
        "processor": platform.machine(),
        **lacking,
        "cores": os.cpu_count() or 0,
        "system": platform.system(),
    }


def cpu_name() -> str:
    """The processor's own name; its family where the system does not tell."""
    names = [line.partition(":")[2].strip() for line in _lines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def lacks_bfloat16() -> bool:
    """Whether this is a processor of Intel's or AMD's on which torch computes bfloat16 a number at a time."""
    words = {word for line in _lines() for word in line.split()}
    return "sse2" in words and not NEEDED & words


def _lines() -> list[str]:
    """What the system says of its processors, by line; nothing where it has no such file."""
    try:
        return CPUINFO.read_text().splitlines()
    except OSError:
        return []
