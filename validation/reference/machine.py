"""What a run was made on, in words that name no particular machine."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

RECORDED = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def machine_class(threads: int) -> str:
    """Threads used and the processor's model, such as ``2 CPU threads (AMD EPYC)``."""
    return f"{threads} CPU threads ({_processor()})"


def software() -> dict[str, str]:
    """Versions of Python and of the packages that made the model."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in RECORDED}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
