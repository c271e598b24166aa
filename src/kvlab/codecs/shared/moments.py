"""Count, mean and scatter of rows, folded up as they come: what is left of K and V once they are gone."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.core.errors import Fault

FOLDS = 8


def folds(count: int, most: int = FOLDS) -> list[slice]:
    """`count` tokens as at most `most` runs of neighbours, two tokens long at least."""
    number = max(1, min(most, count // 2))
    return [slice(count * i // number, count * (i + 1) // number) for i in range(number)]


class Moments:
    """Moments of the rows of several heads, kept apart for each of `folds` of the tokens.

    Apart, because eigenvalues are cross-validated on runs of neighbours (see `covariance.out_of_sample_variance`).
    Which tokens make up a run is settled by the number of all tokens beforehand, so that rows may come in any order
    and on several machines. Nothing grows with the number of tokens.

    Parameters
    ----------
    tokens : int
        All that will come.
    heads, head_dim : int
        Of a row.
    device : torch.device or str
        Where sums are kept, and rows are brought.

    Attributes
    ----------
    count : Tensor
        Tokens so far, float64 [folds].
    mean : Tensor
        float64 [folds, heads, head_dim].
    scatter : Tensor
        Sum of the outer products of what is left after the fold's mean, float64 [folds, heads, head_dim, head_dim].
    """

    def __init__(self, tokens: int, heads: int, head_dim: int, device: torch.device | str = "cpu"):
        self.tokens = tokens
        number = len(folds(tokens))
        self.count = torch.zeros(number, dtype=torch.float64, device=device)
        self.mean = torch.zeros(number, heads, head_dim, dtype=torch.float64, device=device)
        self.scatter = torch.zeros(number, heads, head_dim, head_dim, dtype=torch.float64, device=device)

    @classmethod
    def of(cls, rows: Tensor) -> Moments:
        """Those of rows [heads, n, head_dim] that are all there, on their device."""
        found = cls(rows.shape[1], rows.shape[0], rows.shape[2], rows.device)
        return found.update(rows, 0)

    @classmethod
    def holding(cls, tokens: int, count: Tensor, mean: Tensor, scatter: Tensor) -> Moments:
        """Those that were kept as three tensors; see the attributes."""
        found = cls(tokens, 0, 0)
        found.count, found.mean, found.scatter = count, mean, scatter
        return found

    def update(self, rows: Tensor, first: int) -> Moments:
        """Fold in rows [heads, n, head_dim] of any float dtype, the tokens `first` to `first + n` of all; self.

        Raises
        ------
        Fault
            There are no such tokens.
        """
        last = first + rows.shape[1]
        if not 0 <= first <= last <= self.tokens:
            raise Fault(
                f"moments of {self.tokens} tokens were given tokens {first} to {last}", code="fault.token-range"
            )
        rows = rows.to(self.mean)
        for number, run in enumerate(folds(self.tokens)):
            own = rows[:, max(run.start - first, 0) : max(run.stop - first, 0)]
            if own.shape[1]:
                mean = own.mean(1)
                centred = own - mean[:, None]
                count = self.count.new_tensor(own.shape[1])
                self._add(slice(number, number + 1), count[None], mean[None], (centred.mT @ centred)[None])
        return self

    def merge(self, other: Moments) -> Moments:
        """Fold in moments of other tokens of the same whole; self.

        Raises
        ------
        Fault
            They are of another whole, or of rows of another shape.
        """
        if (self.tokens, self.mean.shape) != (other.tokens, other.mean.shape):
            raise Fault(
                f"moments of {other.tokens} tokens, {list(other.mean.shape)}, cannot be merged into those of"
                f" {self.tokens} tokens, {list(self.mean.shape)}",
                code="fault.other-extent",
            )
        moved = (part.to(self.mean) for part in (other.count, other.mean, other.scatter))
        self._add(slice(None), *moved)
        return self

    def _add(self, at: slice, count: Tensor, mean: Tensor, scatter: Tensor) -> None:
        """The pairwise update of Chan, Golub and LeVeque (1979): no difference of large sums is taken."""
        total = self.count[at] + count
        share = count / total.clamp(min=1)
        apart = mean - self.mean[at]
        weight = self.count[at] * share
        self.scatter[at] += scatter + weight[:, None, None, None] * apart[..., :, None] * apart[..., None, :]
        self.mean[at] += share[:, None, None] * apart
        self.count[at] = total

    def pooled(self, leave_out: int | None = None) -> tuple[float, Tensor, Tensor]:
        """Count, mean [heads, head_dim] and scatter [heads, head_dim, head_dim] of all folds, or of all but one."""
        used = self.count.clone()
        if leave_out is not None:
            used[leave_out] = 0
        total = used.sum()
        mean = torch.einsum("f,fhd->hd", used / total, self.mean)
        apart = self.mean - mean
        between = torch.einsum("f,fhd,fhe->hde", used, apart, apart)
        return float(total), mean, torch.einsum("f,fhde->hde", (used > 0).to(used), self.scatter) + between

    def turned(self, matrix: Tensor) -> Moments:
        """Those of the rows times `matrix` [heads, head_dim, head_dim]."""
        matrix = matrix.to(self.mean)
        mean, scatter = (self.mean[..., None, :] @ matrix)[..., 0, :], matrix.mT @ self.scatter @ matrix
        return Moments.holding(self.tokens, self.count, mean, scatter)

    def to(self, device: torch.device | str) -> Moments:
        """The same on another device."""
        return Moments.holding(self.tokens, *(part.to(device) for part in (self.count, self.mean, self.scatter)))
