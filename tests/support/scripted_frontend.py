"""A stand-in for FrontendLoop whose requests do what a script says, and a tokenizer of bytes.

For tests of exact shapes and of moments that a real loop passes too quickly.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from rtp.core.card import ModelCard
from rtp.core.commands import Chunk, Deliver, Ended, Failed
from rtp.core.errors import TemplateError
from rtp.core.events import Begin
from rtp.core.steps import TokenLogprobs
from rtp.core.types import pack_ids, unpack_ids
from rtp.io.http_frontend import make_app
from rtp.io.http_server import make_runner
from rtp.io.metrics import Metrics

BOS, EOS = 256, 257
VOCAB = 300
Command = Deliver | Ended | Failed
Script = Callable[[Begin], Iterable[Command]]


def a_card(model: str = "toy", **changes: Any) -> ModelCard:
    fields = {
        "model": model,
        "revision": "r1",
        "tokenizer_json": "{}",
        "chat_template": "toy",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": None,
        "eos_ids": (EOS,),
        "add_bos": True,
        "vocab_size": VOCAB,
        "max_model_len": 128,
        "block_size": 16,
        "created": 1,
    }
    return ModelCard(**(fields | changes))


class ByteCodec:
    """One token per byte of UTF-8; 256 is BOS, 257 EOS; 258 reads like `a` (97)."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card

    async def encode_packed(self, text: str, add_special_tokens: bool = True) -> bytes:
        await asyncio.sleep(0)
        return pack_ids([BOS] * (add_special_tokens and self.card.add_bos) + list(text.encode()))

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and self.is_special(i))]
        return b"".join(self.token_bytes(i) for i in kept).decode(errors="replace")

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        named = {BOS: b"<s>", EOS: b"</s>", 258: b"a"}
        return named.get(token) or (bytes([token]) if token < 256 else b"")

    def is_special(self, token: int) -> bool:
        return token in (BOS, EOS)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: Mapping[str, object],
    ) -> str:
        if any(m["role"] == "system" for m in messages) and kwargs.get("strict"):
            raise TemplateError("System role not supported")
        text = "".join(f"{m['role'][0]}:{m['content']}\n" for m in messages)
        if continue_final_message:
            return text.removesuffix("\n")
        return text + "a:" * add_generation_prompt


class ScriptedHandle:
    """What a test wants a request to do: put() commands, look at cancelled, pauses, resumes."""

    def __init__(self, begin: Begin) -> None:
        self.begin = begin
        self.cancelled = asyncio.Event()
        self.pauses = self.resumes = 0
        self.ended = False
        self._queue: asyncio.Queue[Command] = asyncio.Queue()

    def put(self, *commands: Command) -> None:
        for command in commands:
            self._queue.put_nowait(command)

    def __aiter__(self) -> ScriptedHandle:
        return self

    async def __anext__(self) -> Command:
        if self.ended:
            raise StopAsyncIteration
        command = await self._queue.get()
        self.ended = not isinstance(command, Deliver)
        return command

    def cancel(self) -> None:
        if not self.ended:
            self.ended = True
            self.cancelled.set()

    def paused(self) -> None:
        self.pauses += 1

    def ready(self) -> None:
        self.resumes += 1


class ScriptedFrontend:
    """begin() runs the script at once; without one, tests put() commands themselves."""

    def __init__(self, script: Script | None = None, cards: Iterable[ModelCard] = ()) -> None:
        self.models = {card.model: card for card in cards or [a_card()]}
        self.draining = False
        self.script = script
        self.handles: list[ScriptedHandle] = []
        self.begun = asyncio.Event()

    def begin(self, begin: Begin) -> ScriptedHandle:
        handle = ScriptedHandle(begin)
        self.handles.append(handle)
        self.begun.set()
        if self.script is not None:
            handle.put(*self.script(begin))
        return handle

    @property
    def begins(self) -> list[Begin]:
        return [handle.begin for handle in self.handles]


def scored(token: int, num_top: int | None, logprob: float = -0.25) -> TokenLogprobs:
    """The token, likeliest, and `num_top - 1` less likely others."""
    others = [(token + 1 + i) % VOCAB for i in range(max((num_top or 0) - 1, 0))]
    tops = [(token, logprob), *((o, logprob - 1.1 * (i + 1)) for i, o in enumerate(others))]
    tops = tops[: num_top or 0]
    return TokenLogprobs(token, logprob, tuple(t for t, _ in tops), tuple(v for _, v in tops))


