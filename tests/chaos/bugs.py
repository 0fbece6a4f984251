"""Bugs put into the cores on purpose: a simulation that does not find them proves nothing.

Each is a context manager; inside it the cores have the bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest.mock import Mock, patch

import msgspec
import numpy as np

import rtp.core.hashing
from rtp.core.commands import Command, Send
from rtp.core.events import Event, From
from rtp.core.master.external import External
from rtp.core.master.offer import Offer
from rtp.core.master.placement import Placement
from rtp.core.master.predictor import RankPredict
from rtp.core.master.prefix_map import PrefixMap
from rtp.core.master.ranks import Ranks
from rtp.core.master.tenants import Charge, Tenants
from rtp.core.messages import Cancel, Submit, Tokens
from rtp.core.policy import Query
from rtp.core.steps import StepPlan
from rtp.core.types import FloatArray, Hashes, Ids, Tier
from rtp.core.worker.batcher import Batcher
from rtp.core.worker.blocks import BlockManager
from rtp.core.worker.group import LockstepGroup
from rtp.core.worker.handovers import HandOvers
from rtp.core.worker.running import Running
from rtp.core.worker.sequence import Sequence
from rtp.core.worker.streams import Attempt
from rtp.core.worker.worker import Worker


@contextmanager
def release_skipped_on_cancel() -> Iterator[None]:
    """A cancelled sequence keeps its last page."""
    handle, release = Worker.handle, BlockManager.release

    def leaky(self: Worker, event: Event, now: float) -> list[Command]:
        cancels = isinstance(event, From) and isinstance(event.message, Cancel)
        skip = patch.object(BlockManager, "release", lambda self, ids: release(self, ids[:-1]))
        with skip if cancels else nullcontext():
            return handle(self, event, now)

    with patch.object(Worker, "handle", leaky):
        yield


@contextmanager
def resume_index_off_by_one() -> Iterator[None]:
    """The worker numbers the tokens of a resumed choice one too low."""
    handle = Worker.handle

    def shifted(self: Worker, event: Event, now: float) -> list[Command]:
        resumed = self.__dict__.setdefault("resumed", set())
        if isinstance(event, From) and isinstance(event.message, Submit):
            submit = event.message
            resumed |= {
                (submit.request_id, submit.attempt, state.choice)
                for state in submit.choices
                if state.output
            }
        return [_shift(command, resumed) for command in handle(self, event, now)]

    with patch.object(Worker, "handle", shifted):
        yield


def _shift(command: Command, resumed: set[tuple[str, int, int]]) -> Command:
    if not (isinstance(command, Send) and isinstance(command.message, Tokens)):
        return command
    runs = tuple(
        msgspec.structs.replace(run, first_index=run.first_index - 1)
        if (run.request_id, run.attempt, run.choice) in resumed
        else run
        for run in command.message.runs
    )
    return Send(command.peer, Tokens(runs))


@contextmanager
def blocks_shared_before_they_are_written() -> Iterator[None]:
    """A prompt's blocks are findable from its start on, not from the end of a finite step."""
    start = Running.start

    def early(self: Running, seq: Sequence, held: list[int]) -> None:
        start(self, seq, held)
        computed, seq.computed = seq.computed, len(seq.ids)
        self.register(seq)
        seq.computed = computed

    with patch.object(Running, "start", early):
        yield


@contextmanager
def hash_without_parent() -> Iterator[None]:
    """A block's hash names its own tokens instead of the whole prefix."""
    block_hashes = rtp.core.hashing.block_hashes

    def alone(ids: Ids, block_size: int, seed: bytes, parent: bytes = b"") -> Hashes:
        size = 4 * block_size
        blocks = (ids[start : start + size] for start in range(0, len(ids) - size + 1, size))
        return b"".join(block_hashes(block, block_size, seed) for block in blocks)

    with (
        patch("rtp.core.worker.sequence.block_hashes", alone),
        patch("tests.support.cluster.block_hashes", alone),
        patch("tests.chaos.scenario.block_hashes", alone),
    ):
        yield


@contextmanager
def evicted_keys_kept() -> Iterator[None]:
    """The Master goes on crediting a rank with what it no longer holds."""

    def keep(self: PrefixMap, rank: int, hashes: Hashes, tier: Tier) -> None:
        """Does nothing."""

    with patch.object(PrefixMap, "remove", keep):
        yield


@contextmanager
def rank_without_work_left_out() -> Iterator[None]:
    """Ranks that step together without those that have nothing to do."""
    plans = LockstepGroup.plans

    def without_dummies(self: LockstepGroup, now: float) -> list[tuple[int, StepPlan]]:
        with patch.object(Batcher, "dummy_plan", Mock()):
            return [(rank, plan) for rank, plan in plans(self, now) if not isinstance(plan, Mock)]

    with patch.object(LockstepGroup, "plans", without_dummies):
        yield


@contextmanager
def policy_trusted() -> Iterator[None]:
    """Whatever a user's policy answers or raises is taken."""

    def trust(
        self: Placement, query: Query, offer: Offer, predict: RankPredict
    ) -> tuple[FloatArray, str]:
        return np.array(self._routing.score(query, offer, predict), dtype=np.float64), ""

    with patch.object(Placement, "_score", trust):
        yield


@contextmanager
def group_busy_on_one_rank_only() -> Iterator[None]:
    """The Master takes ranks for free that wait for another of their group."""
    with patch.object(Ranks, "_busy_together", Mock()):
        yield


@contextmanager
def tenant_charge_kept() -> Iterator[None]:
    """A tenant goes on paying for a request that used nothing."""
    settle = Tenants.settle

    def keep(self: Tenants, charge: Charge, used: float, now: float) -> None:
        if used:
            settle(self, charge, used, now)

    with patch.object(Tenants, "settle", keep):
        yield


@contextmanager
def foreign_leases_never_end() -> Iterator[None]:
    """A place that was only asked for is kept for a caller who says nothing more."""

    def keep(self: External, now: float) -> list[Command]:
        for booking in self._ledger.external.take(now):
            self._ledger.external.set(booking, now + 3600.0)
        return []

    with patch.object(External, "expire", keep):
        yield


@contextmanager
def handed_over_pages_kept() -> Iterator[None]:
    """A worker goes on pinning what it handed over."""

    def keep(self: HandOvers, attempt: Attempt) -> None:
        """Does nothing."""

    with patch.object(HandOvers, "release", keep):
        yield


BUGS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "release_skipped_on_cancel": release_skipped_on_cancel,
    "resume_index_off_by_one": resume_index_off_by_one,
    "blocks_shared_before_they_are_written": blocks_shared_before_they_are_written,
    "hash_without_parent": hash_without_parent,
    "evicted_keys_kept": evicted_keys_kept,
    "rank_without_work_left_out": rank_without_work_left_out,
    "group_busy_on_one_rank_only": group_busy_on_one_rank_only,
    "policy_trusted": policy_trusted,
    "handed_over_pages_kept": handed_over_pages_kept,
    "tenant_charge_kept": tenant_charge_kept,
    "foreign_leases_never_end": foreign_leases_never_end,
}
