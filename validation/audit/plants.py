"""All faults of the running chain, in one table."""

from __future__ import annotations

from validation.audit import engine, score, way

PLANTS = way.PLANTS | engine.PLANTS | score.PLANTS
