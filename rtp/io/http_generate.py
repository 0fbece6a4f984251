"""The two generating routes: body -> Begin -> what the frontend loop delivers -> JSON or SSE."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
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
from rtp.io.http_gate import Gate
from rtp.io.metrics import Metrics
from rtp.io.openai_prompts import Prompt, chat_prompt, completion_prompts
from rtp.io.openai_reply import ChatReply, CompletionReply, Outcome, Reply, Usage, usage
from rtp.io.openai_request import Caller, Limits, begins, shared_params
from rtp.io.openai_schema import ChatBody, CompletionBody, parse
from rtp.io.request_meter import RequestMeter

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

    def begin(self, begin: Begin) -> Handle: ...


class Generate:
    """POST /v1/completions and /v1/chat/completions."""

    def __init__(
        self,
        frontend: Frontend,
        served: Served,
        keys: Keys,
        gate: Gate,
        metrics: Metrics,
        *,
        limits: Limits,
        times: sse.SseTimes,
    ) -> None:
        self._frontend = frontend
        self._served = served
        self._keys = keys
        self._gate = gate
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
            "request_id": wanted[0].request_id,
            "model": wanted[0].model,
            "prompt_tokens": sum(num_tokens),
        }
        with self._gate.admit():
            handles = [self._frontend.begin(begin) for begin in wanted]
            try:
                if body.stream:
                    return await self._stream(request, body, reply, handles, meter)
                return await self._whole(reply, handles, meter)
            except asyncio.CancelledError as error:
                raise self._gate.reason(error) from None
            finally:
                for handle in handles:
                    handle.cancel()
                request[FACTS].update(meter.facts())

    async def _whole(
        self, reply: Reply, handles: Sequence[Handle], meter: RequestMeter
    ) -> web.Response:
        outcomes = [Outcome() for _ in handles]
        async with aclosing(_commands(handles)) as commands:
            async for prompt_no, command in commands:
                match command:
                    case Deliver():
                        outcomes[prompt_no].keep(command)
                        meter.deliver(prompt_no, command)
                    case Failed():
                        raise of_failed(command)
                    case Ended():
                        outcomes[prompt_no].ended = command
        meter.finished()
        choices = [
            reply.choice(prompt_no, sample, chunk, outcome)
            for prompt_no, outcome in enumerate(outcomes)
            for sample, chunk in enumerate(outcome.samples(reply.n))
        ]
        body = reply.envelope(choices, _usage(outcomes), whole=True)
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
        except (Exception, asyncio.CancelledError) as error:
            reason = self._gate.reason(error)
            if not stream.is_open or isinstance(reason, asyncio.CancelledError):
                raise reason from None
            # The status is out: the error can only be an event, which the middleware cannot send.
            fault = reason if isinstance(reason, ApiError) else of_bug(log)
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
        async with aclosing(_commands(handles)) as commands:
            async for prompt_no, command in commands:
                match command:
                    case Deliver():
                        outcome = outcomes[prompt_no]
                        outcome.note(command)
                        events = []
                        for chunk in command.chunks:
                            choice = reply.delta(prompt_no, chunk, outcome)
                            so_far = None
                            if body.continuous_usage:
                                so_far = meter.usage(prompt_no, command, chunk)
                            events.append(sse.event(reply.envelope([choice], so_far, whole=False)))
                        meter.deliver(prompt_no, command)
                        await stream.send(b"".join(events))
                    case Failed():
                        raise of_failed(command)
                    case Ended():
                        outcomes[prompt_no].ended = command
        meter.finished()
        last = b""
        if body.include_usage:
            last = sse.event(reply.envelope([], _usage(outcomes), whole=False))
        await stream.send(last + sse.DONE)


async def _commands(
    handles: Sequence[Handle],
) -> AsyncGenerator[tuple[int, Deliver | Ended | Failed]]:
    """What all handles bring, as it comes, with the number of the handle; ends when all have."""
    if len(handles) == 1:
        async for command in handles[0]:
            yield 0, command
        return
    arrived: asyncio.Queue[tuple[int, Deliver | Ended | Failed]] = asyncio.Queue()

    async def pump(number: int, handle: Handle) -> None:
        async for command in handle:
            arrived.put_nowait((number, command))

    tasks = [asyncio.create_task(pump(i, handle)) for i, handle in enumerate(handles)]
    try:
        open_handles = len(handles)
        while open_handles:
            number, command = await arrived.get()
            open_handles -= not isinstance(command, Deliver)
            yield number, command
    finally:
        for task in tasks:
            task.cancel()


def _usage(outcomes: Sequence[Outcome]) -> Usage:
    ends = [outcome.ended for outcome in outcomes if outcome.ended is not None]
    return usage(
        sum(end.prompt_tokens for end in ends),
        sum(end.generated for end in ends),
        sum(end.cached_tokens for end in ends),
    )
