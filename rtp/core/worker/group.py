"""Which ranks of a worker step, and when: the DP-Controller.

Ranks that hold a whole model each step for themselves (Group). Where the experts of a model lie
over the ranks, every layer of every rank needs all others (LockstepGroup): a group step begins on
all ranks at once when any has work, ranks without work run a dummy step, and the next one begins
when the slowest is done. What a group step costs everybody is the cost of its longest share, so

- a rank's prompts are cut into the short chunks of a step that decodes as soon as any rank of the
  group decodes: no decode row waits for another rank's long chunk;
- Submits that the Master granted together start in one step: it waits for the last of them, for
  GATHER_S at most.

With two steps in flight the Runners get the next step before the slowest is done. Those that
exchange activations wait for each other inside the step; whatever they do, no rank is ever more
than that one step ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf

from rtp.core.messages import Submit
from rtp.core.steps import StepPlan, StepResult
from rtp.core.worker.rank import Rank
from rtp.core.worker.stats import Stats

GATHER_S = 0.003
"""Longest wait for the rest of a grant round. Its Submits leave in one turn of a frontend, or of a
few that are a network hop apart, and arrive within about a millisecond; a step they miss costs
tens."""
ROUNDS_REMEMBERED = 64


class Group:
    """Ranks that step each for itself."""

    def __init__(self, ranks: SequenceOf[Rank]) -> None:
        self._ranks = ranks

    def plans(self, now: float) -> list[tuple[int, StepPlan]]:
        """The steps to hand out now: (rank, plan), in the order in which they run."""
        return [
            (index, plan)
            for index, rank in enumerate(self._ranks)
            if not rank.failed
            for plan in iter(rank.batcher.next_plan, None)
        ]

    def completed(self, index: int, result: StepResult) -> None:
        """A rank's step came back."""

    def submitted(self, submit: Submit, now: float) -> None:
        """A grant's Submit arrived, whatever becomes of it."""

    def stop_waiting(self) -> None:
        """Some Submit that the next step may be waiting for will not come."""

    def fail_with(self, index: int) -> list[int]:
        """The ranks that cannot go on without this one, itself included."""
        return [index]

    def next_deadline(self) -> float | None:
        """When plans() is to be asked though nothing happened."""
        return None

    def check(self) -> None:
        """Raises AssertionError unless the ranks stand as they should to each other."""


class LockstepGroup(Group):
    """Ranks that step together, under one step number."""

    def __init__(self, ranks: SequenceOf[Rank], stats: Stats, *, steps_in_flight: int) -> None:
        super().__init__(ranks)
        self._stats = stats
        self._steps_in_flight = steps_in_flight
        self._gathering = Gathering()
        self._elapsed: dict[int, list[float]] = {}  # by step, of the ranks that are done

    def plans(self, now: float) -> list[tuple[int, StepPlan]]:
        waits = self._gathering.waits(now)
        out: list[tuple[int, StepPlan]] = []
        batchers = [rank.batcher for rank in self._ranks]
        while not (waits or self._ranks[0].failed):
            if max(batcher.num_in_flight for batcher in batchers) >= self._steps_in_flight:
                break
            decodes = any(batcher.decodes() for batcher in batchers)
            plans = [batcher.next_plan(beside_decodes=decodes) for batcher in batchers]
            if not any(plans):
                break
            out += [
                (index, plan or batcher.dummy_plan())
                for index, (plan, batcher) in enumerate(zip(plans, batchers, strict=True))
            ]
        return out

    def completed(self, index: int, result: StepResult) -> None:
        elapsed = self._elapsed.setdefault(result.step, [])
        elapsed.append(result.elapsed_s)
        if len(elapsed) == len(self._ranks):
            del self._elapsed[result.step]
            whole = len(elapsed) * max(elapsed)
            self._stats.group_steps += 1
            self._stats.group_step_s += whole
            self._stats.group_wait_s += whole - sum(elapsed)

    def submitted(self, submit: Submit, now: float) -> None:
        self._gathering.arrived(submit.group_id, submit.group_size, now)

    def stop_waiting(self) -> None:
        self._gathering.give_up()

    def fail_with(self, index: int) -> list[int]:
        self._elapsed.clear()
        return list(range(len(self._ranks)))

    def next_deadline(self) -> float | None:
        return self._gathering.next_deadline()

    def check(self) -> None:
        assert len({rank.batcher.next_step for rank in self._ranks}) == 1, "a rank was left out"


class Gathering:
    """Rounds of grants of which some Submits are here and others are not. A round is waited for
    once: what comes after its time finds it over."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[float, int]] = {}  # until when, how many are missing; by age
        self._over: deque[int] = deque(maxlen=ROUNDS_REMEMBERED)

    def arrived(self, round_id: int, size: int, now: float) -> None:
        """One of `size` Submits of a round."""
        if size < 2 or round_id in self._over:
            return
        until, missing = self._open.get(round_id, (now + GATHER_S, size))
        if missing > 1:
            self._open[round_id] = (until, missing - 1)
        else:
            self._close(round_id)

    def waits(self, now: float) -> bool:
        """Whether some round is worth waiting for."""
        for round_id in [at for at, (until, _) in self._open.items() if until <= now]:
            self._close(round_id)
        return bool(self._open)

    def give_up(self) -> None:
        """Waits for none of those that are missing now."""
        for round_id in list(self._open):
            self._close(round_id)

    def next_deadline(self) -> float | None:
        return min((until for until, _ in self._open.values()), default=None)

    def _close(self, round_id: int) -> None:
        del self._open[round_id]
        self._over.append(round_id)
