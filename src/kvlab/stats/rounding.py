"""How large the error of rounding to a floating-point format is, before anything is rounded."""

from __future__ import annotations

import math

from kvlab.core.errors import UnknownName

SIGNIFICANT_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}  # the leading one, which is not stored, included


def relative_rounding(dtype: str) -> float:
    r"""Root mean square error of rounding to `dtype`, relative to the root mean square of what is rounded.

    A value :math:`x = \pm m\,2^e` with :math:`1 \le m < 2` is rounded to p significant bits, so its error is
    uniform within half a unit in the last place, :math:`2^{e-p+1}`, on either side: its mean square is
    :math:`2^{2(e-p+1)}/12 = x^2\,2^{-2p} / (3 m^2)`. A smooth density whose scale is unrelated to powers of two
    has its energy spread evenly over :math:`\log m`, and :math:`E[m^{-2}] = 3 / (8 \ln 2)` for log-uniform m:

    .. math:: \sigma = 2^{-p} / \sqrt{8 \ln 2}

    This is the :math:`0.180 \cdot 2^{-2p}` of Widrow & Kollár (2008, Quantization Noise, chapter 12). Overflow
    and subnormal numbers are left out.

    Parameters
    ----------
    dtype : str
        A key of `SIGNIFICANT_BITS`.

    Raises
    ------
    UnknownName
        Another dtype.
    """
    if dtype not in SIGNIFICANT_BITS:
        raise UnknownName("dtype", dtype, SIGNIFICANT_BITS)
    return 2.0 ** -SIGNIFICANT_BITS[dtype] / math.sqrt(8 * math.log(2))
