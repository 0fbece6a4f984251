"""Whether two policies differ, from several arrival seeds that both were run with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t at 0.975 for 1, 2, ... degrees of freedom."""
NORMAL_975 = 1.95996


class Difference(msgspec.Struct, frozen=True):
    """Of one figure: a policy minus the first one, over the same seeds. low and high bound the mean
    with 95 % confidence; None where one seed tells nothing of the spread."""

    mean: float
    low: float | None
    high: float | None

    @property
    def certain(self) -> bool:
        """Both bounds are on one side of nought."""
        return self.low is not None and self.high is not None and self.low * self.high > 0


def student_975(freedom: int) -> float:
    """Student's t at 0.975, to 0.001. Beyond the table by its expansion about the normal quantile
    (Abramowitz and Stegun, 26.7.5)."""
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    z = NORMAL_975
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def difference(base: Sequence[float], other: Sequence[float]) -> Difference:
    """Paired: base[i] and other[i] are of one seed. Student's t interval of the mean."""
    gaps = np.asarray(other, dtype=np.float64) - np.asarray(base, dtype=np.float64)
    mean, count = float(gaps.mean()), len(gaps)
    if count < 2:
        return Difference(mean, None, None)
    margin = student_975(count - 1) * float(gaps.std(ddof=1)) / math.sqrt(count)
    return Difference(mean, mean - margin, mean + margin)
