"""Everything a core can be told beside messages (core/messages): connections, steps, clients, time.

A driver delivers all input of one turn with `handle(event, now)`, then one `Tick`, in which the
decisions of that turn are made (protocol rule 1). `From` wraps a message with its sender."""

from __future__ import annotations

import msgspec

from rtp.core.messages import AnyMessage
from rtp.core.steps import StepResult
from rtp.core.types import FrontendId, Hashes, Ids, RequestId, SamplingParams, WorkerId


class Event(msgspec.Struct, frozen=True, gc=False):
    """Base of all local events."""


class Tick(Event, frozen=True):
    """All input of this turn is in, or a deadline passed: decide."""


class From(Event, frozen=True):
    """A message arrived from `peer`: "master", a worker id or a frontend id."""

    peer: str
    message: AnyMessage


# ---------------------------------------------------------------- Master


class LoopBusy(Event, frozen=True):
    """How busy the driver's loop was lately, 0 to 1; told now and then."""

    share: float


class LinkUp(Event, frozen=True):
    """The Master's dial succeeded; both sides proved the key."""

    worker_id: WorkerId
    epoch: int


class LinkDown(Event, frozen=True):
    """The link closed, or the dial failed (`refused`: nobody listens there)."""

    worker_id: WorkerId
    epoch: int
    refused: bool = False


class FrontendUp(Event, frozen=True):
    frontend_id: FrontendId


class FrontendDown(Event, frozen=True):
    """A frontend's connection closed (at the Master or at a worker)."""

    frontend_id: FrontendId


# ---------------------------------------------------------------- worker


class StepDone(Event, frozen=True):
    """The Runner of `rank` finished a step."""

    rank: int
    result: StepResult


class Pulled(Event, frozen=True):
    """A Pull has ended: all its pages are filled, or, not `ok`, nobody knows what is in them.
    Nothing writes them any more."""

    rank: int
    number: int
    ok: bool
    reason: str = ""


class Stalled(Event, frozen=True):
    """A step in flight takes far longer than predicted; or, not `hung`, none does any more."""

    hung: bool


class RunnerFailed(Event, frozen=True):
    """The Runner of `rank` is gone; nothing on this rank can continue."""

    rank: int
    reason: str


class MasterUp(Event, frozen=True):
    """A Master's link opened with this term (worker), or the Master can be reached (frontend)."""

    term: int


class MasterDown(Event, frozen=True):
    """The link to the Master closed."""


class Drain(Event, frozen=True):
    """Stop accepting; finish what runs until `grace_s` has passed, then give it up."""

    grace_s: float


# ---------------------------------------------------------------- frontend


class Begin(Event, frozen=True, kw_only=True):
    """A client's request, validated, tokenised and hashed."""

    request_id: RequestId
    model: str
    prompt: Ids
    hashes: Hashes
    namespace: bytes
    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    tenant: str = ""
    chat_id: str = ""
    priority: int = 0
    timeout_s: float = 600.0
    ttft_timeout_s: float | None = None


class ClientGone(Event, frozen=True):
    request_id: RequestId


class ClientPaused(Event, frozen=True):
    """The client reads slowly: over 256 KB wait for it. Acknowledgements stop until ClientReady."""

    request_id: RequestId


class ClientReady(Event, frozen=True):
    request_id: RequestId


class StreamUp(Event, frozen=True):
    """The stream to a worker is open."""

    worker_id: WorkerId
    epoch: int


class StreamDown(Event, frozen=True):
    """The stream to a worker closed or could not be opened."""

    worker_id: WorkerId
    refused: bool = False
