"""What became of requests, gathered from the commands of a cluster in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field

from rtp.core.commands import Chunk, Command, Deliver, Ended, Failed, Send
from rtp.core.messages import Grant
from rtp.core.steps import TokenLogprobs
from rtp.core.types import RequestId


@dataclass(slots=True)
class ChoiceOutcome:
    """All that one choice delivered."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str = ""
    stop_reason: int | str | None = None

    def add(self, chunk: Chunk) -> None:
        self.ids += chunk.ids
        self.text += chunk.text
        self.logprobs += chunk.logprobs
        self.finish = chunk.finish
        self.stop_reason = chunk.stop_reason


@dataclass(slots=True)
class Outcome:
    """One request, from its Begin to its end. Times in seconds of the world's clock."""

    request_id: RequestId
    begun_at: float
    grants: list[tuple[float, Grant]] = field(default_factory=list)
    first_token_at: float | None = None
    ended_at: float | None = None
    choices: dict[int, ChoiceOutcome] = field(default_factory=dict)
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    ended: Ended | None = None
    failed: Failed | None = None
    left: bool = False
    """The client left before the end."""

    @property
    def over(self) -> bool:
        return self.ended_at is not None

    @property
    def rank_id(self) -> str:
        """Where its last attempt was placed: worker id and rank inside it."""
        grant = self.grants[-1][1]
        return f"{grant.worker_id}/{grant.rank}"

    @property
    def matched_tokens(self) -> int:
        """What the Master expected in that rank's cache."""
        return self.grants[-1][1].matched_tokens

    @property
    def ids(self) -> list[int]:
        """Of choice 0."""
        return self.choices[0].ids

    @property
    def text(self) -> str:
        return self.choices[0].text


class Outcomes:
    """Watches commands as `VirtualCluster(observe=...)` shows them."""

    def __init__(self) -> None:
        self.by_id: dict[RequestId, Outcome] = {}
        self.num_over = 0
        """Requests that have Ended or Failed."""

    def begin(self, request_id: RequestId, at: float) -> Outcome:
        outcome = self.by_id[request_id] = Outcome(request_id, at)
        return outcome

    def take(self, command: Command, now: float) -> None:
        """Notes the command if it tells of a request that was begun here."""
        match command:
            case Send(message=Grant() as grant):
                if outcome := self.by_id.get(grant.request_id):
                    outcome.grants.append((now, grant))
            case Deliver(request_id=request_id):
                if outcome := self.by_id.get(request_id):
                    _deliver(outcome, command, now)
            case Ended(request_id=request_id):
                if outcome := self.by_id.get(request_id):
                    outcome.ended, outcome.ended_at = command, now
                    self.num_over += 1
            case Failed(request_id=request_id):
                if outcome := self.by_id.get(request_id):
                    outcome.failed, outcome.ended_at = command, now
                    self.num_over += 1


def _deliver(outcome: Outcome, deliver: Deliver, now: float) -> None:
    if outcome.first_token_at is None:
        outcome.first_token_at = now
    outcome.cached_tokens = deliver.cached_tokens
    outcome.prompt_logprobs += deliver.prompt_logprobs
    for chunk in deliver.chunks:
        outcome.choices.setdefault(chunk.choice, ChoiceOutcome()).add(chunk)
