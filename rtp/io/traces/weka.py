"""WEKA's sessions of coding agents: JSONL, one session a line, its requests inside.

A request has `t` (s since the session's start), `in`, `out` tokens, `hash_ids` (whole blocks only,
numbers of this session alone), `api_time` (s that it took) and `think_time` (s from the answer
before to this request). An entry of type `subagent` has requests of its own, `t` counted from its
own. Replayed in closed loop: a request waits for the one before it of its agent; a sub-agent's
first waits for the request before its launch; and where a sub-agent ended last before its parent
went on, the parent waits for it. Sessions have no absolute start and are given one.

Source: callanjfox/kv-cache-tester, traces/.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import inf
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec
from msgspec import Meta

from rtp.io.traces.files import Head, lines
from rtp.io.traces.rows import MOST_S, Chains, Rows, Trace, duration

BLOCK = 64
SUBAGENT = "subagent"


class _Request(msgspec.Struct, frozen=True, rename={"num_tokens": "in", "num_output": "out"}):
    t: float
    type: str
    num_tokens: int = 0
    num_output: int = 0
    hash_ids: tuple[int, ...] = ()
    api_time: float = 0.0
    think_time: float | None = None
    requests: tuple[_Request, ...] = ()


class _Session(msgspec.Struct, frozen=True):
    id: str
    requests: tuple[_Request, ...]
    block_size: int = BLOCK


@dataclass(frozen=True, slots=True)
class _Done:
    """A row that was added."""

    row: int
    arrival_s: float
    t: float
    """As recorded, since the session's start; so is end_s."""
    end_s: float
    cut_s: float
    """By how much the row comes earlier than recorded, long thoughts having been cut."""


def fits(head: Head) -> bool:
    return {"id", "requests", "hash_id_scope"} <= head.keys


def read(
    path: Path,
    *,
    gap_s: Annotated[
        float, Meta(ge=0, le=MOST_S, description="Mean seconds between the starts of two sessions.")
    ] = 30.0,
    seed: Annotated[int, Meta(description="Of the sessions' starts.")] = 0,
    most_think_s: Annotated[
        float, Meta(ge=0, description="Longer thoughts are cut to this.")
    ] = inf,
) -> Trace:
    """Starts are drawn from an exponential distribution; with gap_s 0 all start at once."""
    rows, chains, random = Rows(), Chains(), Random(seed)
    decoder = msgspec.json.Decoder(_Session)
    blocks, agents = count(), count()
    start_s = 0.0

    def take(text: bytes) -> None:
        nonlocal start_s
        session = decoder.decode(text)
        if session.block_size != BLOCK:
            raise ValueError(f"block size {session.block_size}, where others have {BLOCK}")
        own = _Agents(rows, chains, session.id, start_s, most_think_s, blocks, agents)
        own.add(session.requests, 0.0, None)
        if gap_s:
            start_s += random.expovariate(1 / gap_s)

    rows.take_all(lines(path), take)
    return rows.trace(path, "weka", BLOCK, chains.num_renamed)


class _Agents:
    """The agents of one session. blocks, agents: numbers that no other session has."""

    def __init__(
        self,
        rows: Rows,
        chains: Chains,
        name: str,
        start_s: float,
        most_think_s: float,
        blocks: Iterator[int],
        agents: Iterator[int],
    ) -> None:
        self._rows = rows
        self._chains = chains
        self._name = name
        self._start_s = start_s
        self._most_think_s = most_think_s
        self._block = defaultdict[int, int](blocks.__next__)
        """By the session's own number of it."""
        self._agents = agents

    def add(
        self, requests: tuple[_Request, ...], offset_s: float, before: _Done | None
    ) -> _Done | None:
        """One agent's requests, the first of which waits for `before`. Its last row."""
        agent, last, helpers = next(self._agents), before, list[_Done]()
        follows = False
        """The request before is `last`: think times count from its answer."""
        for number, request in enumerate(requests, 1):
            at = offset_s + request.t
            if request.type == SUBAGENT:
                helper = self.add(request.requests, at, last)
                if helper is not None:
                    helpers.append(helper)
                continue
            waited = [done for done in helpers if done.end_s <= at]
            if last is not None:
                waited.append(last)
            after = max(waited, key=lambda done: done.end_s, default=None)
            think_s = request.think_time if follows and after is last else None
            try:
                last = self._request(request, agent, at, after, think_s)
                follows = True
            except ValueError as error:
                self._rows.reject(f"request {number} of {self._name}: {error}")
                follows = False
        return last

    def _request(
        self,
        request: _Request,
        agent: int,
        at: float,
        after: _Done | None,
        think_s: float | None,
    ) -> _Done:
        """think_s: as recorded, or None: what lies between."""
        ids = request.hash_ids
        if len(ids) != request.num_tokens // BLOCK:
            blocks = request.num_tokens // BLOCK
            raise ValueError(f"{len(ids)} hash_ids for {blocks} whole blocks")
        if ids and min(ids) < 0:
            raise ValueError(f"hash id {min(ids)} is negative")
        end_s = duration(at, "t") + duration(request.api_time, "api_time")
        cut_s, between_s, earliest_s = 0.0, 0.0, 0.0
        if after is not None:
            if at < after.t:
                raise ValueError(f"t {at:g} is before {after.t:g}, of the request it waits for")
            between_s = max(0.0, at - after.end_s)
            cut_s = after.cut_s + max(0.0, between_s - self._most_think_s)
            earliest_s = after.arrival_s  # what is cut off is rounded
        arrival_s = max(self._start_s + at - cut_s, earliest_s)
        row = self._rows.add(
            arrival_s,
            request.num_tokens,
            request.num_output,
            lambda: self._chains.of([self._block[block] for block in ids]),
            session=agent,
            after=after.row if after is not None else -1,
            think_s=min(between_s if think_s is None else think_s, self._most_think_s),
            tenant=self._name,
        )
        return _Done(row, arrival_s, at, end_s, cut_s)
