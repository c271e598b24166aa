"""The part ``cells`` of ``metrics.json``: one cell at a time."""

from __future__ import annotations

from typing import Annotated, Literal

from kvlab.core.recipe import Attention, DType, Engine, Placement, Protocol, Span, Stream
from kvlab_pipeline.studies.entries import Compared, Entry, Interval, PValue


class ConfidenceBin(Entry):
    """Mean KL of the tokens on which the uncompressed model gave its top token a probability in [low, high)."""

    low: float
    high: float
    kl: float | None
    n_tokens: int


class CellEntry(Entry):
    """What a cell is, what its codec did, and what it cost beside the same engine and dtype without a codec."""

    cell_id: str
    recipe_id: str
    role: Literal["rerun", "identity", "codec"]
    label: str
    """The entry of params.yaml that it is of."""
    engine: Engine
    dtype: DType
    protocol: Protocol
    stream: Stream
    study: str
    attention: Attention
    placement: Placement
    span: Span
    origin: Engine
    against: str | None
    """The label of the cell that it is to be held against; null for the studied one."""
    difference: Interval | None
    """Net KL minus that of the cell it is held against; null for the studied cell itself and for floors."""
    p_value: Annotated[float, PValue] | None
    """Of the difference, by flipping the signs of windows (of documents, where they are known), in either direction."""
    q_value: Annotated[float, PValue] | None
    """Corrected for all cells that are held against another (Benjamini and Hochberg)."""
    compared: Compared | None
    variance_ratio: float | None
    bits_per_value: float
    """Every stored byte of the scored windows' contexts, uncoded layers included, over the values of K and V."""
    fires: int
    expected_fires: int
    canary_kl: float | None
    d_eff_mean: dict[Literal["k", "v"], float | None]
    outlier_rate: dict[Literal["k", "v"], float | None]
    whitened_error: dict[Literal["k", "v"], float | None]
    kl: Interval
    kl_net: Interval | None
    """KL minus that of the identity cell beside it."""
    delta_nll: Interval
    ppl_ratio: Interval
    published_estimator: Interval
    """The unweighted mean over windows of the signed relative change in perplexity, as the published study has it."""
    effective_tokens: float
    predicted_standard_error: float
    top1_agreement: Interval
    flips_to_wrong: Interval
    flips_to_right: Interval
    kl_percentiles: dict[str, float]
    """KL that the given percentage of tokens stays below."""
    kl_by_confidence: tuple[ConfidenceBin, ...]
