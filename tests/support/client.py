"""A small client of the HTTP API for tests: plain requests and streams, errors as they come."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Stream:
    """What one streamed completion brought."""

    status: int = 0
    text: str = ""
    finish: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    chunks: int = 0
    id: str = ""
    marks: list[asyncio.Event] = field(default_factory=list)


class Client:
    """`async with Client(url) as client`."""

    def __init__(self, url: str, model: str = "smollm2-135m") -> None:
        self.url, self.model = url, model

    async def __aenter__(self) -> Client:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and JSON body."""
        body.setdefault("model", self.model)
        async with self.session.post(self.url + path, json=body) as reply:
            return reply.status, await reply.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as reply:
            kind = reply.content_type
            return reply.status, await (reply.json() if "json" in kind else reply.text())

    async def complete(self, prompt: str | list[int], **body: Any) -> dict[str, Any]:
        """POST /v1/completions, greedy unless told otherwise. Asserts status 200."""
        status, reply = await self.post(
            "/v1/completions", prompt=prompt, **{"temperature": 0, **body}
        )
        assert status == 200, reply
        return reply

    async def chat(self, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
        status, reply = await self.post(
            "/v1/chat/completions", messages=messages, **{"temperature": 0, **body}
        )
        assert status == 200, reply
        return reply

    async def stream(
        self,
        prompt: str | list[int],
        *,
        on_chunk: Any = None,
        leave_after: int | None = None,
        **body: Any,
    ) -> Stream:
        """Streams /v1/completions to its end, or closes the socket after `leave_after` chunks."""
        out = Stream()
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "stream": True, **body}
        async with self.session.post(self.url + "/v1/completions", json=body) as reply:
            out.status = reply.status
            if reply.status != 200:
                out.error = (await reply.json())["error"]
                return out
            async for line in reply.content:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    out.done = True
                    break
                event = json.loads(line[6:])
                if "error" in event:
                    out.error = event["error"]
                    break
                out.id = event["id"]
                out.usage = event.get("usage") or out.usage
                for choice in event["choices"]:
                    out.text += choice["text"]
                    out.finish = choice["finish_reason"] or out.finish
                    out.chunks += 1
                if on_chunk is not None:
                    on_chunk(out)
                if leave_after is not None and out.chunks >= leave_after:
                    reply.close()
                    return out
        return out
