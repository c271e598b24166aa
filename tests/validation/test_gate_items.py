"""How many windows would settle a row: on losses whose answer is known."""

import numpy as np

from kvlab.gate.evidence.measures import ALPHA
from validation.gate_items import SIZES, settled

MARGIN, LEVEL = 0.01, ALPHA / 7
SPREAD = np.linspace(-0.001, 0.001, 16)


def test_a_loss_far_inside_its_margin_is_certified_by_the_fewest_windows():
    assert settled(0.002 + SPREAD, MARGIN, LEVEL, 5) == (SIZES[0], "certified")


def test_a_loss_far_beyond_its_margin_is_refused_by_the_fewest_windows():
    assert settled(0.05 + SPREAD, MARGIN, LEVEL, 5) == (SIZES[0], "refused")


def test_a_loss_on_its_margin_is_settled_by_no_number_of_windows():
    assert settled(MARGIN + SPREAD, MARGIN, LEVEL, 5) is None
