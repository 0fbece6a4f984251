"""How an attempt ends on a worker, and who is told.

Every attempt that was accepted or refused is reported to the Master as Finished exactly once. Its
frontend is told where it does not know yet: the last tokens say so themselves, a Cancel came from
it, everything else is a Rejected. An attempt that ended by its last token is held until its
frontend acknowledged that, or its time is over; then, and at once on every other way, what it holds
is freed and it is buried, so that it never runs here again.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from rtp.core.commands import Command, Note, Send
from rtp.core.messages import Finished, Rejected, Submit
from rtp.core.types import FrontendId, RequestId
from rtp.core.worker.attempts import Attempts
from rtp.core.worker.graves import Graves
from rtp.core.worker.handovers import HandOvers
from rtp.core.worker.rank import Rank
from rtp.core.worker.reports import Reports
from rtp.core.worker.stats import Stats
from rtp.core.worker.streams import Attempt


class Ends:
    """Every way out. The tables are the worker's."""

    __slots__ = ("_attempts", "_graves", "_handovers", "_out", "_ranks", "_reports", "_stats")

    def __init__(
        self,
        ranks: SequenceOf[Rank],
        attempts: Attempts,
        graves: Graves,
        handovers: HandOvers,
        reports: Reports,
        stats: Stats,
        out: list[Command],
    ) -> None:
        """out: commands of the running handle(), to append to."""
        self._ranks = ranks
        self._attempts = attempts
        self._graves = graves
        self._handovers = handovers
        self._reports = reports
        self._stats = stats
        self._out = out

    def refuse(
        self, frontend_id: FrontendId, submit: Submit, reason: str, retry: bool, now: float
    ) -> None:
        """Does not take a Submit."""
        self._reject(frontend_id, submit, reason, retry)
        self._graves.bury(submit.request_id, submit.attempt, "tombstone", now)
        if self._graves.tell(submit.request_id, submit.attempt):
            prompt = len(submit.prompt) // 4
            self._finished(submit.request_id, submit.attempt, "rejected", prompt, 0, 0)

    def settle(self, attempt: Attempt, now: float) -> None:
        """After a choice finished or was forgotten: is its attempt done, may it be forgotten?"""
        if not attempt.generating and not attempt.told:
            finishes = {stream.finish for stream in attempt.streams.values()}
            if "error" in finishes:
                self._tell_end(attempt, "failed")
            elif "handover" in finishes:
                self._tell_end(attempt, "handed_over")
                attempt.handed_at = now
                self._attempts.set_timer(attempt)
            else:
                self._tell_end(attempt, "done")
        if not attempt.streams:
            self._forget(attempt, "unknown", now)

    def cancel(self, attempt: Attempt, now: float) -> None:
        """Frees everything; its frontend is not told."""
        if not attempt.told:
            self._tell_end(attempt, "cancelled")
        self._forget(attempt, "tombstone", now)

    def kill(self, request_id: RequestId, number: int, now: float, *, told_frontend: bool) -> None:
        """Cancel or Fence: no attempt up to `number` may run, now or later."""
        attempt = self._attempts.get(request_id)
        if attempt is not None and attempt.attempt <= number:
            if told_frontend and not attempt.told:
                self._reject(attempt.frontend_id, attempt, "tombstone", True)
            self.cancel(attempt, now)
        self._graves.bury(request_id, number, "tombstone", now)

    def give_up(
        self, attempt: Attempt, reason: str, retry: bool, now: float, end: str = "rejected"
    ) -> None:
        """Ends an attempt that its frontend still waits for. A finished one is only forgotten."""
        if not attempt.told:
            self._reject(attempt.frontend_id, attempt, reason, retry)
            self._tell_end(attempt, end)
        self._forget(attempt, "tombstone", now)

    def expire(self, now: float) -> None:
        """Ends what is over its deadline, read too slowly, or left by its frontend."""
        while (attempt := self._attempts.due(now)) is not None:
            if attempt.told:
                self._forget(attempt, "unknown", now)  # its frontend never acknowledged the end
            else:
                late = attempt.deadline <= now
                self.give_up(attempt, "deadline" if late else "slow_reader", False, now)
        for attempt in self._attempts.orphans(now):
            self.cancel(attempt, now)
        self._attempts.forget_frontends(now)

    # ------------------------------------------------------------ telling and forgetting

    def _reject(
        self, frontend_id: FrontendId, which: Attempt | Submit, reason: str, retry: bool
    ) -> None:
        self._stats.rejects[reason] = self._stats.rejects.get(reason, 0) + 1
        request_id, attempt = which.request_id, which.attempt
        self._out.append(Send(frontend_id, Rejected(request_id, attempt, reason, retry)))
        facts = {"request_id": request_id, "attempt": attempt, "reason": reason}
        self._out.append(Note("request.rejected", facts))

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
        self._stats.finishes[reason] = self._stats.finishes.get(reason, 0) + 1
        self._reports.add(
            Finished(request_id, attempt, reason, prompt_tokens, cached_tokens, generated)
        )

    def _forget(self, attempt: Attempt, reason: str, now: float) -> None:
        """The last of an attempt here: what it held is freed, and it is buried."""
        batcher = self._ranks[attempt.rank].batcher
        for stream in attempt.streams.values():
            batcher.end(stream.sequence)
        self._handovers.release(attempt)
        self._attempts.remove(attempt)
        self._graves.bury(attempt.request_id, attempt.attempt, reason, now)
        self._graves.tell(attempt.request_id, attempt.attempt)
