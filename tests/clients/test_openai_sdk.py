"""The OpenAI Python SDK, as it is, against a Master and two simulated workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.support.live import LiveCluster, live_cluster

openai = pytest.importorskip("openai")

HI = [{"role": "user", "content": "hi there"}]
SAME = {"model": "sim", "max_tokens": 12, "seed": 7}


@pytest.fixture
async def cluster() -> AsyncIterator[LiveCluster]:
    async with live_cluster(workers=2) as running:
        yield running


@pytest.fixture
async def client(cluster: LiveCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    url = cluster.url + "/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


async def test_models_chat_completions_and_streams(client: openai.AsyncOpenAI):
    assert [m.id async for m in client.models.list()] == ["sim"]
    assert (await client.models.retrieve("sim")).object == "model"

    whole = await client.chat.completions.create(messages=HI, logprobs=True, **SAME)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    assert len(whole.choices[0].logprobs.content) == 12

    usage = {"include_usage": True}
    text, chunks = "", []
    async for chunk in await client.chat.completions.create(
        messages=HI, stream=True, stream_options=usage, **SAME
    ):
        chunks.append(chunk)
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert [c.choices[0].finish_reason for c in chunks[:-1]].count("length") == 1

    reply = await client.completions.create(prompt=["a", "b"], n=2, echo=True, **SAME)
    assert [c.index for c in reply.choices] == [0, 1, 2, 3]
    assert [c.text[0] for c in reply.choices] == list("aabb")
    joined = ["", "", "", ""]
    async for chunk in await client.completions.create(
        prompt=["a", "b"], n=2, echo=True, stream=True, **SAME
    ):
        joined[chunk.choices[0].index] += chunk.choices[0].text
    assert joined == [c.text for c in reply.choices]


async def test_the_streaming_helper_assembles_a_message(client: openai.AsyncOpenAI):
    whole = (await client.chat.completions.create(messages=HI, **SAME)).choices[0].message.content
    stop = whole.split()[6]
    async with client.chat.completions.stream(messages=HI, stop=stop, **SAME) as stream:
        async for event in stream:
            assert event.type
        final = (await stream.get_final_completion()).choices[0]
    assert final.finish_reason == "stop"
    assert final.message.content == whole[: whole.index(stop)]


async def test_errors_have_the_sdks_classes(client: openai.AsyncOpenAI):
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(messages=HI, model="nope")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(messages=HI, model="sim", n=1000)
    assert (bad.value.param, bad.value.type) == ("n", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model="sim", prompt="a", max_tokens=10**9)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as shape:
        await client.chat.completions.create(
            messages=HI, model="sim", response_format={"type": "json_object"}
        )
    assert shape.value.code == "unsupported_parameter"


async def test_s11_an_error_in_a_stream_is_raised(client: openai.AsyncOpenAI, cluster: LiveCluster):
    received = []

    async def read() -> None:
        async for chunk in await client.completions.create(
            model="sim", prompt="a", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        ):
            received.append(chunk)
            if len(received) == 3:
                for index in range(2):
                    await cluster.kill(index)

    with pytest.raises(openai.APIError) as lost:
        await read()
    assert lost.value.message
    assert not any(c.choices[0].finish_reason for c in received)
    with pytest.raises(openai.InternalServerError) as down:
        await client.chat.completions.create(messages=HI, model="sim")
    assert (down.value.status_code, down.value.code) == (503, "service_unavailable")
    assert down.value.response.headers["Retry-After"]


async def test_raw_responses_ids_and_the_synchronous_client(cluster: LiveCluster):
    def use() -> tuple[str, str, str]:
        with openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0) as client:
            raw = client.chat.completions.with_raw_response.create(
                messages=HI, extra_headers={"X-Request-Id": "mine-1"}, **SAME
            )
            whole = raw.parse().choices[0].message.content
            stream = client.chat.completions.create(messages=HI, stream=True, **SAME)
            text = "".join(c.choices[0].delta.content or "" for c in stream)
            return raw.request_id, whole, text

    request_id, whole, text = await asyncio.to_thread(use)
    assert request_id == "mine-1"
    assert text == whole


async def test_closing_a_stream_frees_the_worker(client: openai.AsyncOpenAI, cluster: LiveCluster):
    stream = await client.completions.create(
        model="sim", prompt="a" * 200, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    await stream.close()
    async with asyncio.timeout(5):
        while cluster.master.frontend.open_requests:  # noqa: ASYNC110 -- the server sees it by itself
            await asyncio.sleep(0.005)
    assert cluster.master.overview()["bookings"] == 0
