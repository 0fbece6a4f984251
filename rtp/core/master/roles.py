"""What the workers of one model do for each other: who decodes, who can pair, and by what."""

from __future__ import annotations

import numpy as np

from rtp.core.master.members import Member
from rtp.core.master.pairing import Pairs
from rtp.core.master.partners import DECODE, FUSED, PREFILL
from rtp.core.types import IntArray, Role

KINDS = {Role.PREFILL: PREFILL, Role.DECODE: DECODE, Role.FUSION: FUSED}
MOST_TRANSPORTS = 62
"""That are told apart: bits of an int64."""


def schedulable(role: Role) -> bool:
    """Whether a grant may name this role's ranks."""
    return role in KINDS


def decodes(member: Member) -> bool:
    """Whether a request can run to its end there. A decode rank computes prompts as well."""
    return member.register.role is not Role.PREFILL


def paired(members: list[Member]) -> list[Member]:
    """Without the prefill workers that share a transport with no decode worker."""
    ways = {
        name
        for member in members
        if member.register.role is Role.DECODE
        for name in member.register.transports
    }
    return [m for m in members if decodes(m) or not ways.isdisjoint(m.register.transports)]


def pairs_of(members: list[Member]) -> tuple[Pairs, IntArray]:
    """How their ranks pair, in ascending order of rows; and the rows meant for prefills."""
    names = sorted({name for member in members for name in member.register.transports})
    bits = {name: 1 << i for i, name in enumerate(names[:MOST_TRANSPORTS])}
    rows = np.concatenate([member.rows for member in members])
    facts = np.array([_facts(member, bits) for member in members for _ in member.rows])
    order = rows.argsort()
    rows, facts = rows[order], facts[order]
    kinds = facts[:, 0].astype(np.int64)
    pairs = Pairs(kinds, facts[:, 1].astype(np.int64), facts[:, 2], facts[:, 3])
    return pairs, rows[kinds != DECODE]


def _facts(member: Member, bits: dict[str, int]) -> tuple[float, ...]:
    """Kind, transports, and what bringing pages there takes: seconds at first and for a token."""
    register = member.register
    latency_s, tokens_per_s = register.transfer
    mask = sum(bits.get(name, 0) for name in set(register.transports))
    token_s = 1.0 / tokens_per_s if tokens_per_s > 0 else 0.0
    return KINDS[register.role], mask, latency_s, token_s
