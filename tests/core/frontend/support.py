"""A Frontend driven by hand: letters as tokens, and the few messages a test wants to send."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from rtp.core.commands import Command, Deliver, Send
from rtp.core.events import Begin, Event, From, StreamUp, Tick
from rtp.core.frontend.frontend import Frontend
from rtp.core.messages import Grant, Place, TokenRun, Tokens
from rtp.core.types import FrontendId, RequestId, SamplingParams, WorkerId, pack_ids

C = TypeVar("C")
FIRST, SECOND = WorkerId("w0"), WorkerId("w1")


class Letters:
    """Token i is the character with that code point."""

    def push(self, token: int) -> str:
        return chr(token)

    def flush(self) -> str:
        return ""


def a_frontend(**options: int | float) -> Frontend:
    return Frontend(FrontendId("f0"), lambda model, skip: Letters(), **options)  # type: ignore[arg-type]


def a_begin(request_id: str = "r", *, max_tokens: int = 8, **fields: object) -> Begin:
    sampling = fields.pop("sampling", None) or SamplingParams(max_tokens=max_tokens)
    return Begin(
        request_id=RequestId(request_id),
        model="m",
        prompt=pack_ids(range(10)),
        hashes=bytes(16),
        namespace=bytes(32),
        sampling=sampling,  # type: ignore[arg-type]
        **fields,  # type: ignore[arg-type]
    )


def a_grant(
    attempt: int = 1,
    worker_id: WorkerId = FIRST,
    epoch: int = 1,
    number: int = 0,
    request_id: str = "r",
    decode: Place | None = None,
) -> Grant:
    return Grant(
        RequestId(request_id),
        attempt,
        number,
        worker_id,
        epoch,
        "127.0.0.1:1",
        0,
        0,
        0.25,
        decode=decode,
    )


def a_run(
    first_index: int,
    text: str,
    finish: str = "",
    *,
    attempt: int = 1,
    choice: int = 0,
    **fields: object,
) -> TokenRun:
    ids = tuple(map(ord, text))
    return TokenRun(RequestId("r"), attempt, choice, first_index, ids, finish=finish, **fields)  # type: ignore[arg-type]


class Hand:
    """Feeds a frontend and sorts what it answers."""

    def __init__(self, frontend: Frontend | None = None) -> None:
        self.frontend = frontend or a_frontend()
        self.now = 0.0
        self.last: list[Command] = []

    def do(self, *events: Event, tick: bool = True) -> list[Command]:
        """One turn: the events, then a Tick. Every step must leave the frontend consistent."""
        self.last = []
        for event in (*events, Tick()) if tick else events:
            self.last += self.frontend.handle(event, self.now)
            self.frontend.check()
        return self.last

    def tokens(self, *runs: TokenRun, peer: WorkerId = FIRST) -> list[Command]:
        return self.do(From(peer, Tokens(runs)))

    def running(self, **fields: object) -> Hand:
        """A request submitted to the first worker over a stream that is up."""
        self.do(a_begin(**fields))  # type: ignore[arg-type]
        self.do(From("master", a_grant()))
        self.do(StreamUp(FIRST, 1))
        return self

    def sent(self, peer: str) -> list[object]:
        return [c.message for c in self.last if isinstance(c, Send) and c.peer == peer]

    def only(self, kind: type[C]) -> C:
        """The single command of that kind in the last turn."""
        (found,) = self.all(kind)
        return found

    def all(self, kind: type[C]) -> list[C]:
        return [c for c in self.last if isinstance(c, kind)]

    def text(self, commands: Iterable[Command] | None = None) -> str:
        return "".join(
            chunk.text
            for c in (self.last if commands is None else commands)
            if isinstance(c, Deliver)
            for chunk in c.chunks
        )
