"""Continuous batching of one rank: in every step, computed tokens catch up with known tokens.

There is no prefill phase and no decode phase. A sequence has tokens that are known and not yet
computed: one while it decodes, many after it arrived, was resumed or preempted. A step takes the
single ones first and spends what is left of its token budget on chunks of the long ones, oldest
first.

Invariant of pages: plans run in the order they are issued. So a page may be given away while a step
in flight still reads or writes it for its former owner: whatever the new owner writes comes in a
later plan. The former owner's rows of that step are thrown away when it completes. A page becomes
findable by others only when the step that filled it has completed and was finite.

Invariant of progress: the oldest running sequence is never preempted, the running are served oldest
first, and a sequence waits only for blocks that a running sequence is computing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sortedcontainers import SortedDict

from rtp.core.errors import ConfigError
from rtp.core.ports import Capacity
from rtp.core.steps import StepPlan, StepResult
from rtp.core.worker.blocks import BlockManager
from rtp.core.worker.in_flight import Gain, InFlight
from rtp.core.worker.pulls import Pulls, Transfer
from rtp.core.worker.running import Running
from rtp.core.worker.sequence import Sequence
from rtp.core.worker.stats import Stats

MAX_PREEMPTIONS = 3
MAX_BYPASS = 64
"""Later sequences that may be started before one that waits for room."""
LOOKAHEAD = 16
"""Sequences without room that a plan looks past."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A completed step, without the rows of sequences that ended or were preempted meanwhile."""

    gains: list[Gain]
    prefilled: list[Sequence]
    """Sequences whose prompt (or tokens to recompute) the step worked on."""


@dataclass(frozen=True, slots=True)
class Load:
    """A rank's work at one instant; tokens, but for the counts of sequences."""

    running: int
    waiting: int
    prefill_tokens: int
    decode_rows: int
    context_tokens: int
    kv_free: int


