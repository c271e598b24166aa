"""The package of docs/codecs.md, put where Python finds it with its metadata, and broken ones like it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "codecs.md"


def documented() -> dict[str, str]:
    """The Python of the page, by file name."""
    found = re.findall(r"^`(kvlab_sign/\w+\.py)`.*?^```python\n(.*?)^```", DOCS.read_text(), flags=re.M | re.S)
    return dict(found)


def install(folder: Path, files: dict[str, str], points: dict[str, str], name="kvlab-sign", version="1.0") -> Path:
    """Write a distribution as pip lays it out in site-packages."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = "".join(f"{point} = {target}\n" for point, target in points.items())
    (info / "entry_points.txt").write_text(f"[kvlab.codecs]\n{lines}")
    return folder


def forget() -> None:
    """Drop the plugin's modules."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "kvlab_sign"]:
        del sys.modules[name]