def says(text: str, *, finish: str = "stop", cached: int = 0) -> Script:
    """Each choice says `text`, a byte a turn, cut at max_tokens; usage as a real frontend's."""

    def script(begin: Begin) -> Iterable[Command]:
        wanted = begin.sampling
        tokens = list(text.encode())[: wanted.max_tokens]
        end = finish if len(tokens) == len(text.encode()) else "length"
        prompt = unpack_ids(begin.prompt)
        of_prompt = ()
        if wanted.prompt_logprobs is not None:
            of_prompt = tuple(
                scored(t, wanted.prompt_logprobs, -0.1 - i / 3) for i, t in enumerate(prompt[1:])
            )
        for i, token in enumerate(tokens or [None]):
            last = i >= len(tokens) - 1
            chunks = []
            for choice in range(begin.n):
                if token is None:
                    chunks.append(Chunk(choice, "", (), (), end))
                    continue
                logprobs = ()
                if wanted.logprobs is not None:
                    logprobs = (scored(token, wanted.logprobs, -0.25 - choice / 7 - i / 3),)
                chunks.append(Chunk(choice, chr(token), (token,), logprobs, end if last else ""))
            generated = 0 if token is None else (i + 1) * begin.n
            yield Deliver(
                begin.request_id, tuple(chunks), cached, generated, of_prompt if i == 0 else ()
            )
        yield Ended(begin.request_id, len(prompt), cached, len(tokens) * begin.n)

    return script


def fails(status: int, code: str, message: str, after: str = "") -> Script:
    """Ends in an error, after saying `after`."""

    def script(begin: Begin) -> Iterable[Command]:
        for i, token in enumerate(after.encode()):
            yield Deliver(begin.request_id, (Chunk(0, chr(token), (token,)),), 0, i + 1)
        kind = "rate_limit_error" if status == 429 else "server_error"
        yield Failed(begin.request_id, status, kind, code, message, 2.0)

    return script


class Api:
    """A running application over a scripted frontend, and a session to it."""

    def __init__(self, url: str, session: aiohttp.ClientSession, frontend: Any, metrics: Metrics):
        self.url, self.session, self.frontend, self.metrics = url, session, frontend, metrics

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, headers=headers) as reply:
            return reply.status, await reply.json()

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path, headers=headers) as reply:
            is_json = reply.content_type == "application/json"
            return reply.status, await (reply.json() if is_json else reply.text())

    async def complete(self, **body: Any) -> dict[str, Any]:
        status, reply = await self.post("/v1/completions", {"prompt": "ab"} | body)
        assert status == 200, reply
        return reply

    async def chat(self, *messages: Any, **body: Any) -> dict[str, Any]:
        messages = messages or ({"role": "user", "content": "ab"},)
        status, reply = await self.post("/v1/chat/completions", {"messages": messages} | body)
        assert status == 200, reply
        return reply

    async def refused(self, path: str = "/v1/completions", status: int = 400, **body: Any) -> Any:
        """The error object of a request that must be refused with this status."""
        got, reply = await self.post(path, body)
        assert got == status, reply
        assert set(reply) == {"error"}
        assert set(reply["error"]) == {"message", "type", "param", "code"}
        return reply["error"]

    async def raw_stream(self, path: str = "/v1/completions", **body: Any) -> bytes:
        body = {"prompt": "ab", "stream": True} | body
        async with self.session.post(self.url + path, json=body) as reply:
            assert reply.status == 200, await reply.text()
            assert reply.headers["Content-Type"] == "text/event-stream"
            return await reply.read()


@asynccontextmanager
async def an_api(
    script: Script | None = None, *, cards: Iterable[ModelCard] = (), **options: Any
) -> AsyncIterator[Api]:
    """The whole application on a loopback port."""
    frontend = options.pop("frontend", None) or ScriptedFrontend(script, cards)
    metrics = Metrics()
    codecs: dict[str, ByteCodec] = {}
    settings: dict[str, Any] = {
        "codec_of": lambda card: codecs.setdefault(card.model, ByteCodec(card)),
        "overview": lambda: {"workers": [{"worker_id": "w", "state": "ready", "ranks": []}]},
        "placement": lambda request_id: None,
        "metrics": metrics,
        "secret": b"secret",
    }
    runner = make_runner(make_app(frontend, **(settings | options)))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    async with aiohttp.ClientSession() as session:
        yield Api(f"http://{host}:{port}", session, frontend, metrics)
    await runner.cleanup()
