"""One request from the client's side: its attempts, and what each choice has produced.

Output tokens are numbered per choice from 0 and accepted strictly in order, whichever worker sends
them and however often. So a stream that is interrupted goes on with exactly the next token: the
text state stays, a new attempt is told the ids so far, and sampling depends only on (seed, choice,
index).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from enum import Enum, auto

import msgspec

from rtp.core.commands import Chunk, Deliver
from rtp.core.events import Begin
from rtp.core.frontend.stops import StopStrings
from rtp.core.frontend.text import ChoiceText
from rtp.core.messages import AckItem, Ask, ChoiceState, Grant, Source, Submit, TokenRun
from rtp.core.phases import Phase, move
from rtp.core.ports import Detokenizer
from rtp.core.steps import TokenLogprobs
from rtp.core.types import FrontendId, WorkerId

ID_BYTES = 4
NO_LOGPROBS: tuple[TokenLogprobs, ...] = ()
FIRST_PAUSE_S = 0.05
MOST_PAUSE_S = 2.0


class Taken(Enum):
    """What became of a run of tokens."""

    NEW = auto()
    DUPLICATE = auto()  # seen before; the worker has missed an acknowledgement
    GAP = auto()  # tokens before it are missing; nothing was taken
    FAILED = auto()  # the worker could not compute this choice


class Choice:
    """One of a request's n outputs."""

    __slots__ = (
        "finish", "handed", "index", "output", "source", "stop_reason", "stopped", "text", "told",
    )  # fmt: skip

    def __init__(self, index: int, text: ChoiceText) -> None:
        self.index = index
        self.text = text
        self.output = array("i")
        """Every token accepted, int32; its length is the next index wanted."""
        self.finish = ""
        self.stop_reason: int | str | None = None
        self.stopped = False
        """Ended here by a stop string: the worker must be told."""
        self.told = False
        """The finish has been delivered."""
        self.handed = False
        """Its worker has done its part and another one is to go on."""
        self.source: Source | None = None
        """Where the other one finds its pages."""

    def ack(self, request: Request) -> AckItem:
        """What the worker should know: the next token wanted, or that no more are."""
        wanted = -1 if self.finish else len(self.output)
        return AckItem(
            request.begin.request_id, request.attempt, self.index, wanted, stop=self.stopped
        )


