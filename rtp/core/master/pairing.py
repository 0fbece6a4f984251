"""Splitting a request: which decode rank its tokens would come from, and whether that is better.

A decode rank is a candidate while it has headroom for all that the request is expected to put
there, in tokens:

    headroom(d) = kv_free - expected output of all that is on d or coming - prompts coming
                  - prompt tokens of this request not held - n * E[output]

What is reserved for a request stays E[output] until it ends, for lengths are near enough geometric,
while kv_free falls with every token it puts there: the reservation grows before anybody has to be
preempted. The chat's last decode rank is taken while it has headroom, else the one with the least

    time per output token + transfer / E[output]

in seconds, ties to the most headroom. Then three ways compete, each with the rank that the routing
policy likes best for it: a prefill rank with that decode rank, a fused rank, the prefill on a
decode rank. The least predicted time to the whole answer wins, time it takes from others included:

    wait + prefill + E[output] * time per output token         wherever it decodes
        + transfer                                             of a split pair
        + prefill * requests that decode or will on that rank  of the other two

What the time per token exceeds the best one by is all that differs between ways, so this is TTFT
plus excess TPOT. A request does not go to a fused or decode rank where it would be better off in
line for a prefill rank.
"""

from __future__ import annotations

import msgspec
import numpy as np

from rtp.core.master.contenders import NONE
from rtp.core.master.offer import Offer
from rtp.core.master.partners import (
    DECODE,
    PREFILL,
    best_partner,
    least_in_line_s,
    pair_candidates,
    room_to_end,
)
from rtp.core.master.view import View
from rtp.core.types import BoolArray, FloatArray, IntArray

SLACK_S = 1e-6
"""A way is taken before one that is named earlier only if it is better by this."""


class Need(msgspec.Struct, frozen=True, gc=False):
    """What one request is going to take, in tokens."""

    num_tokens: int
    choices: int
    output: int
    """Expected of one choice."""
    short: bool = False
    """It ends with its first tokens: a prefill rank is all it needs."""

    @property
    def whole(self) -> int:
        return self.num_tokens + self.choices * self.output


class Partner(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The decode rank that a split request would go on at."""

    row: int
    tokens: int
    """Of the prompt, to be brought there."""
    token_s: float
    """Predicted time per output token."""
    transfer_s: float
    headroom: float
    """Tokens left there once this request is."""
    why: str
    """"chat": it served this chat before; "time": predicted best."""


class Pairs:
    """The ranks of one model by what they do. Length R, rows as in the pool's views."""

    def __init__(
        self, kinds: IntArray, transports: IntArray, latency_s: FloatArray, token_s: FloatArray
    ) -> None:
        """kinds: PREFILL, DECODE or FUSED.  transports: a bit for each that a rank can use.
        latency_s, token_s: of bringing pages to it.  There is a prefill and a decode rank that
        share a transport."""
        self.kinds = np.ascontiguousarray(kinds)
        self.ways = np.unique(kinds).tolist()
        """That there are ranks for."""
        self.decoding = kinds != PREFILL
        """Ranks that a request can stay on to its end."""
        self._transports = np.ascontiguousarray(transports)
        self._partners = (kinds == DECODE).nonzero()[0]
        self._place = {at: i for i, at in enumerate(self._partners.tolist())}
        any_prefill = int(np.bitwise_or.reduce(transports[kinds == PREFILL]))
        self._facts = np.ascontiguousarray(
            [
                (transports[self._partners] & any_prefill) != 0,
                latency_s[self._partners],
                token_s[self._partners],
            ],
            dtype=np.float64,
        )
        self._token_s = np.zeros(len(self._partners))

    def partner(
        self, view: View, need: Need, allowed: BoolArray, affine_row: int
    ) -> Partner | None:
        """The decode rank for a request, None where none has headroom. allowed: [R]."""
        own = self._place.get(view.where(affine_row), NONE)
        best, token_s, transfer_s, headroom, tokens = best_partner(
            view.columns,
            view.flags,
            view.matched_tokens,
            allowed,
            view.coefficients,
            self._partners,
            self._facts,
            self._token_s,
            need.num_tokens,
            need.choices,
            need.output,
            own,
        )
        at = int(best)
        if at < 0:
            return None
        return Partner(
            row=view.rows.item(self._partners.item(at)),
            tokens=int(tokens),
            token_s=token_s,
            transfer_s=transfer_s,
            headroom=headroom,
            why="chat" if at == own else "time",
        )

    def candidates(
        self,
        view: View,
        need: Need,
        allowed: BoolArray,
        partner: Partner | None,
        holds: bool,
        prunes: bool,
        own: int,
    ) -> tuple[int, int, int, int]:
        """As contenders.candidates does it: how many ranks fit the request, how many of them are
        ready, how many are candidates, how many contend, -1 for all of those; view.mask and
        view.few are set. partner: as just found."""
        theirs, after_s = self._behind(view, need, partner)
        return pair_candidates(
            view.columns,
            view.flags,
            view.matched_tokens,
            allowed,
            view.coefficients,
            self.kinds,
            self._transports,
            self._partners,
            self._token_s,
            need.num_tokens,
            need.choices,
            need.output,
            need.short,
            theirs,
            after_s,
            holds,
            prunes,
            own,
            view.mask,
            view.few,
        )

    def _behind(self, view: View, need: Need, partner: Partner | None) -> tuple[int, float]:
        """Transports of the decode rank, 0 without one, and seconds from a prefill to the end by
        it."""
        if partner is None:
            return 0, 0.0
        theirs = self._transports.item(view.at.index(partner.row))
        return theirs, need.output * partner.token_s + partner.transfer_s

    def room(self, view: View) -> float:
        """The most that any rank offers on which a request could end."""
        return room_to_end(view.columns, view.flags, self.kinds)

    def best(
        self,
        view: View,
        offer: Offer,
        by_way: list[tuple[int, int, float]],
        need: Need,
        allowed: BoolArray,
        partner: Partner | None,
    ) -> tuple[int, int] | None:
        """The way, and which candidate: by_way has the ways, the best of each, its predicted
        prefill. None: it is better off in line for a prefill rank."""
        chosen, best, least = NONE, NONE, np.inf
        theirs, after_s = self._behind(view, need, partner)
        for way, index, prefill_s in by_way:
            cost = offer.wait_s.item(index) + prefill_s
            if way == PREFILL:
                cost += after_s
            else:
                others = offer.num_requests.item(index)
                cost += need.output * _token_s(offer, index, need) + others * prefill_s
            if cost < least - SLACK_S:
                chosen, best, least = way, index, cost
        if chosen != PREFILL:
            line_s = least_in_line_s(
                view.columns,
                view.flags,
                view.matched_tokens,
                allowed,
                view.coefficients,
                self.kinds,
                self._transports,
                theirs,
                need.num_tokens,
                need.choices,
                need.short,
            )
            if line_s + after_s < least:
                return None
        return chosen, best


def _token_s(offer: Offer, index: int, need: Need) -> float:
    """Predicted time per output token on a candidate's own rank."""
    some = offer.coefficients
    d, e, f = some[3:, index if some.shape[1] > 1 else 0].tolist()
    batch = offer.num_requests.item(index) + need.choices
    context = offer.context_tokens.item(index) + need.choices * need.num_tokens
    return float(d + e * batch + f * context)
