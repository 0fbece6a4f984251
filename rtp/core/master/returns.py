"""Requests held for a rank that is about to be free: they compete for it one by one, the first in
the order first.

Together they would all be looked at, and all but one in vain, for the rank is busy again when one
has it. The others stay held and are not charged to the rank meanwhile, so that it looks as free to
the one that competes as it is. They follow when it went elsewhere or nowhere, and are charged again
when the rank is taken. Ranks that step together can start several at once, so theirs all compete.
"""

from __future__ import annotations

from rtp.core.master.load import MOST_HELD
from rtp.core.master.pool import Pool
from rtp.core.master.ranks import Ranks
from rtp.core.master.view import View
from rtp.core.master.window import Waiting
from rtp.core.types import RequestId


class Returns:
    """begin() with a round, placed() after each look in it, end() with it."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._competing: dict[RequestId, tuple[int, list[Waiting]]] = {}
        """Who competes: for which rank, and who comes after it."""

    def begin(self, pool: Pool, view: View, now: float) -> None:
        window = pool.window
        if not window.num_held:
            return
        for row in view.wanted():
            held = window.held_on(row)
            if row in self._ranks.groups:
                for waiting in held:
                    pool.let_go(waiting, self._ranks)
            else:
                for waiting in held:
                    self._ranks.let_go(row, waiting.held_s)
                self._compete(pool, row, held, now)
            view.reread(row)

    def placed(self, pool: Pool, waiting: Waiting, now: float) -> int | None:
        """It was looked at. Returns the rank it competed for if its charges have changed."""
        found = self._competing.pop(waiting.ask.request_id, None)
        if found is None or not found[1]:
            return None
        row, others = found
        if self._ranks.busy_until.item(row) - now < pool.lead.seconds:
            self._compete(pool, row, others, now)
            return None
        self._hold_again(pool, row, others)
        return row

    def end(self, pool: Pool) -> None:
        for row, others in self._competing.values():
            self._hold_again(pool, row, others)
        self._competing.clear()

    def _compete(self, pool: Pool, row: int, held: list[Waiting], now: float) -> None:
        first = pool.window.first_of(held, now)
        held.remove(first)
        pool.window.let_go(first)
        self._competing[first.ask.request_id] = row, held

    def _hold_again(self, pool: Pool, row: int, others: list[Waiting]) -> None:
        """Those for whom no place is left, as further ones are held there now, compete anywhere."""
        for waiting in others:
            if self._ranks.held.item(row) < MOST_HELD:
                self._ranks.hold(row, waiting.held_s)
            else:
                pool.window.let_go(waiting)
