"""Worker: takes attempts from frontends, runs them on its ranks, and answers for them.

`handle(event, now)` of an arrival or a result changes state and answers at once (tokens, refusals);
steps are planned and reports are sent in the Tick that ends a turn (protocol rule 1). Every attempt
that was accepted or refused is reported to the Master as Finished exactly once, and everything it
holds is freed in the same handle().
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import asdict

from rtp.core.commands import Command, Note, RunStep, Send
from rtp.core.events import (
    Drain,
    Event,
    From,
    FrontendDown,
    FrontendUp,
    MasterDown,
    MasterUp,
    RunnerFailed,
    Stalled,
    StepDone,
    Tick,
)
from rtp.core.messages import (
    MOST_PARKED,
    Ack,
    AckItem,
    Cancel,
    Fence,
    Finished,
    FirstToken,
    Poll,
    Register,
    Rejected,
    Submit,
    TokenRun,
    Tokens,
)
from rtp.core.ports import Capacity
from rtp.core.types import FrontendId, RequestId
from rtp.core.worker.attempts import Attempts
from rtp.core.worker.batcher import Batcher, Gain
from rtp.core.worker.checks import MAX_NUMBER, refusal
from rtp.core.worker.graves import Graves
from rtp.core.worker.rank import Rank
from rtp.core.worker.reports import Reports, status_table
from rtp.core.worker.sequence import Sequence, sequences
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
    ) -> None:
        """card: what it registers with, one entry of kv_total per rank.  capacities: one per rank.
        max_attempts: held at once.  max_unacked: tokens of a choice before it is parked."""
        self.stats = Stats()
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
                    stats=self.stats,
                ),
            )
            for capacity in capacities
        ]
        self._max_attempts = max_attempts
        self._max_unacked = max_unacked
        self._reports = Reports(card, [rank.batcher.blocks for rank in self._ranks], self.stats)
        self._graves = Graves()
        self._attempts = Attempts()
        self._drain_until: float | None = None
        self._undecided_since: float | None = None
        self._out: list[Command] = []

    # ------------------------------------------------------------ the three calls of a driver

    def handle(self, event: Event, now: float) -> list[Command]:
        """Cost: O(tokens) for a Submit, O(rows) for a StepDone, O(1) a message else."""
        self._out = []
        if isinstance(event, Tick):
            self._tick(now)
            self._undecided_since = None
            return self._out
        match event:
            case From(peer, message):
                self._message(peer, message, now)
            case StepDone():
                self._step_done(event, now)
            case FrontendUp(frontend_id):
                self._send_runs(frontend_id, _unacked(self._attempts.connected(frontend_id)))
            case FrontendDown(frontend_id):
                self._attempts.disconnected(frontend_id, now)
            case MasterUp(term):
                self._reports.up(term, now)
            case MasterDown():
                self._reports.down(now)
            case Stalled(hung):
                self._reports.stalled(hung)
            case RunnerFailed(rank, reason):
                self._runner_failed(rank, reason, now)
            case Drain(grace_s):
                self._drain_until = now + grace_s
                self._reports.changed()
        self._undecided_since = now
        return self._out

    def next_deadline(self) -> float | None:
        """When to send the next Tick if nothing else happens."""
        times = [
            self._undecided_since,
            self._reports.next_deadline(),
            self._attempts.next_deadline(),
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
        for rank in self._ranks:
            rank.batcher.check()
        self._attempts.check()
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
            "unacked_reports": self._reports.num_unacked,
            "cache_version": self._reports.cache.version,
            "ranks": [rank.overview() for rank in self._ranks],
            "stats": asdict(self.stats),
        }

    # ------------------------------------------------------------ Tick

    def _tick(self, now: float) -> None:
        self._graves.expire(now)
        self._expire(now)
        for index, rank in enumerate(self._ranks):
            if not rank.failed:
                self._plan(index, rank, now)
        self._out += self._reports.flush(
            now, self._table, self._drain_until is not None, self._attempts.parked(MOST_PARKED)
        )

    def _expire(self, now: float) -> None:
        while (attempt := self._attempts.due(now)) is not None:
            if attempt.told:
                self._forget(attempt, "unknown", now)  # its frontend never acknowledged the end
            else:
                late = attempt.deadline <= now
                self._give_up(attempt, "deadline" if late else "slow_reader", False, now)
        for attempt in self._attempts.orphans(now):
            self._cancel(attempt, now)
        self._attempts.forget_frontends(now)
        if self._drain_until is not None and self._drain_until <= now:
            for attempt in self._attempts:
                self._give_up(attempt, "shutdown", True, now)

    def _plan(self, index: int, rank: Rank, now: float) -> None:
        while (plan := rank.batcher.next_plan()) is not None:
            self._out.append(RunStep(index, plan))
        for sequence, reason in rank.batcher.take_dropped():
            attempt = self._attempts.get(sequence.request_id)
            if reason == "outgrown":
                self._deliver([Gain(sequence, finish="error")], now)
            elif attempt is not None:  # else another choice of it took the attempt along
                self._give_up(attempt, reason, True, now)

    def _table(self) -> bytes:
        return status_table([rank.status_row() for rank in self._ranks])

    # ------------------------------------------------------------ messages

    def _message(self, peer: str, message: object, now: float) -> None:
        match message:
            case Submit():
                self._submit(FrontendId(peer), message, now)
            case Ack(items):
                for item in items:
                    self._ack(peer, item, now)
            case Cancel(request_id, attempt):
                self._kill(request_id, attempt, now, told_frontend=False)
            case Fence(request_id, attempt, rank, number):
                if 0 <= rank < len(self._ranks) and 0 <= number < MAX_NUMBER:
                    self._ranks[rank].seen.add(number)
                self._kill(request_id, attempt, now, told_frontend=True)
                self._reports.changed()
            case Poll():
                self._reports.polled(message)
            case _:
                self._note("message.ignored", peer=peer, kind=type(message).__name__)

    def _submit(self, frontend_id: FrontendId, submit: Submit, now: float) -> None:
        known = self._attempts.get(submit.request_id)
        if known is not None and known.attempt == submit.attempt:
            self._send_runs(known.frontend_id, _unacked([known]))
            return
        if known is not None and known.attempt < submit.attempt:
            self._cancel(known, now)  # its frontend gave it up, whatever becomes of this one
        if not 0 <= submit.rank < len(self._ranks):
            self._refuse(frontend_id, submit, "invalid", False, now)
            return
        rank = self._ranks[submit.rank]
        if 0 <= submit.number < MAX_NUMBER:
            rank.seen.add(submit.number)
        self._reports.changed()
        dead = self._graves.reason(submit.request_id, submit.attempt)
        reason = refusal(submit, rank.capacity)
        if dead is not None or (known is not None and known.attempt > submit.attempt):
            self._refuse(frontend_id, submit, dead or "tombstone", True, now)
        elif self._drain_until is not None:
            self._refuse(frontend_id, submit, "draining", True, now)
        elif rank.failed:
            self._refuse(frontend_id, submit, "shutdown", True, now)
        elif reason is not None:
            self._refuse(frontend_id, submit, reason, False, now)
        elif len(self._attempts) >= self._max_attempts:
            self._refuse(frontend_id, submit, "full", True, now)
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
        )
        choices = sequences(submit, rank.capacity)
        done = [seq for seq in choices if seq.num_output >= seq.limit > 0]
        running = [seq for seq in choices if seq not in done]
        if not all(rank.batcher.add(seq) for seq in running):
            for seq in running:
                rank.batcher.end(seq)
            self._refuse(frontend_id, submit, "too_long", False, now)
            return
        attempt.streams = {seq.choice: Stream(seq) for seq in choices}
        self._attempts.add(attempt)
        self._deliver([Gain(seq, finish="length") for seq in done], now)

    def _ack(self, peer: str, item: AckItem, now: float) -> None:
        attempt = self._attempts.get(item.request_id)
        if attempt is None or attempt.attempt != item.attempt or attempt.frontend_id != peer:
            return
        stream = attempt.streams.get(item.choice)
        if stream is None:
            return
        if item.stop or (item.next_index < 0 and stream.finish):
            self._ranks[attempt.rank].batcher.end(stream.sequence)
            del attempt.streams[item.choice]
            self._settle(attempt, now)
            return
        stream.acknowledge(item.next_index)
        if stream.parked_at is not None and stream.num_unacked <= self._max_unacked // 2:
            stream.parked_at = None
            self._ranks[attempt.rank].batcher.unpark(stream.sequence)
            self._attempts.set_timer(attempt)
            self._reports.changed()

    def _kill(self, request_id: RequestId, number: int, now: float, *, told_frontend: bool) -> None:
        """Cancel or Fence: no attempt up to `number` may run, now or later."""
        attempt = self._attempts.get(request_id)
        if attempt is not None and attempt.attempt <= number:
            if told_frontend and not attempt.told:
                self._reject(attempt.frontend_id, attempt, "tombstone", True)
            self._cancel(attempt, now)
        self._graves.bury(request_id, number, "tombstone", now)

    # ------------------------------------------------------------ steps

    def _step_done(self, event: StepDone, now: float) -> None:
        rank = self._ranks[event.rank]
        if rank.failed:
            return
        elapsed = event.result.elapsed_s
        outcome = rank.batcher.complete(event.result)
        for request_id in dict.fromkeys(seq.request_id for seq in outcome.prefilled):
            attempt = self._of(request_id)
            if not attempt.first_token_told:
                attempt.prefill_s += elapsed
                if attempt.first_step_at is None:
                    attempt.first_step_at = now - elapsed
        self._deliver(outcome.gains, now)
        self._reports.changed()

    def _deliver(self, gains: list[Gain], now: float) -> None:
        """Sends what choices gained, one frame per frontend, and settles those that finished."""
        runs: dict[FrontendId, list[TokenRun]] = {}
        for gain in gains:
            seq = gain.sequence
            attempt = self._of(seq.request_id)
            stream = attempt.streams[seq.choice]
            attempt.generated += len(gain.ids)
            if not attempt.first_token_told and gain.finish != "error" and seq.cached >= 0:
                self._tell_first_token(attempt, seq)
            runs.setdefault(attempt.frontend_id, []).append(stream.push(gain))
            if not gain.finish and stream.num_unacked > self._max_unacked:
                self._ranks[attempt.rank].batcher.park(seq)
                stream.parked_at = now
                self._attempts.set_timer(attempt)
        for frontend_id, frontend_runs in runs.items():
            self._send_runs(frontend_id, frontend_runs)
        for gain in gains:
            if gain.finish:
                self._settle(self._of(gain.sequence.request_id), now)

    def _tell_first_token(self, attempt: Attempt, seq: Sequence) -> None:
        attempt.first_token_told = True
        attempt.cached = seq.cached
        start = attempt.accepted_at if attempt.first_step_at is None else attempt.first_step_at
        self._reports.add(
            FirstToken(
                request_id=attempt.request_id,
                attempt=attempt.attempt,
                new_tokens=attempt.prompt_tokens - seq.cached,
                cached_tokens=seq.cached,
                prefill_s=attempt.prefill_s,
                queue_s=max(0.0, start - attempt.accepted_at),
            )
        )

    # ------------------------------------------------------------ ends

    def _settle(self, attempt: Attempt, now: float) -> None:
        """After a choice finished or was forgotten: is its attempt done, may it be forgotten?"""
        if not attempt.generating and not attempt.told:
            failed = any(stream.finish == "error" for stream in attempt.streams.values())
            self._tell_end(attempt, "failed" if failed else "done")
        if not attempt.streams:
            self._forget(attempt, "unknown", now)

    def _cancel(self, attempt: Attempt, now: float) -> None:
        """Frees everything; its frontend is not told."""
        if not attempt.told:
            self._tell_end(attempt, "cancelled")
        self._forget(attempt, "tombstone", now)

    def _give_up(
        self, attempt: Attempt, reason: str, retry: bool, now: float, end: str = "rejected"
    ) -> None:
        """Ends an attempt that its frontend still waits for. A finished one is only forgotten."""
        if not attempt.told:
            self._reject(attempt.frontend_id, attempt, reason, retry)
            self._tell_end(attempt, end)
        self._forget(attempt, "tombstone", now)

    def _refuse(
        self, frontend_id: FrontendId, submit: Submit, reason: str, retry: bool, now: float
    ) -> None:
        """Does not take a Submit."""
        self._reject(frontend_id, submit, reason, retry)
        self._graves.bury(submit.request_id, submit.attempt, "tombstone", now)
        if self._graves.tell(submit.request_id, submit.attempt):
            prompt = len(submit.prompt) // 4
            self._finished(submit.request_id, submit.attempt, "rejected", prompt, 0, 0)

    def _reject(
        self, frontend_id: FrontendId, which: Attempt | Submit, reason: str, retry: bool
    ) -> None:
        self.stats.rejects[reason] = self.stats.rejects.get(reason, 0) + 1
        self._out.append(
            Send(frontend_id, Rejected(which.request_id, which.attempt, reason, retry))
        )
        self._note(
            "request.rejected", request_id=which.request_id, attempt=which.attempt, reason=reason
        )

    def _tell_end(self, attempt: Attempt, reason: str) -> None:
        attempt.told = True
        self._finished(
            attempt.request_id,
            attempt.attempt,
            reason,
            attempt.prompt_tokens,
            attempt.cached,
            attempt.generated,
        )

    def _finished(
        self,
        request_id: RequestId,
        attempt: int,
        reason: str,
        prompt_tokens: int,
        cached_tokens: int,
        generated: int,
    ) -> None:
        self.stats.finishes[reason] = self.stats.finishes.get(reason, 0) + 1
        self._reports.add(
            Finished(request_id, attempt, reason, prompt_tokens, cached_tokens, generated)
        )

    def _forget(self, attempt: Attempt, reason: str, now: float) -> None:
        """The last of an attempt here: what it held is freed, and it is buried."""
        batcher = self._ranks[attempt.rank].batcher
        for stream in attempt.streams.values():
            batcher.end(stream.sequence)
        self._attempts.remove(attempt)
        self._graves.bury(attempt.request_id, attempt.attempt, reason, now)
        self._graves.tell(attempt.request_id, attempt.attempt)

    def _runner_failed(self, index: int, reason: str, now: float) -> None:
        rank = self._ranks[index]
        rank.failed = True
        self._note("runner.failed", rank=index, reason=reason)
        for attempt in self._attempts:
            if attempt.rank == index and not attempt.told:
                self._give_up(attempt, "shutdown", True, now, end="failed")
        rank.batcher.fail()
        self._reports.changed()

    def _send_runs(self, frontend_id: FrontendId, runs: list[TokenRun]) -> None:
        if runs and self._attempts.is_up(frontend_id):
            self._out.append(Send(frontend_id, Tokens(tuple(runs))))

    def _of(self, request_id: RequestId) -> Attempt:
        """Of a live sequence: its attempt is there."""
        attempt = self._attempts.get(request_id)
        assert attempt is not None
        return attempt

    def _note(self, event: str, **fields: object) -> None:
        self._out.append(Note(event, dict(fields)))


def _unacked(attempts: SequenceOf[Attempt]) -> list[TokenRun]:
    streams = (stream for attempt in attempts for stream in attempt.streams.values())
    runs = (stream.unacked() for stream in streams)
    return [run for run in runs if run is not None]
