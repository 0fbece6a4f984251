"""Requests on their way in and out: asks through the gates into a window, cancels, deadlines."""

from __future__ import annotations

from rtp.core.commands import Command, Note, Send
from rtp.core.master.admission import Admission
from rtp.core.master.early import Early
from rtp.core.master.fleet import Fleet
from rtp.core.master.ledger import Ledger
from rtp.core.master.limits import Limits
from rtp.core.master.placement import reusable
from rtp.core.master.pool import Pool
from rtp.core.master.prefix_map import PrefixMap
from rtp.core.master.ranks import Ranks
from rtp.core.master.tenants import Tenants
from rtp.core.master.totals import Totals
from rtp.core.master.window import Waiting
from rtp.core.messages import Ask, Cancel, Refuse
from rtp.core.types import FrontendId, RequestId

MOST_DISPLACED = 16
"""Waiting requests that one may push out of a full queue."""


class Intake:
    """`waiting` holds every request that has neither a grant nor an end, by id, but for those that
    are early."""

    def __init__(
        self,
        ranks: Ranks,
        prefix_map: PrefixMap,
        ledger: Ledger,
        fleet: Fleet,
        admission: Admission,
        tenants: Tenants,
        totals: Totals,
        early: Early,
    ) -> None:
        self.waiting: dict[RequestId, Waiting] = {}
        self.early = early
        self._ranks = ranks
        self._map = prefix_map
        self._ledger = ledger
        self._fleet = fleet
        self._admission = admission
        self._tenants = tenants
        self._limits = Limits(ranks, admission, tenants)
        self._totals = totals

    def ask(self, ask: Ask, now: float) -> list[Command]:
        """Queues it or refuses it. A higher attempt takes its predecessor's place and age; an equal
        one is a repeat after a lost connection; a lower one is late and ignored."""
        self._totals.asked += 1
        out: list[Command] = []
        arrival = now
        before = self.waiting.get(ask.request_id)
        early = self.early.get(ask.request_id)
        booking = self._ledger.find(ask.request_id)
        if early is not None:
            if ask.attempt <= early.ask.attempt:
                return []
            arrival = early.arrival
            self.early.remove(ask.request_id)
        if before is not None:
            if ask.attempt <= before.ask.attempt:
                return []
            arrival = before.arrival
            self._withdraw(before, now)
        if booking is not None:
            if ask.attempt < booking.grant.attempt:
                return []
            if ask.attempt == booking.grant.attempt:
                return [] if booking.seen else [Send(ask.frontend_id, booking.grant)]
            arrival = booking.arrival
            out += self._fleet.withdraw(booking, now)
        again = bool(before or early or booking or ask.failed)
        if again:
            self._totals.replaced += 1
            self._totals.failed_attempts += ask.failed
        self._fleet.frontends.setdefault(ask.frontend_id)
        return out + self._admit(ask, arrival, now, again=again)

    def cancel(self, cancel: Cancel, now: float) -> list[Command]:
        """Withdraws everything of the request up to that attempt."""
        waiting = self.waiting.get(cancel.request_id)
        early = self.early.get(cancel.request_id)
        booking = self._ledger.find(cancel.request_id)
        self._totals.cancelled += 1
        if early is not None and early.ask.attempt <= cancel.attempt:
            self.early.remove(cancel.request_id)
        if waiting is not None and waiting.ask.attempt <= cancel.attempt:
            self._withdraw(waiting, now)
        if booking is not None and booking.grant.attempt <= cancel.attempt:
            used = booking.computed_tokens + cancel.generated if booking.first_token else 0
            return self._fleet.withdraw(booking, now, used=used)
        return []

    def frontend_down(self, frontend_id: FrontendId, now: float) -> None:
        """Its queued asks are dropped. Granted ones may run on, for streams are not this link:
        the worker's reports, or the lease, settle them."""
        self._fleet.frontends.pop(frontend_id, None)
        self.early.frontend_down(frontend_id)
        for waiting in list(self.waiting.values()):
            if waiting.ask.frontend_id == frontend_id:
                self._withdraw(waiting, now)

    def recall(self, now: float) -> list[Command]:
        """Asks anew for those that came before any worker and need not, or may not, wait on."""
        out: list[Command] = []
        for early in self.early.due(self._alive, now) if len(self.early) else ():
            if now >= early.deadline:
                out += _refused(early.ask, self._admission.deadline_passed(early.ask))
            else:
                out += self._admit(early.later(now), early.arrival, now, again=early.again)
        return out

    def _alive(self, model: str) -> bool:
        pool = self._fleet.pools.get(model)
        return pool is not None and pool.alive

    def expire(self, pool: Pool, now: float) -> list[Command]:
        """Deadlines that passed; everybody, when nobody is left to serve the model."""
        window = pool.window
        out: list[Command] = []
        if not pool.alive and (window.num_waiting or pool.at_once):
            for waiting in [*window, *pool.at_once.values()]:
                out += self._refuse(waiting, self._admission.no_worker(waiting.ask), now)
        for waiting in window.expired(now):
            out += self._refuse(waiting, self._admission.deadline_passed(waiting.ask), now)
        return out

    def no_room(self, waiting: Waiting, now: float) -> list[Command]:
        """It would not wait, and no rank can take it now."""
        return self._refuse(waiting, self._admission.no_room(waiting.ask), now)

    # ------------------------------------------------------------ gates

    def _admit(self, ask: Ask, arrival: float, now: float, *, again: bool) -> list[Command]:
        """Lets the request into its model's window, or tells why not. again: it passed the limits
        with an earlier attempt, so that only facts can refuse it now."""
        pool = self._fleet.pools.get(ask.model)
        if pool is None or not pool.alive:
            if self.early.takes(ask, arrival, now, again=again):
                return []
            unknown = pool is None and len(self._fleet.members)
            gates = self._admission
            return _refused(ask, (gates.unknown_model if unknown else gates.no_worker)(ask))
        if pool.outside and not ask.lease_s:
            return _refused(ask, self._admission.no_worker(ask))
        refusal = self._facts(ask, pool)
        if refusal is not None:
            return _refused(ask, refusal)
        cached, by_prompt = 0, self._limits.by_prompt(ask)
        if not ask.at_once or by_prompt:
            best = self._map.best(ask.hashes) * pool.block_size
            cached = min(best, reusable(ask.num_tokens, pool.block_size))
        uncached = ask.num_tokens - cached
        service_s = pool.prefill_s(uncached, cached)
        need = uncached + ask.n * pool.outputs.expected(ask.tenant, ask.max_tokens)
        out: list[Command] = []
        # No queue is full while nobody waits.
        if not again and (by_prompt or pool.window.num_waiting):
            refusal = self._limits.refusal(ask, pool, uncached, need, service_s, now)
            if refusal is not None:
                self._tenants.refused(ask.tenant)
                return _refused(ask, refusal)
            if not ask.at_once:
                out = self._make_way(pool, uncached, now)
        patience = min(ask.deadline_s, ask.ttft_timeout_s or ask.deadline_s)
        waiting = Waiting(ask, arrival, deadline=now + patience, asked_at=now)
        waiting.charge = self._tenants.charge(ask.tenant, need, now)
        if ask.at_once:
            pool.at_once[ask.request_id] = waiting
        else:
            pool.window.add(waiting, uncached, service_s, need)
        pool.dirty = True
        self.waiting[ask.request_id] = waiting
        return out

    def _facts(self, ask: Ask, pool: Pool) -> Refuse | None:
        refusal = self._admission.never_fits(ask, pool.max_model_len, pool.kv_total)
        if refusal is None and ask.deadline_s <= 0:
            return self._admission.deadline_passed(ask)
        return refusal

    def _make_way(self, pool: Pool, uncached: int, now: float) -> list[Command]:
        """A request that is let into a full queue pushes others out."""
        out: list[Command] = []
        for _ in range(MOST_DISPLACED):
            other = self._limits.in_the_way(pool, uncached)
            if other is None:
                break
            drain_s = self._limits.pool_drain_s(pool)
            out += self._refuse(other, self._admission.displaced(other.ask, drain_s), now)
        return out

    def _refuse(self, waiting: Waiting, refusal: Refuse, now: float) -> list[Command]:
        self._withdraw(waiting, now)
        return _refused(waiting.ask, refusal)

    def _withdraw(self, waiting: Waiting, now: float) -> None:
        """It waits no longer and got no grant: nothing is charged for it."""
        del self.waiting[waiting.ask.request_id]
        self._fleet.pools[waiting.ask.model].withdraw(waiting, self._ranks)
        if waiting.charge is not None:
            self._tenants.settle(waiting.charge, 0, now)


def _refused(ask: Ask, refusal: Refuse) -> list[Command]:
    facts: dict[str, object] = {
        "request_id": ask.request_id,
        "attempt": ask.attempt,
        "status": refusal.status,
        "code": refusal.code,
        "reason": refusal.reason,
    }
    return [Send(ask.frontend_id, refusal), Note("request.refused", facts)]
