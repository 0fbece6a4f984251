"""Tokens on their way to frontends: sent at once, kept until acknowledged, sent again after a
connection was lost. A choice whose frontend lags too far behind is parked until it catches up."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from rtp.core.commands import Command, Send
from rtp.core.messages import AckItem, FirstToken, TokenRun, Tokens
from rtp.core.types import FrontendId
from rtp.core.worker.attempts import Attempts
from rtp.core.worker.ends import Ends
from rtp.core.worker.handovers import HandOvers
from rtp.core.worker.in_flight import Gain
from rtp.core.worker.rank import Rank
from rtp.core.worker.reports import Reports
from rtp.core.worker.sequence import Sequence
from rtp.core.worker.streams import Attempt


class Delivery:
    """Sends what steps bring, and hears how far it was read. The tables are the worker's."""

    __slots__ = (
        "_attempts", "_ends", "_handovers", "_max_unacked", "_out", "_ranks", "_reports",
    )  # fmt: skip

    def __init__(
        self,
        ranks: SequenceOf[Rank],
        attempts: Attempts,
        handovers: HandOvers,
        reports: Reports,
        ends: Ends,
        out: list[Command],
        *,
        max_unacked: int,
    ) -> None:
        """out: commands of the running handle(), to append to.  max_unacked: tokens of a choice
        before it is parked."""
        self._ranks = ranks
        self._attempts = attempts
        self._handovers = handovers
        self._reports = reports
        self._ends = ends
        self._out = out
        self._max_unacked = max_unacked

    def deliver(self, gains: list[Gain], now: float) -> None:
        """Sends what choices gained, one frame per frontend, and settles those that finished."""
        runs: dict[FrontendId, list[TokenRun]] = {}
        for gain in gains:
            seq = gain.sequence
            attempt = self._attempts.of(seq)
            stream = attempt.streams[seq.choice]
            attempt.generated += len(gain.ids)
            if not attempt.first_token_told and gain.finish != "error" and seq.cached >= 0:
                self._tell_first_token(attempt, seq)
            if gain.finish == "handover":
                stream.source = self._handovers.keep(attempt, seq)
            runs.setdefault(attempt.frontend_id, []).append(stream.push(gain))
            if not gain.finish and stream.num_unacked > self._max_unacked:
                self._ranks[attempt.rank].batcher.park(seq)
                stream.parked_at = now
                self._attempts.set_timer(attempt)
        for frontend_id, frontend_runs in runs.items():
            self._send(frontend_id, frontend_runs)
        for gain in gains:
            if gain.finish:
                self._ends.settle(self._attempts.of(gain.sequence), now)

    def acknowledged(self, peer: str, item: AckItem, now: float) -> None:
        """A frontend has read a choice this far, or wants no more of it."""
        attempt = self._attempts.get(item.request_id)
        if attempt is None or attempt.attempt != item.attempt or attempt.frontend_id != peer:
            return
        stream = attempt.streams.get(item.choice)
        if stream is None:
            return
        if item.stop or (item.next_index < 0 and stream.finish):
            self._ranks[attempt.rank].batcher.end(stream.sequence)
            del attempt.streams[item.choice]
            self._ends.settle(attempt, now)
            return
        stream.acknowledge(item.next_index)
        if stream.parked_at is not None and stream.num_unacked <= self._max_unacked // 2:
            stream.parked_at = None
            self._ranks[attempt.rank].batcher.unpark(stream.sequence)
            self._attempts.set_timer(attempt)
            self._reports.changed()

    def repeat(self, frontend_id: FrontendId, attempts: list[Attempt]) -> None:
        """Sends once more what this frontend has not acknowledged of these attempts of its own."""
        streams = (stream for attempt in attempts for stream in attempt.streams.values())
        runs = (stream.unacked() for stream in streams)
        self._send(frontend_id, [run for run in runs if run is not None])

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

    def _send(self, frontend_id: FrontendId, runs: list[TokenRun]) -> None:
        if runs and self._attempts.is_up(frontend_id):
            self._out.append(Send(frontend_id, Tokens(tuple(runs))))
