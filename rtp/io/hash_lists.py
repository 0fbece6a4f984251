"""Block hashes as callers of router-only mode give them in JSON -> 16 bytes each.

Lists of integers come with every request and are long: a kernel reads them from the JSON text, so
that no Python object is made of a number.
"""

from __future__ import annotations

import base64
import binascii

import msgspec
import numpy as np
from numpy.typing import NDArray

from rtp.core.kernels import kernel
from rtp.core.types import HASH_BYTES, Hashes
from rtp.io.errors_http import invalid

LOW_DIGITS, DIGITS = HASH_BYTES, 2 * HASH_BYTES
"""Hex digits of the low half of a hash, and of all of it."""
NULL = msgspec.Raw(b"null")
OTHER = -1
ZERO, ONE, COMMA, OPEN, CLOSE, SPACE = b"01,[] "
MOST_DIGITS = 20
"""Of a number below 2^64. One with so many begins with a 1 and is at least SMALLEST_LONG: what is
larger leaves a smaller rest of 2^64."""
SMALLEST_LONG = np.uint64(10 ** (MOST_DIGITS - 1))


def is_null(raw: msgspec.Raw) -> bool:
    """Whether a field is unset."""
    return bytes(raw) == b"null"


def packed(raw: msgspec.Raw) -> Hashes:
    """raw: the JSON of them, valid as such; null is none.

    A list of integers or of 16 hex digits: the low 64 bits, which are all that the Master keys on.
    A list of 32 hex digits, or one text of base64: all 128. 15 ns a number. Raises ApiError 400.
    """
    text = np.frombuffer(raw, dtype=np.uint8)
    out = np.zeros(most_numbers(text) * HASH_BYTES, dtype=np.uint8)
    count = read_numbers(text, out)
    if count != OTHER:
        return out[: count * HASH_BYTES].tobytes()
    try:
        given = msgspec.json.decode(raw, type=list[int | str] | str | None)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid("hashes", f"hashes: {error}") from None
    if isinstance(given, str):
        return _of_base64(given)
    if given and isinstance(given[0], str):
        return _of_hex(given)
    if given:
        raise invalid(
            "hashes", "hashes must hold unsigned 64-bit integers, or only texts of hex digits"
        )
    return b""


@kernel("i8(Array(u1, 1, 'C', readonly=True))")
def most_numbers(text: NDArray[np.uint8]) -> int:
    """An upper bound of how many numbers a JSON list has."""
    count = 1
    for character in text:
        count += character == COMMA
    return count


@kernel("i8(Array(u1, 1, 'C', readonly=True), u1[::1])")
def read_numbers(text: NDArray[np.uint8], out: NDArray[np.uint8]) -> int:
    """A JSON list of integers below 2^64 -> how many they are; OTHER for anything else, and for
    what is written in an unusual way.

    out: [most_numbers, 16] flat, zeros; the second eight bytes of each become the number, most
    significant byte first.
    """
    if len(text) < 2 or text[0] != OPEN or text[-1] != CLOSE:
        return OTHER
    at, count, ten = 0, 0, np.uint64(10)
    while at < len(text) - 1:
        at += 1
        while text[at] <= SPACE:
            at += 1
        start, value = at, np.uint64(0)
        digit = np.int64(text[at]) - ZERO
        while 0 <= digit <= 9:
            if value == 0 and at > start:  # no JSON
                return OTHER
            value = value * ten + np.uint64(digit)
            at += 1
            digit = np.int64(text[at]) - ZERO
        num_digits = at - start
        if num_digits == 0 or num_digits > MOST_DIGITS:
            return OTHER
        if num_digits == MOST_DIGITS and (text[start] != ONE or value < SMALLEST_LONG):
            return OTHER  # over 2^64
        for i in range(8):
            byte = value >> np.uint64(56 - 8 * i) & np.uint64(255)
            out[count * HASH_BYTES + 8 + i] = np.uint8(byte)
        count += 1
        while text[at] <= SPACE:
            at += 1
        if text[at] != COMMA and at != len(text) - 1:
            return OTHER
    return count


def _of_base64(text: str) -> Hashes:
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise invalid("hashes", "hashes is a text, but not of base64") from None
    if len(raw) % HASH_BYTES:
        raise invalid("hashes", f"hashes in base64 must be {HASH_BYTES} bytes each")
    return raw


def _of_hex(given: list[int | str]) -> Hashes:
    width = len(str(given[0]))
    texts = [h for h in given if isinstance(h, str) and len(h) == width]
    if width not in (LOW_DIGITS, DIGITS) or len(texts) != len(given):
        raise invalid(
            "hashes", f"hashes as texts must all have {LOW_DIGITS} or {DIGITS} hex digits"
        )
    text = "".join(texts)
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    if 2 * len(raw) != len(text):  # fromhex skips spaces
        raise invalid("hashes", "hashes holds a text that is not of hex digits")
    return raw if width == DIGITS else _widened(raw)


def _widened(low: bytes) -> Hashes:
    """64-bit hashes, back to back -> 128-bit ones whose high half is 0."""
    wide = np.zeros((len(low) // 8, 2), dtype="<u8")
    wide[:, 1] = np.frombuffer(low, dtype="<u8")  # bytes are moved, so their order is kept
    return wide.tobytes()
