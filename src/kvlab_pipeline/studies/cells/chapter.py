"""The cells in the report: every cell, and what one change of the codec costs."""

from __future__ import annotations

from kvlab_pipeline.studies.cells.claims import claims
from kvlab_pipeline.studies.cells.figure import cells, cells_table
from kvlab_pipeline.studies.cells.numbers import cell_entries
from kvlab_pipeline.studies.cells.schema import CellEntry
from kvlab_pipeline.studies.cells.tables import context
from kvlab_pipeline.studies.chapter import Chapter, Drawn, Section, estimates_of

CHAPTER = Chapter(
    parts={"cells": tuple[CellEntry, ...]},
    entries=lambda measured: {"cells": cell_entries(measured.params, measured.results, measured.boot)},
    sections={
        "cells": Section(
            60, "Bits, KL, perplexity and top token of every cell", asks="one change of the codec at a time"
        )
    },
    context=context,
    claims=lambda metrics: claims(metrics.get("cells") or []),
    figures={"cells": Drawn(cells_table, cells)},
    limits=lambda metrics: [("cells, net KL", estimates_of(metrics, "cells", "kl_net"))],
)