class Request:
    """State of one request; told of time, grants and tokens by the Frontend, its only user."""

    __slots__ = (
        "ask_at",
        "attempt",
        "begin",
        "cached_tokens",
        "choices",
        "connect_by",
        "deadline",
        "excluded",
        "first_token",
        "fruitless",
        "generated",
        "given_by",
        "grant",
        "paused",
        "phase",
        "prompt_logprobs",
        "replacements",
        "ttft_deadline",
    )

    def __init__(
        self, begin: Begin, detokenizer: Callable[[str, bool], Detokenizer], now: float
    ) -> None:
        self.begin = begin
        self.phase = Phase.QUEUED
        self.attempt = 1
        self.grant: Grant | None = None
        """Where the current attempt runs; None while QUEUED."""
        self.given_by: WorkerId | None = None
        """The worker that began this attempt and keeps its pages for the one that runs it."""
        self.excluded: list[WorkerId] = []
        self.replacements = 0
        self.fruitless = 0
        """Of them: since the last new token."""
        self.ask_at: float | None = None
        """When to ask for the next place; None once asked."""
        self.deadline = now + begin.timeout_s
        self.ttft_deadline = None if begin.ttft_timeout_s is None else now + begin.ttft_timeout_s
        self.connect_by: float | None = None
        """While the worker's stream is not up: when to give this attempt up."""
        self.paused = False
        self.first_token = False
        self.cached_tokens = 0
        self.generated = 0
        """Output tokens delivered, all choices."""
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        """None until they arrive; empty once delivered."""
        stops = StopStrings(begin.stop) if begin.stop else None
        self.choices = [
            Choice(
                index,
                ChoiceText(
                    detokenizer(begin.model, begin.skip_special_tokens),
                    stops,
                    include_stop=begin.include_stop,
                    min_tokens=begin.sampling.min_tokens,
                ),
            )
            for index in range(begin.n)
        ]

    @property
    def prompt_tokens(self) -> int:
        return len(self.begin.prompt) // ID_BYTES

    @property
    def finished(self) -> bool:
        return all(choice.finish for choice in self.choices)

    @property
    def handed_over(self) -> bool:
        """Its worker has done its part with every choice, and another one is to go on."""
        some = False
        for choice in self.choices:
            if not choice.finish:
                if not choice.handed:
                    return False
                some = True
        return some

    def next_timer(self) -> float:
        """The earliest instant at which this request may have to be given up or placed anew."""
        times = [self.deadline]
        if self.ttft_deadline is not None and not self.first_token:
            times.append(self.ttft_deadline)
        times += [at for at in (self.connect_by, self.ask_at) if at is not None]
        return min(times)

    def expired(self, now: float) -> bool:
        late = self.ttft_deadline is not None and not self.first_token and now >= self.ttft_deadline
        return late or now >= self.deadline

    # ------------------------------------------------------------ placing

    def ask(self, frontend_id: FrontendId, now: float) -> Ask:
        """What the Master must know to place the choices that are not finished.

        The hashes are the prompt's; resumed output counts in num_tokens. The least advanced choice
        is described: prompt and output together reach the same length for all of them.
        """
        begin = self.begin
        rest = self._unfinished()
        done = min((len(choice.output) for choice in rest), default=0)
        ttft = None
        if self.ttft_deadline is not None and not self.first_token:
            ttft = max(0.0, self.ttft_deadline - now)
        return Ask(
            frontend_id=frontend_id,
            request_id=begin.request_id,
            attempt=self.attempt,
            model=begin.model,
            tenant=begin.tenant,
            chat_id=begin.chat_id,
            priority=begin.priority,
            hashes=begin.hashes,
            num_tokens=self.prompt_tokens + done,
            max_tokens=begin.sampling.max_tokens - done,
            n=len(rest),
            deadline_s=max(0.0, self.deadline - now),
            ttft_timeout_s=ttft,
            exclude=tuple(self.excluded),
            failed=self.attempt > 1,
        )

    def submit(self, now: float) -> Submit:
        """The current attempt, for the worker it was granted to; it may be sent again.

        Prompt log-probabilities that the client already has are not computed twice.
        """
        assert self.grant is not None
        begin = self.begin
        sampling = begin.sampling
        if self.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return Submit(
            request_id=begin.request_id,
            attempt=self.attempt,
            rank=self.grant.rank,
            number=self.grant.number,
            prompt=begin.prompt,
            hashes=begin.hashes,
            namespace=begin.namespace,
            sampling=sampling,
            choices=tuple(
                ChoiceState(choice.index, choice.output.tobytes(), choice.source)
                for choice in self._unfinished()
            ),
            deadline_s=max(0.0, self.deadline - now),
            group_id=self.grant.group_id,
            group_size=self.grant.group_size,
            handover=self.grant.decode,
        )

    def place(self, grant: Grant) -> None:
        self.grant = grant
        self.phase = move(self.phase, Phase.PREFILL)

    def hand_over(self) -> None:
        """The same attempt goes on at the worker that was reserved for it."""
        assert self.grant is not None
        to = self.grant.decode
        assert to is not None
        self.given_by = self.grant.worker_id
        self.grant = msgspec.structs.replace(
            self.grant,
            worker_id=to.worker_id,
            epoch=to.epoch,
            address=to.address,
            rank=to.rank,
            number=to.number,
            group_id=-1,
            group_size=1,
            decode=None,
        )
        self.connect_by = None
        for choice in self.choices:
            choice.handed = False

    @property
    def needs_giver(self) -> bool:
        """A choice has not shown yet that the decode worker is through with its pages."""
        return any(choice.source is not None for choice in self._unfinished())

    def take_giver(self) -> WorkerId | None:
        """Who has kept pages for this attempt and no longer need."""
        giver, self.given_by = self.given_by, None
        for choice in self.choices:
            choice.source = None
        return giver

    def runs(self, worker_id: WorkerId, attempt: int) -> bool:
        """Whether `attempt` is the current one and was granted to that worker."""
        grant = self.grant
        return grant is not None and grant.worker_id == worker_id and self.attempt == attempt

    def gave(self, worker_id: WorkerId, attempt: int) -> bool:
        """Whether that worker began the current attempt and keeps its pages."""
        return self.given_by == worker_id and self.attempt == attempt

    def conclude(self) -> None:
        """Finishes choices that have all their tokens and lack only the word that they ended. The
        first one may still owe the prompt's logprobs, if no output was asked for."""
        owed = self.begin.sampling.prompt_logprobs is not None and self.prompt_logprobs is None
        for choice in self._unfinished():
            if owed and choice is self.choices[0]:
                continue
            if self.first_token and len(choice.output) >= self.begin.sampling.max_tokens:
                self._finish(choice, "length", -1)

    def displace(self, blame: WorkerId | None, now: float) -> None:
        """The current attempt is over without an end; the next one avoids the worker to blame.

        It is asked for at once after a loss, with growing pauses where one follows another and
        nothing was gained between them: a cluster that refuses needs time, not more requests.
        """
        self.phase = move(self.phase, Phase.QUEUED)
        self.grant = None
        self.connect_by = None
        for choice in self.choices:
            choice.handed = False
        self.attempt += 1
        self.replacements += 1
        self.fruitless += 1
        pause_s = min(FIRST_PAUSE_S * 2.0 ** (self.fruitless - 2), MOST_PAUSE_S)
        self.ask_at = now + (pause_s if self.fruitless > 1 else 0.0)
        if blame is not None and blame not in self.excluded:
            self.excluded.append(blame)

    # ------------------------------------------------------------ tokens

    def accept(self, run: TokenRun) -> Taken:
        """Takes what is new of a run of the current attempt. Cost: O(new tokens and characters)."""
        choice = self.choices[run.choice]
        if choice.finish:
            return Taken.DUPLICATE
        if run.finish == "error":
            return Taken.FAILED
        skip = len(choice.output) - run.first_index
        if skip < 0:
            return Taken.GAP
        if skip > len(run.ids) or (skip == len(run.ids) and not run.finish):
            return Taken.DUPLICATE
        self.fruitless = 0
        self._begun(run)
        self._extend(choice, run, skip)
        if run.finish == "handover":
            choice.handed, choice.source = True, run.source
            return Taken.NEW
        choice.source = None
        if run.finish and not choice.finish:
            self._finish(choice, run.finish, run.stop_token)
        return Taken.NEW

    def deliver(self) -> Deliver | None:
        """What became certain since the last time; None when nothing did."""
        chunks = []
        for choice in self.choices:
            if choice.told:
                continue
            released = choice.text.take()
            if released is None and not choice.finish:
                continue
            text, ids, logprobs = released or ("", (), NO_LOGPROBS)
            chunks.append(
                Chunk(choice.index, text, ids, logprobs, choice.finish, choice.stop_reason)
            )
            self.generated += len(ids)
            choice.told = bool(choice.finish)
        if not chunks:
            return None
        prompt_logprobs = self.prompt_logprobs or ()
        if prompt_logprobs:
            self.prompt_logprobs = ()
        return Deliver(
            self.begin.request_id,
            tuple(chunks),
            self.cached_tokens,
            self.generated,
            prompt_logprobs,
        )

    def _unfinished(self) -> list[Choice]:
        return [choice for choice in self.choices if not choice.finish]

    def _begun(self, run: TokenRun) -> None:
        """Notes what comes with the first run of an attempt, or of choice 0."""
        if self.phase is Phase.PREFILL:
            self.phase = move(self.phase, Phase.DECODE)
        if not self.first_token:
            self.first_token = True
            self.cached_tokens = run.cached_tokens
        if run.prompt_logprobs and self.prompt_logprobs is None:
            self.prompt_logprobs = run.prompt_logprobs

    def _extend(self, choice: Choice, run: TokenRun, skip: int) -> None:
        """Adds run.ids[skip:]; a stop string ends the choice with the token that completes it."""
        show_stop = self.begin.include_stop
        last = len(run.ids) - 1
        for i in range(skip, len(run.ids)):
            choice.output.append(run.ids[i])
            silent = i == last and run.stop_token >= 0 and not show_stop
            logprobs = run.logprobs[i] if run.logprobs else None
            if choice.text.push(run.ids[i], logprobs, silent=silent):
                self._stop_string(choice)
                choice.stopped = not (i == last and run.finish)
                return

    def _finish(self, choice: Choice, finish: str, stop_token: int) -> None:
        if choice.text.finish():
            self._stop_string(choice)
            return
        choice.finish = finish
        if finish == "stop" and stop_token in self.begin.sampling.stop_token_ids:
            choice.stop_reason = stop_token

    def _stop_string(self, choice: Choice) -> None:
        choice.finish = "stop"
        choice.stop_reason = choice.text.stop
