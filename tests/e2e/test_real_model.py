"""smollm2-135m served by a Master and two workers in their own processes, asked over HTTP."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator

import pytest

from bench.servers import Server, rtp
from tests.support.client import Client
from tests.support.processes import kill, workers
from tests.support.references import parted, stored

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with rtp(workers=2, extra=["--dtype", "fp32"]) as running:
        yield running


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    async with Client(server.url) as opened:
        yield opened


async def ready(client: Client, num_workers: int) -> None:
    """Until that many workers take requests again (a restarted one loads its model first)."""
    for _ in range(600):
        _, data = await client.get("/dashboard/data.json")
        if sum(w["state"] == "ready" for w in data["overview"]["workers"]) >= num_workers:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("a worker did not come back within a minute")


async def quiet(client: Client, within_s: float = 1.0) -> None:
    """Asserts that no worker has a request within a second: work and memory are back."""
    for _ in range(int(within_s / 0.05) + 1):
        _, data = await client.get("/dashboard/data.json")
        ranks = [rank for w in data["overview"]["workers"] for rank in w["ranks"]]
        busy = [r for r in ranks if r["running"] or r["waiting"] or r["kv_free"] != r["kv_total"]]
        if not busy and data["overview"]["queue"]["requests"] == 0:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"still held: {busy}, queue {data['overview']['queue']}")


async def test_france_has_a_capital(client: Client):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    reply = await client.chat(question, max_tokens=32)
    assert "Paris" in reply["choices"][0]["message"]["content"]


async def test_greedy_text_over_http_equals_the_stored_references(client: Client):
    """20 prompts at once over two workers, 64 tokens each."""
    references = stored()
    replies = await asyncio.gather(
        *(client.complete(r.prompt, max_tokens=64, ignore_eos=True, logprobs=0) for r in references)
    )
    texts = [reply["choices"][0]["text"] for reply in replies]
    assert parted(references, texts) == []


async def test_a_second_turn_goes_back_to_its_prefix(client: Client):
    talk = [{"role": "user", "content": "Tell me about the river Nile. " + "Please. " * 60}]
    first = await client.chat(talk, max_tokens=24)
    answer = first["choices"][0]["message"]["content"]
    await asyncio.sleep(0.2)  # the worker's cache delta travels every 50 ms
    talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
    second = await client.chat(talk, max_tokens=8)
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] // 16 * 16 - 16
    places = [(await client.get(f"/v1/requests/{r['id']}/placement"))[1] for r in (first, second)]
    chosen = [next(c for c in p["candidates"] if c["chosen"])["worker_id"] for p in places]
    assert chosen[0] == chosen[1]


async def test_f04_two_equal_cold_prompts_compute_shared_blocks_once(client: Client):
    prompt = [random.Random(4).randrange(17, 49152) for _ in range(512)]
    replies = await asyncio.gather(*(client.complete(prompt, max_tokens=4) for _ in range(2)))
    cached = sorted(r["usage"]["prompt_tokens_details"]["cached_tokens"] for r in replies)
    assert cached == [0, 496]
    assert replies[0]["choices"][0]["text"] == replies[1]["choices"][0]["text"]


async def test_o03_clients_that_leave_cost_nothing_after_a_second(client: Client):
    """Closes 200 streams: queued, in prefill, in decode. Blocks are back within a second."""
    rng = random.Random(3)

    async def leave(number: int) -> None:
        prompt = [rng.randrange(17, 49152) for _ in range(rng.choice([16, 64, 400]))]
        if number % 2:
            await client.stream(prompt, max_tokens=200, leave_after=1 + number % 5)
            return
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.stream(prompt, max_tokens=200, ignore_eos=True), 0.15)

    for start in range(0, 200, 40):
        await asyncio.gather(*(leave(start + i) for i in range(40)))
    await quiet(client)


async def test_kill_one_worker_under_16_streams(server: Server, client: Client):
    """kill -9 in the middle: 16 complete answers, equal to the undisturbed run."""
    references = stored()[:16]
    await ready(client, 2)
    middle = asyncio.Event()

    def seen(stream: object) -> None:
        if stream.chunks >= 10:
            middle.set()

    async def answer(prompt: list[int]) -> str:
        out = await client.stream(prompt, max_tokens=64, ignore_eos=True, on_chunk=seen)
        assert out.error is None, out.error
        assert (out.done, out.finish) == (True, "length")
        return out.text

    tasks = [asyncio.create_task(answer(r.prompt)) for r in references]
    await middle.wait()
    kill(workers(server.process.pid)[0])
    texts = await asyncio.gather(*tasks)
    assert parted(references, texts) == []
    _, data = await client.get("/dashboard/data.json")
    resumes = data["overview"]["frontend"]["resumes"]
    assert resumes > 0, "the killed worker served none of the streams"
    await ready(client, 2)
    await quiet(client)


async def test_o01_a_stopped_worker_takes_no_new_work(server: Server, client: Client):
    """SIGSTOP: suspect after 500 ms; requests go to the other one and none fails."""
    await ready(client, 2)
    stopped = workers(server.process.pid)[0]
    stopped.suspend()
    try:
        await asyncio.sleep(1.0)
        replies = await asyncio.gather(
            *(client.complete(f"Number {i} is", max_tokens=4) for i in range(8))
        )
        assert len(replies) == 8
    finally:
        stopped.resume()
    await ready(client, 2)
