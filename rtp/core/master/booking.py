"""One grant, from the decision until the end of the request: what it charges, and what it keeps."""

from __future__ import annotations

from math import inf

import msgspec

from rtp.core.master.tenants import Charge
from rtp.core.messages import Grant
from rtp.core.types import FrontendId, Hashes


class Booking(msgspec.Struct, eq=False):
    """Changed by Ranks and Ledger only."""

    grant: Grant
    row: int
    frontend_id: FrontendId
    model: str
    tenant: str
    choices: int
    new_tokens: int
    """Prompt tokens to compute; charged until seen."""
    reserved_tokens: int
    """Expected output; reserved until the end."""
    prefill_s: float
    granted_at: float
    arrival: float
    arriving: Hashes = b""
    """Blocks that count as arriving on the rank."""
    open: bool = True
    seen: bool = False
    prompt_due: bool = True
    """Its prompt counts as work of the rank."""
    first_token: bool = False
    computed_tokens: int = 0
    """Prompt tokens it did compute, as told with its first token."""
    parked: bool = False
    """It waits for a slow reader and holds no pages: nothing is reserved for it meanwhile."""
    external: bool = False
    """Nobody submits it, so no Status tells of it; its number is none of the rank's."""
    lease_ends: float = inf
    """When an external one is settled unless it is renewed."""
    charge: Charge | None = None
    """What its tenant was charged; settled with its end."""
    decode: Booking | None = None
    """What is reserved on the rank where it goes on; until then, it is that."""
    prefill: Booking | None = None
    """Of a reservation: the grant it belongs to, until the hand-over."""
    coming_tokens: int = 0
    """Of `reserved_tokens`: its prompt, on the way from another rank; until seen."""
    handed: bool = False
    """Another rank has computed its prompt and its first tokens."""
