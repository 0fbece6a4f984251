"""Block hashes in every form that callers give them in, and what is none."""

from __future__ import annotations

import base64
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rtp.io.errors_http import ApiError
from rtp.io.hash_lists import packed

HASHES = [2**64 - 1, 7, 0, 10**19, 10**19 - 1, 2**63]


def read(value: object, **form: object) -> bytes:
    return packed(msgspec.Raw(json.dumps(value, **form)))


def wide(hashes: list[int]) -> bytes:
    return b"".join(h.to_bytes(16, "big") for h in hashes)


def test_every_form_of_hashes_is_one_key():
    expected = wide(HASHES)
    assert read(HASHES) == expected
    assert read(HASHES, separators=(",", ":")) == expected
    assert read(HASHES, indent=1) == expected
    assert read([f"{h:016x}" for h in HASHES]) == expected
    assert read([f"{h:032X}" for h in HASHES]) == expected
    assert read(base64.b64encode(expected).decode()) == expected
    assert read([]) == read("") == read(None) == b""


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_any_numbers_are_read_as_they_are(hashes: list[int]):
    assert read(hashes) == wide(hashes)


@pytest.mark.parametrize(
    "text",
    [
        *("[-1]", "[18446744073709551616]", "[19999999999999999999]", "[20000000000000000000]"),
        *("[99999999999999999999]", "[100000000000000000000]", "[1.5]", "[true]", "[null]"),
        *("[[1]]", "[{}]", "{}", "7", "true", '["12"]', '[1,"0000000000000000"]', '"!"', '"AAAA"'),
        *('["0000000000000000",1]', '["00000000000000 0"]', '["000000000000000g"]'),
    ],
)
def test_what_is_no_hash_is_refused(text: str):
    with pytest.raises(ApiError) as refused:
        packed(msgspec.Raw(text))
    assert (refused.value.status, refused.value.param) == (400, "hashes")


def test_a_list_may_be_laid_out_in_any_way():
    assert packed(msgspec.Raw(b"[\t1 ,\n 22\r, 333 ]")) == wide([1, 22, 333])
