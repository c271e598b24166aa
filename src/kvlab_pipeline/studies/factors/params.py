"""The section `gap`: the factors that the gap between the two corners divides into."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from kvlab.core.params import Params, Section, captured
from kvlab.core.recipe import DType, Engine

Ratio = Annotated[float, Field(gt=0, le=1)]


class GapSection(Section):
    """The factors of the decomposition; each has a level of low and one of high distortion, in that order."""

    key = "gap"
    told = "the factors of the decomposition"
    takes = ("calibration",)

    variance_ratios: tuple[Ratio, Ratio] = Field(
        default=(1.0, 0.95), description="levels of the factor `variance_ratio`"
    )
    origins: tuple[Engine, ...] = Field(
        default=("hf", "vllm"),
        min_length=1,
        max_length=2,
        description="levels of the factor `origin`: whose capture calibrates; default: all that are captured",
    )
    dtypes: tuple[DType, ...] = Field(
        default=("float32", "bfloat16"), min_length=1, max_length=2, description="levels of the factor `dtype`"
    )
    dtype: DType = Field(
        default="bfloat16", description="of the published corners, and of the cells; default: the last of gap.dtypes"
    )
    windows: int | None = Field(
        default=None,
        ge=2,
        description="the most windows that are scored of the corners in `dtype`; null: all of windows.test",
    )
    other_windows: int | None = Field(
        default=None,
        ge=2,
        description="the most windows that are scored of the corners in any dtype but `dtype`, and of the engines'"
        " agreement with a codec; null: as many as in `dtype`",
    )

    def fitted(self, params: Params) -> GapSection:
        """Origins that are captured, and a dtype among the levels."""
        return self.unsaid(origins=tuple(dict.fromkeys(params.calibration.engines)), dtype=self.dtypes[-1])

    def windows_in(self, dtype: DType, params: Params) -> int:
        """Scored windows of what is measured in a dtype."""
        most = [params.windows.test, self.windows, None if dtype == self.dtype else self.other_windows]
        return min(count for count in most if count is not None)

    def problems(self, params: Params) -> Iterator[str]:
        """A dtype that is no level, origins that are not captured, and engines that cannot be compared."""
        given = ", ".join(self.dtypes)
        if self.dtype not in self.dtypes:
            yield f"gap.dtype is {self.dtype!r}; it must be one of gap.dtypes: {given}"
        if len(set(params.engines)) > 1 and "float32" not in self.dtypes:
            yield f"gap.dtypes is {given}; engines are compared in 'float32': add it, or run one engine"
        for number, origin in enumerate(self.origins):
            yield from captured(f"gap.origins.{number}", origin, params)
