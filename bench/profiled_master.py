"""`python -m rtp.master` with a sampler: where its CPU time goes, by stage and by function.

    python -m bench.profiled_master OUT.json [options of rtp.master]

Every few milliseconds of the process's CPU time a signal notes the Python stack, from SIGUSR1 to
SIGUSR2, which writes it down. Time in C counts for the Python function that called it. The sampling
itself costs about a percent.
"""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

from rtp.master import main as master_main

EVERY_S = 0.004
ALWAYS = 0.98
"""Functions on more of the stacks are the way into the loop."""
Stack = tuple[str, ...]
"""module:function, outermost first."""

STAGES = (
    (
        "write",
        ("worker_link:_write_all", "connection:flush", "worker_link:send", "connection:send"),
    ),
    ("tick", ("master:_tick",)),
    ("handle", ("master:handle",)),
    ("notes", ("master:_on_note",)),
    ("read", ("worker_link:_drain", "connection:data_received", "ask_link:_next_turn")),
    ("collector", ("clock:_maybe_collect",)),
)
"""The first stage of which a function is on the stack; "loop" is everything else."""


class Sampler:
    """Made in the main thread."""

    def __init__(self, out: Path) -> None:
        self._stacks: Counter[Stack] = Counter()
        self._out = out
        signal.signal(signal.SIGPROF, self._sample)
        signal.signal(signal.SIGUSR1, lambda number, frame: self._begin())
        signal.signal(signal.SIGUSR2, lambda number, frame: self._end())

    def _begin(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)

    def _end(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._out.write_text(json.dumps([[list(s), n] for s, n in self._stacks.items()]))

    def _sample(self, number: int, frame: FrameType | None) -> None:
        stack = []
        while frame is not None:
            code = frame.f_code
            stack.append(f"{Path(code.co_filename).stem}:{code.co_name}")
            frame = frame.f_back
        self._stacks[tuple(reversed(stack))] += 1


def report(path: Path, us_per_grant: float, top: int = 40) -> str:
    """Samples in `path` as us of each grant: by stage, then the functions that take most."""
    stacks: list[tuple[list[str], int]] = json.loads(path.read_text())
    total = sum(count for _, count in stacks) or 1
    stages: Counter[str] = Counter()
    own: Counter[str] = Counter()
    below: Counter[str] = Counter()
    for stack, count in stacks:
        stages[stage_of(stack)] += count
        own[stack[-1]] += count
        below.update(dict.fromkeys(stack, count))
    us = us_per_grant / total
    lines = [", ".join(f"{name} {count * us:.0f}" for name, count in stages.most_common())]
    lines += [f"{'us a grant (sampled)':44}with callees{'alone':>9}"]
    frequent = [name for name, count in below.most_common() if count < ALWAYS * total][:top]
    lines += [f"{name:44}{below[name] * us:12.1f}{own[name] * us:9.1f}" for name in frequent]
    return "\n".join(lines)


def stage_of(stack: list[str]) -> str:
    for stage, functions in STAGES:
        if any(function in stack for function in functions):
            return stage
    return "loop"


def main() -> None:
    Sampler(Path(sys.argv.pop(1)))
    master_main()


if __name__ == "__main__":
    main()
