"""What the tests of reports share."""

from gate.judged_once import corruptions_judged_once

__all__ = ["corruptions_judged_once"]  # a fixture
