"""Streams over a scripted frontend: exact bytes, usage, errors, slow readers, leaving clients."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rtp.core.commands import Chunk, Deliver, Ended, Failed
from rtp.io.sse import SseTimes
from tests.support.scripted_frontend import Api, ScriptedHandle, an_api, fails, says

PATHS = ["/v1/completions", "/v1/chat/completions"]
MESSAGES = [{"role": "user", "content": "ab"}]


def events(raw: bytes) -> list[Any]:
    """The JSON of each event; asserts that nothing else is in the stream."""
    *parts, rest = raw.split(b"\n\n")
    assert rest == b""
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
    return [json.loads(part[6:]) for part in parts if part != b"data: [DONE]"]


async def started(api: Api, path: str = PATHS[0], **body: Any) -> tuple[Any, ScriptedHandle]:
    """A stream in flight: the client's pending request and the request's handle."""
    body = {"prompt": "ab", "messages": MESSAGES, "stream": True} | body
    asked = asyncio.create_task(api.session.post(api.url + path, json=body))
    await api.frontend.begun.wait()
    return asked, api.frontend.handles[-1]


def one(handle: ScriptedHandle, text: str, at: int = 0, finish: str = "") -> Deliver:
    return Deliver(handle.begin.request_id, (Chunk(0, text, (1,), (), finish),), 0, at + 1)


@pytest.mark.parametrize("path", PATHS)
async def test_s13_bytes_of_a_stream(path: str):
    async with an_api(says("hey")) as api:
        raw = await api.raw_stream(path, messages=MESSAGES)
    assert raw.endswith(b"\n\ndata: [DONE]\n\n")
    assert raw.count(b"data: ") == 4
    found = events(raw)
    assert [e["choices"][0]["finish_reason"] for e in found] == [None, None, "stop"]
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in found}) == 1
    assert not any("usage" in e for e in found)


async def test_chat_tells_the_role_once_with_the_first_text():
    async with an_api(says("hey")) as api:
        found = events(await api.raw_stream(PATHS[1], messages=MESSAGES, n=2))
    assert {e["object"] for e in found} == {"chat.completion.chunk"}
    deltas: dict[int, list[Any]] = {0: [], 1: []}
    for e in found:
        deltas[e["choices"][0]["index"]].append(e["choices"][0]["delta"])
    expected = [{"role": "assistant", "content": "h"}, {"content": "e"}, {"content": "y"}]
    assert deltas == {0: expected, 1: expected}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("asked", [True, False, None])
async def test_s07_usage_is_a_last_chunk_when_asked_for(path: str, asked: bool | None):
    options = None if asked is None else {"include_usage": asked}
    async with an_api(says("hey", cached=2)) as api:
        found = events(await api.raw_stream(path, messages=MESSAGES, stream_options=options))
        body = {"prompt": "a", "messages": MESSAGES, "stream_options": {"include_usage": True}}
        assert (await api.refused(path, **body))["param"] == "stream_options"
    if asked:
        last = found.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 3
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert all(len(e["choices"]) == 1 and "usage" not in e for e in found)


@pytest.mark.parametrize("n", [1, 2])
async def test_s09_s15_usage_grows_by_what_each_chunk_brings(n: int):
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with an_api(says("hello")) as api:
        found = events(await api.raw_stream(n=n, stream_options=options))
        whole = await api.complete(n=n)
    counts = [e["usage"]["completion_tokens"] for e in found]
    assert counts == [*range(1, 5 * n + 1), 5 * n]
    assert {e["usage"]["prompt_tokens"] for e in found} == {3}
    assert found[-1]["usage"] == whole["usage"]


async def test_prompts_of_one_stream_are_told_apart():
    async with an_api(says("xy")) as api:
        raw = await api.raw_stream(
            prompt=[[1], [2, 3]], n=2, stream_options={"include_usage": True}
        )
    *found, last = events(raw)
    texts = ["", "", "", ""]
    for e in found:
        texts[e["choices"][0]["index"]] += e["choices"][0]["text"]
    assert texts == ["xy"] * 4
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 8)


@pytest.mark.parametrize("path", PATHS)
async def test_s14_nothing_is_sent_before_the_first_token(path: str):
    async with an_api() as api:
        asked, handle = await started(api, path)
        assert (await api.get("/live"))[0] == 200  # time enough for a header to arrive
        assert not asked.done()
        handle.put(one(handle, "x", finish="stop"), Ended(handle.begin.request_id, 3, 0, 1))
        reply = await asked
        assert b'"x"' in await reply.content.readuntil(b"\n\n")
        reply.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_fault_before_the_first_token_is_a_status(path: str, stream: bool):
    async with an_api(fails(503, "overloaded", "busy")) as api:
        body = {"prompt": "a", "messages": MESSAGES, "stream": stream}
        async with api.session.post(api.url + path, json=body) as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (503, "2")
            assert reply.content_type == "application/json"
            error = (await reply.json())["error"]
    assert error == {
        "message": "busy",
        "type": "server_error",
        "param": None,
        "code": "overloaded",
    }


@pytest.mark.parametrize("path", PATHS)
async def test_s11_a_fault_in_a_stream_is_an_event(path: str):
    async with an_api(fails(500, "numeric_fault", "not finite", after="abc")) as api:
        found = events(await api.raw_stream(path, messages=MESSAGES))
        counted = api.metrics.text().decode()
    *chunks, last = found
    assert set(last) == {"error"}
    assert last["error"]["code"] == "numeric_fault"
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 3
    assert f'outcome="failed",route="{path}",status="200"' in counted


async def test_o07_a_fault_in_a_stream_leaves_the_connection_to_the_next_request():
    """The body ends in order, so the client keeps the connection; closing it then would fail what
    it sends next, and no client sends a POST twice."""
    body = b'{"prompt":"a","stream":true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    async with an_api(fails(500, "numeric_fault", "not finite", after="abc")) as api:
        host, port = api.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(2):
            writer.write(head.encode() + body)
            async with asyncio.timeout(20):
                answer = await reader.readuntil(b"\r\n0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"numeric_fault" in answer
        writer.close()


async def test_one_failed_prompt_ends_the_request_and_its_neighbours():
    def script(begin):
        if len(begin.prompt) == 4:
            yield Failed(begin.request_id, 504, "server_error", "timeout", "late")

    async with an_api(script) as api:
        error = await api.refused(status=504, prompt=[[1], [2, 3]])
        assert error["code"] == "timeout"
        await asyncio.wait_for(api.frontend.handles[1].cancelled.wait(), 5)


async def test_a_bug_after_the_first_byte_is_an_event_without_its_text(
    monkeypatch: pytest.MonkeyPatch,
):
    async with an_api() as api:
        asked, handle = await started(api)
        handle.put(one(handle, "a"))
        reply = await asked
        await reply.content.readuntil(b"\n\n")
        monkeypatch.setattr("rtp.io.openai_reply.CompletionReply.delta", lambda *a: 1 / 0)
        handle.put(one(handle, "b"))
        last = events(await reply.read())[-1]
        await asyncio.wait_for(handle.cancelled.wait(), 5)
    assert last["error"]["code"] == "internal_error"
    assert "division" not in last["error"]["message"]


async def test_s13_a_quiet_stream_is_kept_alive_by_comments_after_its_first_token():
    async with an_api(times=SseTimes(keepalive_s=0.02)) as api:
        asked, handle = await started(api)
        handle.put(one(handle, "a"))
        reply = await asked
        assert (await reply.content.readuntil(b"\n\n")).startswith(b"data: ")
        for _ in range(2):
            assert await reply.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        handle.put(one(handle, "b", 1, "stop"), Ended(handle.begin.request_id, 3, 0, 2))
        rest = await reply.read()
    assert rest.replace(b": keep-alive\n\n", b"").count(b"data: ") == 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("phase", ["before the first token", "whole", "in the stream"])
async def test_o03_o04_a_client_that_leaves_cancels_its_request(path: str, phase: str):
    async with an_api() as api:
        asked, handle = await started(api, path, stream=phase != "whole")
        if phase == "in the stream":
            handle.put(one(handle, "a"))
            reply = await asked
            await reply.content.readuntil(b"\n\n")
            reply.close()
        else:
            asked.cancel()
        await asyncio.wait_for(handle.cancelled.wait(), 5)
        await asyncio.sleep(0)
        counted = api.metrics.text().decode()
    assert f'rtp_requests_total{{outcome="disconnected",route="{path}",status="499"}} 1' in counted
    assert "rtp_refusals_total{" not in counted


async def test_every_prompt_of_a_client_that_leaves_is_cancelled():
    async with an_api() as api:
        asked, _ = await started(api, prompt=[[1], [2], [3]])
        asked.cancel()
        for handle in api.frontend.handles:
            await asyncio.wait_for(handle.cancelled.wait(), 5)
        assert len(api.frontend.handles) == 3


async def slow_reader(api: Api) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A raw client with a small receive window that has asked and does not read."""
    host, port = api.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = json.dumps({"prompt": "ab", "stream": True, "max_tokens": 100}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await api.frontend.begun.wait()
    return reader, writer


async def test_a_slow_reader_pauses_its_request_until_it_has_caught_up():
    async with an_api() as api:
        reader, writer = await slow_reader(api)
        handle = api.frontend.handles[0]
        sent = 0
        while not handle.pauses:
            handle.put(one(handle, "x" * 65536, sent))
            sent += 1
            await asyncio.sleep(0.001)
        assert sent > 4
        assert handle.resumes == 0
        received = b""
        while not handle.resumes:
            received += await reader.read(1 << 20)
        handle.put(one(handle, "y", sent, "stop"), Ended(handle.begin.request_id, 3, 0, sent))
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            received += await reader.read(1 << 20)
        writer.close()
    assert received.count(b"x" * 65536) == sent


async def test_a_reader_that_stopped_is_cut_and_its_request_cancelled():
    async with an_api(times=SseTimes(patience_s=0.05)) as api:
        _, writer = await slow_reader(api)
        handle = api.frontend.handles[0]
        while not handle.pauses:
            handle.put(one(handle, "x" * 65536))
            await asyncio.sleep(0.001)
        await asyncio.wait_for(handle.cancelled.wait(), 5)
        writer.close()
