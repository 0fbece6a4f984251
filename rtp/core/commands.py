"""Everything a core can ask its driver for beside what it returns to its caller. Data, no
behaviour."""

from __future__ import annotations

import msgspec

from rtp.core.messages import AnyMessage, Source
from rtp.core.steps import StepPlan, TokenLogprobs
from rtp.core.types import RequestId, WorkerId


class Command(msgspec.Struct, frozen=True, gc=False):
    """Base of all commands."""


class Send(Command, frozen=True):
    """Send a message to `peer`: "master", a worker id or a frontend id. To a peer whose connection
    is down it is dropped; the core learns of it by the Down event and mends it."""

    peer: str
    message: AnyMessage


class Note(Command, frozen=True):
    """Something to log and count: `noun.past_verb` and its facts. Cores do not log."""

    event: str
    fields: dict[str, object]


# ---------------------------------------------------------------- Master


class Dial(Command, frozen=True):
    """Open the link to a worker; answered by LinkUp or LinkDown."""

    worker_id: WorkerId
    epoch: int
    address: str


class HangUp(Command, frozen=True):
    """Close the link to this life of a worker."""

    worker_id: WorkerId
    epoch: int


# ---------------------------------------------------------------- worker


class RunStep(Command, frozen=True):
    """Hand a plan to the Runner of `rank`; answered by StepDone or RunnerFailed."""

    rank: int
    plan: StepPlan


class Pull(Command, frozen=True):
    """Have a Transport fill pages of `rank`; answered by Pulled within `timeout_s`, whatever
    happens. No step in flight touches them, and none will before the answer."""

    rank: int
    number: int
    """Of this pull, unique on its rank for the life of the worker."""
    source: Source
    start: int
    """Position of the first token wanted; the first of a block."""
    pages: bytes
    """int32: local ids of the pages to fill."""
    num_tokens: int
    timeout_s: float


# ---------------------------------------------------------------- frontend


class Connect(Command, frozen=True):
    """Open the stream to a worker; answered by StreamUp or StreamDown. Messages sent to the worker
    meanwhile wait for it, in order."""

    worker_id: WorkerId
    epoch: int
    address: str


class Chunk(Command, frozen=True):
    """What one choice gained: text, and the tokens it came from."""

    choice: int
    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per id when logprobs were asked for."""
    finish: str = ""
    """"", "stop" or "length"."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the choice; None for EOS and length."""


class Deliver(Command, frozen=True):
    """Give the client what a turn brought. The first Deliver holds the first token."""

    request_id: RequestId
    chunks: tuple[Chunk, ...]
    cached_tokens: int
    generated: int
    """Output tokens of all choices so far."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Ended(Command, frozen=True):
    """Every choice finished and was delivered. The last word on this request."""

    request_id: RequestId
    prompt_tokens: int
    cached_tokens: int
    generated: int


class Failed(Command, frozen=True):
    """The request ends with an error. The last word on this request."""

    request_id: RequestId
    status: int
    type: str
    code: str
    message: str
    retry_after_s: float | None = None
