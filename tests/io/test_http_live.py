"""The HTTP API over real loops and simulated workers: what needs the whole path to be true."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.support.live import LiveCluster, live_cluster

LONG = {"max_tokens": 4000, "ignore_eos": True}


class Live:
    """A session to a live cluster."""

    def __init__(self, cluster: LiveCluster, session: aiohttp.ClientSession) -> None:
        self.cluster, self.session = cluster, session

    async def post(self, path: str = "/v1/completions", **body: Any) -> tuple[int, Any]:
        async with self.session.post(self.cluster.url + path, json=body) as reply:
            return reply.status, await reply.json()

    async def complete(self, **body: Any) -> Any:
        status, reply = await self.post(**{"prompt": "abc", "seed": 1} | body)
        assert status == 200, reply
        return reply

    async def stream(self, **body: Any) -> list[Any]:
        body = {"prompt": "abc", "seed": 1, "stream": True} | body
        url = self.cluster.url + "/v1/completions"
        async with self.session.post(url, json=body) as reply:
            raw = await reply.read()
        assert reply.status == 200, raw
        assert raw.endswith(b"data: [DONE]\n\n")
        return [json.loads(part[6:]) for part in raw.split(b"\n\n")[:-2]]

    async def quiet(self) -> None:
        """Returns when every page is free again and nothing is charged to any rank."""
        async with asyncio.timeout(5):
            while not self._is_quiet():  # noqa: ASYNC110 -- reports come by themselves
                await asyncio.sleep(0.005)

    def _is_quiet(self) -> bool:
        overview = self.cluster.master.overview()
        ranks = [rank for worker in overview["workers"] for rank in worker["ranks"]]
        idle = all(r["running"] == r["waiting"] == 0 for r in ranks)
        return (
            idle and overview["bookings"] == 0 and all(r["kv_free"] == r["kv_total"] for r in ranks)
        )


@pytest.fixture
async def live() -> AsyncIterator[Live]:
    async with live_cluster(workers=2) as cluster, aiohttp.ClientSession() as session:
        yield Live(cluster, session)


def joined(events: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


async def test_s03_streams_equal_their_whole_twins(live: Live):
    """With and without a stop string, n, echo; S04: the stop string is shown or not; S09, V15."""
    plain = (await live.complete(max_tokens=30))["choices"][0]["text"]
    stop = plain[40:52]
    usage = {"include_usage": True, "continuous_usage_stats": True}
    for wish in (
        {},
        {"stop": stop},
        {"stop": [stop, "never seen"], "include_stop_str_in_output": True},
        {"n": 3, "echo": True, "temperature": 0},
        {"prompt": [[5, 6, 7], [8, 9]], "n": 2},
        {"max_tokens": 0, "echo": True},
    ):
        wish = {"max_tokens": 30} | wish
        whole = await live.complete(**wish)
        events = await live.stream(stream_options=usage, **wish)
        assert joined(events) == {c["index"]: c["text"] for c in whole["choices"]}
        finishes = {
            c["index"]: c["finish_reason"]
            for e in events
            for c in e["choices"]
            if c["finish_reason"]
        }
        assert finishes == {c["index"]: c["finish_reason"] for c in whole["choices"]}
        assert events[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        if "stop" in wish:
            text = whole["choices"][0]["text"]
            shown = wish.get("include_stop_str_in_output", False)
            assert text == plain[: 52 if shown else 40]
            assert whole["choices"][0]["finish_reason"] == "stop"
            assert whole["choices"][0]["stop_reason"] == stop
    await live.quiet()


async def test_l01_scores_do_not_depend_on_the_cache(live: Live):
    wish = {"prompt": list(range(40, 140)), "max_tokens": 1, "logprobs": 1, "echo": True}
    cold = await live.complete(**wish)
    warm = await live.complete(**wish)
    arrays = cold["choices"][0]["logprobs"]
    assert arrays == warm["choices"][0]["logprobs"]
    assert {len(values) for values in arrays.values()} == {101}
    for token, value, tops in zip(
        arrays["tokens"][1:],
        arrays["token_logprobs"][1:],
        arrays["top_logprobs"][1:],
        strict=True,
    ):
        assert tops[token] == value


@pytest.mark.parametrize("stream", [True, False])
async def test_o03_clients_that_leave_free_everything(live: Live, stream: bool):
    async def leave(number: int) -> None:
        body = {"prompt": [number + 1] * 200, "stream": stream, "n": 2, **LONG}
        post = live.session.post(live.cluster.url + "/v1/completions", json=body)
        if stream:
            async with post as reply:
                await reply.content.readuntil(b"\n\n")
        else:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(post, 0.1)

    await asyncio.gather(*(leave(number) for number in range(20)))
    await live.quiet()
    assert live.cluster.master.frontend.open_requests == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_an_ending_server_tells_the_clients_it_cuts(live: Live, stream: bool):
    body = {"prompt": "abc", "stream": stream, **LONG}
    asked = asyncio.create_task(live.session.post(live.cluster.url + "/v1/completions", json=body))
    if stream:
        reply = await asked
        await reply.content.readuntil(b"\n\n")
    while not live.cluster.master.frontend.open_requests:  # noqa: ASYNC110 -- seen from outside
        await asyncio.sleep(0.005)
    await live.cluster.master.frontend.drain(0)
    reply = await asked
    last = (await reply.read()).split(b"\n\n")[-2 if stream else -1].removeprefix(b"data: ")
    assert json.loads(last)["error"]["code"] == "service_unavailable"
    assert reply.status == (200 if stream else 503)


async def test_o01_an_ending_server_is_not_ready_on_connections_that_are_open():
    async with live_cluster(workers=1) as cluster, aiohttp.ClientSession() as session:
        async with session.get(f"{cluster.url}/health") as reply:
            assert reply.status == 200
        await cluster.master.drain()
        async with session.get(f"{cluster.url}/health") as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (
                503,
                "service_unavailable",
            )
        async with session.get(f"{cluster.url}/live") as reply:
            assert reply.status == 200
        await cluster.master.stop()  # the end of the cluster stops it again


async def test_refusals_of_the_master_have_their_status(live: Live):
    kept = {"prompt": "a", "max_tokens": 10, "timeout_s": 1e-6}
    status, reply = await live.post(**kept)
    assert (status, reply["error"]["code"]) == (504, "timeout")
    status, reply = await live.post(prompt="a", model="no" * 9)
    assert (status, reply["error"]["code"]) == (404, "model_not_found")


async def test_v03_bad_requests_change_nothing_for_their_neighbours(live: Live):
    alone = (await live.complete(max_tokens=60))["choices"][0]["text"]
    bad = [
        {"prompt": [999_999_999]},
        {"logit_bias": {"99999999": 5}},
        {"n": 5_000_000},
        {"temperature": -0.5},
        {"prompt": []},
    ]
    neighbour = asyncio.create_task(live.complete(max_tokens=60))
    replies = await asyncio.gather(*(live.post(**{"prompt": "a"} | fields) for fields in bad * 5))
    assert {status for status, _ in replies} == {400}
    assert (await neighbour)["choices"][0]["text"] == alone


async def test_r06_a_chat_whose_worker_is_gone_goes_to_another(live: Live):
    async def worker_of(reply: Any) -> str:
        url = f"{live.cluster.url}/v1/requests/{reply['id']}/placement"
        async with live.session.get(url) as answer:
            found: str = (await answer.json())["chosen"]["worker_id"]
            return found

    talk = {"chat_id": "c1", "max_tokens": 4, "prompt": list(range(300))}
    homes = [await worker_of(await live.complete(**talk)) for _ in range(2)]
    assert homes[0] == homes[1]
    await live.cluster.kill(int(homes[0].removeprefix("worker-")))
    assert await worker_of(await live.complete(**talk)) != homes[0]


async def test_placement_and_metrics_can_be_asked_for(live: Live):
    reply = await live.complete(max_tokens=5)
    url = f"{live.cluster.url}/v1/requests/{reply['id']}/placement"
    async with live.session.get(url) as answer:
        found = await answer.json()
    assert found["chosen"]["worker_id"] in {"worker-0", "worker-1"}
    assert len(found["candidates"]) == 2
    await live.quiet()
    async with live.session.get(live.cluster.url + "/metrics") as answer:
        text = await answer.text()
    assert 'vllm:num_requests_running{model_name="sim",rank="0",worker="worker-1"} 0.0' in text
    assert 'rtp_generation_tokens_total{model_name="sim"} 5.0' in text
    assert 'rtp_workers{state="ready"} 2.0' in text
    assert "rtp_loop_late_seconds_total" in text
