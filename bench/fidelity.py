"""Whether a replay in virtual time tells what happens: python -m bench.fidelity

300 rows of Azure's conversation trace of 2023, lengths over 4, go live over HTTP to two real
workers of this machine, three times, and once through the simulated cluster. The simulation knows
of the machine only what the Master learned of it in another run, of other rows, with both workers
busy: the coefficients of its predictor. TTFT P50, P95 and output tokens a second have to be within
the larger of 20 % and twice the live runs' own spread (highest less lowest over their mean).

The load is chosen from that other run so that the workers are busy 0.6 to 0.8 of the time. Wants a
machine on which nothing else runs, and some ten minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import ROOT, Claim, finish, machine
from bench.servers import Server, rtp
from rtp.backends import sim
from rtp.core import plugins
from rtp.core.arrivals import part
from rtp.core.replay import Fleet, replay
from rtp.core.replayed import Replayed
from rtp.core.trace import TraceRow
from rtp.io import traces
from rtp.io.live_replay import Prompts, Target, replay_live

FILE = "azure_2023_conv.csv"
BLOCK_SIZE = 16
SHORTER = 4
CALIBRATION_ROWS = 100
RUNS = 3
FIRST_SPEED, UTILISATION = 0.25, 0.7
ALLOWED = 0.20
LIMITS = {"max_batch_tokens": 512, "chunk_while_decoding": 128, "max_rows": 64}
"""The worker's defaults, given to both."""
FIGURES = ("TTFT P50, s", "TTFT P95, s", "output tokens a second")


@dataclass(frozen=True, slots=True)
class Learned:
    """What the run before tells of this machine."""

    coefficients: tuple[float, ...]
    """Prefill a, b, c and decode d, e, f, seconds."""
    kv_tokens: int
    utilisation: float


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


def live(server: Server, rows: Sequence[TraceRow], speed: float, salt: int) -> Replayed:
    """salt: another one finds nothing of other runs in the caches."""
    target = Target(url=server.url, model=server.model)
    prompts = Prompts(block_size=BLOCK_SIZE, first_id=1000, end_id=9000, salt=salt)
    run, late_s = asyncio.run(replay_live(rows, target, prompts, speed=speed))
    failed = sorted({str(reason) for reason in run.failed if reason})
    assert not failed, failed
    print(
        f"  live, seed {salt}: {_told(run)}; sent at most {1000 * late_s:.0f} ms late", flush=True
    )
    return run


def learned(server: Server, busy_s: float, seconds: float) -> Learned:
    """The mean of both workers' predictors. busy_s: of both, since the run began."""
    workers = _overview(server)["workers"]
    found = [list(worker["predictor"]["coefficients"].values()) for worker in workers]
    return Learned(
        coefficients=tuple(np.mean(found, axis=0).tolist()),
        kv_tokens=min(rank["kv_total"] for worker in workers for rank in worker["ranks"]),
        utilisation=busy_s / seconds / len(workers),
    )


def busy_s(server: Server) -> float:
    """Of both workers, in steps."""
    addresses = [worker["address"] for worker in _overview(server)["workers"]]
    return sum(float(_get(f"http://{a}/status")["stats"]["busy_s"]) for a in addresses)


def simulated(rows: Sequence[TraceRow], speed: float, facts: Learned) -> Replayed:
    cost = dict(zip("abcdef", facts.coefficients, strict=True))
    fleet = Fleet(
        runner=lambda: sim.build(
            num_blocks=facts.kv_tokens // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            max_model_len=8192,
            contents=False,
            **cost,
        ),
        profile=facts.coefficients,
        workers=2,
        **LIMITS,
    )
    run = replay(rows, fleet, plugins.build("routing", "predicted_ttft"), speed=speed)
    print(f"  simulated: {_told(run)}")
    return run


def figures(run: Replayed) -> tuple[float, float, float]:
    p50, p95 = np.percentile(run.ttft_s, [50, 95])
    return float(p50), float(p95), float(run.output_tokens.sum()) / run.end_s


def claims(live_runs: Sequence[Replayed], model: Replayed) -> list[Claim]:
    """A deviation for each figure."""
    lives = np.array([figures(run) for run in live_runs])
    means = lives.mean(axis=0)
    spreads = (lives.max(axis=0) - lives.min(axis=0)) / means
    out = []
    for name, ours, mean, spread in zip(FIGURES, figures(model), means, spreads, strict=True):
        print(f"{name}: live {mean:.3f} (spread {100 * spread:.1f} %), simulated {ours:.3f}")
        allowed = max(ALLOWED, 2 * float(spread))
        out.append(Claim(f"{name}, off by", abs(ours / float(mean) - 1), allowed, "lower"))
    return out


def _told(run: Replayed) -> str:
    p50, p95, rate = figures(run)
    return f"TTFT P50 {p50:.3f} s, P95 {p95:.3f} s, {rate:.1f} output tokens/s, {run.end_s:.0f} s"


def _overview(server: Server) -> dict[str, Any]:  # Any: what JSON holds
    return _get(f"{server.url}/dashboard/data.json")["overview"]


def _get(url: str) -> dict[str, Any]:  # Any: what JSON holds
    with urllib.request.urlopen(url) as reply:
        found: dict[str, Any] = json.load(reply)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300)
    args = parser.parse_args()
    print(machine())
    rows, others = rows_of(0, args.rows), rows_of(1000, CALIBRATION_ROWS)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
    with rtp(workers=2, extra=[*flags, f"--block-size={BLOCK_SIZE}", "--ask=false"]) as server:
        before = busy_s(server)
        first = live(server, others, FIRST_SPEED, 0)
        facts = learned(server, busy_s(server) - before, first.end_s)
        print(f"  learned {facts}")
        speed = FIRST_SPEED * UTILISATION / facts.utilisation
        runs, shares = [], []
        for number in range(RUNS):
            before = busy_s(server)
            runs.append(live(server, rows, speed, number + 1))
            shares.append((busy_s(server) - before) / runs[-1].end_s / 2)
    print(f"speed {speed:.3f}, workers busy {', '.join(f'{share:.2f}' for share in shares)}")
    found = claims(runs, simulated(rows, speed, facts))
    found.append(Claim("workers' busy share, at least", min(shares), 0.6, "higher"))
    found.append(Claim("workers' busy share, at most", max(shares), 0.8, "lower"))
    finish("fidelity", found)


if __name__ == "__main__":
    main()
