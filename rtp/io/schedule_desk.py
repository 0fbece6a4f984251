"""The frontend of router-only mode: it asks the Master for callers whose own engines run the
requests, and submits nothing."""

from __future__ import annotations

from collections.abc import Callable

from rtp.core.messages import Ask, AskMessage, Cancel, Done, Grant, Refuse, Renew
from rtp.core.types import FrontendId, RequestId

Answer = Callable[[Grant | Refuse], None]
ANSWERS = (Grant, Refuse)


class Desk:
    """tell: carries a message to the Master, which may answer before it returns."""

    def __init__(
        self, frontend_id: FrontendId, tell: Callable[[Ask | Cancel | Done | Renew], None]
    ):
        self.frontend_id = frontend_id
        self.tell = tell
        self._waiting: dict[RequestId, tuple[int, Answer]] = {}

    def __len__(self) -> int:
        """Requests without an answer."""
        return len(self._waiting)

    def ask(self, ask: Ask, answer: Answer) -> None:
        """answer: called once, unless the request is called off before."""
        self._waiting[ask.request_id] = (ask.attempt, answer)
        self.tell(ask)

    def call_off(self, request_id: RequestId, attempt: int, reason: str) -> None:
        """It waits no longer; nothing of it stays charged."""
        self._waiting.pop(request_id, None)
        self.tell(Cancel(request_id, attempt, reason))

    def master_up(self, term: int) -> None:
        """It lives in the Master's process, so there is nothing to be told again."""

    def from_master(self, message: AskMessage) -> None:
        """A grant nobody waits for any more goes back; those of a lost worker are gone with it."""
        if not isinstance(message, ANSWERS):
            return
        attempt, answer = self._waiting.get(message.request_id, (0, None))
        if answer is not None and attempt == message.attempt:
            del self._waiting[message.request_id]
            answer(message)
        elif isinstance(message, Grant):
            self.tell(Cancel(message.request_id, message.attempt, "nobody waits"))

    def close(self) -> None:
        """Refuses what waits: the server stops."""
        for request_id, (attempt, answer) in list(self._waiting.items()):
            del self._waiting[request_id]
            self.tell(Cancel(request_id, attempt, "stopping"))
            answer(_stopping(request_id, attempt))


def _stopping(request_id: RequestId, attempt: int) -> Refuse:
    return Refuse(
        request_id, attempt, 503, "service_unavailable", "The server is stopping", retry_after_s=1.0
    )
