"""Seconds of a prefill and of a decode step, learned while serving; tokens a request will produce.

    t_prefill = a + b*new + c*new*(cached + new/2)
    t_decode  = d + e*batch + f*context

The six coefficients of one hardware class start from its workers' own measurements (their
registrations' `profile`): the best of them, for whatever else a machine does at a start can only
make it look slower. They are corrected online by least squares on relative errors, with
forgetting: a millisecond of error matters at one millisecond, not at one second. The unknowns are
factors on the starting coefficients, so they are free of units and near one.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf

import numpy as np

from rtp.core.kernels import kernel
from rtp.core.types import FloatArray, IntArray

NUM_COEFFICIENTS = 6
Coefficients = FloatArray | list[float]
DEFAULT_PROFILE = (5e-3, 1e-4, 1e-9, 5e-3, 1e-3, 1e-7)
"""A small model on a CPU; used where a worker measured nothing."""
SMALLEST = 1e-12
LOWEST_FACTOR = 1e-3
FORGETTING = 0.99
ANCHOR = 0.01
"""Weight, in samples, of leaving the factors as they are: little, for a start may well be off by
two; but what no sample tells of stays where it is."""
MOST_SURPRISE = 8.0
"""A sample counts as at most so many times the prediction: one hung step must not teach."""
ERROR_WEIGHT = 0.05
FEW_SAMPLES = 16
"""Online samples that count for more than any measurement at a start."""
TYPICAL_TERMS = ((1.0, 256.0, 256.0 * 128.0), (1.0, 4.0, 2048.0))
"""A prefill and a decode step by which two profiles are compared."""


def prefill_seconds(coefficients: Coefficients, new: FloatArray, cached: FloatArray) -> FloatArray:
    """coefficients: [6] or [6, R]; new, cached: tokens, broadcast against R."""
    a, b, c = coefficients[:3]
    return np.asarray(a + new * (b + c * (cached + 0.5 * new)))


def decode_seconds(
    coefficients: Coefficients, batch: FloatArray, context: FloatArray
) -> FloatArray:
    """coefficients: [6] or [6, R]; batch: rows, context: tokens in their pages."""
    d, e, f = coefficients[3:]
    return np.asarray(d + e * batch + f * context)


class RankPredict:
    """What a policy asks: row i of its columns is answered for rank i's hardware."""

    def __init__(self, coefficients: FloatArray, num_ranks: int = 0) -> None:
        """coefficients: [6, R], or [6, 1] where all `num_ranks` have the same."""
        self.coefficients = coefficients
        self._num_ranks = num_ranks or coefficients.shape[1]
        self._all_alike = coefficients.shape[1] == 1

    def prefill_s(self, new: FloatArray, cached: FloatArray) -> FloatArray:
        return self._column(prefill_seconds(self._some, new, cached), new, cached)

    def decode_s(self, batch: FloatArray, context: FloatArray) -> FloatArray:
        return self._column(decode_seconds(self._some, batch, context), batch, context)

    def prefill_of(self, index: int, new: float, cached: float) -> float:
        """For one of the ranks."""
        a, b, c = self.coefficients[:3, 0 if self._all_alike else index].tolist()
        return float(a + new * (b + c * (cached + 0.5 * new)))

    @property
    def _some(self) -> Coefficients:
        """Six numbers are multiplied faster than six columns of one."""
        return self.coefficients[:, 0].tolist() if self._all_alike else self.coefficients

    def _column(self, seconds: FloatArray, *given: FloatArray) -> FloatArray:
        """A number is a column of itself."""
        if isinstance(given[0], np.ndarray) or isinstance(given[1], np.ndarray):
            return seconds
        return np.full(self._num_ranks, seconds)


FACTORS, SQUARES, SUMS, FIT_SIZE = 3, 6, 12, 15
"""A Fit's state: starting coefficients from 0, then factors, three each; six sums of squares and
products, the upper half of a symmetric matrix, row by row; three sums."""


@kernel("f8(f8[::1], f8[::1], f8, f8, f8, f8)")
def _learn(
    state: FloatArray,
    coefficients: FloatArray,
    first: float,
    second: float,
    third: float,
    seconds: float,
) -> float:
    """Takes one sample into a Fit's state: its three terms and the seconds measured. Returns the
    relative error of what was predicted. Solved by elimination: the matrix is positive."""
    factors = state[FACTORS:SQUARES]
    p, q, r = state[0] * first, state[1] * second, state[2] * third
    predicted = p * factors[0] + q * factors[1] + r * factors[2]
    error = abs(seconds - predicted) / seconds
    seconds = min(max(seconds, predicted / MOST_SURPRISE), predicted * MOST_SURPRISE)
    p, q, r = p / seconds, q / seconds, r / seconds
    for i, new in enumerate((p * p, p * q, p * r, q * q, q * r, r * r, p, q, r)):
        state[SQUARES + i] = FORGETTING * state[SQUARES + i] + new
    a, b, c = state[SQUARES] + ANCHOR, state[SQUARES + 1], state[SQUARES + 2]
    d, e, f = state[SQUARES + 3] + ANCHOR, state[SQUARES + 4], state[SQUARES + 5] + ANCHOR
    x = state[SUMS] + ANCHOR * factors[0]
    y = state[SUMS + 1] + ANCHOR * factors[1]
    z = state[SUMS + 2] + ANCHOR * factors[2]
    ba, ca = b / a, c / a
    d, e, f = d - ba * b, e - ba * c, f - ca * c
    y, z = y - ba * x, z - ca * x
    ed = e / d
    z = (z - ed * y) / (f - ed * e)
    y = (y - e * z) / d
    x = (x - b * y - c * z) / a
    factors[0], factors[1], factors[2] = x, y, z
    for i in range(FACTORS):
        factors[i] = max(factors[i], LOWEST_FACTOR)
        coefficients[i] = state[i] * factors[i]
    return float(error)


