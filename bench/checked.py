"""Streams that are held to the very tokens they must have, whatever is killed meanwhile."""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

import aiohttp

from rtp.backends.sim import Rule, expected_tokens
from rtp.core.ports import Capacity
from rtp.core.types import SamplingParams
from rtp.io.tokenizer import Tokenizer
from rtp.rank import byte_card

VOCAB_SIZE = 32000
EOS_IDS = (2,)
BLOCK = 16
HEADS = 8
HEAD_TOKENS = 64
RULE = Rule(VOCAB_SIZE, EOS_IDS)


class Checked:
    """Asks a server of the simulated model, whose output follows from the prompt alone."""

    def __init__(self, url: str, session: aiohttp.ClientSession, model: str = "sim") -> None:
        self._url = f"{url}/v1/completions"
        self._session = session
        self._model = model
        capacity = Capacity(
            num_blocks=1,
            block_size=BLOCK,
            max_model_len=8192,
            vocab_size=VOCAB_SIZE,
            eos_ids=EOS_IDS,
            kv_format="sim",
        )
        self._tokenizer = Tokenizer(byte_card(model, capacity))

    async def stream(self, number: int, tokens: int) -> str:
        """Request `number`, which shares its head with every eighth; "" when it brought exactly the
        text it must, one end and nothing behind it, else what is wrong."""
        random = Random(number)
        head = [300 + 100 * (number % HEADS) + i for i in range(HEAD_TOKENS)]
        prompt = head + [random.randrange(300, VOCAB_SIZE) for _ in range(16)]
        body: dict[str, Any] = {  # Any: JSON
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        wanted = self._tokenizer.decode(expected_tokens(RULE, prompt, sampling))
        try:
            text, ends = await self._read(body)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return f"request {number}: {type(error).__name__} {error}"
        if ends != {"length": 1, "[DONE]": 1}:
            return f"request {number}: ended with {dict(ends)} after {len(text)} characters"
        if text != wanted:
            return f"request {number}: wrong text, {len(text)} characters of {len(wanted)}"
        return ""

    async def _read(self, body: dict[str, Any]) -> tuple[str, Counter[str]]:
        """The text, and everything that looked like an end, by kind."""
        text, ends = "", Counter[str]()
        async with self._session.post(self._url, json=body) as reply:
            if reply.status != 200:
                ends[f"{reply.status} {(await reply.text())[:200]}"] += 1
                return text, ends
            async for line in reply.content:
                data = line.removeprefix(b"data: ").strip()
                if not data:
                    continue
                if data == b"[DONE]":
                    ends["[DONE]"] += 1
                    continue
                event = json.loads(data)
                if "error" in event:
                    ends[str(event["error"]["code"])] += 1
                    continue
                for choice in event["choices"]:
                    text += choice["text"]
                    if choice["finish_reason"]:
                        ends[choice["finish_reason"]] += 1
        return text, ends
