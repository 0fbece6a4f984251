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

from rtp.core.master.offer import Offer
from rtp.core.master.predictor import prefill_seconds
from rtp.core.master.view import View
from rtp.core.types import BoolArray, FloatArray, IntArray

ROUND_DIGITS = 6
ROUNDING = 2.0 * 10.0**-ROUND_DIGITS
PREFILL, FUSED, DECODE = 0, 1, 2
WAYS = (PREFILL, FUSED, DECODE)
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
        self.prefills = kinds == PREFILL
        self.decoding = ~self.prefills
        """Ranks that a request can stay on to its end."""
        self.by_way = [(way, kinds == way) for way in WAYS if (kinds == way).any()]
        """Which ranks go each way."""
        self._fused = bool((kinds == FUSED).any())
        self._transports = transports
        self._sharing: dict[int, BoolArray] = {}
        """By transports: the prefill ranks that have one of them."""
        self._partners = (kinds == DECODE).nonzero()[0]
        self._place = {at: i for i, at in enumerate(self._partners.tolist())}
        self._latency_s = latency_s[self._partners]
        self._page_s = token_s[self._partners]
        any_prefill = int(np.bitwise_or.reduce(transports[self.prefills]))
        self._reachable = (transports[self._partners] & any_prefill) != 0
        self._view: View | None = None
        self._token_s = self._latency_s

    def partner(
        self, view: View, need: Need, matched: FloatArray, allowed: BoolArray, affine_row: int
    ) -> Partner | None:
        """The decode rank for a request, None where none has headroom. matched, allowed: [R].
        About 15 array calls on the decode ranks."""
        self._look_at(view)
        cached = matched.take(self._partners)
        headroom = self._room + cached
        headroom -= need.whole
        able = self._able & (headroom >= 0)
        if allowed is not view.open:
            able &= allowed.take(self._partners)
        added = self._per_row * need.choices + self._per_token * (need.choices * need.num_tokens)
        token_s = self._token_s = self._base_s + added
        transfer_s = self._latency_s + self._page_s * (need.num_tokens - cached)
        own = self._place.get(view.where(affine_row), -1)
        if own >= 0 and able.item(own):
            best, why = own, "chat"
        else:
            why = "time"
            cost = np.where(able, token_s + transfer_s / need.output, np.inf)
            best = int(cost.argmin())
            if not able.item(best):
                return None
            near = (cost <= cost.item(best) + ROUNDING).nonzero()[0]
            if len(near) > 1:
                rounded = np.round(cost.take(near), ROUND_DIGITS)
                near = near[rounded == rounded.min()]
                best = near.item(headroom.take(near).argmax())
        return Partner(
            row=view.rows.item(self._partners.item(best)),
            tokens=int(need.num_tokens - cached.item(best)),
            token_s=token_s.item(best),
            transfer_s=transfer_s.item(best),
            headroom=headroom.item(best),
            why=why,
        )

    def contenders(
        self,
        view: View,
        offered: BoolArray,
        need: Need,
        matched: FloatArray,
        allowed: BoolArray,
        partner: Partner | None,
        affine_row: int,
    ) -> IntArray | None:
        """Where the candidates stand that may win by a monotone policy, as placement.contenders
        finds them: an idle prefill rank and those that have more of the prompt. None: all, for none
        is idle, or a decode rank might be better off with the prefill. partner: as just found."""
        if self._fused or (partner is None and not need.short):
            return None
        prefills = self.prefills if partner is None else self._sharing_with(view, partner)
        among = prefills if allowed is view.open else prefills & allowed
        idlest = view.idlest(matched, among)
        if idlest < 0:
            return None
        cached = matched.item(idlest)
        a, b, c = view.coefficients[:3, 0].tolist()
        new = need.num_tokens - cached
        prefill_s = a + new * (b + c * (cached + 0.5 * new))
        if partner is not None:
            after_s = need.output * partner.token_s + partner.transfer_s
            there_s = self._requests * prefill_s + need.output * self._token_s
            if there_s.item(there_s.argmin()) <= after_s:
                return None
        better = offered & (matched > cached)
        if allowed is not view.open:
            better &= allowed
        own = view.where(affine_row)
        if own >= 0 and offered.item(own) and allowed.item(own):
            better[own] = True
        at = better.nonzero()[0]
        if len(at):
            room, decoding = view.room.take(at) + matched.take(at), self.decoding.take(at)
            fits = np.where(decoding, room >= need.whole, room >= need.num_tokens + need.choices)
            at = at[fits & (decoding | prefills.take(at))]
        return at if idlest in at else np.sort(np.append(at, idlest))

    def _look_at(self, view: View) -> None:
        """Takes in what a new round, or its last decisions, changed of the decode ranks."""
        at = self._partners
        if view is not self._view:
            self._view, self._num_touched = view, len(view.touched)
            some = view.coefficients
            d, e, f = some[3:, 0].tolist() if view.alike else some[3:].take(at, axis=1)
            self._per_row, self._per_token = e, f
            self._requests = view.num_requests.take(at)
            self._base_s = d + e * self._requests + f * view.context_tokens.take(at)
            self._room = view.room.take(at)
            self._able = self._reachable & view.numbered.take(at) & view.open.take(at)
        for index in view.touched[self._num_touched :]:
            i = self._place.get(index)
            if i is not None:
                more = view.num_requests.item(index) - self._requests.item(i)
                self._requests[i] += more
                self._base_s[i] += more * (self._per_row if view.alike else self._per_row[i])
                self._room[i] = view.room.item(index)
                able = self._reachable.item(i) and view.numbered.item(index)
                self._able[i] = able and view.open.item(index)
        self._num_touched = len(view.touched)

    def _sharing_with(self, view: View, partner: Partner) -> BoolArray:
        """[R] the prefill ranks that can hand over to it."""
        theirs = self._transports.item(view.at.index(partner.row))
        found = self._sharing.get(theirs)
        if found is None:
            found = self._sharing[theirs] = self.prefills & ((self._transports & theirs) != 0)
        return found

    def fits(
        self,
        view: View,
        need: Need,
        matched: FloatArray,
        allowed: BoolArray,
        partner: Partner | None,
    ) -> BoolArray:
        """[R] ranks with room for it: for its prompt where it is handed over, else for all."""
        room = view.room + matched
        fits: BoolArray = self.decoding & (room >= need.whole)
        if need.short:
            fits |= self.prefills & (room >= need.num_tokens + need.choices)
        elif partner is not None:
            pairs = self._sharing_with(view, partner)
            fits |= pairs & (room >= need.num_tokens + need.choices)
        fits &= allowed
        return fits

    def room(self, view: View) -> float:
        """The most that any rank offers on which a request could end."""
        return float(np.where(self.decoding & view.open, view.room, -np.inf).max())

    def best(
        self,
        view: View,
        offer: Offer,
        by_way: list[tuple[int, int, float]],
        need: Need,
        matched: FloatArray,
        allowed: BoolArray,
        partner: Partner | None,
    ) -> int | None:
        """Which candidate: by_way has the ways, the best of each, its predicted prefill. None: it
        is better off in line for a prefill rank."""
        best, least, after_s = -1, np.inf, 0.0
        if partner is not None:
            after_s = need.output * partner.token_s + partner.transfer_s
        for way, index, prefill_s in by_way:
            cost = offer.wait_s.item(index) + prefill_s
            if way == PREFILL:
                cost += after_s
            else:
                others = offer.num_requests.item(index)
                cost += need.output * _token_s(offer, index, need) + others * prefill_s
            if cost < least - SLACK_S:
                best, least = index, cost
        if offer.which(self.prefills).item(best):
            return best
        # Ready ones have no line: the policy did not want them, and they took part all the same.
        fits = self.fits(view, need, matched, allowed, partner)
        at = (fits & self.prefills & ~view.ready).nonzero()[0]
        if len(at):
            some, cached = view.coefficients, matched.take(at)
            some = some if some.shape[1] == 1 else some.take(at, axis=1)
            ttft_s = view.wait_s.take(at) + prefill_seconds(some, need.num_tokens - cached, cached)
            if ttft_s.item(ttft_s.argmin()) + after_s < least:
                return None
        return best


def _token_s(offer: Offer, index: int, need: Need) -> float:
    """Predicted time per output token on a candidate's own rank."""
    some = offer.coefficients
    d, e, f = some[3:, index if some.shape[1] > 1 else 0].tolist()
    batch = offer.num_requests.item(index) + need.choices
    context = offer.context_tokens.item(index) + need.choices * need.num_tokens
    return float(d + e * batch + f * context)