class Batcher:
    """Plans the steps of one rank. A plan costs O(running + LOOKAHEAD * blocks of a prompt)."""

    def __init__(
        self,
        capacity: Capacity,
        *,
        max_batch_tokens: int = 512,
        chunk_while_decoding: int = 128,
        max_rows: int = 64,
        steps_in_flight: int = 1,
        max_preemptions: int = MAX_PREEMPTIONS,
        stats: Stats | None = None,
    ) -> None:
        """max_batch_tokens: of one step.  chunk_while_decoding: tokens of prompts in a step that
        also decodes.  max_rows: sequences with pages; one less than max_batch_tokens at most, so
        that a prompt advances in every step.  steps_in_flight: issued and not completed.
        max_preemptions: of one sequence; the next one drops it."""
        if min(max_batch_tokens - 1, chunk_while_decoding, max_rows, steps_in_flight) < 1:
            raise ConfigError(
                "max_batch_tokens must be at least 2; chunk_while_decoding, max_rows and"
                " steps_in_flight at least 1"
            )
        self.blocks = BlockManager(capacity.num_blocks, capacity.block_size)
        self.stats = stats or Stats()
        self.last_step_s = 0.0
        self.starved = False
        """The last plan found sequences that wait for room, or one that runs alone and needs more,
        and none running that could free some."""
        self._block_size = capacity.block_size
        self._max_batch_tokens = max_batch_tokens
        self._chunk_while_decoding = chunk_while_decoding
        self._max_rows = min(max_rows, max_batch_tokens - 1)
        self._steps_in_flight = steps_in_flight
        self._max_preemptions = max_preemptions
        self._arrivals = 0
        self._handles = 0
        self._waiting: SortedDict[int, Sequence] = SortedDict()  # by arrival
        self._running = Running(self.blocks)
        self._parked: dict[int, Sequence] = {}  # by arrival
        self._in_flight = InFlight(capacity.vocab_size, capacity.block_size, self.stats)
        self._pulls = Pulls(self.blocks, self.stats)
        self._dropped: list[tuple[Sequence, str]] = []

    # ------------------------------------------------------------ sequences

    def add(self, seq: Sequence) -> bool:
        """Takes a sequence in. False, and nothing changed, where the pool can never hold it."""
        more = seq.num_output + 1 < seq.until
        if self._running.pages_for(len(seq.ids) + more) > self.blocks.num_blocks:
            return False
        seq.arrival = self._arrivals
        self._arrivals += 1
        seq.extend_keys(self._block_size)
        self._waiting[seq.arrival] = seq
        return True

    def end(self, seq: Sequence) -> None:
        """Frees all that the sequence holds. Its rows in flight will be thrown away."""
        if seq.ended:
            return
        seq.ended = True
        if seq in self._running:
            self._stop(seq)
        else:
            self._waiting.pop(seq.arrival, None)
            self._parked.pop(seq.arrival, None)

    def park(self, seq: Sequence) -> None:
        """Sets a sequence aside until unpark(); its blocks stay cached, but are not held for it."""
        if seq.ended or seq.arrival in self._parked:
            return
        if seq in self._running:
            self._stop(seq)
            seq.restart()
        self._waiting.pop(seq.arrival, None)
        self._parked[seq.arrival] = seq

    def unpark(self, seq: Sequence) -> None:
        if self._parked.pop(seq.arrival, None):
            self._waiting[seq.arrival] = seq

    def fail(self) -> None:
        """The Runner is gone: nothing in its pages or in flight exists any more."""
        for seq in [*self._running, *self._waiting.values(), *self._parked.values()]:
            self.end(seq)
        self._in_flight.clear()
        self._pulls.take_ready(self._in_flight.next_step)  # drops them: nobody waits any more
        self.blocks.clear()

    def take_dropped(self) -> list[tuple[Sequence, str]]:
        """Sequences that next_plan() gave up, ended, with the reason: "outgrown" (alone, and the
        pool is too small) or "preempted" (once too often)."""
        dropped, self._dropped = self._dropped, []
        return dropped

    # ------------------------------------------------------------ steps

    def next_plan(self, *, beside_decodes: bool = False) -> StepPlan | None:
        """The next step, or None: nothing to do, or enough steps are in flight. beside_decodes:
        ranks that step with this one decode, so its prompts advance in short chunks as well."""
        self.starved = False
        if len(self._in_flight) >= self._steps_in_flight:
            return None
        chosen: dict[Sequence, int] = {}
        self._choose_decodes(chosen)
        budget = self._max_batch_tokens - len(chosen)
        if chosen or beside_decodes:
            budget = min(budget, self._chunk_while_decoding)
        budget = self._choose_prefills(chosen, budget)
        self._admit(chosen, budget)
        self.starved |= bool(self._waiting) and not self._running
        return self._in_flight.issue(chosen, self._pulls.take_received()) if chosen else None

    def dummy_plan(self) -> StepPlan:
        """A step without rows, beside those of ranks that have work."""
        self.stats.dummy_steps += 1
        return self._in_flight.issue({}, (), dummy=True)

    def complete(self, result: StepResult) -> Outcome:
        """Takes the result of the oldest step in flight. Raises ProtocolError for any other."""
        landed = self._in_flight.land(result)
        self.last_step_s = result.elapsed_s
        self.stats.steps += 1
        self.stats.busy_s += result.elapsed_s
        outcome = Outcome([], [row.sequence for row, _ in landed if row.prefill])
        for row, answer in landed:
            gain = self._in_flight.take(row, answer)
            if gain is None or gain.finish != "error":
                self._running.register(row.sequence)
            if gain is not None:
                outcome.gains.append(gain)
                if gain.finish:
                    self.end(row.sequence)
        return outcome

    # ------------------------------------------------------------ pages from other workers

    def take_pulls(self) -> list[Transfer]:
        """Transfers that may begin: no step in flight touches their pages."""
        return self._pulls.take_ready(self._in_flight.oldest_step)

    def pulled(self, number: int, ok: bool) -> None:
        """A transfer has ended. Its sequence goes on behind what came; where it failed, and nobody
        knows what is in the pages, from the start with other ones. Further choices of its request
        do not try then: to fail may take a transfer seconds, one after the other."""
        transfer = self._pulls.get(number)
        seq = transfer.sequence
        if transfer.wanted:
            seq.pull = seq.source = None
            if ok:
                self._pulls.filled(transfer)
                seq.scheduled = seq.computed = transfer.end
                self._running.register(seq)
            else:
                self._stop(seq)
                seq.restart()
                self._waiting[seq.arrival] = seq
        if not ok:
            for other in self._waiting.values():
                if other.request_id == seq.request_id:
                    other.source = None
        self._pulls.release(transfer)

    # ------------------------------------------------------------ facts

    @property
    def num_pulls(self) -> int:
        return len(self._pulls)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def next_step(self) -> int:
        """Number of the next plan."""
        return self._in_flight.next_step

    def decodes(self) -> bool:
        """Whether its next step has rows that decode. Cost O(running)."""
        return any(seq.to_compute and not seq.in_prefill for seq in self._running)

    def idle(self) -> bool:
        """No sequence and no step; every block is free or cached."""
        nothing = not (self._running or self._waiting or self._parked or self._in_flight)
        return nothing and self.blocks.num_available == self.blocks.num_blocks

    def load(self) -> Load:
        """Cost O(running + waiting)."""
        running, waiting = list(self._running), self._waiting.values()
        decodes = [seq for seq in running if seq.computed >= seq.target]
        todo = sum(max(0, seq.target - seq.computed) for seq in running if seq.pull is None)
        return Load(
            running=len(running),
            waiting=len(waiting) + len(self._parked),
            prefill_tokens=todo + sum(self._uncached(seq) for seq in waiting),
            decode_rows=len(decodes),
            context_tokens=sum(seq.scheduled for seq in decodes),
            kv_free=self.blocks.num_available * self._block_size,
        )

    def check(self, pinned: Iterable[int] = ()) -> None:
        """Raises AssertionError unless pages, counters and owners of blocks agree. pinned: pages
        kept for other workers, one entry per use."""
        self._running.check([*pinned, *self._pulls.pages()])
        assert all(seq.pull is None or seq.pull in self._pulls for seq in self._running)
        for seq in [*self._waiting.values(), *self._parked.values()]:
            assert not seq.ended
            assert len(seq.pages) == len(seq.pending) == 0

    # ------------------------------------------------------------ choosing

    def _choose_decodes(self, chosen: dict[Sequence, int]) -> None:
        for seq in self._running:
            if seq not in self._running or seq.in_prefill or not seq.to_compute:
                continue  # an older one may just have preempted it
            if self._make_room(seq, chosen):
                chosen[seq] = 1

    def _choose_prefills(self, chosen: dict[Sequence, int], budget: int) -> int:
        for seq in self._running:
            if seq.in_prefill and seq.pull is None and budget > 0:
                chosen[seq] = min(seq.to_compute, budget)
                budget -= chosen[seq]
        return budget

    def _admit(self, chosen: dict[Sequence, int], budget: int) -> None:
        """Starts waiting sequences, first come first served but for those that must wait for room
        or for a block in the making. One whose pages another worker has gets them first."""
        if budget <= 0 or len(self._running) >= self._max_rows:
            return
        without_room: list[Sequence] = []
        for seq in list(self._waiting.values()):
            if budget <= 0 or len(self._running) >= self._max_rows:
                break
            if any(other.bypassed >= MAX_BYPASS for other in without_room):
                break
            if self._running.in_the_making(seq.waits_for):
                continue
            reusable = seq.keys[: seq.reusable(self._block_size)]
            held = self.blocks.match(reusable)
            seq.waits_for = reusable[len(held)] if len(held) < len(reusable) else None
            if self._running.in_the_making(seq.waits_for):
                continue  # to wait for the block is cheaper than to compute it twice
            if not self._running.has_room_for(seq, held):
                without_room.append(seq)
                if len(without_room) >= LOOKAHEAD:
                    break
                continue
            for other in without_room:
                other.bypassed += 1
            self._start(seq, held)
            if self._pulls.begin(seq, len(held), self._in_flight.next_step):
                continue
            chosen[seq] = min(seq.to_compute, budget)
            budget -= chosen[seq]

    def _start(self, seq: Sequence, held: list[int]) -> None:
        first = seq.cached < 0
        del self._waiting[seq.arrival]
        self._running.start(seq, held)
        seq.handle = self._handles
        self._handles += 1
        if first:
            self.stats.prefix_query_tokens += seq.num_prompt
            self.stats.prefix_hit_tokens += seq.cached

    # ------------------------------------------------------------ preemption

    def _make_room(self, seq: Sequence, chosen: dict[Sequence, int]) -> bool:
        """A page for its next token, if need be another's. False: it lost its own."""
        while not self._running.grow(seq):
            if len(self._running) == 1:
                if len(seq.pages) < self.blocks.num_blocks:
                    self.starved = True  # the rest is kept for other workers, or in transfers
                else:
                    self._drop(seq, "outgrown")
                return False
            victim = self._running.cheapest()
            self._preempt(victim, chosen)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence, chosen: dict[Sequence, int]) -> None:
        self.stats.preemptions += 1
        chosen.pop(seq, None)
        if seq.preemptions >= self._max_preemptions:
            self._drop(seq, "preempted")
            return
        self._stop(seq)
        seq.restart()
        seq.preemptions += 1
        self._waiting[seq.arrival] = seq

    def _drop(self, seq: Sequence, reason: str) -> None:
        self.end(seq)
        self._dropped.append((seq, reason))

    def _stop(self, seq: Sequence) -> None:
        """Takes a sequence off the running ones and its pages from it."""
        self._running.stop(seq)
        if seq.announced:
            self._in_flight.ended(seq.handle)

    def _uncached(self, seq: Sequence) -> int:
        """Tokens a waiting sequence will have to compute, as far as is known."""
        reusable = seq.reusable(self._block_size)
        if seq.waits_for is None:
            reusable = 0
        return len(seq.ids) - reusable * self._block_size
