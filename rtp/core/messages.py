"""Every message between Master, frontends and workers; a command of the core that sends it, an
event of the core that gets it. Between processes each is one frame (io/codec): a msgpack array with
an integer tag, tables of numbers and lists of hashes one binary field each. Durations and counts
travel, never timestamps. What each message means and what settles it: the protocol page of the
docs."""

from __future__ import annotations

import msgspec
import numpy as np

from rtp.core.steps import TokenLogprobs
from rtp.core.types import (
    FrontendId,
    Hashes,
    Ids,
    IntArray,
    RequestId,
    Role,
    SamplingParams,
    WorkerId,
)


class Message(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Base of all frames."""


# ---------------------------------------------------------------- worker -> Master, HTTP


class Register(Message, frozen=True, tag=1):
    """Asks to be dialled. Same worker_id with a new epoch replaces the old one."""

    worker_id: WorkerId
    epoch: int
    """Start of this worker process; a larger epoch is a later life."""
    address: str
    """host:port of the worker's HTTP server, IPv6 bracketed (io/addresses normalises)."""
    role: Role
    ranks: int
    kv_total: tuple[int, ...]
    """Device-tier capacity of each rank, in tokens."""
    block_size: int
    model: str
    max_model_len: int
    card: str
    """Digest of the model card, which GET /card on `address` serves."""
    kv_format: str
    key_id: str
    max_batch_tokens: int
    profile: tuple[float, ...] = ()
    """Predictor coefficients measured at start: a, b, c (prefill), d, e, f (decode), in seconds."""
    prefix_closed: bool = False
    """Blocks leave the cache tails first, so that whoever holds one holds all before it."""
    hardware: str = ""
    """What computes, and how: ranks for which it is equal take the same time for the same step, and
    learn of each other. "": nothing is known but the profile."""
    max_rows: int = 0
    """Sequences a rank runs at once; 0: not told."""
    lockstep: bool = False
    """Its ranks step together: each step takes as long as that of the slowest."""
    transports: tuple[str, ...] = ()
    """By which its ranks send and receive KV pages; two workers that share one, and `kv_format`,
    can split a request between them."""
    transfer: tuple[float, float] = (0.0, 0.0)
    """Of those transports, measured or configured: seconds until the first token's pages, tokens
    per second from then on (0: without end)."""
    silence_s: float = 0.0
    """Above 0: an engine of somebody else, known by what is told of it over HTTP (router-only
    mode). It is not dialled, takes only grants that nobody submits, and is given up after so long
    without a word."""


# ---------------------------------------------------------------- Master <-> worker, link


class Poll(Message, frozen=True, tag=3):
    """Standing request for reports; answered until the next Poll."""

    term: int
    status_period_s: float
    delta_period_s: float
    acked_seq: int
    """Highest Status.seq the Master has seen; -1 for none. What it acknowledged is not repeated."""
    acked_version: int
    """Cache version the Master's view has reached; -1: it has none and wants a Snapshot."""


STATUS_COLUMNS = (
    "running",  # sequences with pages
    "waiting",  # sequences accepted, no pages yet
    "prefill_tokens",  # prompt tokens not computed, running and waiting; in flight is not computed
    "decode_rows",
    "context_tokens",  # tokens in the pages of the decode rows
    "kv_free",  # tokens, device tier; cached blocks without a user count as free
    "kv_total",
    "host_free",
    "host_total",
    "step_us",  # last step's duration
    "step_age_us",  # how long the step in flight has run; 0 where none is
    "granted_upto",  # every grant number <= this has been seen
    "granted_mask",  # bit i: grant number granted_upto + 1 + i has been seen
)
"""Columns of Status.table, one int64 each, one row per rank."""
TABLE_TYPE = np.dtype("<i8")
MOST_PARKED = 256


class Finished(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How an attempt ended on a worker, however it ended."""

    request_id: RequestId
    attempt: int
    reason: str
    """"done", "cancelled", "rejected", "failed", or "handed_over": another worker goes on."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in the cache and not computed."""
    generated: int


class FirstToken(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A prefill ended: what it took, for the predictor and the Master's picture of the request."""

    request_id: RequestId
    attempt: int
    new_tokens: int
    cached_tokens: int
    prefill_s: float
    """Execution time of the steps that computed the prompt."""
    queue_s: float
    """From acceptance to the start of the first of those steps."""


class GroupCost(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What stepping together costs the ranks of a worker, since its start."""

    steps: int
    """Of the group."""
    dummy_steps: int
    """Of ranks without work."""
    step_s: float
    """Of all ranks together, from the begin of each step to the end of its slowest share."""
    wait_s: float
    """The part of it in which a rank was done and waited for the slowest."""

    @property
    def wait_share(self) -> float:
        return self.wait_s / self.step_s if self.step_s else 0.0


class Status(Message, frozen=True, tag=4):
    """At most one per status period, only after something changed; idle beat 250 ms. At once, and
    whatever is unacknowledged, where `hung` changes."""

    worker_id: WorkerId
    epoch: int
    term: int
    seq: int
    table: bytes
    """int64 [ranks, len(STATUS_COLUMNS)]."""
    first_tokens: tuple[FirstToken, ...] = ()
    """Not yet acknowledged ones; the Master ignores repeats."""
    finished: tuple[Finished, ...] = ()
    """Not yet acknowledged ones; the Master ignores repeats."""
    draining: bool = False
    hung: bool = False
    """A step takes far longer than predicted: no new work until a Status says otherwise."""
    parked: tuple[RequestId, ...] = ()
    """Some, at most MOST_PARKED, of those that hold no pages and wait for a slow reader."""
    group: GroupCost | None = None
    """Where its ranks step together."""

    def columns(self) -> IntArray:
        """[ranks, len(STATUS_COLUMNS)] int64, a read-only view."""
        return np.frombuffer(self.table, TABLE_TYPE).reshape(-1, len(STATUS_COLUMNS))


class Now(Message, frozen=True, tag=5):
    """First tokens and ends, sent at once; also repeated in Status until acknowledged."""

    worker_id: WorkerId
    epoch: int
    first_tokens: tuple[FirstToken, ...] = ()
    finished: tuple[Finished, ...] = ()


class KeyChange(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What one rank's tier gained and lost."""

    rank: int
    tier: int
    added: Hashes
    removed: Hashes


class Delta(Message, frozen=True, tag=6):
    """True change of the cache between two versions. A gap makes the Master ask for a Snapshot."""

    worker_id: WorkerId
    epoch: int
    from_version: int
    to_version: int
    changes: tuple[KeyChange, ...]


class Snapshot(Message, frozen=True, tag=7):
    """Slice `index` of `count` of everything held at `version`; slices come in order."""

    worker_id: WorkerId
    epoch: int
    version: int
    index: int
    count: int
    changes: tuple[KeyChange, ...]
    """Only `added`."""


class Fence(Message, frozen=True, tag=8):
    """Tombstone for 10 minutes: this attempt must not run; if it runs, it is cancelled. The grant
    number counts as seen."""

    request_id: RequestId
    attempt: int
    rank: int
    number: int


# ---------------------------------------------------------------- frontend <-> Master


class Ask(Message, frozen=True, tag=10):
    """Wants a place. One live Ask per request: a higher attempt replaces the earlier one, whose
    booking the Master releases and fences."""

    frontend_id: FrontendId
    request_id: RequestId
    attempt: int
    model: str
    tenant: str
    chat_id: str
    priority: int
    hashes: Hashes
    num_tokens: int
    """Prompt tokens, resumed output included."""
    max_tokens: int
    """Output tokens still wanted per choice."""
    n: int
    deadline_s: float
    ttft_timeout_s: float | None = None
    exclude: tuple[WorkerId, ...] = ()
    """Workers that failed this request."""
    failed: bool = False
    """The attempt before this one was lost after its grant (counted, and fenced on its worker)."""
    lease_s: float = 0.0
    """Above 0: nobody will submit it, the caller's own engine runs it (router-only mode). The grant
    is then settled by Done, by Cancel, or by the end of this lease unless it is renewed."""
    at_once: bool = False
    """Bind now, to the best rank even if it is busy, or refuse."""


class Place(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A rank that a request was given, and under which grant number."""

    worker_id: WorkerId
    epoch: int
    address: str
    rank: int
    number: int


class Refuse(Message, frozen=True, tag=11):
    """Final."""

    request_id: RequestId
    attempt: int
    status: int
    code: str
    reason: str
    retry_after_s: float | None = None


class Grant(Message, frozen=True, tag=12):
    """A place: the ledger has been charged."""

    request_id: RequestId
    attempt: int
    number: int
    """Grant number, consecutive per rank and worker epoch, from 0."""
    worker_id: WorkerId
    epoch: int
    address: str
    rank: int
    """Rank inside the worker."""
    matched_tokens: int
    """Tokens expected in the rank's cache."""
    lease_s: float
    """Submit within this time or ask again."""
    held: bool = False
    """It waited on purpose, for a busy rank that had its prefix."""
    group_id: int = -1
    group_size: int = 1
    """So many grants of this Master, with this id, go to different ranks of a worker whose ranks
    step together, and should start in one step."""
    decode: Place | None = None
    """Where the request goes on after its first tokens; None: where it begins. Also reserved."""


class WorkerLost(Message, frozen=True, tag=13):
    """The Master gave this life of a worker up; its requests ask again."""

    worker_id: WorkerId
    epoch: int


class Done(Message, frozen=True, tag=14):
    """frontend -> Master: how a grant that nobody submitted ended. Repeats change nothing."""

    request_id: RequestId
    attempt: int
    reason: str
    """"done" or "failed"; what is called off is cancelled by Cancel."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in the cache and not computed; -1: not told."""
    generated: int
    """Output tokens of all choices; -1: not told."""
    prefill_s: float = 0.0
    """What computing the rest of the prompt took, for the predictor; 0: not told."""


class Renew(Message, frozen=True, tag=15):
    """frontend -> Master: such a grant is still wanted."""

    request_id: RequestId
    attempt: int
    lease_s: float
    """From now on."""
    prefilled: bool = False
    """Its prompt has been computed."""


# ---------------------------------------------------------------- frontend <-> worker, stream


class Source(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Pages of a choice that another worker keeps until they were pulled, or a lease is over."""

    worker_id: WorkerId
    epoch: int
    address: str
    rank: int
    ticket: bytes
    """Opens these pages to the worker that the request was handed to, and to nobody else."""
    num_tokens: int
    """Tokens in them, from the first of the prompt on; whole blocks."""


class ChoiceState(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A choice to generate and what it has already produced elsewhere."""

    choice: int
    output: Ids = b""
    source: Source | None = None
    """Where its pages may be pulled from; what does not come is computed."""


class Submit(Message, frozen=True, tag=20):
    """Accepted once per (request_id, attempt); a repeat replays unacknowledged tokens; a tombstone
    or a finished attempt refuses it."""

    request_id: RequestId
    attempt: int
    rank: int
    number: int
    prompt: Ids
    hashes: Hashes
    """Of the prompt's whole blocks."""
    namespace: bytes
    """Chain seed of the request's hashes, so that the worker can hash generated blocks."""
    sampling: SamplingParams
    choices: tuple[ChoiceState, ...]
    deadline_s: float
    group_id: int = -1
    group_size: int = 1
    """As in the Grant."""
    handover: Place | None = None
    """Each choice ends here with its next token, unless that is its last, and goes on there."""


class TokenRun(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Consecutive tokens of one choice."""

    request_id: RequestId
    attempt: int
    choice: int
    first_index: int
    """Output index of ids[0]. A run without ids only tells the finish."""
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: str = ""
    """"", "stop", "length", "handover" (it goes on at another worker), or "error" (the choice
    failed: non-finite numbers, ...)."""
    stop_token: int = -1
    """The EOS or stop id that ended the choice; it is the last of ids."""
    cached_tokens: int = 0
    """Prompt tokens reused, told with the first run of a choice."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """For prompt positions 1 .., with the first run of choice 0 when asked for."""
    source: Source | None = None
    """With "handover": the pages of this choice."""


class Tokens(Message, frozen=True, tag=21):
    """One frame per step for all of a frontend's requests; kept until acknowledged."""

    runs: tuple[TokenRun, ...]


class Rejected(Message, frozen=True, tag=22):
    """The worker did not take, or gives up, an attempt without finishing it. `retry`: another rank
    may do it ("tombstone", "draining", "full", "preempted", "shutdown", "unknown"); else it is the
    request's own fault or end ("too_long", "deadline", "slow_reader", "non_finite")."""

    request_id: RequestId
    attempt: int
    reason: str
    retry: bool


class AckItem(msgspec.Struct, frozen=True, gc=False, array_like=True):
    request_id: RequestId
    attempt: int
    choice: int
    next_index: int
    """The next output index wanted; -1: the choice's finish was seen as well."""
    stop: bool = False
    """Stop generating this choice (a stop string was found)."""


class Ack(Message, frozen=True, tag=23):
    items: tuple[AckItem, ...]


class Cancel(Message, frozen=True, tag=24):
    """frontend -> Master and worker: frees everything of this request up to `attempt`."""

    request_id: RequestId
    attempt: int
    reason: str
    generated: int = 0
    """To the Master: output tokens the client was given, all choices."""


LinkMessage = Poll | Fence | Status | Now | Delta | Snapshot
AskMessage = Ask | Cancel | Done | Renew | Grant | Refuse | WorkerLost
StreamMessage = Submit | Ack | Cancel | Tokens | Rejected
AnyMessage = (
    Register
    | Poll
    | Status
    | Now
    | Delta
    | Snapshot
    | Fence
    | Ask
    | Refuse
    | Grant
    | WorkerLost
    | Done
    | Renew
    | Submit
    | Tokens
    | Rejected
    | Ack
    | Cancel
)
