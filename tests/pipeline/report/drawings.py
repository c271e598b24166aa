"""Reads a drawing back: where the marks of a figure stand in its SVG, and whether that is what was described."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import numpy as np

from kvlab_pipeline.rendering.figure import Figure, Panel

SVG = "{http://www.w3.org/2000/svg}"
NUMBER = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
TOLERANCE = 0.02  # of a point, 1/72 inch


def read(text: str) -> list[tuple[int, str, np.ndarray]]:
    """Row, kind (``dot``, ``line`` or ``bar``) and corners of everything that is drawn of a row, in order."""
    found = []
    for group in ElementTree.fromstring(text).iter(f"{SVG}g"):
        name = group.get("data-row") or (group.get("id") or "").partition("row-")[2]
        if not name:
            continue
        dots = [(float(use.get("x")), float(use.get("y"))) for use in group.iter(f"{SVG}use")]
        if dots:
            found.append((int(name), "dot", np.array(dots)))
            continue
        (path,) = [one.get("d") for one in group.iter(f"{SVG}path")]
        corners = np.array(re.findall(rf"({NUMBER}) ({NUMBER})", path), dtype=float)
        found.append((int(name), "line" if len(corners) == 2 else "bar", corners))
    return found


def expected(panel: Panel) -> list[tuple[int, str, list[float], float]]:
    """The same as it was described: row, kind, numbers on the axis of values, place."""
    floor = panel.values.ends[0] if panel.values.log else -math.inf
    found = []
    for mark in panel.marks:
        whisker = (mark.row, "line", [max(mark.start + x, floor) for x in (mark.low, mark.high)], mark.at)
        if mark.bar:
            found.append((mark.row, "bar", [mark.start, mark.start + mark.value], mark.at))
        if mark.low != mark.high:
            found.append(whisker)
        if not mark.bar:
            found.append((mark.row, "dot", [max(mark.value, floor)], mark.at))
    return found


def assert_drawn(figure: Figure, text: str) -> None:
    """Every mark is in the drawing, and one straight map per axis takes all described numbers to where they stand."""
    given = read(text)
    for panel in figure.panels:
        told = expected(panel)
        seen, given = take(given, told)
        along, other = (0, 1) if panel.across else (1, 0)
        numbers, places, at, coordinates = [], [], [], []
        for (_, kind, values, place), corners in zip(told, seen, strict=True):
            reach = [corners[:, along].min(), corners[:, along].max()]
            numbers += sorted(values) if len(values) > 1 else values
            coordinates += (reach if panel.across else reach[::-1]) if len(values) > 1 else [corners[0, along]]
            places.append(place)
            at.append((corners[:, other].min() + corners[:, other].max()) / 2 if kind != "dot" else corners[0, other])
        straight(np.log(numbers) if panel.values.log else np.array(numbers), coordinates)
        straight(np.log(places) if panel.places.log else np.array(places), at)
    assert given == []


def take(given: list, told: list) -> tuple[list[np.ndarray], list]:
    """For each described thing the drawn one of its row and kind; and what is left."""
    left, seen = list(given), []
    for row, kind, _, _ in told:
        found = next((one for one in left if one[:2] == (row, kind)), None)
        assert found is not None, f"{kind} of row {row} is not drawn"
        left = [one for one in left if one is not found]
        seen.append(found[2])
    return seen, left


def straight(numbers: np.ndarray, coordinates: list[float]) -> None:
    """All coordinates lie on one straight line over the numbers."""
    if np.ptp(numbers) == 0:
        assert np.ptp(coordinates) < TOLERANCE
        return
    slope, offset = np.polyfit(numbers, coordinates, 1)
    assert abs(slope * np.ptp(numbers)) > 1  # points: what differs is drawn apart
    assert np.abs(slope * numbers + offset - coordinates).max() < TOLERANCE
