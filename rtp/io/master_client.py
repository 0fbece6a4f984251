"""A frontend's connection to the Master: dialled, and dialled again for as long as it lives.

While it is down nothing is kept here: the core asks again what it still wants once it is up.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from rtp.core.errors import ConfigError, ProtocolError
from rtp.core.messages import Ask, AskMessage, Cancel
from rtp.core.types import FrontendId
from rtp.io.codec import FrameDecoder, ToAsker
from rtp.io.connection import FrameConnection
from rtp.io.handshake import ASK_KIND, MASTER, Claim, new_nonce
from rtp.io.upgrade import Refused, dial

FIRST_REDIAL_S = 0.02
LAST_REDIAL_S = 0.5


class MasterClient:
    """Build inside the running loop, then start(). A Master of a lower term than one met before is
    refused: it is one that should have ended.

    address: host:port of the Master's HTTP server.  on_up(term), on_down(): connection events.
    on_message: gets what the Master answers.  on_trouble(reason): why it is down, per try.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: bytes,
        frontend_id: FrontendId,
        on_up: Callable[[int], None],
        on_down: Callable[[], None],
        on_message: Callable[[AskMessage], None],
        on_trouble: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.term = 0
        """The highest term met; 0: none."""
        self._address = address
        self._secret = secret
        self._frontend_id = frontend_id
        self._on_up = on_up
        self._on_down = on_down
        self._on_message = on_message
        self._on_trouble = on_trouble
        self._connection: FrameConnection | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep())

    def send(self, message: Ask | Cancel) -> None:
        """Queues a frame, all of a turn in one write; dropped while there is no connection."""
        if self._connection is not None:
            self._connection.send(message)

    async def close(self) -> None:
        """Ends the connection, what was said first; no event follows."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        wait_s = FIRST_REDIAL_S
        while True:
            was_up, reason = await self._once()
            if was_up:
                wait_s = FIRST_REDIAL_S
            self._on_trouble(reason)
            await asyncio.sleep(wait_s * random.uniform(0.8, 1.2))
            wait_s = min(2 * wait_s, LAST_REDIAL_S)

    async def _once(self) -> tuple[bool, str]:
        """One connection from its dial to its end: whether it was ever up, and why it is not."""
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def closed(reason: str) -> None:
            if not lost.done():
                lost.set_result(reason)

        connection = FrameConnection(FrameDecoder(ToAsker), self._on_message, closed)
        claim = Claim(ASK_KIND, MASTER, self.term, self._frontend_id, new_nonce())
        try:
            term = await dial(self._address, claim, self._secret, connection)
        except TimeoutError:
            return False, f"no answer from {self._address}"
        except (Refused, ProtocolError, ConfigError, OSError) as error:
            return False, str(error)
        try:
            if not term.isdecimal() or int(term) < self.term:
                return False, f"term {term} answers, but {self.term} was met"
            self.term = int(term)
            self._connection = connection
            self._on_up(self.term)
            reason = await lost
        finally:
            self._connection = None
            connection.close()
        self._on_down()
        return True, reason
