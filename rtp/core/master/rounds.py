"""One scheduling round of one model: the best request to the best rank, until ranks run out.

Where that rank steps together with others, requests of like length go to the others at the same
time (core/master/grouping), and their grants say so.

Bounded: at most 16 requests are looked at a round, and what starts together with the last of them,
so a backlog costs time in turn, not a pause.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from math import inf

import numpy as np

from rtp.core.commands import Command, Note
from rtp.core.master.affinity import Affinity
from rtp.core.master.fleet import Fleet
from rtp.core.master.grants import Grants
from rtp.core.master.grouping import MOST_TOGETHER
from rtp.core.master.placement import Choice, Placement
from rtp.core.master.pool import Pool
from rtp.core.master.ranks import Ranks
from rtp.core.master.returns import Returns
from rtp.core.master.view import View
from rtp.core.master.window import Waiting
from rtp.core.types import BoolArray

MOST_LOOKS = 16
MOST_IN_LINE = 2
"""Of a round, looks that find a request better off in line for a busy prefill rank. Those behind it
would find the same, one after the other, every round anew."""
NEXT_ROUND_S = 0.001
"""Between rounds that ended by the bound."""
LEAST_PAUSE_S = 0.0005
EXCLUDED_S = 1.0
"""A request avoids workers that failed it so long; then it may be that the others stay busy."""
HOLD_MARGIN = 1.25
"""A held request is looked at again when its rank took so many times the predicted wait."""


class Rounds:
    """run() places what can be placed now; its grants are charged before it returns."""

    def __init__(
        self,
        ranks: Ranks,
        fleet: Fleet,
        placement: Placement,
        chats: Affinity,
        grants: Grants,
        no_room: Callable[[Waiting, float], list[Command]],
        *,
        grouping: bool = True,
    ) -> None:
        """no_room: refuses a request that would not wait. grouping: a request for ranks that step
        together takes others like it along."""
        self._grouping = grouping
        self._ranks = ranks
        self._fleet = fleet
        self._placement = placement
        self._chats = chats
        self._grants = grants
        self._no_room = no_room
        self._returns = Returns(ranks)
        self.num_group_rounds = 0
        self.num_group_grants = 0
        """In them."""

    def run(self, pool: Pool, now: float) -> list[Command]:
        """One round. Sets the time of the next one that is worth while without news."""
        window = pool.window
        pool.dirty, pool.next_round = False, inf
        out = self._bind_at_once(pool, now) if pool.at_once else []
        if not window.num_waiting or not len(pool.rows):
            return out
        for held in window.held_too_long(now):
            pool.let_go(held, self._ranks)
        view = pool.view
        view.begin(now, pool.lead.seconds)
        self._returns.begin(pool, view, now)
        most, in_line = self._placement.num_looks + MOST_LOOKS, 0
        while self._placement.num_looks < most:
            if not window.num_open:
                break
            waiting = self._next(pool, view, now)
            if waiting is None:
                pool.num_held_back += pool.pairs is not None and bool(view.ready.any())
                break
            choice = self._look(pool, waiting, view, now)
            if choice is None:
                self._make_room(pool, waiting, view, now)
                window.skip(waiting)
                in_line += self._placement.better_in_line
            elif choice.hold:
                out += _failure(choice)
                self._ranks.hold(choice.row, choice.prefill_s)
                until = now + HOLD_MARGIN * choice.wait_s + pool.lead.seconds
                window.hold(waiting, choice.row, until, choice.prefill_s)
                view.reread(choice.row)
            else:
                out += self._start(pool, waiting, choice, view, now)
            row = self._returns.placed(pool, waiting, now)
            if row is not None:
                view.reread(row)
            if in_line == MOST_IN_LINE:
                break
        else:
            pool.next_round = now + NEXT_ROUND_S
        window.unskip()
        self._returns.end(pool)
        if pool.next_round == inf:
            pool.next_round = min(self._next_free(pool, view, now), window.next_hold)
        return out

    def _bind_at_once(self, pool: Pool, now: float) -> list[Command]:
        """Requests that do not wait: each to the best rank that has room, busy or not."""
        out: list[Command] = []
        view = pool.view
        view.begin(now, inf)  # any wait will do
        for waiting in list(islice(pool.at_once.values(), MOST_LOOKS)):
            choice = self._look(pool, waiting, view, now)
            if choice is None:
                out += self._no_room(waiting, now)
                continue
            out += _failure(choice) + self._grants.grant(pool, waiting, choice, now)
            self._reread(view, choice.row)
            if choice.partner is not None:
                view.reread(choice.partner.row)
        pool.dirty = bool(pool.at_once)
        return out

    def _next(self, pool: Pool, view: View, now: float) -> Waiting | None:
        """The request to look at, if any rank could take one."""
        room = view.most_room
        if pool.reserved is not None:
            row, waiting = pool.reserved
            index = view.where(row)
            if index >= 0:
                if view.ready.item(index) and view.room.item(index) >= pool.window.need(waiting):
                    return waiting
                room = view.most_room_but(index)
        if pool.pairs is not None and room > -inf:  # a prompt has room, but has what follows?
            room = pool.pairs.room(view)
        return pool.window.best(now, room) if room > -inf else None

    def _look(
        self, pool: Pool, waiting: Waiting, view: View, now: float, among: BoolArray | None = None
    ) -> Choice | None:
        """among: [R] of view.rows on which it may begin; all by default."""
        ask = waiting.ask
        allowed = self._allowed(pool, waiting, view, now)
        output = pool.outputs.expected(ask.tenant, ask.max_tokens)
        pairs, affine_decode_row = pool.pairs, -1
        if pairs is not None:
            chat = self._chats.find_decode(ask.tenant, ask.chat_id, now)
            affine_decode_row = self._fleet.row_of(chat)
        choice = self._placement.look(
            waiting,
            view,
            pool.block_size,
            output,
            allowed=allowed if among is None else allowed & among,
            affine_row=self._fleet.row_of(self._chats.find(ask.tenant, ask.chat_id, now)),
            now=now,
            pairs=pairs,
            partners=allowed,
            affine_decode_row=affine_decode_row,
            backlog_s=pool.backlog_s(waiting),
        )
        if choice is not None:
            if choice.hold or choice.row in self._ranks.groups:  # else it waits no longer
                tokens = choice.new_tokens if choice.partner is None else choice.partner.tokens
                need = tokens + ask.n * output
                pool.window.refresh(waiting, choice.new_tokens, choice.prefill_s, need)
        elif pairs is not None and among is None and self._placement.lacked_headroom:
            # What is cached for it may make it fit; when that is not enough, it waits for the rest.
            need = ask.num_tokens + ask.n * output
            pool.window.refresh(waiting, waiting.uncached, waiting.service_s, need)
            pool.num_held_back += 1
        return choice

    def _allowed(self, pool: Pool, waiting: Waiting, view: View, now: float) -> BoolArray:
        """Not a rank that takes none now or is kept for another. Not the workers that failed this
        request: until their next Status where nothing else is left, for EXCLUDED_S else. (Those
        that may be used again beat, so that a round follows.)"""
        allowed = view.open
        if waiting.ask.exclude:
            others = ~np.isin(view.rows, self._fleet.rows_of(waiting.ask.exclude))
            if not others.any() or now - waiting.asked_at > EXCLUDED_S:
                others |= view.reported_at > waiting.asked_at
            allowed = allowed & others
        if pool.reserved is not None and pool.reserved[1] is not waiting:
            allowed = allowed & (view.rows != pool.reserved[0])
        return allowed

    def _make_room(self, pool: Pool, waiting: Waiting, view: View, now: float) -> None:
        """An overdue request for which no pool has room gets a rank to itself as it drains; or
        small requests would pass it for ever."""
        if pool.reserved is not None or not pool.window.overdue(waiting, now):
            return
        fits = view.kv_total >= min(pool.window.need(waiting), pool.kv_total)
        if pool.pairs is not None:
            fits &= pool.pairs.decoding
        if view.ready.any() and fits.any():
            room = np.where(fits, view.room, -inf)
            pool.reserved = (int(view.rows[room.argmax()]), waiting)

    def _next_free(self, pool: Pool, view: View, now: float) -> float:
        """When the next busy rank comes under the lead."""
        if not pool.window.num_waiting:
            return inf
        return now + max(view.next_end_s - pool.lead.seconds, LEAST_PAUSE_S)

    def _start(
        self, pool: Pool, first: Waiting, choice: Choice, view: View, now: float
    ) -> list[Command]:
        """Grants a request its rank; where that one steps together with others, others theirs."""
        together = [(first, choice)]
        if self._grouping and choice.row in self._ranks.groups and not first.ask.lease_s:
            self._expect(pool, first, choice, view)
            together += self._company(pool, first, choice.row, view, now)
        group_id, size = -1, len(together)
        if size > 1:
            group_id = self.num_group_rounds
            self.num_group_rounds += 1
            self.num_group_grants += size
        out: list[Command] = []
        for waiting, where in together:
            leads = waiting is first
            out += _failure(where)
            out += self._grants.grant(pool, waiting, where, now, group_id, size, leads)
            if where.partner is not None:
                view.reread(where.partner.row)
        self._reread(view, choice.row)
        return out

    def _reread(self, view: View, row: int) -> None:
        """A row was charged; ranks that step together have become busy together."""
        group = self._ranks.groups.get(row)
        for each in (row,) if group is None else group.tolist():
            view.reread(each)

    def _expect(self, pool: Pool, waiting: Waiting, choice: Choice, view: View) -> None:
        """Its decode rank, which others of the round may want too, is charged with the grant."""
        if choice.partner is not None:
            ask = waiting.ask
            output = ask.n * pool.outputs.expected(ask.tenant, ask.max_tokens)
            view.expect(choice.partner.row, choice.partner.tokens + output, ask.n)

    def _company(
        self, pool: Pool, first: Waiting, row: int, view: View, now: float
    ) -> list[tuple[Waiting, Choice]]:
        """Who goes best with the first request of a group, each to another of its free ranks.
        Those whose callers have engines of their own submit to none of ours, so nobody waits for
        them."""
        at = [view.at.index(row) for row in self._ranks.groups[row].tolist()]
        free = np.zeros(len(view.rows), dtype=np.bool_)
        free[at] = view.ready[at]
        free[view.at.index(row)] = False
        count = min(int(free.sum()), MOST_TOGETHER - 1)
        if not count:
            return []
        token_s = float(pool.coefficients[1])
        at_ease = pool.lead.seconds / token_s if token_s else inf
        room = float(view.room[free].max()) if pool.pairs is None else pool.pairs.room(view)
        found: list[tuple[Waiting, Choice]] = []
        for other in pool.window.company(first, count, room, at_ease):
            external = other.ask.lease_s > 0
            choice = None if external else self._look(pool, other, view, now, free)
            if choice is not None:
                free[view.at.index(choice.row)] = False
                found.append((other, choice))
                self._expect(pool, other, choice, view)
        return found


def _failure(choice: Choice) -> list[Command]:
    return [Note("policy.failed", {"reason": choice.failure})] if choice.failure else []
