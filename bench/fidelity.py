"""Whether a replay in virtual time tells what happens: python -m bench.fidelity

300 rows of Azure's conversation trace of 2023, lengths over 4, go live over HTTP to two real
workers of this machine, three times, and once through the simulated cluster. TTFT P50, P95 and
output tokens a second have to be within the larger of 20 % and twice the live runs' own spread
(highest less lowest over their mean).

The simulation knows of the machine what both workers measured when they started, at the same time,
and from a run before, of other rows, in which they share the machine with the Master and the
client: how much longer they were busy, and how much later the median first token came, than a
simulation of that run says. The one scales all step times, the other is time on the way: of the
Submit to the worker and of the tokens back. Step times vary a little, so the simulation is run with
several draws of them, and the median of each figure counts. The load is chosen by simulation so
that the workers are busy 0.7 of the time. Wants a machine on which nothing else runs, and some
fifteen minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import ROOT, Claim, finish, machine
from bench.servers import Server, rtp
from rtp.backends import sim
from rtp.core import plugins
from rtp.core.arrivals import part
from rtp.core.ports import Runner
from rtp.core.replay import Fleet, replay
from rtp.core.replayed import Replayed
from rtp.core.steps import StepPlan, StepResult
from rtp.core.trace import TraceRow
from rtp.io import traces
from rtp.io.live_replay import Prompts, Target, replay_live

FILE = "azure_2023_conv.csv"
BLOCK_SIZE = 16
SHORTER = 4
RUNS, WORKERS = 3, 2
DRAWS, STEP_ERROR = 9, 0.1
"""Simulations, and the standard deviation of a step's time in them, as a share."""
UTILISATION = 0.7
ALLOWED = 0.20
LIMITS = {"max_batch_tokens": 512, "chunk_while_decoding": 128, "max_rows": 64}
"""The worker's defaults, given to both."""
FIGURES = ("TTFT P50, s", "TTFT P95, s", "output tokens a second")


@dataclass(frozen=True, slots=True)
class Worker:
    """What is known of a worker of this machine."""

    coefficients: tuple[float, ...]
    """Prefill a, b, c and decode d, e, f, seconds."""
    kv_tokens: int
    latency_s: float = 0.0002
    """Of a message to it or from it."""

    def slower(self, factor: float) -> Worker:
        return replace(self, coefficients=tuple(factor * c for c in self.coefficients))

    def farther(self, seconds: float) -> Worker:
        """So much later comes a first token: a message there, one back."""
        return replace(self, latency_s=self.latency_s + max(0.0, seconds) / 2)


class Busy:
    """A Runner that counts its seconds."""

    def __init__(self, runner: Runner) -> None:
        self.capacity = runner.capacity
        self.seconds = 0.0
        self._runner = runner

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._runner.execute(plan)
        self.seconds += result.elapsed_s
        return result

    def close(self) -> None:
        self._runner.close()


def rows_of(first: int, count: int) -> list[TraceRow]:
    """Part of the trace, lengths over 4. Ends the process where the trace is not."""
    path = Path(os.environ.get("RTP_TRACES", ROOT.parent / "shared" / "traces")) / FILE
    if not path.exists():
        raise SystemExit(f"{path} is not there; RTP_TRACES names the folder of traces")
    trace = traces.read(path, block_size=BLOCK_SIZE)
    return [_shorter(row) for row in part(trace.rows, first, first + count)]


