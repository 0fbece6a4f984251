"""What steps of a Runner cost here, measured at start: the predictor's first coefficients.

    t_prefill = a + b*new + c*new*(cached + new/2)      t_decode = d + e*batch + f*context

seconds; the Master corrects them online (design section 4), so a few short steps are enough. Each
is taken several times, in turn, and its shortest time counts: what else the machine does makes a
step longer, never shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

import numpy as np

from rtp.core.ports import Runner
from rtp.core.steps import Known, Row, SequenceStart, StepPlan
from rtp.core.types import SamplingParams, pack_ids

Profile = tuple[float, float, float, float, float, float]

FIRST_STEP = -1_000_000
FIRST_SEQUENCE = 1 << 62
"""Steps and handles no batcher uses."""
BUDGET_S = 1.2
"""At a start."""
REPEATS = 3
LONGEST = 256
"""Tokens of the longest prefill: on a slow machine a longer one would take the whole budget."""


def measure(
    runner: Runner,
    max_batch_tokens: int,
    progress: Callable[[str], None],
    *,
    budget_s: float = BUDGET_S,
    longest: int = LONGEST,
) -> Profile:
    """Runs prefills and decodes on an idle Runner; its pages hold nothing of use afterwards.
    budget_s: no measurement starts that is known to end after so many seconds of steps. longest:
    tokens of the longest prefill."""
    bench = _Bench(runner)
    progress("measuring")
    prefills, decodes = _points(min(max_batch_tokens, longest, bench.longest), bench.longest)
    decodes = [point for point in decodes if bench.fits(*point)]
    bench.prefill(*prefills[0])  # warm-up: first touch of buffers is not what steps cost
    best: dict[tuple[Callable[[int, int], float], int, int], float] = {}
    for _ in range(REPEATS):
        for run, points in ((bench.decode, decodes), (bench.prefill, prefills)):
            for i, point in enumerate(points):
                key = (run, *point)
                # The first of each kind is measured whatever it takes.
                if (i or key in best) and bench.spent_s + best.get(key, 0.0) > budget_s:
                    continue
                best[key] = min(best.get(key, inf), run(*point))
    a, b, c = fit(
        (s, (1.0, n, n * (k + n / 2))) for (run, n, k), s in best.items() if run == bench.prefill
    )
    d, e, f = fit((s, (1.0, n, n * k)) for (run, n, k), s in best.items() if run == bench.decode)
    return a, b, c, d, e, f


def _points(longest: int, room: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """What is measured, cheapest first: (new, cached) of prefills, (batch, context) of decodes."""
    eighth = max(1, longest // 8)
    news = sorted({max(1, longest // 16), eighth, max(1, longest // 2), longest})
    cached = min(4 * longest, room - eighth)
    prefills = [(new, 0) for new in news]
    prefills.insert(2, (eighth, max(0, cached)))
    short, long = min(16, room - 1), max(1, min(2 * longest, room) - 1)
    return prefills, [(1, short), (4, short), (8, short), (1, long), (8, max(1, long // 8))]


class _Bench:
    """Makes plans for measurements. Pages are used from 0 on, again and again."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._capacity = runner.capacity
        self._step = FIRST_STEP
        self._sequence = FIRST_SEQUENCE
        pool = self._capacity.num_blocks * self._capacity.block_size
        self.longest = max(2, min(pool, self._capacity.max_model_len) - 1)
        self.spent_s = 0.0

    def fits(self, batch: int, context: int) -> bool:
        blocks = batch * (context // self._capacity.block_size + 1)
        return 0 < context < self.longest and blocks <= self._capacity.num_blocks

    def prefill(self, new: int, cached: int) -> float:
        """Seconds of one step that computes `new` tokens behind `cached` ones."""
        return self._run([(cached, min(new, self.longest - cached))])

    def decode(self, batch: int, context: int) -> float:
        """Seconds of one step with one token for each of `batch` sequences of `context` tokens."""
        return self._run([(context, 1)] * batch)

    def _run(self, rows: list[tuple[int, int]]) -> float:
        started, planned, page = [], [], 0
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        for start, num_new in rows:
            self._sequence += 1
            prompt = np.arange(start + num_new) % min(self._capacity.vocab_size, 1000)
            blocks = -(-(start + num_new) // self._capacity.block_size)
            started.append(SequenceStart(self._sequence, 0, pack_ids(prompt), b"", sampling, ()))
            planned.append(
                Row(
                    sequence=self._sequence,
                    start=start,
                    num_new=num_new,
                    inputs=Known(pack_ids(prompt[start:])),
                    pages=pack_ids(range(page, page + blocks)),
                    output_index=0,
                )
            )
            page += blocks
        self._step += 1
        result = self._runner.execute(StepPlan(self._step, tuple(planned), tuple(started)))
        self._step += 1
        ended = tuple(s.sequence for s in started)
        self._runner.execute(StepPlan(self._step, (), (), ended))
        self.spent_s += result.elapsed_s
        return result.elapsed_s


def fit(samples: Iterable[tuple[float, tuple[float, float, float]]]) -> list[float]:
    """Least squares with coefficients >= 0, relative errors weighted alike: a column whose
    coefficient comes out negative is left out (three columns, so at most two rounds)."""
    seconds, columns = zip(*samples, strict=True)
    y = np.maximum(np.array(seconds), 1e-7)
    x = np.array(columns) / y[:, None]
    kept = list(range(x.shape[1]))
    found = np.zeros(x.shape[1])
    while kept:
        scale = np.abs(x[:, kept]).max(axis=0) + 1e-30
        part = np.linalg.lstsq(x[:, kept] / scale, np.ones(len(y)), rcond=None)[0] / scale
        if (part >= 0).all():
            found[kept] = part
            break
        kept.pop(int(np.argmin(part * scale)))
    coefficients: list[float] = found.tolist()
    return coefficients
