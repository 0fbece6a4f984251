"""What a frontend's turn sends: commands in order, acks gathered per worker, cancels once."""

from __future__ import annotations

from collections import OrderedDict

from rtp.core.commands import Command, Note, Send
from rtp.core.frontend.lifecycle import Request
from rtp.core.messages import Ack, AckItem, AnyMessage, Cancel
from rtp.core.types import RequestId, WorkerId

MASTER = "master"


class Outbox:
    """Commands of the running handle(), and what waits for the turn's end."""

    __slots__ = ("_cancelled", "_commands", "_max_cancelled", "_owed")

    def __init__(self, max_cancelled: int) -> None:
        """max_cancelled: how many cancelled attempts are remembered, so that each is told once."""
        self._commands: list[Command] = []
        self._owed: dict[tuple[RequestId, int], Request] = {}
        self._cancelled: OrderedDict[tuple[WorkerId, RequestId, int], None] = OrderedDict()
        self._max_cancelled = max_cancelled

    def __bool__(self) -> bool:
        """Acknowledgements wait for the turn's end."""
        return bool(self._owed)

    def collect(self) -> list[Command]:
        """The commands so far; the next ones start a new list."""
        commands, self._commands = self._commands, []
        return commands

    def add(self, command: Command) -> None:
        self._commands.append(command)

    def note(self, event: str, **fields: object) -> None:
        self._commands.append(Note(event, fields))

    def send(self, peer: str, message: AnyMessage) -> None:
        self._commands.append(Send(peer, message))

    def owe(self, request: Request, choice: int) -> None:
        """The turn's end acknowledges this choice."""
        self._owed[request.begin.request_id, choice] = request

    def owe_all(self, request: Request) -> None:
        for choice in request.choices:
            self.owe(request, choice.index)

    def acknowledge(self) -> None:
        """One Ack per worker. A slow client withholds it, but not of a choice that has ended."""
        owed, self._owed = self._owed, {}
        items: dict[WorkerId, list[AckItem]] = {}
        for (_, index), request in owed.items():
            choice = request.choices[index]
            if request.grant is not None and (choice.finish or not request.paused):
                items.setdefault(request.grant.worker_id, []).append(choice.ack(request))
        for worker_id, batch in items.items():
            self.send(worker_id, Ack(tuple(batch)))

    def cancel(self, worker_id: WorkerId, request_id: RequestId, attempt: int, reason: str) -> None:
        """Tells a worker, unless it has been told, that an attempt is over."""
        if (worker_id, request_id, attempt) not in self._cancelled:
            self.over(worker_id, request_id, attempt)
            self.send(worker_id, Cancel(request_id, attempt, reason))

    def over(self, worker_id: WorkerId, request_id: RequestId, attempt: int) -> None:
        """A worker knows that this attempt is over: late tokens of it need no answer."""
        self._cancelled[worker_id, request_id, attempt] = None
        if len(self._cancelled) > self._max_cancelled:
            self._cancelled.popitem(last=False)

    def doubt(self, worker_id: WorkerId) -> None:
        """A worker's connection is new: any cancel may have been lost with the one before."""
        for key in [key for key in self._cancelled if key[0] == worker_id]:
            del self._cancelled[key]
