"""The two generating routes: body -> Begin -> what the frontend loop delivers -> JSON or SSE."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import structlog
from aiohttp import web

from rtp.core.card import ModelCard
from rtp.core.commands import Deliver, Ended, Failed
from rtp.core.events import Begin
from rtp.io import sse
from rtp.io.errors_http import ApiError, of_bug, of_failed
from rtp.io.http_account import END, FACTS, End
from rtp.io.http_auth import Keys
from rtp.io.http_body import Served, header_seconds, header_text, read_json
from rtp.io.metrics import Metrics
from rtp.io.openai_prompts import Prompt, chat_prompt, completion_prompts
from rtp.io.openai_reply import ChatReply, CompletionReply, Outcome, Reply
from rtp.io.openai_request import Caller, Limits, begins, shared_params
from rtp.io.openai_schema import ChatBody, CompletionBody, parse
from rtp.io.openai_shapes import total_usage
from rtp.io.request_meter import RequestMeter

Take = Callable[[int, Deliver], Awaitable[None]]
"""What becomes of a delivery for the prompt of this number."""

log = structlog.get_logger(__name__)


class Handle(sse.Source, Protocol):
    """One request as the frontend loop gives it out (io/frontend_loop)."""

    def __aiter__(self) -> Handle: ...

    async def __anext__(self) -> Deliver | Ended | Failed: ...

    def cancel(self) -> None: ...


class Frontend(Protocol):
    """What the HTTP side needs of a FrontendLoop."""

    @property
    def models(self) -> Mapping[str, ModelCard]: ...

    @property
    def draining(self) -> bool: ...

    def begin(self, begin: Begin) -> Handle: ...


class Generate:
    """POST /v1/completions and /v1/chat/completions."""

    def __init__(
        self,
        frontend: Frontend,
        served: Served,
        keys: Keys,
        metrics: Metrics,
        *,
        limits: Limits,
        times: sse.SseTimes,
    ) -> None:
        self._frontend = frontend
        self._served = served
        self._keys = keys
        self._metrics = metrics
        self._limits = limits
        self._times = times

    async def completions(self, request: web.Request) -> web.StreamResponse:
        arrived = time.monotonic()
        caller = self._caller(request)
        body = parse(await read_json(request), CompletionBody)
        card, codec = self._served.find(body.model)
        shared = shared_params(body, card)
        prompts = await completion_prompts(body, card, codec)
        reply_id = f"cmpl-{uuid.uuid4().hex}"
        wanted = await begins(reply_id, body, shared, prompts, card, caller, self._limits)
        reply = CompletionReply(reply_id, int(time.time()), card.model, codec, body, prompts)
        return await self._answer(request, body, reply, wanted, prompts, arrived)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        arrived = time.monotonic()
        caller = self._caller(request)
        body = parse(await read_json(request), ChatBody)
        card, codec = self._served.find(body.model)
        shared = shared_params(body, card)
        prompts = [await chat_prompt(body, card, codec)]
        reply_id = f"chatcmpl-{uuid.uuid4().hex}"
        wanted = await begins(reply_id, body, shared, prompts, card, caller, self._limits)
        reply = ChatReply(reply_id, int(time.time()), card.model, codec, body)
        return await self._answer(request, body, reply, wanted, prompts, arrived)

    def _caller(self, request: web.Request) -> Caller:
        return Caller(
            tenant=self._keys.tenant(request),
            chat_id=header_text(request, "X-Session-Id"),
            timeout_s=header_seconds(request, "X-Request-Timeout"),
        )

    async def _answer(
        self,
        request: web.Request,
        body: CompletionBody | ChatBody,
        reply: Reply,
        wanted: Sequence[Begin],
        prompts: Sequence[Prompt],
        arrived: float,
    ) -> web.StreamResponse:
        """Runs the requests side by side. However this ends, none of them outlives it."""
        num_tokens = [prompt.num_tokens for prompt in prompts]
        model = self._metrics.model(wanted[0].model)
        meter = RequestMeter(model, num_tokens, arrived)
        request[FACTS] = {
            "request_id": reply.id,
            "model": wanted[0].model,
            "prompt_tokens": sum(num_tokens),
        }
        handles: list[Handle] = []
        try:
            for begin in wanted:
                handles.append(self._frontend.begin(begin))  # noqa: PERF401 -- kept if one fails
            if body.stream:
                return await self._stream(request, body, reply, handles, meter)
            return await self._whole(reply, handles, meter)
        finally:
            for handle in handles:
                handle.cancel()
            request[FACTS].update(meter.facts())

    async def _whole(
        self, reply: Reply, handles: Sequence[Handle], meter: RequestMeter
    ) -> web.Response:
        outcomes = [Outcome() for _ in handles]

        async def take(prompt_no: int, deliver: Deliver) -> None:
            outcomes[prompt_no].keep(deliver)
            meter.deliver(prompt_no, deliver)

        ends = await _run(handles, take)
        meter.finished()
        choices = [
            reply.choice(prompt_no, sample, chunk, outcome)
            for prompt_no, outcome in enumerate(outcomes)
            for sample, chunk in enumerate(outcome.samples(reply.n))
        ]
        body = reply.envelope(choices, total_usage(ends), whole=True)
        return web.Response(body=body, content_type="application/json")

    async def _stream(
        self,
        request: web.Request,
        body: CompletionBody | ChatBody,
        reply: Reply,
        handles: Sequence[Handle],
        meter: RequestMeter,
    ) -> web.StreamResponse:
        stream = sse.SseStream(request, handles, self._times)
        try:
            await self._send_all(stream, body, reply, handles, meter)
        except ConnectionError:
            request[END] = End("disconnected")
        except Exception as error:
            if not stream.is_open:
                raise
            # The status is out: the error can only be an event, which the middleware cannot send.
            fault = error if isinstance(error, ApiError) else of_bug(log)
            request[END] = End("failed", fault)
            await stream.fail(fault.body())
        finally:
            await stream.close()
        return stream.response

    async def _send_all(
        self,
        stream: sse.SseStream,
        body: CompletionBody | ChatBody,
        reply: Reply,
        handles: Sequence[Handle],
        meter: RequestMeter,
    ) -> None:
        outcomes = [Outcome() for _ in handles]

        async def take(prompt_no: int, deliver: Deliver) -> None:
            outcome = outcomes[prompt_no]
            scores = reply.opens_with_scores(prompt_no)
            events = []
            for chunk in outcome.pass_on(deliver, after_scores=scores):
                so_far = None
                if body.continuous_usage:
                    so_far = meter.usage(prompt_no, deliver, chunk)
                choice = reply.delta(prompt_no, chunk, outcome)
                events.append(sse.event(reply.envelope([choice], so_far, whole=False)))
            meter.deliver(prompt_no, deliver)
            if events:
                await stream.send(b"".join(events))

        ends = await _run(handles, take)
        meter.finished()
        last = b""
        if body.include_usage:
            last = sse.event(reply.envelope([], total_usage(ends), whole=False))
        await stream.send(last + sse.DONE)


async def _run(handles: Sequence[Handle], take: Take) -> list[Ended]:
    """Hands what all handles bring, as it comes, to `take`; returns their ends in order.

    Raises what a Failed says, or what `take` raises; then nothing more is taken.
    """
    if len(handles) == 1:
        return [await _run_one(0, handles[0], take)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_run_one(prompt_no, handle, take))
                for prompt_no, handle in enumerate(handles)
            ]
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]


async def _run_one(prompt_no: int, handle: Handle, take: Take) -> Ended:
    async for command in handle:
        match command:
            case Deliver():
                await take(prompt_no, command)
            case Failed():
                raise of_failed(command)
            case Ended():
                return command
    raise RuntimeError("a request stopped without its last word")
