"""Bodies: every field is checked, and the refusal names it, before anything is begun."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rtp.core.events import Begin
from rtp.core.types import SamplingParams
from rtp.io.chat_messages import normalise
from rtp.io.errors_http import ApiError
from rtp.io.openai_prompts import chat_prompt, completion_prompts
from rtp.io.openai_request import Caller, Limits, begins, shared_params
from rtp.io.openai_schema import ChatBody, CompletionBody, parse
from tests.support.scripted_frontend import ByteCodec, a_card

USER = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> CompletionBody:
    return parse(json.dumps({"prompt": "a"} | fields).encode(), CompletionBody)


def chat(**fields: Any) -> ChatBody:
    return parse(json.dumps({"messages": USER} | fields).encode(), ChatBody)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", [1] * 65),
        ("stop_token_ids", ["a"] * 257),
        ("logit_bias", {str(i): "x" for i in range(1025)}),
    ],
)
def test_v01_a_list_that_is_too_long_is_refused_unread(field: str, value: Any):
    """A million faults of a million items would be collected before one of them is reported."""
    with pytest.raises(ApiError) as caught:
        completion(**{field: value})
    assert caught.value.param == field
    assert "at most" in caught.value.message


BAD_FIELDS = [
    ("n", 0),
    ("n", 5_000_000),
    ("n", 129),
    ("n", True),
    ("n", 1.5),
    ("n", "2"),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", 10**30),
    ("max_completion_tokens", "16"),
    ("min_tokens", -1),
    ("temperature", -0.5),
    ("temperature", 2.01),
    ("temperature", "0"),
    ("temperature", True),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.0),
    ("min_p", 2),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("logit_bias", {"5": 1000}),
    ("logit_bias", {"5": "x"}),
    ("logit_bias", [1]),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("seed", 1.5),
    ("seed", 2**64),
    ("stop_token_ids", "1"),
    ("ignore_eos", 1),
    ("stream", "true"),
    ("prompt_logprobs", 21),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("priority", "high"),
    ("cache_salt", 1),
    ("timeout_s", 0),
    ("timeout_s", -1),
    ("ttft_timeout_s", 0),
    ("chat_id", 1),
    ("model", 5),
    ("stop", 5),
    ("stop", ["x"] * 65),
    ("response_format", "text"),
    ("response_format", {}),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("response_format", {"type": "foo"}),
    ("guided_json", {}),
    ("guided_regex", "("),
    ("structured_outputs", {"json": {}}),
    ("use_beam_search", True),
    ("adapter", "x"),
    ("stream_options", {"include_usage": True}),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
@pytest.mark.parametrize("make", [completion, chat])
def test_a_bad_field_is_refused_by_name(make: Any, field: str, value: Any):
    """V01, V04, V08, C07: on both routes alike."""
    with pytest.raises(ApiError) as refusal:
        make(**{field: value})
    assert (refusal.value.status, refusal.value.param) == (400, field)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["x", ""]}, "stop[1]"),
        ({"stop": ["x", 5]}, "stop[1]"),
        ({"stop": "y" * 1025}, "stop[0]"),
        ({"stop_token_ids": [1, 1.5]}, "stop_token_ids[1]"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": None}, "prompt"),
    ],
)
def test_completion_fields(fields: dict[str, Any], param: str):
    with pytest.raises(ApiError) as refusal:
        completion(**fields)
    assert (refusal.value.status, refusal.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function"}], "tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"messages": None}, "messages"),
    ],
)
def test_chat_fields(fields: dict[str, Any], param: str):
    with pytest.raises(ApiError) as refusal:
        chat(**fields)
    assert (refusal.value.status, refusal.value.param) == (400, param)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","extra":1e400}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"\xff"}',
        b'{"prompt":' + b"[" * 100_000,
    ],
)
def test_v18_what_is_no_json_object_is_refused(raw: bytes):
    with pytest.raises(ApiError) as refusal:
        parse(raw, CompletionBody)
    assert (refusal.value.status, refusal.value.code) == (400, "invalid_json")
    assert "\\ud800" not in refusal.value.message


def test_v12_null_is_unset_and_unknown_fields_are_ignored():
    body = completion(
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=1,
        max_completion_tokens=1,
        stop=None,
        ignore_eos=True,
        temperature=None,
        logit_bias=None,
        n=None,
        stream_response=True,
        kv_transfer_params={"tp_size": 10**9, "remote_host": "169.254.169.254"},
        metadata={"a": 1},
        guided_json=None,
        tools=None,
    )
    assert (body.output_tokens, body.ignore_eos, body.temperature, body.n) == (1, True, 1.0, 1)
    assert body.include_usage
    assert body.stop == []
    assert not hasattr(body, "kv_transfer_params")


def test_documented_bounds_are_accepted():
    body = completion(
        temperature=2,
        n=128,
        top_k=-1,
        stop=["a", "b", "c", "d", "e"],
        seed=-1,
        best_of=128,
        response_format={"type": "text"},
        suffix="",
        logit_bias={"5": -100},
    )
    assert body.stop == list("abcde")
    assert chat(tools=[{"type": "function"}], tool_choice="none", top_logprobs=0).n == 1


def test_v14_messages_of_every_shape():
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    given = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "u", "name": "ann", "extra": 1},
        {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "tool_calls": []},
        {"role": "user", "content": "again"},
    ]
    out = normalise(given)
    assert [m["role"] for m in out] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert [m["content"] for m in out] == ["d", "u", "", "42", "no", "again"]
    assert out[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert "tool_calls" not in out[4]
    assert set(out[1]) == {"role", "content", "name"}


def test_c09_parts_and_string_are_one_message():
    parts = [{"type": "text", "text": "Hello"}]
    assert normalise([{"role": "user", "content": parts}]) == normalise(
        [{"role": "user", "content": "Hello"}]
    )
    two = [*parts, {"type": "text", "text": "there"}]
    assert normalise([{"role": "user", "content": two}])[0]["content"] == "Hello\nthere"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([*USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0]",
        ),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
    ],
)
def test_a_bad_message_is_refused_by_its_place(messages: Any, param: str):
    with pytest.raises(ApiError) as refusal:
        normalise(messages)
    assert (refusal.value.status, refusal.value.param) == (400, param)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**6), 10**6),
    st.sampled_from([-1, 0, 1, 2, 2**31, 2**63, 2**64, -(2**63), 10**400]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


def outcome(fields: dict[str, Any], chats: bool) -> list[Begin] | ApiError:
    """What a body leads to, without a loop: nothing here really waits."""
    card = a_card()

    async def run() -> list[Begin]:
        body: Any = (chat if chats else completion)(**fields)
        shared = shared_params(body, card)
        codec = ByteCodec(card)
        if chats:
            prompts = [await chat_prompt(body, card, codec)]
        else:
            prompts = await completion_prompts(body, card, codec)
        return await begins("id", body, shared, prompts, card, Caller(), Limits(secret=b"s"))

    running = run()
    try:
        while True:
            running.send(None)
    except StopIteration as end:
        begun: list[Begin] = end.value
        return begun
    except ApiError as refusal:
        return refusal


@given(
    st.dictionaries(st.sampled_from(sorted(CompletionBody.model_fields)), VALUES, max_size=4),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_any_json_is_begun_soundly_or_refused_by_name(fields: dict[str, Any], chats: bool):
    """Whatever passes can be sent to a worker; whatever does not is a 400 naming a field."""
    found = outcome(fields, chats)
    if isinstance(found, ApiError):
        assert found.status == 400
        assert found.param is not None
        return
    for begin in found:
        sent = msgspec.msgpack.encode(begin.sampling)
        assert msgspec.msgpack.decode(sent, type=SamplingParams) == begin.sampling
        assert 0 < len(begin.prompt) // 4 <= 128 - begin.sampling.max_tokens
        assert 0 < begin.timeout_s <= 3600
