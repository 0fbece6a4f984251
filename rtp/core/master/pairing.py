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
from rtp.core.master.predictor import decode_seconds, prefill_seconds
from rtp.core.master.view import View
from rtp.core.types import BoolArray, FloatArray, IntArray

ROUND_DIGITS = 6
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
        self.by_way = [(way, kinds == way) for way in WAYS]
        """Which ranks go each way."""
        self._transports = transports
        self._sharing: dict[int, BoolArray] = {}
        """By transports: the prefill ranks that have one of them."""
        self._partners = (kinds == DECODE).nonzero()[0]
        self._latency_s = latency_s[self._partners]
        self._token_s = token_s[self._partners]
        any_prefill = int(np.bitwise_or.reduce(transports[self.prefills]))
        self._reachable = (transports[self._partners] & any_prefill) != 0

    def partner(
        self, view: View, need: Need, matched: FloatArray, allowed: BoolArray, affine_row: int
    ) -> Partner | None:
        """The decode rank for a request, None where none has headroom. matched, allowed: [R].
        About 25 array calls on the decode ranks."""
        at = self._partners
        new = need.num_tokens - matched.take(at)
        headroom = view.room.take(at) - new - need.choices * need.output
        able = allowed.take(at) & view.numbered.take(at) & self._reachable & (headroom >= 0)
        if not np.count_nonzero(able):
            return None
        batch = view.num_requests.take(at) + need.choices
        context = view.context_tokens.take(at) + need.choices * need.num_tokens
        some = view.coefficients
        token_s = decode_seconds(
            some if some.shape[1] == 1 else some.take(at, axis=1), batch, context
        )
        transfer_s = self._latency_s + self._token_s * new
        why = "time"
        if affine_row >= 0:
            affine = able & (view.rows.take(at) == affine_row)
            if np.count_nonzero(affine):
                able, why = affine, "chat"
        cost = np.where(able, np.round(token_s + transfer_s / need.output, ROUND_DIGITS), np.inf)
        ties = np.where(cost == cost.item(cost.argmin()), headroom, -np.inf)
        best = int(ties.argmax())
        return Partner(
            row=view.rows.item(at.item(best)),
            tokens=int(new.item(best)),
            token_s=token_s.item(best),
            transfer_s=transfer_s.item(best),
            headroom=headroom.item(best),
            why=why,
        )

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
            theirs = self._transports.item(view.at.index(partner.row))
            pairs = self._sharing.get(theirs)
            if pairs is None:
                pairs = self._sharing[theirs] = self.prefills & ((self._transports & theirs) != 0)
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
        by_way: list[tuple[int, float]],
        need: Need,
        matched: FloatArray,
        fits: BoolArray,
        partner: Partner | None,
    ) -> int | None:
        """Which candidate: by_way has the best of each way, and its predicted prefill, -1 where
        there is none. None: it is better off in line for a prefill rank."""
        best, least, after_s = -1, np.inf, 0.0
        if partner is not None:
            after_s = need.output * partner.token_s + partner.transfer_s
        for way, (index, prefill_s) in zip(WAYS, by_way, strict=True):
            if index < 0:
                continue
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
