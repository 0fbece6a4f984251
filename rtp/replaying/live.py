"""Runs against a server: which one, and what is sent."""

from __future__ import annotations

import asyncio
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Annotated, Self

import msgspec
from msgspec import Meta, Struct
from pydantic import Field, field_validator, model_validator

from rtp.config import Seconds, Settings, checked_address, option
from rtp.core.errors import ConfigError
from rtp.core.replayed import Replayed
from rtp.core.trace import TraceRow
from rtp.io.live_replay import Prompts, Sending, Target, replay_live
from rtp.replaying.progress import Bars

TokenId = Annotated[int, Field(ge=0)]


class LiveOptions(Settings):
    """A server instead of a simulated cluster."""

    live: str | None = option(
        None,
        "Replay against this OpenAI-compatible server; $RTP_API_KEY is its key.",
        "live",
        "URL",
    )
    live_model: str = option("", "Model to ask for; default: the first it lists.", "live", "NAME")
    live_timeout_s: Seconds = option(600.0, "Longest one request may take.", "live")
    first_id: TokenId = option(
        1000, "Prompts are made of token ids from this one on ...", "live", "ID"
    )
    end_id: TokenId = option(
        9000, "... to before this one, which any vocabulary has.", "live", "ID"
    )

    @field_validator("live")
    @classmethod
    def _is_an_address(cls, text: str | None) -> str | None:
        return None if text is None else checked_address(text)

    @model_validator(mode="after")
    def _has_token_ids(self) -> Self:
        if self.end_id <= self.first_id:
            raise ValueError(f"end_id {self.end_id} is not above first_id {self.first_id}")
        return self


def play(
    options: LiveOptions,
    rows: Sequence[TraceRow],
    block_size: int,
    seed: int,
    speed: float,
    decode: bool,
) -> tuple[Replayed, Sending]:
    """One live run, with its progress. Raises ConfigError where the server cannot be reached."""
    assert options.live is not None
    url = options.live.rstrip("/").removesuffix("/v1")
    url = url if "://" in url else f"http://{url}"
    key = os.environ.get("RTP_API_KEY")
    target = Target(
        url=url,
        model=options.live_model or _first_model(url, key),
        key=key,
        timeout_s=options.live_timeout_s,
    )
    prompts = Prompts(
        block_size=block_size, first_id=options.first_id, end_id=options.end_id, salt=seed
    )
    with Bars([f"live, seed {seed}"]) as bars:
        done = asyncio.run(
            replay_live(
                rows,
                target,
                prompts,
                speed=speed,
                decode=decode,
                progress=lambda fraction: bars.moved(0, fraction),
            )
        )
        bars.ended(0)
    return done


class _Model(Struct):
    id: Annotated[str, Meta(min_length=1)]


class _Models(Struct):
    data: list[_Model]


def _first_model(url: str, key: str | None) -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url}/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            models = msgspec.json.decode(reply.read(), type=_Models).data
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{url}/v1/models: {words}") from None
    if not models:
        raise ConfigError(f"{url} lists no model")
    return models[0].id
