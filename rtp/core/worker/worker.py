"""Worker: takes attempts from frontends, runs them on its ranks, and answers for them.

`handle(event, now)` of an arrival or a result changes state and answers at once (tokens, refusals);
steps are planned and reports are sent in the Tick that ends a turn (protocol rule 1). The way of an
attempt: a Submit is accepted here, Ticks plan its steps, StepDone brings what they gained,
delivery.py sends the tokens, ends.py ends it. Whatever it holds is freed in the same handle().
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import asdict

from rtp.core.commands import Command, Note, RunStep
from rtp.core.events import (
    Drain,
    Event,
    From,
    FrontendDown,
    FrontendUp,
    MasterDown,
    MasterUp,
    Pulled,
    RunnerFailed,
    Stalled,
    StepDone,
    Tick,
)
from rtp.core.messages import (
    MOST_PARKED,
    Ack,
    Cancel,
    Fence,
    Poll,
    Register,
    Submit,
)
from rtp.core.ports import Capacity
from rtp.core.types import FrontendId, Role
from rtp.core.worker.attempts import Attempts
from rtp.core.worker.batcher import MAX_PREEMPTIONS, Batcher
from rtp.core.worker.checks import MAX_NUMBER, refusal
from rtp.core.worker.delivery import Delivery
from rtp.core.worker.ends import Ends
from rtp.core.worker.graves import Graves
from rtp.core.worker.group import Group, LockstepGroup
from rtp.core.worker.handovers import HandOvers
from rtp.core.worker.in_flight import Gain
from rtp.core.worker.rank import Rank
from rtp.core.worker.reports import Reports, status_table
from rtp.core.worker.sequence import sequences
from rtp.core.worker.stats import Stats
from rtp.core.worker.streams import Attempt, Stream


class Worker:
    """Decisions of one worker. No I/O: commands go to a driver, events come from it."""

    def __init__(
        self,
        card: Register,
        capacities: SequenceOf[Capacity],
        *,
        max_batch_tokens: int = 512,
        chunk_while_decoding: int = 128,
        max_rows: int = 64,
        steps_in_flight: int = 1,
        max_attempts: int = 4096,
        max_unacked: int = 1024,
        ticket_key: bytes = b"",
    ) -> None:
        """card: what it registers with, one entry of kv_total per rank.  capacities: one per rank.
        max_attempts: held at once.  max_unacked: tokens of a choice before it is parked.
        ticket_key: secret of this life, from which tickets are made."""
        self.stats = Stats()
        # A decode rank is full because its sequences grew: the Master knows where there is room.
        max_preemptions = 0 if card.role is Role.DECODE else MAX_PREEMPTIONS
        self._card = card
        self._ranks = [
            Rank(
                capacity,
                Batcher(
                    capacity,
                    max_batch_tokens=max_batch_tokens,
                    chunk_while_decoding=chunk_while_decoding,
                    max_rows=max_rows,
                    steps_in_flight=steps_in_flight,
                    max_preemptions=max_preemptions,
                    stats=self.stats,
                ),
            )
            for capacity in capacities
        ]
        self._group = Group(self._ranks)
        if card.lockstep:
            self._group = LockstepGroup(self._ranks, self.stats, steps_in_flight=steps_in_flight)
        self._max_attempts = max_attempts
        self._reports = Reports(card, [rank.batcher.blocks for rank in self._ranks], self.stats)
        self._graves = Graves()
        self._attempts = Attempts()
        self._out: list[Command] = []  # of the running handle(), shared with the next two
        self.handovers = HandOvers(card, self._ranks, ticket_key)
        self._ends = Ends(
            self._ranks,
            self._attempts,
            self._graves,
            self.handovers,
            self._reports,
            self.stats,
            self._out,
        )
        self._delivery = Delivery(
            self._ranks,
            self._attempts,
            self.handovers,
            self._reports,
            self._ends,
            self._out,
            max_unacked=max_unacked,
        )
        self._drain_until: float | None = None
        self._undecided_since: float | None = None

    # ------------------------------------------------------------ the three calls of a driver

    def handle(self, event: Event, now: float) -> list[Command]:
        """Cost: O(tokens) for a Submit, O(rows) for a StepDone, O(1) a message else."""
        self._out.clear()
        self._undecided_since = None if isinstance(event, Tick) else now
        match event:
            case Tick():
                self._tick(now)
            case From(peer, message):
                self._message(peer, message, now)
            case StepDone():
                self._step_done(event, now)
            case FrontendUp(frontend_id):
                self._delivery.repeat(frontend_id, self._attempts.connected(frontend_id))
            case FrontendDown(frontend_id):
                self._attempts.disconnected(frontend_id, now)
            case MasterUp(term):
                self._reports.up(term, now)
                self._group.stop_waiting()
            case MasterDown():
                self._reports.down(now)
            case Pulled():
                self._pulled(event)
            case Stalled(hung):
                self._reports.stalled(hung)
            case RunnerFailed(rank, reason):
                self._runner_failed(rank, reason, now)
            case Drain(grace_s):
                self._drain_until = now + grace_s
                self._reports.changed()
        return self._out.copy()

    def next_deadline(self) -> float | None:
        """When to send the next Tick if nothing else happens."""
        times = [
            self._undecided_since,
            self._reports.next_deadline(),
            self._attempts.next_deadline(),
            self._group.next_deadline(),
            self._drain_until if self._attempts else None,
        ]
        return min((time for time in times if time is not None), default=None)

    # ------------------------------------------------------------ facts

    @property
    def drained(self) -> bool:
        """Draining, and nothing is left to do."""
        return self._drain_until is not None and not self._attempts

    def idle(self) -> bool:
        """No attempt, no sequence, no step; every block is free or cached."""
        batchers = all(rank.batcher.idle() for rank in self._ranks)
        return batchers and not self._attempts

    def check(self) -> None:
        """Raises AssertionError unless the tables agree with each other."""
        for index, rank in enumerate(self._ranks):
            rank.batcher.check(self.handovers.pages(index))
        self._attempts.check()
        self._group.check()
        self.handovers.check(self._attempts)
        for attempt in self._attempts:
            assert attempt.streams
            assert attempt.told != attempt.generating
            assert self._graves.reason(attempt.request_id, attempt.attempt) is None

    def overview(self) -> dict[str, object]:
        """What GET /status shows; JSON-able."""
        return {
            "worker_id": self._card.worker_id,
            "epoch": self._card.epoch,
            "term": self._reports.term,
            "linked": self._reports.linked,
            "draining": self._drain_until is not None,
            "hung": self._reports.hung,
            "attempts": len(self._attempts),
            "frontends": self._attempts.num_frontends,
            "tombstones": len(self._graves),
            "handovers": len(self.handovers),
            "unacked_reports": self._reports.num_unacked,
            "cache_version": self._reports.cache.version,
            "lockstep": self._card.lockstep,
            "group_wait_share": self.stats.group_cost().wait_share,
            "ranks": [rank.overview() for rank in self._ranks],
            "stats": asdict(self.stats),
        }

    # ------------------------------------------------------------ messages

    def _message(self, peer: str, message: object, now: float) -> None:
        match message:
            case Submit():
                self._submit(FrontendId(peer), message, now)
            case Ack(items):
                for item in items:
                    self._delivery.acknowledged(peer, item, now)
            case Cancel(request_id, attempt):
                self._group.stop_waiting()
                self._ends.kill(request_id, attempt, now, told_frontend=False)
            case Fence(request_id, attempt, rank, number):
                self._group.stop_waiting()
                if 0 <= rank < len(self._ranks) and 0 <= number < MAX_NUMBER:
                    self._ranks[rank].seen.add(number)
                self._ends.kill(request_id, attempt, now, told_frontend=True)
                self._reports.changed()
            case Poll():
                self._reports.polled(message)
            case _:
                self._note("message.ignored", peer=peer, kind=type(message).__name__)

    def _submit(self, frontend_id: FrontendId, submit: Submit, now: float) -> None:
        known = self._attempts.get(submit.request_id)
        if known is not None and known.attempt == submit.attempt:
            self._delivery.repeat(known.frontend_id, [known])
            return
        if known is not None and known.attempt < submit.attempt:
            self._ends.cancel(known, now)  # its frontend gave it up, whatever becomes of this one
        if not 0 <= submit.rank < len(self._ranks):
            self._ends.refuse(frontend_id, submit, "invalid", False, now)
            return
        rank = self._ranks[submit.rank]
        if 0 <= submit.number < MAX_NUMBER:
            rank.seen.add(submit.number)
        self._group.submitted(submit, now)
        self._reports.changed()
        dead = self._graves.reason(submit.request_id, submit.attempt)
        reason = refusal(submit, rank.capacity)
        if dead is not None or (known is not None and known.attempt > submit.attempt):
            self._ends.refuse(frontend_id, submit, dead or "tombstone", True, now)
        elif self._drain_until is not None:
            self._ends.refuse(frontend_id, submit, "draining", True, now)
        elif rank.failed:
            self._ends.refuse(frontend_id, submit, "shutdown", True, now)
        elif reason is not None:
            self._ends.refuse(frontend_id, submit, reason, False, now)
        elif len(self._attempts) >= self._max_attempts:
            self._ends.refuse(frontend_id, submit, "full", True, now)
        else:
            self._accept(frontend_id, rank, submit, now)

    def _accept(self, frontend_id: FrontendId, rank: Rank, submit: Submit, now: float) -> None:
        attempt = Attempt(
            request_id=submit.request_id,
            attempt=submit.attempt,
            frontend_id=frontend_id,
            rank=submit.rank,
            prompt_tokens=len(submit.prompt) // 4,
            accepted_at=now,
            deadline=now + submit.deadline_s,
            handover=submit.handover,
        )
        choices = sequences(submit, rank.capacity)
        done = [seq for seq in choices if seq.num_output >= seq.limit > 0]
        running = [seq for seq in choices if seq not in done]
        if not all(rank.batcher.add(seq) for seq in running):
            for seq in running:
                rank.batcher.end(seq)
            self._ends.refuse(frontend_id, submit, "too_long", False, now)
            return
        attempt.streams = {seq.choice: Stream(seq) for seq in choices}
        self._attempts.add(attempt)
        self._delivery.deliver([Gain(seq, finish="length") for seq in done], now)

    # ------------------------------------------------------------ steps

    def _tick(self, now: float) -> None:
        self._graves.expire(now)
        self._ends.expire(now)
        if self._drain_until is not None and self._drain_until <= now:
            for attempt in self._attempts:
                self._ends.give_up(attempt, "shutdown", True, now)
        self._plan(now)
        while any(
            rank.batcher.starved and self.handovers.make_way(index)
            for index, rank in enumerate(self._ranks)
        ):
            self._plan(now)
        for index, rank in enumerate(self._ranks):
            self._out += [transfer.command(index) for transfer in rank.batcher.take_pulls()]
            self._give_up_dropped(rank, now)
        self._out += self._reports.flush(
            now,
            lambda: status_table([rank.status_row(now) for rank in self._ranks]),
            self._drain_until is not None,
            self._attempts.parked(MOST_PARKED),
        )

    def _plan(self, now: float) -> None:
        for index, plan in self._group.plans(now):
            self._out.append(RunStep(index, plan))
            if self._ranks[index].step_since is None:
                self._ranks[index].step_since = now

    def _give_up_dropped(self, rank: Rank, now: float) -> None:
        for sequence, reason in rank.batcher.take_dropped():
            attempt = self._attempts.get(sequence.request_id)
            if reason == "outgrown":  # it has met the limit of what can be held here
                self._delivery.deliver([Gain(sequence, finish="length")], now)
            elif attempt is not None:  # else another choice of it took the attempt along
                self._ends.give_up(attempt, reason, True, now)

    def _step_done(self, event: StepDone, now: float) -> None:
        rank = self._ranks[event.rank]
        if rank.failed:
            return
        elapsed = event.result.elapsed_s
        outcome = rank.batcher.complete(event.result)
        rank.step_since = now if rank.batcher.num_in_flight else None
        self._group.completed(event.rank, event.result)
        for attempt in dict.fromkeys(self._attempts.of(seq) for seq in outcome.prefilled):
            if not attempt.first_token_told:
                attempt.prefill_s += elapsed
                if attempt.first_step_at is None:
                    attempt.first_step_at = now - elapsed
        self._delivery.deliver(outcome.gains, now)
        self._reports.changed()

    def _pulled(self, event: Pulled) -> None:
        if not event.ok:
            self.stats.pulls_failed += 1
            self._note("pull.failed", rank=event.rank, reason=event.reason)
        self._ranks[event.rank].batcher.pulled(event.number, event.ok)
        self._reports.changed()

    def _runner_failed(self, index: int, reason: str, now: float) -> None:
        """What runs on its rank, and on those that step with it, is over."""
        lost = self._group.fail_with(index)
        self._note("runner.failed", rank=index, reason=reason, lost_ranks=lost)
        for each in lost:
            self._ranks[each].failed = True
        for attempt in self._attempts:
            if attempt.rank in lost and not attempt.told:
                self._ends.give_up(attempt, "shutdown", True, now, end="failed")
        for each in lost:
            self._ranks[each].batcher.fail()
        self._reports.changed()

    def _note(self, event: str, **fields: object) -> None:
        self._out.append(Note(event, fields))
