"""Messages <-> bytes: a frame is a 4-byte length and one msgpack array with an integer tag."""

from __future__ import annotations

from struct import Struct
from typing import Any, Generic, TypeVar

import msgspec

from rtp.core.errors import ProtocolError
from rtp.core.messages import (
    STATUS_COLUMNS,
    Ack,
    Ask,
    Cancel,
    Delta,
    Fence,
    Grant,
    Message,
    Now,
    Poll,
    Refuse,
    Register,
    Rejected,
    Snapshot,
    Status,
    Submit,
    Tokens,
    WorkerLost,
)
from rtp.core.types import HASH_BYTES

WIRE_VERSION = 8
"""Raised with every change of a message; peers of another version are refused in the handshake."""
MAX_TRANSPORTS = 16
MAX_FRAME_BYTES = 32 << 20
"""The longest prompt (a million tokens, its hashes, resumed output) and a snapshot slice fit."""

ToMaster = Status | Now | Delta | Snapshot
ToWorker = Poll | Fence
FromFrontend = Submit | Ack | Cancel
ToFrontend = Tokens | Rejected
FromAsker = Ask | Cancel
ToAsker = Grant | Refuse | WorkerLost

T = TypeVar("T")
_LENGTH = Struct(">I")
_encode = msgspec.msgpack.Encoder().encode


def frame(message: object) -> bytes:
    """One frame. Raises ProtocolError when it is larger than a peer would take."""
    body = _encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a {type(message).__name__} of {len(body)} bytes is too large to send")
    return _LENGTH.pack(len(body)) + body


class FrameDecoder(Generic[T]):
    """Bytes as they come, in any pieces -> messages of one direction.

    accepts: a union of message types; a frame of another type is a ProtocolError. Whole frames are
    decoded where they lie; only the beginning of an unfinished one is kept, and grows in place.
    """

    def __init__(self, accepts: Any, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        # Any: a union of types is not a type to mypy.
        self._decode = msgspec.msgpack.Decoder(accepts).decode
        self._max = max_frame_bytes
        self._partial = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[T]:
        """Messages completed by `data`, in order. Raises ProtocolError on anything else than a
        frame; the connection is then of no more use."""
        partial = self._partial
        if partial:
            partial += data
            if len(partial) < 4 or len(partial) < 4 + self._length(partial, 0):
                return []
            data, self._partial = partial, bytearray()
        view, decode, length_at = memoryview(data), self._decode, _LENGTH.unpack_from
        messages: list[T] = []
        start, end, most = 0, len(view), self._max
        try:
            while end - start >= 4:
                (length,) = length_at(view, start)
                stop = start + 4 + length
                if stop > end or length > most:
                    self._length(view, start)  # raises where it is too long
                    break
                message = decode(view[start + 4 : stop])
                check = _CHECKS.get(type(message))
                if check is not None and (fault := check(message)):
                    raise ProtocolError(f"{type(message).__name__}: {fault}")
                messages.append(message)
                start = stop
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"not a frame of this connection: {error}") from None
        if start < end:
            self._partial += view[start:]
        return messages

    def _length(self, data: bytearray | memoryview, at: int) -> int:
        length: int = _LENGTH.unpack_from(data, at)[0]
        if length > self._max:
            raise ProtocolError(f"a frame of {length} bytes; at most {self._max} are taken")
        return length


def malformed(message: Message) -> str:
    """What is wrong with the binary fields and numbers of a message that types cannot tell; '' if
    all is well. The cores trust what passed here."""
    check = _CHECKS.get(type(message))
    return check(message) if check else ""


def _hashes(num_bytes: int) -> str:
    return "hashes are 16 bytes each" if num_bytes % HASH_BYTES else ""


def _ids(*fields: bytes) -> str:
    return "" if all(len(f) % 4 == 0 for f in fields) else "token ids are 4 bytes each"


def _register(m: Register) -> str:
    if not m.worker_id or not m.address or not m.model:
        return "worker_id, address and model must be given"
    if not 1 <= m.ranks <= 4096 or len(m.kv_total) != m.ranks:
        return "kv_total needs one entry per rank"
    if min(m.kv_total) < 1 or min(m.block_size, m.max_model_len, m.max_batch_tokens) < 1:
        return "sizes must be positive"
    if len(m.profile) not in (0, 6) or not all(0 <= x < 1e6 for x in m.profile):
        return "profile is empty or six coefficients in seconds"
    if len(m.transports) > MAX_TRANSPORTS or not all(0 <= x < 1e18 for x in m.transfer):
        return f"at most {MAX_TRANSPORTS} transports, with times that are at least 0"
    return ""


def _status(m: Status) -> str:
    row = 8 * len(STATUS_COLUMNS)
    return "" if m.table and len(m.table) % row == 0 else f"table rows are {row} bytes"


def _changes(m: Delta | Snapshot) -> str:
    odd = 0
    for change in m.changes:
        odd |= len(change.added) | len(change.removed)
    return _hashes(odd)


def _ask(m: Ask) -> str:
    if min(m.num_tokens, m.n) < 1 or m.max_tokens < 0:
        return "a prompt, a choice and no negative output are needed"
    if not (m.deadline_s >= 0 and (m.ttft_timeout_s is None or m.ttft_timeout_s >= 0)):
        return "times to wait are seconds from now"
    if m.lease_s or m.at_once:
        return "places for engines of others are asked for at the Master"
    return _hashes(len(m.hashes))


def _submit(m: Submit) -> str:
    return _ids(m.prompt, *(c.output for c in m.choices)) or _hashes(len(m.hashes))


_CHECKS: dict[type[Message], Any] = {  # Any: each check takes its own type
    Register: _register,
    Status: _status,
    Delta: _changes,
    Snapshot: _changes,
    Ask: _ask,
    Submit: _submit,
}
