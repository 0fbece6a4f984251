"""Output ids of one choice -> the text a client sees, with the ids and logprobs it came from.

Text is released once it can no longer be part of a stop string; a token is released with its last
character, so a character spread over several tokens, or a held one, holds its tokens too.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from rtp.core.frontend.stops import StopStrings
from rtp.core.ports import Detokenizer
from rtp.core.steps import TokenLogprobs


class Released(NamedTuple):
    """What a choice may show since the last time it was asked."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One per id, or empty when there are none."""


class ChoiceText:
    """Text of one choice. Feed tokens with push(), end with finish(), collect with take()."""

    __slots__ = (
        "_armed_from",
        "_count",
        "_detokenizer",
        "_include_stop",
        "_open",
        "_pending",
        "_ready",
        "_released",
        "_state",
        "_stops",
        "ended",
        "stop",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopStrings | None = None,
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """min_tokens: a stop string that is complete before that many tokens does not count."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._include_stop = include_stop
        self._armed_from = min_tokens
        self._count = 0
        self._state = 0
        self._pending = ""
        self._released = 0  # characters already taken
        self._open: list[tuple[int, TokenLogprobs | None]] = []  # their text is not complete
        self._ready: deque[tuple[int, int, TokenLogprobs | None]] = deque()  # end of text, token
        self.stop = ""
        """The stop string that ended the text, or ''."""
        self.ended = False

    def push(
        self, token: int, logprobs: TokenLogprobs | None = None, *, silent: bool = False
    ) -> bool:
        """Adds one token; returns whether a stop string is complete, which ends the text.

        silent: the token is counted but shows no text (the stop token that ended the choice).
        """
        self._count += 1
        self._open.append((token, logprobs))
        piece = "" if silent else self._detokenizer.push(token)
        if piece:
            self._add(piece)
        return self.ended

    def finish(self) -> bool:
        """No more tokens: all held text is released. Returns whether a stop string came of it."""
        if not self.ended:
            tail = self._detokenizer.flush()
            if tail:
                self._add(tail)
            self._end()
        return bool(self.stop)

    def take(self) -> Released | None:
        """What became certain since the last call; None when nothing did."""
        held = 0 if self.ended or self._stops is None else self._stops.held(self._state)
        cut = len(self._pending) - held
        text = self._pending[:cut]
        self._pending = self._pending[cut:]
        self._released += cut
        ids = []
        values = []
        ready = self._ready
        while ready and ready[0][0] <= self._released:
            _, token, logprobs = ready.popleft()
            ids.append(token)
            if logprobs is not None:
                values.append(logprobs)
        return Released(text, tuple(ids), tuple(values)) if text or ids else None

    def _add(self, piece: str) -> None:
        """Appends text; on a complete stop string cuts it and ends."""
        start = len(self._pending)
        self._pending += piece
        if self._stops is not None:
            scan = self._stops.scan(self._state, piece, armed=self._count >= self._armed_from)
            self._state = scan.state
            if scan.stop:
                self.stop = scan.stop
                end = start + scan.end
                self._pending = self._pending[: end if self._include_stop else end - len(scan.stop)]
                self._end()
                return
        self._close(self._released + len(self._pending))

    def _end(self) -> None:
        self.ended = True
        self._close(0)
        # A cut may have removed text that tokens wait for: what is left goes out with all of them.
        self._ready = deque((0, token, logprobs) for _, token, logprobs in self._ready)

    def _close(self, end: int) -> None:
        for token, logprobs in self._open:
            self._ready.append((end, token, logprobs))
        self._open.clear()
