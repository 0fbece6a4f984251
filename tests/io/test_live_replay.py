"""A trace over real HTTP: every row once and in order, every failure counted, never a short
success."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rtp.core.replayed import Replayed
from rtp.core.run_stats import Slo, stats
from rtp.core.trace import TraceRow
from rtp.io.live_replay import Prompts, Target, replay_live
from rtp.io.sse_reader import Event, Events
from tests.support.live import live_cluster

PROMPTS = Prompts(block_size=16, first_id=1000, end_id=9000)
TOKEN = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
END = b'data: {"choices":[{"text":"b","finish_reason":"length"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":20,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"gone","type":"server_error","code":"worker_lost"}}\n\n'
WHOLE = (TOKEN, END, USAGE, DONE)


def a_row(number: int, at: float = 0.0, **more: Any) -> TraceRow:
    return TraceRow(at, 20, 2, (2 * number, 2 * number + 1), **more)


async def started(runner: web.AppRunner) -> str:
    """Its URL."""
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


@asynccontextmanager
async def a_server(answer: Callable[[int], tuple[int, tuple[bytes, ...]]]) -> AsyncIterator[Any]:
    """answer: status and parts of the body of the n-th request. Yields (url, bodies)."""
    bodies: list[dict[str, Any]] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        status, parts = answer(len(bodies) - 1)
        reply = web.StreamResponse(status=status)
        await reply.prepare(request)
        for part in parts:
            await reply.write(part)
        if parts and parts[-1] is TOKEN:  # cut off: the connection goes, no end of the body
            assert request.transport is not None
            request.transport.abort()
        return reply

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    try:
        yield await started(runner), bodies
    finally:
        await runner.cleanup()


async def play(url: str, rows: list[TraceRow], **options: Any) -> Replayed:
    run, _ = await replay_live(rows, Target(url=url, model="m"), PROMPTS, **options)
    return run


async def test_t08_an_error_event_in_a_stream_is_a_failure():
    """T08: after tokens and before [DONE], with status 200."""
    answers = [(200, WHOLE), (200, (TOKEN, ERROR, DONE)), (200, (ERROR, DONE))]
    async with a_server(lambda n: answers[n % 3]) as (url, _):
        run = await play(url, [a_row(i, 0.02 * i) for i in range(6)])
    assert run.failed.tolist() == ["", "stream error worker_lost", "stream error worker_lost"] * 2
    assert run.ok.sum() == 2
    assert np.isnan(run.tpot_s[~run.ok]).all()


@pytest.mark.parametrize(
    ("status", "parts", "reason"),
    [
        (503, (b'{"error":{"code":"service_unavailable"}}',), "503 service_unavailable"),
        (429, (b"slow down",), "429 "),
        (200, (TOKEN,), "connection: "),
        (200, (TOKEN, END, USAGE), "cut off"),
        (200, (TOKEN, USAGE, DONE), "ended without a finish reason"),
        (200, (b"data: {nonsense\n\n",), "odd chunk: "),
    ],
)
async def test_whatever_is_no_whole_answer_is_a_failure(
    status: int, parts: tuple[bytes, ...], reason: str
):
    async with a_server(lambda n: (status, parts)) as (url, _):
        run = await play(url, [a_row(0)])
    assert run.failed[0].startswith(reason)
    assert not np.isnan(run.ended_s).any()


async def test_a_server_that_is_not_there_fails_every_row():
    async with a_server(lambda n: (200, WHOLE)) as (url, _):
        pass
    run = await play(url, [a_row(0), a_row(1)])
    assert [reason.partition(":")[0] for reason in run.failed] == ["connection", "connection"]


async def test_t07_half_the_requests_fail_live():
    """T07: the other half is as fast as ever, and the figures say how few it was."""
    refused = (503, (b'{"error":{"code":"overloaded"}}',))
    async with a_server(lambda n: (200, WHOLE) if n % 2 else refused) as (url, _):
        run = await play(url, [a_row(i) for i in range(20)])
    found = stats(run, Slo(5.0, 0.0), np.zeros(20), np.zeros(20), 0)
    assert (found.ended, found.failed) == (10, 10)
    assert found.failures == {"503 overloaded": 10}
    assert found.ttft_s.count == 10
    assert found.slo_share == 0.5


async def test_t06_each_row_is_sent_once_in_order_and_equal_blocks_are_equal_tokens():
    rows = [TraceRow(0.01 * i, 20 + i % 3, 2, (0, i + 1)) for i in range(40)]
    async with a_server(lambda n: (200, WHOLE)) as (url, bodies):
        run = await play(url, rows)
    assert run.ok.all()
    prompts = [body["prompt"] for body in bodies]
    assert [len(prompt) for prompt in prompts] == [row.num_tokens for row in rows]
    assert {tuple(prompt[:16]) for prompt in prompts} == {tuple(prompts[0][:16])}
    assert len({tuple(prompt[16:]) for prompt in prompts}) == 40
    assert prompts == [PROMPTS.tokens(row, i) for i, row in enumerate(rows)]
    assert all(1000 <= token < 9000 for prompt in prompts for token in prompt)
    assert {body["max_tokens"] for body in bodies} == {2}
    assert run.output_tokens.tolist() == [2] * 40


def test_prompts_are_whole_and_share_only_what_the_trace_does():
    """What of a prompt has no block number is the row's own, and another one with another salt."""
    rows = [TraceRow(0, 50, 2, ()), TraceRow(0, 50, 2, ()), TraceRow(0, 20, 2, (5,))]
    rows.append(TraceRow(0, 30, 2, (5,)))
    prompts = [PROMPTS.tokens(row, index) for index, row in enumerate(rows)]
    assert [len(prompt) for prompt in prompts] == [50, 50, 20, 30]
    assert prompts[2][:16] == prompts[3][:16]
    other = Prompts(block_size=16, first_id=1000, end_id=9000, salt=1).tokens(rows[0], 0)
    own = [prompts[0], prompts[1], prompts[2][16:], prompts[3][16:], other]
    assert len({tuple(tokens[:4]) for tokens in own}) == 5


