"""A calibration fitted here and now, for `kvlab calibrate` and `kvlab measure`: windows of a text through an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvlab.calibration.calibrate import calibrate
from kvlab.calibration.load import Calibrated
from kvlab.core.model import ModelInfo, load_tokenizer
from kvlab.core.recipe import Recipe
from kvlab.engines.base import Engine
from kvlab.output.terminal import all_there_are
from kvlab.text.corpus import windows_hash
from kvlab.text.excerpts import docstrings, windows_of

DOCSTRINGS = "docstrings of installed packages"


@dataclass(frozen=True)
class CalibrationText:
    """Windows to calibrate on, and what they were cut from.

    Parameters
    ----------
    name : str
        Of the text, for people.
    windows : numpy.ndarray of int32, shape (windows, context)
    most : int
        How many would have been taken of a longer text.
    """

    name: str
    windows: np.ndarray
    most: int

    @classmethod
    def read(
        cls, info: ModelInfo, path: Path | None, text: str | None, context: int, most: int, exactly: str | None = None
    ) -> CalibrationText:
        """That of a text which was read from `path`, or of docstrings where there is none; as `windows_of`."""
        name, tokenizer = DOCSTRINGS if path is None else str(path), load_tokenizer(info)
        texts = docstrings() if text is None else [text]
        return cls(name, windows_of(texts, tokenizer, context, most, name, exactly=exactly), most)

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.windows.size

    def fit(self, engine: Engine, recipes: Sequence[Recipe]) -> Calibrated:
        """What these recipes read, as this engine computes it."""
        corpus_hash = windows_hash({"calib": self.windows}, self.windows.shape[1])
        return calibrate(engine, self.windows.tolist(), recipes, corpus_hash=corpus_hash)

    def about(self, engine: Engine) -> str:
        """In a line."""
        count, length = self.windows.shape
        seen = f"{count} windows of {length} tokens of {self.name}{all_there_are(count, self.most)}"
        return f"calibrated on {seen}, on {engine.name} in {engine.dtype}"
