"""From a choice to a Grant: the ledger is charged, the frontend answered, the chat remembered."""

from __future__ import annotations

from math import inf

from rtp.core.commands import Command, Note, Send
from rtp.core.master.affinity import Affinity
from rtp.core.master.booking import Booking
from rtp.core.master.fleet import Fleet
from rtp.core.master.ledger import Ledger
from rtp.core.master.pairing import Partner
from rtp.core.master.placement import Choice
from rtp.core.master.pool import Pool
from rtp.core.master.ranks import Ranks
from rtp.core.master.window import Waiting
from rtp.core.messages import Ask, Grant, Place
from rtp.core.types import RequestId


class Grants:
    """grant() takes a request out of the queue."""

    def __init__(
        self,
        ranks: Ranks,
        ledger: Ledger,
        fleet: Fleet,
        chats: Affinity,
        queue: dict[RequestId, Waiting],
        lease_s: float,
    ) -> None:
        self._ranks = ranks
        self._ledger = ledger
        self._fleet = fleet
        self._chats = chats
        self._queue = queue
        self._lease_s = lease_s

    def grant(
        self,
        pool: Pool,
        waiting: Waiting,
        choice: Choice,
        now: float,
        group_id: int = -1,
        group_size: int = 1,
        leads: bool = True,
    ) -> list[Command]:
        """Charges the rank, and the one where it goes on."""
        ask, row, partner = waiting.ask, choice.row, choice.partner
        del self._queue[ask.request_id]
        pool.withdraw(waiting, self._ranks)
        expected = ask.n * pool.outputs.expected(ask.tenant, ask.max_tokens)
        service_s = choice.prefill_s + pool.decode_s(ask.num_tokens, expected)
        if ask.at_once:
            pool.window.bound(ask.tenant, service_s)
        else:
            pool.window.granted(waiting, service_s, leads)
        member, rank = self._fleet.at_row(row)
        grant = Grant(
            request_id=ask.request_id,
            attempt=ask.attempt,
            number=self._number(ask, row),
            worker_id=member.worker_id,
            epoch=member.register.epoch,
            address=member.register.address,
            rank=rank,
            matched_tokens=choice.matched_tokens,
            lease_s=ask.lease_s or self._lease_s,
            held=waiting.hold_number > 0,
            group_id=group_id,
            group_size=group_size,
            decode=None if partner is None else self._place(ask, partner.row),
        )
        booking = Booking(
            grant=grant,
            row=row,
            frontend_id=ask.frontend_id,
            model=ask.model,
            tenant=ask.tenant,
            choices=ask.n,
            new_tokens=choice.new_tokens,
            reserved_tokens=expected if partner is None else ask.n,
            prefill_s=choice.prefill_s,
            granted_at=now,
            arrival=waiting.arrival,
            external=ask.lease_s > 0,
            lease_ends=now + ask.lease_s if ask.lease_s > 0 else inf,
            charge=waiting.charge,
        )
        if partner is not None:
            booking.decode = _reservation(booking, partner, expected)
        self._ledger.charge(booking, ask.hashes, choice.matched_tokens // pool.block_size)
        facts: dict[str, object] = {
            "request_id": ask.request_id,
            "attempt": ask.attempt,
            "worker_id": member.worker_id,
            "rank": rank,
            "matched_tokens": choice.matched_tokens,
            "new_tokens": choice.new_tokens,
            "waited_s": now - waiting.arrival,
        }
        goes_on = None
        if pool.pairs is not None:
            to = grant.decode or grant
            goes_on = to.worker_id, to.rank
            facts |= {"decode_worker_id": to.worker_id, "decode_rank": to.rank}
        self._chats.remember(ask.tenant, ask.chat_id, member.worker_id, rank, now, goes_on)
        return [Send(ask.frontend_id, grant), Note("request.placed", facts)]

    def _place(self, ask: Ask, row: int) -> Place:
        member, rank = self._fleet.at_row(row)
        register = member.register
        number = self._number(ask, row)
        return Place(register.worker_id, register.epoch, register.address, rank, number)

    def _number(self, ask: Ask, row: int) -> int:
        external = ask.lease_s > 0
        return self._ranks.external_number() if external else int(self._ranks.next_number[row])


def _reservation(booking: Booking, partner: Partner, expected: int) -> Booking:
    """On the decode rank: its output, and its prompt until that is there."""
    grant, place = booking.grant, booking.grant.decode
    assert place is not None
    return Booking(
        grant=Grant(
            request_id=grant.request_id,
            attempt=grant.attempt,
            number=place.number,
            worker_id=place.worker_id,
            epoch=place.epoch,
            address=place.address,
            rank=place.rank,
            matched_tokens=grant.matched_tokens,
            lease_s=grant.lease_s,
            held=grant.held,
            group_id=grant.group_id,
            group_size=grant.group_size,
        ),
        row=partner.row,
        frontend_id=booking.frontend_id,
        model=booking.model,
        tenant=booking.tenant,
        choices=booking.choices,
        new_tokens=0,
        reserved_tokens=expected + partner.tokens,
        prefill_s=0.0,
        granted_at=booking.granted_at,
        arrival=booking.arrival,
        external=booking.external,
        prefill=booking,
        coming_tokens=partner.tokens,
    )
