"""What a server streams is a whole answer, or a failure with its reason; no figure is made of
nonsense."""

from __future__ import annotations

import pytest

from rtp.io.completion_reader import Completion, error_code

TOKEN = b'{"choices":[{"text":"a","finish_reason":null}]}'
END = b'{"choices":[{"text":"b","finish_reason":"length"}],"usage":null}'
DONE = b"[DONE]"


def usage(text: str) -> bytes:
    return b'{"choices":[],"usage":{%s}}' % text.encode()


def read(*chunks: bytes) -> Completion:
    answer = Completion(20)
    for chunk in chunks:
        answer.feed(chunk if chunk.startswith(b"event") else b"data: " + chunk + b"\n\n")
    return answer


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (b'{"object":"error","message":"boom","code":500}', "stream error 500"),
        (b'{"object":"error","message":"boom"}', "stream error boom"),
        (b'{"error":"boom"}', "stream error boom"),
        (b'{"error":{"code":null,"type":"server_error"}}', "stream error server_error"),
        (b'event: error\ndata: {"message":"bad"}\n\n', "stream error bad"),
        (b"event: error\n\n", "stream error "),
        (b'{"choices":[{"text":"","finish_reason":"error"}]}', "finish reason error"),
        (b'{"choices":[{"text":"","finish_reason":"abort"}]}', "finish reason abort"),
    ],
)
def test_t08_a_stream_that_tells_of_an_error_is_a_failure(chunk: bytes, reason: str):
    """T08: in each form that servers have for it, whatever comes after it."""
    answer = read(TOKEN, chunk, END, usage('"completion_tokens":2'), DONE)
    assert answer.end == reason
    assert answer.started


@pytest.mark.parametrize(
    "chunk",
    [
        b"[1]",
        b"null",
        b"{oops",
        b"\xff",
        b'{"choices":[null]}',
        b'{"choices":[{"text":3}]}',
        b'{"choices":[],"usage":[1]}',
        usage('"completion_tokens":null'),
        usage('"completion_tokens":-5'),
        usage('"completion_tokens":1' + 30 * "0"),
        usage('"completion_tokens":1e400'),
        usage('"completion_tokens":3,"prompt_tokens_details":"x"'),
        b'{"x":' + 100_000 * b"[",
    ],
)
def test_a_chunk_that_is_none_fails_this_request_alone(chunk: bytes):
    answer = read(TOKEN, chunk, END, DONE)
    assert answer.end is not None
    assert answer.end.startswith("odd chunk: ")


def test_more_cached_than_there_was_is_a_failure():
    cached = '"completion_tokens":2,"prompt_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}'
    beyond = read(TOKEN, END, usage(cached % (20, 10**9)), DONE)
    assert (beyond.end, beyond.cached_tokens) == ("usage: 1000000000 cached of 20 tokens", 0)
    with_a_first_token = read(TOKEN, END, usage(cached % (21, 21)), DONE)
    assert (with_a_first_token.end, with_a_first_token.cached_tokens) == ("", 20)
    assert read(END, usage('"prompt_tokens_details":{"cached_tokens":null}'), DONE).end == ""


def test_an_answer_starts_with_text_ids_or_a_finish():
    answer = read(b'{"choices":[]}', b'{"choices":[{"text":"","finish_reason":null}]}')
    assert not answer.started
    for chunk in (TOKEN, b'{"choices":[{"text":"","token_ids":[5]}]}', END):
        assert read(chunk).started


def test_output_is_counted_where_no_usage_tells_it():
    silent = read(TOKEN, TOKEN, b'{"choices":[{"text":""}]}', END, DONE)
    assert (silent.end, silent.output_tokens, silent.has_usage) == ("", 3, False)
    ids = read(b'{"choices":[{"text":"ab","token_ids":[5,6]}]}', END)
    assert ids.output_tokens == 3
    told = read(TOKEN, END, usage('"completion_tokens":7'), DONE)
    assert (told.output_tokens, told.has_usage) == (7, True)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error":{"code":"overloaded","type":"x"}}', "overloaded"),
        (b'{"object":"error","message":"m","type":"BadRequestError","code":400}', "400"),
        (b"slow down", ""),
        (b"[]", ""),
        (b'{"error":{"code":[1]}}', ""),
        (100_000 * b"[", ""),
    ],
)
def test_codes_of_errors(body: bytes, code: str):
    assert error_code(body) == code