async def test_an_odd_answer_costs_no_other_row_its_result():
    odd = (TOKEN, b"data: [1]\n\n", DONE)
    async with a_server(lambda n: (200, odd if n == 1 else WHOLE)) as (url, _):
        run = await play(url, [a_row(i, 0.02 * i) for i in range(3)])
    assert run.failed.tolist() == ["", "odd chunk: Expected `object`, got `array`", ""]
    assert run.output_tokens.tolist() == [2, 1, 2]


async def test_without_a_usage_the_goal_for_later_tokens_still_counts():
    rows = [a_row(i) for i in range(4)]
    async with a_server(lambda n: (200, (TOKEN, END, DONE) if n else WHOLE)) as (url, _):
        run, sending = await replay_live(rows, Target(url=url, model="m"), PROMPTS)
    assert run.output_tokens.tolist() == [2] * 4
    assert sending.num_counted == 3
    found = stats(run, Slo(5.0, 0.0, tpot_s=1e-9), np.zeros(4), np.zeros(4), 0)
    assert found.slo_share == 0


async def test_t01_times_are_relative_and_divided_by_speed():
    async with a_server(lambda n: (200, WHOLE)) as (url, _):
        run = await play(url, [a_row(0, 0.0), a_row(1, 0.2)], speed=4.0)
    assert run.arrival_s == pytest.approx([0.0, 0.05])
    assert (run.first_s > run.arrival_s).all()


async def test_in_a_closed_loop_the_next_turn_waits_for_the_last():
    rows = [a_row(0), a_row(1, 0.0, after=0, think_s=0.03), a_row(2, 0.0, after=1)]
    async with a_server(lambda n: (200, WHOLE)) as (url, bodies):
        run = await play(url, rows)
    assert run.ok.all()
    assert run.arrival_s[1] == pytest.approx(run.ended_s[0] + 0.03)
    assert run.arrival_s[2] == pytest.approx(run.ended_s[1])
    assert [body["prompt"] for body in bodies] == [
        PROMPTS.tokens(row, i) for i, row in enumerate(rows)
    ]


async def test_a_slow_answer_ends_by_the_timeout():
    hang = asyncio.Event()

    async def never(request: web.Request) -> web.StreamResponse:
        await hang.wait()
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/completions", never)
    runner = web.AppRunner(app)
    target = Target(url=await started(runner), model="m", timeout_s=0.05)
    run, _ = await replay_live([a_row(0)], target, PROMPTS)
    hang.set()
    await runner.cleanup()
    assert run.failed.tolist() == ["timeout"]


async def test_a_real_cluster_finds_what_the_trace_shares():
    rows = [TraceRow(0.15 * i, 60, 4, (7, 8, 9, 20 + i)) for i in range(4)]
    async with live_cluster(workers=1) as cluster:
        run, _ = await replay_live(rows, Target(url=cluster.url, model="sim"), PROMPTS)
    assert run.failed.tolist() == [""] * 4
    assert run.output_tokens.tolist() == [4] * 4
    assert run.cached_tokens.tolist() == [0, 48, 48, 48]
    assert (run.tpot_s > 0).all()


def test_events_are_read_however_they_are_cut():
    data = b": ping\n\n" + TOKEN + b"event: x\r\ndata: 2\r\ndata: 3\r\n\r\n" + DONE
    whole = Events().feed(data)
    events = Events()
    cut = [event for i in range(len(data)) for event in events.feed(data[i : i + 1])]
    assert whole == cut
    assert whole[1:] == [Event(b"2\n3", b"x"), Event(b"[DONE]")]
