"""Frames: every message survives, in whatever pieces it comes; garbage is a ProtocolError."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rtp.core.errors import ProtocolError
from rtp.core.messages import (
    STATUS_COLUMNS,
    Ack,
    AckItem,
    AnyMessage,
    Ask,
    Cancel,
    ChoiceState,
    Delta,
    Done,
    Fence,
    Finished,
    FirstToken,
    Grant,
    GroupCost,
    KeyChange,
    Now,
    Place,
    Poll,
    Refuse,
    Register,
    Rejected,
    Renew,
    Snapshot,
    Source,
    Status,
    Submit,
    TokenRun,
    Tokens,
    WorkerLost,
)
from rtp.core.steps import TokenLogprobs
from rtp.core.types import FrontendId, RequestId, Role, SamplingParams, WorkerId, pack_ids
from rtp.io.codec import FrameDecoder, FromFrontend, ToMaster, frame, malformed

W, R, F = WorkerId("w1"), RequestId("r1"), FrontendId("f1")
TABLE = np.arange(2 * len(STATUS_COLUMNS), dtype="<i8").tobytes()
HASHES = bytes(range(32))
REGISTER = Register(
    worker_id=W,
    epoch=7,
    address="127.0.0.1:9",
    role=Role.FUSION,
    ranks=2,
    kv_total=(64, 64),
    block_size=16,
    model="m",
    max_model_len=64,
    card="c" * 32,
    kv_format="k",
    key_id="0123abcd",
    max_batch_tokens=64,
    profile=(0.1,) * 6,
    transports=("sim",),
    transfer=(0.002, 1e6),
)
PLACE = Place(WorkerId("w2"), 8, "127.0.0.1:8", 1, 3)
SOURCE = Source(W, 7, "127.0.0.1:9", 1, b"t" * 16, 32)
LOGPROBS = TokenLogprobs(5, -0.5, (5, 6), (-0.5, -1.5))
MESSAGES: list[AnyMessage] = [
    REGISTER,
    Poll(3, 0.02, 0.05, -1, 12),
    Status(
        W,
        7,
        3,
        9,
        TABLE,
        (FirstToken(R, 1, 100, 20, 0.25, 0.01),),
        (Finished(R, 1, "done", 120, 20, 8),),
        True,
        group=GroupCost(40, 12, 3.5, 0.75),
    ),
    Now(W, 7, (), (Finished(R, 1, "cancelled", 1, 0, 0),)),
    Delta(W, 7, 4, 5, (KeyChange(1, 0, HASHES, b""),)),
    Snapshot(W, 7, 5, 0, 2, (KeyChange(0, 1, HASHES, b""),)),
    Fence(R, 2, 0, 17),
    Ask(F, R, 1, "m", "t", "chat", -3, HASHES, 40, 16, 2, 59.5, None, (W,), True),
    Refuse(R, 1, 429, "rate_limit_exceeded", "queue full", 1.5),
    Grant(R, 1, 17, W, 7, "127.0.0.1:9", 1, 32, 0.25, decode=PLACE),
    WorkerLost(W, 7),
    Submit(
        R,
        1,
        1,
        17,
        pack_ids([1, 2, 3]),
        HASHES,
        b"n" * 32,
        SamplingParams(max_tokens=4, logit_bias={7: -1.5}, seed=2**63, stop_token_ids=(2, 3)),
        (ChoiceState(0), ChoiceState(1, pack_ids([9]), SOURCE)),
        30.0,
        handover=PLACE,
    ),
    Tokens((TokenRun(R, 1, 0, 4, (8, 9), (LOGPROBS, LOGPROBS), "stop", 9, 32, (LOGPROBS,)),)),
    Tokens((TokenRun(R, 1, 0, 4, (8,), finish="handover", source=SOURCE),)),
    Rejected(R, 1, "draining", True),
    Ack((AckItem(R, 1, 0, 5), AckItem(R, 1, 1, -1, True))),
    Cancel(R, 1, "client gone", 7),
    Done(R, 1, "done", 17, 16, 4, 0.25),
    Renew(R, 1, 30.0, True),
]


def decoder(**options: int) -> FrameDecoder[AnyMessage]:
    return FrameDecoder(AnyMessage, **options)


def test_every_kind_of_message_is_tried():
    kinds = {type(m) for m in MESSAGES}
    assert kinds == set(AnyMessage.__args__)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_survives(message: AnyMessage):
    assert decoder().feed(frame(message)) == [message]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_frame_split_at_every_byte_is_the_same_message(message: AnyMessage):
    data = frame(message) + frame(MESSAGES[1])
    for cut in range(1, len(data)):
        feeding = decoder()
        assert feeding.feed(data[:cut]) + feeding.feed(data[cut:]) == [message, MESSAGES[1]]


def test_byte_by_byte():
    data = b"".join(map(frame, MESSAGES))
    feeding = decoder()
    assert [m for b in data for m in feeding.feed(bytes([b]))] == MESSAGES


@given(st.lists(st.integers(0, 3000), max_size=8))
def test_any_pieces(cuts: list[int]):
    data = b"".join(map(frame, MESSAGES))
    feeding, out, last = decoder(), [], 0
    for cut in [*sorted(c for c in cuts if c < len(data)), len(data)]:
        out += feeding.feed(memoryview(data)[last:cut])
        last = cut
    assert out == MESSAGES


def test_what_was_decoded_does_not_lie_in_the_readers_buffer():
    buffer = bytearray(frame(MESSAGES[2]))
    (status,) = decoder().feed(memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    assert status == MESSAGES[2]


def test_oversize_is_refused_by_its_length_alone():
    """Before a byte of it has been kept."""
    with pytest.raises(ProtocolError, match="at most 100"):
        decoder(max_frame_bytes=100).feed((101).to_bytes(4, "big"))
    assert decoder(max_frame_bytes=100).feed((100).to_bytes(4, "big")) == []


def test_oversize_is_not_sent():
    with pytest.raises(ProtocolError, match="too large to send"):
        frame(Tokens((TokenRun(R, 1, 0, 0, (), finish="x" * (33 << 20)),)))


@given(st.binary(min_size=1, max_size=200))
def test_garbage_is_a_protocol_error_or_a_message(body: bytes):
    """No other exception gets out."""
    try:
        found = decoder().feed(len(body).to_bytes(4, "big") + body)
    except ProtocolError:
        return
    assert all(isinstance(m, AnyMessage.__args__) for m in found)


def test_a_direction_takes_only_its_own_messages():
    with pytest.raises(ProtocolError):
        FrameDecoder(ToMaster).feed(frame(MESSAGES[1]))
    with pytest.raises(ProtocolError):
        FrameDecoder(FromFrontend).feed(frame(Tokens(())))


REPLACE = msgspec.structs.replace
SUBMIT = next(m for m in MESSAGES if isinstance(m, Submit))
ASK = next(m for m in MESSAGES if isinstance(m, Ask))


@pytest.mark.parametrize(
    "message",
    [
        REPLACE(REGISTER, kv_total=(64,)),
        REPLACE(REGISTER, kv_total=(64, 0)),
        REPLACE(REGISTER, ranks=0, kv_total=()),
        REPLACE(REGISTER, block_size=0),
        REPLACE(REGISTER, worker_id=WorkerId("")),
        REPLACE(REGISTER, profile=(1.0,)),
        REPLACE(REGISTER, profile=(float("nan"),) * 6),
        REPLACE(ASK, lease_s=float("inf")),
        REPLACE(ASK, at_once=True),
        REPLACE(SUBMIT, prompt=b"123"),
        REPLACE(SUBMIT, hashes=b"1" * 15),
        REPLACE(SUBMIT, choices=(ChoiceState(0, b"1"),)),
        Status(W, 7, 3, 9, TABLE[:-1]),
        Status(W, 7, 3, 9, b""),
        Delta(W, 7, 4, 5, (KeyChange(1, 0, b"", b"1"),)),
    ],
)
def test_binary_fields_of_a_wrong_size_are_malformed(message: AnyMessage):
    assert malformed(message)
    with pytest.raises(ProtocolError):
        decoder().feed(frame(message))
