"""Prefix matches of prompts, each worked out once for as long as the map stays as it is.

A request is matched when it comes, for its place in the order, and again when it is looked at. In
between, most of the time, nothing has changed.
"""

from __future__ import annotations

from rtp.core.hashing import low64
from rtp.core.master.prefix_map import Match, PrefixMap
from rtp.core.types import Hashes

MOST_KEPT = 64
"""A match holds two columns of the rank table."""


class Matches:
    """of(): how far a prompt matches now."""

    def __init__(self, prefix_map: PrefixMap) -> None:
        self._map = prefix_map
        self._version = prefix_map.version
        self._known: dict[Hashes, Match] = {}

    def of(self, hashes: Hashes) -> Match:
        if self._version != self._map.version:
            self._version = self._map.version
            self._known.clear()
        match = self._known.get(hashes)
        if match is None:
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            match = self._known[hashes] = self._map.match(low64(hashes))
        return match