def _shorter(row: TraceRow) -> TraceRow:
    tokens, output = max(2, row.num_tokens // SHORTER), max(1, row.num_output // SHORTER)
    return TraceRow(row.arrival_s, tokens, output, row.block_ids[: -(-tokens // BLOCK_SIZE)])


def live(
    server: Server, rows: Sequence[TraceRow], speed: float, salt: int
) -> tuple[Replayed, float]:
    """The run and the workers' busy share. salt: another one finds nothing of other runs in the
    caches."""
    target = Target(url=server.url, model=server.model)
    prompts = Prompts(block_size=BLOCK_SIZE, first_id=1000, end_id=9000, salt=salt)
    before = busy_s(server)
    run, sending = asyncio.run(replay_live(rows, target, prompts, speed=speed))
    share = (busy_s(server) - before) / run.end_s / WORKERS
    failed = sorted({str(reason) for reason in run.failed if reason})
    assert not failed, failed
    late_ms = 1000 * sending.late_s
    print(f"  live, seed {salt}: {_told(run, share)}; sent {late_ms:.0f} ms late at most")
    return run, share


def simulated(
    rows: Sequence[TraceRow], speed: float, worker: Worker, seed: int = 0
) -> tuple[Replayed, float]:
    """The same in virtual time. seed: of what the steps' times are."""
    runners: list[Busy] = []

    def a_runner() -> Runner:
        cost = dict(zip("abcdef", worker.coefficients, strict=True))
        num_blocks = worker.kv_tokens // BLOCK_SIZE
        size = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "max_model_len": 8192}
        runners.append(Busy(sim.build(contents=False, **size, **cost)))
        return runners[-1]

    fleet = Fleet(
        runner=a_runner,
        profile=worker.coefficients,
        workers=WORKERS,
        latency_s=worker.latency_s,
        service_error=STEP_ERROR,
        **LIMITS,
    )
    run = replay(rows, fleet, plugins.build("routing", "predicted_ttft"), speed=speed, seed=seed)
    return run, sum(runner.seconds for runner in runners) / run.end_s / WORKERS


def speed_for(rows: Sequence[TraceRow], worker: Worker) -> float:
    """At which the workers are busy UTILISATION of the time, to 2 %."""
    low, high = 0.01, 10.0
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        if simulated(rows, middle, worker)[1] < UTILISATION:
            low = middle
        else:
            high = middle
    return low


def measured(server: Server) -> Worker:
    """What the workers measured at their start; nothing else may have run yet."""
    workers = _overview(server)["workers"]
    found = [list(worker["predictor"]["coefficients"].values()) for worker in workers]
    kv_tokens = min(rank["kv_total"] for worker in workers for rank in worker["ranks"])
    return Worker(tuple(np.mean(found, axis=0).tolist()), kv_tokens)


def busy_s(server: Server) -> float:
    """Of both workers, in steps, since their start."""
    addresses = [worker["address"] for worker in _overview(server)["workers"]]
    return sum(float(_get(f"http://{a}/status")["stats"]["busy_s"]) for a in addresses)


def figures(run: Replayed) -> tuple[float, float, float]:
    p50, p95 = np.percentile(run.ttft_s, [50, 95])
    return float(p50), float(p95), float(run.output_tokens.sum()) / run.end_s


def drawn(rows: Sequence[TraceRow], speed: float, worker: Worker) -> list[Replayed]:
    """Simulations that differ in what each step takes."""
    return [simulated(rows, speed, worker, seed)[0] for seed in range(DRAWS)]


def median_ttft_s(runs: Sequence[Replayed]) -> float:
    return float(np.median([np.median(run.ttft_s) for run in runs]))


def claims(live_runs: Sequence[Replayed], models: Sequence[Replayed]) -> list[Claim]:
    """A deviation for each figure."""
    lives = np.array([figures(run) for run in live_runs])
    model = np.median([figures(run) for run in models], axis=0).tolist()
    means = lives.mean(axis=0)
    spreads = (lives.max(axis=0) - lives.min(axis=0)) / means
    out = []
    for name, ours, mean, spread in zip(FIGURES, model, means, spreads, strict=True):
        print(f"{name}: live {mean:.3f} (spread {100 * spread:.1f} %), simulated {ours:.3f}")
        allowed = max(ALLOWED, 2 * float(spread))
        out.append(Claim(f"{name}, off by", abs(ours / float(mean) - 1), allowed, "lower"))
    return out


def _told(run: Replayed, share: float) -> str:
    p50, p95, rate = figures(run)
    return (
        f"TTFT P50 {p50:.3f} s, P95 {p95:.3f} s, {rate:.1f} output tokens/s, {run.end_s:.0f} s,"
        f" workers busy {share:.2f}"
    )


def _overview(server: Server) -> dict[str, Any]:  # Any: what JSON holds
    return _get(f"{server.url}/dashboard/data.json")["overview"]


def _get(url: str) -> dict[str, Any]:  # Any: what JSON holds
    with urllib.request.urlopen(url) as reply:
        found: dict[str, Any] = json.load(reply)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300, help="live and simulated")
    parser.add_argument("--rows-before", type=int, default=100, help="of the run before")
    args = parser.parse_args()
    print(machine())
    rows, others = rows_of(0, args.rows), rows_of(args.rows, args.rows_before)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
    flags += [f"--block-size={BLOCK_SIZE}", "--ask=false"]
    with rtp(workers=WORKERS, extra=flags) as server:
        alone = measured(server)
        before = speed_for(others, alone)
        first, busy = live(server, others, before, 0)
        factor = busy / simulated(others, before, alone)[1]
        worker = alone.slower(factor)
        later_s = median_ttft_s([first]) - median_ttft_s(drawn(others, before, worker))
        worker = worker.farther(later_s)
        speed = speed_for(rows, worker)
        print(
            f"  measured {alone}; busy {factor:.2f} times as long, first tokens"
            f" {1000 * later_s:.0f} ms later; speed {speed:.3f}"
        )
        runs = [live(server, rows, speed, number + 1) for number in range(RUNS)]
    print(f"  simulated: {_told(*simulated(rows, speed, worker))}")
    found = claims([run for run, _ in runs], drawn(rows, speed, worker))
    found.append(Claim("workers' busy share", min(share for _, share in runs), 0.6, "higher"))
    found.append(Claim("workers' busy share", max(share for _, share in runs), 0.8, "lower"))
    finish("fidelity", found)


if __name__ == "__main__":
    main()
