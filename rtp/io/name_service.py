"""Who is alive, for a Master that is given its workers' addresses instead of waiting for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import aiohttp

from rtp.core.errors import RtpError
from rtp.core.messages import Register
from rtp.io.registration import ask

AGAIN_S = 1.0


class StaticNames:
    """A fixed list of addresses, each asked on its own: a dead one delays nobody (cases X08).

    known(address): whether the worker there has a link already.  on_register: gets what they say.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        session: aiohttp.ClientSession,
        secret: bytes,
        challenge: str,
        known: Callable[[str], bool],
        on_register: Callable[[Register], object],
    ) -> None:
        self._session = session
        self._secret = secret
        self._challenge = challenge
        self._known = known
        self._on_register = on_register
        self._tasks = [asyncio.create_task(self._watch(address)) for address in addresses]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _watch(self, address: str) -> None:
        while True:
            if not self._known(address):
                # Not there, or not one of ours: asked again like one that is away.
                with suppress(aiohttp.ClientError, OSError, TimeoutError, RtpError):
                    self._on_register(
                        await ask(self._session, address, self._secret, self._challenge)
                    )
            await asyncio.sleep(AGAIN_S)