class Fit:
    """seconds = sum(factor_i * start_i * term_i), three terms, factors by least squares.

    Kept are the sums of x x^T and of x over the samples, where x is what each term predicts as a
    share of what was measured; old ones fade. Such sums stay positive for ever. The covariance of
    the recursive form does not: without noise, rounding makes it indefinite after some ten thousand
    samples, and the next change of pace blows it up.
    """

    def __init__(self, start: tuple[float, ...], coefficients: FloatArray) -> None:
        """coefficients: [3], where they are to lie."""
        self.coefficients = coefficients
        self.num_samples = 0
        self.error = 0.0
        """Moving mean of |actual - predicted| / actual, predicted before the sample was learned."""
        self._state = np.zeros(FIT_SIZE)
        self.restart(start)

    def restart(self, start: tuple[float, ...]) -> None:
        """From another measurement."""
        self._state[:] = 0.0
        self._state[:FACTORS] = np.maximum(start, SMALLEST)
        self._state[FACTORS:SQUARES] = 1.0
        self.coefficients[:] = self._state[:FACTORS]

    def seconds(self, terms: tuple[float, ...]) -> float:
        return float(self.coefficients @ terms)

    def observe(self, first: float, second: float, third: float, seconds: float) -> None:
        """Learns one measurement, three terms and what they took, in half a us. Ignores what cannot
        be one (zero, negative, not finite)."""
        if not 0 < seconds < inf:
            return
        error = _learn(self._state, self.coefficients, first, second, third, seconds)
        weight = ERROR_WEIGHT if self.num_samples else 1.0
        self.error += weight * (error - self.error)
        self.num_samples += 1


class HardwareClass:
    """The predictor of all ranks that run one model on one kind of machine."""

    def __init__(
        self, profile: tuple[float, ...], index: int = 0, coefficients: FloatArray | None = None
    ) -> None:
        """coefficients: [6], where they are to lie; index: of those in Ranks.profiles."""
        self.index = index
        self.coefficients = np.zeros(NUM_COEFFICIENTS) if coefficients is None else coefficients
        """[6]: a, b, c, d, e, f, all positive, in seconds."""
        self._measured = _usable(profile)
        start = profile if self._measured else DEFAULT_PROFILE
        self.prefill = Fit(start[:3], self.coefficients[:3])
        self.decode = Fit(start[3:], self.coefficients[3:])
        self.rows: IntArray = np.zeros(0, dtype=np.int64)
        """Rows of the ranks that are predicted by it."""

    def offer(self, profile: tuple[float, ...]) -> None:
        """A further worker's measurement: it counts where it is the faster one, or the first, and
        serving has not taught better yet."""
        if not _usable(profile):
            return
        for terms, fit, start in zip(
            TYPICAL_TERMS,
            (self.prefill, self.decode),
            (profile[:3], profile[3:]),
            strict=True,
        ):
            faster = float(np.dot(start, terms)) < fit.seconds(terms)
            if fit.num_samples < FEW_SAMPLES and (faster or not self._measured):
                fit.restart(start)
        self._measured = True

    @property
    def num_samples(self) -> int:
        return self.prefill.num_samples + self.decode.num_samples

    def observe_prefill(self, new: int, cached: int, seconds: float) -> None:
        self.prefill.observe(1.0, new, new * (cached + 0.5 * new), seconds)

    def observe_decode(self, batch: float, context: float, seconds: float) -> None:
        self.decode.observe(1.0, batch, context, seconds)


def _usable(profile: tuple[float, ...]) -> bool:
    return len(profile) == NUM_COEFFICIENTS and all(0 <= x < 1e6 for x in profile)


class OutputLengths:
    """Expected output tokens of one choice: a mean per tenant, and over all where a tenant is new.

    Lengths are near enough geometric that a request half done is expected to produce as much again,
    so E[remaining] of a running request is the same number. Bounded to the last `capacity` tenants.
    """

    START_TOKENS = 128.0
    WEIGHT = 0.02

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._all = (self.START_TOKENS, 0, round(self.START_TOKENS))
        self._tenants: OrderedDict[str, tuple[float, int, int]] = OrderedDict()
        """Mean, samples, and the mean as a whole number of at least 1."""

    @property
    def mean(self) -> float:
        return self._all[0]

    def expected(self, tenant: str, max_tokens: int) -> int:
        _, _, tokens = self._tenants.get(tenant, self._all)
        return tokens if tokens <= max_tokens else max(1, max_tokens)

    def observe(self, tenant: str, tokens: float) -> None:
        own = self._tenants.pop(tenant, self._all)
        self._all = self._moved(self._all, tokens)
        self._tenants[tenant] = self._moved(own, tokens)
        if len(self._tenants) > self._capacity:
            self._tenants.popitem(last=False)

    def _moved(self, state: tuple[float, int, int], tokens: float) -> tuple[float, int, int]:
        mean, count, _ = state
        mean += max(self.WEIGHT, 1.0 / (count + 2)) * (tokens - mean)
        return mean, count + 1, max(1, round(mean))
