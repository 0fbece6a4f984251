"""Watches one run: what must hold after every event, and what must be true once all is quiet."""

from __future__ import annotations

from dataclasses import dataclass

from rtp.core.commands import Command, Deliver, Ended, Failed
from rtp.core.events import Begin
from rtp.core.outcomes import Outcome, Outcomes
from rtp.core.types import RequestId, unpack_ids
from tests.support.oracles import Expected

ROUNDING_S = 1e-6


@dataclass(slots=True)
class Run:
    """One request under way."""

    begin: Begin
    expected: tuple[Expected, ...]
    outcome: Outcome
    paused: bool = False
    """Its client stopped reading at least once."""
    abandoned: bool = False
    """Its frontend died, and the client's connection with it."""
    forgotten: bool = False
    """Its frontend knows that the client has left."""


class Witness:
    """Every request ends once; what its client got is the beginning of the right output, and all of
    it when the request ended well."""

    def __init__(self, calm: bool, well_by_s: float, limited: frozenset[str]) -> None:
        """calm: nothing goes wrong in this run.  limited: tenants that may be refused for what they
        use.  well_by_s: from here on it has been well for so long that no patience may end."""
        self.outcomes = Outcomes()
        self.runs: dict[RequestId, Run] = {}
        self.num_events = 0
        self._calm = calm
        self._limited = limited
        self._well_by_s = well_by_s

    def begin(self, begin: Begin, expected: tuple[Expected, ...], now: float) -> Run:
        outcome = self.outcomes.begin(begin.request_id, now)
        run = self.runs[begin.request_id] = Run(begin, expected, outcome)
        return run

    def observe(self, command: Command, now: float) -> None:
        if not isinstance(command, Deliver | Ended | Failed):
            self.outcomes.take(command, now)
            return
        run = self.runs[command.request_id]
        assert not run.outcome.over, f"{command} after the end of {run.outcome.request_id}"
        assert not run.forgotten, f"{command} to a client that has left"
        assert not run.abandoned, f"{command} from a frontend that died"
        if run.outcome.left:
            return  # nobody reads it
        self.outcomes.take(command, now)
        match command:
            case Deliver():
                self._check_delivered(run)
            case Ended():
                self._check_complete(run, command)
            case Failed():
                self._check_failure(run, command, now)

    def open_runs(self) -> list[Run]:
        return [
            run
            for run in self.runs.values()
            if not (run.outcome.over or run.outcome.left or run.abandoned)
        ]

    def _check_delivered(self, run: Run) -> None:
        for number, choice in run.outcome.choices.items():
            right = run.expected[number]
            assert tuple(choice.ids) == right.ids[: len(choice.ids)], (
                f"{run.outcome.request_id}, choice {number}: {choice.ids} is not the beginning of "
                f"{right.ids}"
            )
            assert right.text.startswith(choice.text)
            if run.begin.sampling.logprobs is not None:
                assert [entry.token for entry in choice.logprobs] == choice.ids

    def _check_complete(self, run: Run, ended: Ended) -> None:
        got = run.outcome.choices
        assert sorted(got) == list(range(run.begin.n))
        for number, right in enumerate(run.expected):
            choice = got[number]
            found = Expected(tuple(choice.ids), choice.text, choice.finish, choice.stop_reason)
            assert found == right, (
                f"{run.outcome.request_id}, choice {number}: {found}, not {right}"
            )
        assert ended.generated == sum(len(right.ids) for right in run.expected)
        assert ended.prompt_tokens == len(run.begin.prompt) // 4
        if run.begin.sampling.prompt_logprobs is not None:
            told = [entry.token for entry in run.outcome.prompt_logprobs]
            assert told == unpack_ids(run.begin.prompt)[1:]

    def _check_failure(self, run: Run, failed: Failed, now: float) -> None:
        begin, age = run.begin, now - run.outcome.begun_at
        patience = min(begin.timeout_s, begin.ttft_timeout_s or begin.timeout_s)
        permitted = {
            504: age >= patience - ROUNDING_S and now < self._well_by_s,
            503: not self._calm or failed.code == "overloaded",
            429: begin.tenant in self._limited,
            499: run.paused,
        }
        assert permitted.get(failed.status, False), f"{failed} after {age:.3f} s"
