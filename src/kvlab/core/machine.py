"""The machine that something was measured on."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """The processor's own name; its family where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
