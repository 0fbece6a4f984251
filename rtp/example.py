"""The example question that rtp.local asks the model it has started, and tells how to ask."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from rtp.api import read_keys

QUESTION = "What is the capital of France?"
BEGINNING = "The capital of France is"
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Example:
    """A request that shows that a model works, greedy: everybody gets the same answer."""

    url: str
    model: str
    key: str
    chat: bool
    """Without a chat template a model only continues text."""

    @property
    def text(self) -> str:
        return QUESTION if self.chat else BEGINNING

    @property
    def route(self) -> str:
        return self.url + ("/v1/chat/completions" if self.chat else "/v1/completions")

    def body(self) -> dict[str, Any]:  # Any: JSON
        prompt: dict[str, Any] = {"prompt": self.text}
        if self.chat:
            prompt = {"messages": [{"role": "user", "content": self.text}]}
        return {"model": self.model, **prompt, "temperature": 0, "max_tokens": 48}

    async def ask(self) -> str:
        """The model's answer."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
            session.post(self.route, json=self.body(), headers=headers) as answer,
        ):
            found = await answer.json()
        if "error" in found:
            return f"(no answer: {found['error']['message']})"
        choice = found["choices"][0]
        return str(choice["message"]["content"] if self.chat else choice["text"]).strip()

    def curl(self) -> str:
        """A line to paste into a shell."""
        words = ["curl", self.route, "-H", "Content-Type: application/json"]
        if self.key:
            words += ["-H", f"Authorization: Bearer {self.key}"]
        return shlex.join([*words, "-d", json.dumps(self.body())])


async def has_chat_template(url: str, model: str, key: str) -> bool:
    """Asks until the model is offered, which is a moment after its workers are ready."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    params = {"model": model}
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(
                f"{url}/tokenizer_info", params=params, headers=headers
            ) as answer:
                if answer.status == 200:
                    return bool((await answer.json())["chat_template"])
            await asyncio.sleep(LOOK_S)


def first_key(path: Path | None) -> str:
    """The API key for our own question; '' where none is needed."""
    keys = [os.environ.get("RTP_API_KEY", ""), *(read_keys(path) if path else ())]
    return next(filter(None, keys), "")
