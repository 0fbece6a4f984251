"""Times single steps of the CPU Runner on a real checkpoint: decode by batch, prefill by length.

    python -m bench.step MODEL [--dtype bf16] [--threads 2]

Other work on the machine slows single steps by whole scheduler slices, so the table gives the
minimum and the median of many steps. Prompts are random ids; nothing is shared between them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median

import numpy as np

from rtp.backends.model.runner import ModelRunner
from rtp.backends.torch_cpu import build
from rtp.core.steps import FromStep, Known, Row, SequenceStart, StepPlan
from rtp.core.types import SamplingParams

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=1 << 20, temperature=0.8, top_p=0.95, top_k=50, seed=1)


class Bench:
    """Makes plans for one Runner with its own step numbers, handles and pages."""

    def __init__(self, runner: ModelRunner):
        self._runner = runner
        self._draw = np.random.default_rng(0)
        self._step = 0
        self._handle = 0

    def prefill(self, new: int, history: int = 0, repeats: int = 5) -> list[float]:
        """Seconds of one step with `new` prompt tokens after `history` tokens in the pages."""
        runs = []
        for _ in range(repeats):
            start = self._start(GREEDY)
            if history:
                self._execute([self._row(start.sequence, 0, history, 0)], (start,))
            row = self._row(start.sequence, history, new, 0)
            runs.append(self._execute([row], () if history else (start,)))
        return runs

    def decode(
        self, batch: int, context: int, sampling: SamplingParams, repeats: int = 24
    ) -> list[float]:
        """Seconds of each decode step of `batch` requests that hold `context` tokens."""
        starts = [self._start(sampling) for _ in range(batch)]
        for at, start in enumerate(starts):
            self._execute([self._row(start.sequence, 0, context, at)], (start,))
        first = [self._row(s.sequence, context, 1, at) for at, s in enumerate(starts)]
        runs = [self._execute(first, ())]
        for index in range(1, repeats):
            rows = [
                Row(
                    row.sequence,
                    context + index,
                    1,
                    FromStep(self._step - 1, at),
                    self._pages(at, context + index + 1),
                    index,
                )
                for at, row in enumerate(first)
            ]
            runs.append(self._execute(rows, ()))
        return runs[2:]

    def _start(self, sampling: SamplingParams) -> SequenceStart:
        self._handle += 1
        return SequenceStart(self._handle, 0, b"", b"", sampling, ())

    def _row(self, handle: int, start: int, new: int, place: int) -> Row:
        ids = self._draw.integers(0, self._runner.capacity.vocab_size, new)
        return Row(
            handle,
            start,
            new,
            Known(ids.astype("<i4").tobytes()),
            self._pages(place, start + new),
            0,
        )

    def _pages(self, place: int, tokens: int) -> bytes:
        """Pages of the place-th request, spread over the pool as they are in service."""
        size = self._runner.capacity.block_size
        held = np.arange(-(-tokens // size)) * 37 + place * 4099
        return (held % self._runner.capacity.num_blocks).astype("<i4").tobytes()

    def _execute(self, rows: list[Row], started: tuple[SequenceStart, ...]) -> float:
        result = self._runner.execute(StepPlan(self._step, tuple(rows), started))
        assert all(row.finite for row in result.rows)
        self._step += 1
        return result.elapsed_s


def table(bench: Bench) -> Iterator[str]:
    """Lines of the report, as they are measured."""
    yield f"{'step':34}{'min ms':>9}{'median ms':>11}{'tok/s at median':>17}"
    for batch in (1, 8, 32):
        for label, sampling in (("greedy", GREEDY), ("top-k, top-p", SAMPLED)):
            runs = bench.decode(batch, 256, sampling)
            yield _line(f"decode {batch} x 256, {label}", runs, batch)
    yield _line("decode 1 x 2048, greedy", bench.decode(1, 2048, GREEDY), 1)
    for new, history in ((64, 0), (512, 0), (2048, 0), (16, 2000), (512, 1536)):
        runs = bench.prefill(new, history)
        yield _line(f"prefill {new} new after {history}", runs, new)


def _line(label: str, runs: list[float], tokens: int) -> str:
    middle = median(runs)
    return f"{label:34}{min(runs) * 1e3:9.1f}{middle * 1e3:11.1f}{tokens / middle:17.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="Hugging Face directory or .gguf file")
    parser.add_argument("--dtype", default="auto", help="auto, bf16 or fp32")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    runner = build(
        checkpoint=options.model, dtype=options.dtype, num_blocks=4096, threads=options.threads
    )
    print(f"{runner.capacity.kv_format}, {options.threads} threads", flush=True)
    for line in table(Bench(runner)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
