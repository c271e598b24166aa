"""Write docs/metrics.schema.json, the JSON schema of metrics.json, from the models that the studies declare.

python workflow/scripts/metrics_schema.py           writes it
python workflow/scripts/metrics_schema.py --check   says whether it is what the models generate
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from kvlab_pipeline.report.schema import json_schema  # noqa: E402

PUBLISHED = Path("docs/metrics.schema.json")


def text() -> str:
    """The published file."""
    return json.dumps(json_schema(), indent=1) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    there = (ROOT / PUBLISHED).read_text() if (ROOT / PUBLISHED).is_file() else ""
    if check and there != text():
        sys.exit(f"{PUBLISHED} is not what the models generate; run `python workflow/scripts/metrics_schema.py`")
    if not check:
        (ROOT / PUBLISHED).write_text(text())


if __name__ == "__main__":
    main()
