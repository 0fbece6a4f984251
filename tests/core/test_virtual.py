"""Virtual time and its connections, with cores that only write down what they are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from rtp.backends import sim
from rtp.core.commands import Command, Connect, Dial, HangUp, RunStep, Send
from rtp.core.events import (
    ClientGone,
    Event,
    From,
    FrontendDown,
    FrontendUp,
    LinkDown,
    LinkUp,
    MasterDown,
    MasterUp,
    Stalled,
    StepDone,
    StreamDown,
    StreamUp,
    Tick,
)
from rtp.core.messages import Cancel, Register, WorkerLost
from rtp.core.ports import Capacity
from rtp.core.steps import StepPlan, StepResult
from rtp.core.types import FrontendId, RequestId, Role, WorkerId
from rtp.core.virtual import HANDSHAKE_S, Network, VirtualCluster
from rtp.core.virtual_time import Process
from tests.support.cluster import a_cluster, a_request
from tests.support.oracles import Expected, expected_choices

TICK = Tick()
F1, W1 = FrontendId("f1"), WorkerId("w1")


@dataclass
class Scripted:
    """A core that writes down its events and answers as told beforehand."""

    answers: dict[type[Event], list[Command]] = field(default_factory=dict)
    deadlines: list[float] = field(default_factory=list)
    told: list[tuple[float, Event]] = field(default_factory=list)

    def handle(self, event: Event, now: float) -> list[Command]:
        self.told.append((now, event))
        if event == TICK:
            self.deadlines = [at for at in self.deadlines if at > now]
        return self.answers.get(type(event), [])

    def next_deadline(self) -> float | None:
        return min(self.deadlines, default=None)

    @property
    def events(self) -> list[Event]:
        return [event for _, event in self.told if event != TICK]

    def times(self, event: Event) -> list[float]:
        return [round(at, 6) for at, other in self.told if other == event]


class SlowRunner:
    """Every step takes a quarter second."""

    capacity = Capacity(1, 1, 1, 1, (), "")

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, (), 0.25)

    def close(self) -> None: ...


class ScriptedNetwork(Network):
    """Delays as told, in turn, then a millisecond."""

    def __init__(self, *delays: float | None) -> None:
        super().__init__(0.001)
        self.delays = list(delays)

    def delay_s(self, source: str, target: str) -> float | None:
        return self.delays.pop(0) if self.delays else self.latency_s


def a_register(epoch: int = 1, worker_id: WorkerId = W1) -> Register:
    return Register(
        worker_id=worker_id,
        epoch=epoch,
        address=f"{worker_id}:1",
        role=Role.FUSION,
        ranks=1,
        kv_total=(64,),
        block_size=16,
        model="m",
        max_model_len=64,
        card="",
        kv_format="",
        key_id="",
        max_batch_tokens=64,
    )


def cancel(number: int) -> Cancel:
    return Cancel(RequestId("r"), number, "")


def connect(epoch: int = 1) -> Connect:
    return Connect(W1, epoch, "w1:1")


def dial(epoch: int = 1) -> Dial:
    return Dial(W1, epoch, "w1:1")


GO = ClientGone(RequestId("go"))


@dataclass
class World:
    cluster: VirtualCluster
    frontend: Scripted
    worker: Scripted

    def process(self, name: str) -> Process:
        found = {**self.cluster.frontends, **self.cluster.workers}
        return found[name]


def a_stream_world(*, network: Network | None = None, sends: Sequence[Command] = ()) -> World:
    """A frontend that connects to a worker at time 1 and then sends; there is no Master."""
    cluster = VirtualCluster(network or Network(0.001))
    frontend, worker = Scripted({ClientGone: [connect(), *sends]}), Scripted()
    cluster.add_frontend(F1, frontend)
    cluster.add_worker(a_register(), worker, [SlowRunner(), SlowRunner()])
    cluster.tell(cluster.frontends["f1"], GO, at=1.0)
    return World(cluster, frontend, worker)


def test_all_input_of_an_instant_comes_before_one_tick() -> None:
    cluster = VirtualCluster()
    core = Scripted()
    process = cluster.add_frontend(F1, core)
    events = [ClientGone(RequestId(str(i))) for i in range(3)]
    for event in events:
        cluster.tell(process, event, at=2.0)
    cluster.run(5.0)
    assert core.told == [(2.0, event) for event in [*events, TICK]]
    assert cluster.now == 5.0


def test_a_deadline_gets_a_tick_of_its_own() -> None:
    cluster = VirtualCluster()
    core = Scripted(deadlines=[3.0, 4.5])
    process = cluster.add_frontend(F1, core)
    cluster.tell(process, GO, at=1.0)
    cluster.run(10.0)
    assert core.times(TICK) == [1.0, 3.0, 4.5]


@pytest.mark.parametrize("skew_s", [0.1, -123.456789, 1e6 + 1 / 3])
def test_a_clock_that_differs_is_seen_by_its_core_alone(skew_s: float) -> None:
    cluster = VirtualCluster()
    core = Scripted()
    process = cluster.add_frontend(F1, core, skew_s=skew_s)
    core.deadlines = [2.0 + skew_s, 2.7 + skew_s]
    cluster.tell(process, GO, at=1.0)
    cluster.run(10.0)
    assert [at for at, event in core.told if event == TICK][1:] == pytest.approx(
        [2.0 + skew_s, 2.7 + skew_s]
    )


def test_a_core_that_always_has_something_due_is_named() -> None:
    cluster = VirtualCluster()
    core = Scripted()
    process = cluster.add_frontend(F1, core)
    cluster.tell(process, GO, at=1.0)
    core.next_deadline = lambda: 0.0  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="f1 always has something due"):
        cluster.run(2.0)


def test_steps_of_a_rank_run_one_after_another_those_of_two_ranks_side_by_side() -> None:
    plans = [StepPlan(step=0, rows=()), StepPlan(step=1, rows=())]
    world = a_stream_world()
    world.worker.answers[ClientGone] = [
        RunStep(0, plans[0]),
        RunStep(0, plans[1]),
        RunStep(1, plans[0]),
    ]
    world.cluster.tell(world.process("w1"), GO, at=2.0)
    world.cluster.run(3.0)
    done = [(at, e.rank, e.result.step) for at, e in world.worker.told if isinstance(e, StepDone)]
    assert done == [(2.25, 0, 0), (2.25, 1, 0), (2.5, 0, 1)]


def test_what_a_frontend_sends_before_its_stream_is_open_arrives_first_and_in_order() -> None:
    world = a_stream_world(sends=[Send("w1", cancel(1)), Send("w1", cancel(2))])
    world.cluster.run(2.0)
    assert world.frontend.events == [GO, StreamUp(W1, 1)]
    assert world.worker.events == [
        FrontendUp(F1),
        From("f1", cancel(1)),
        From("f1", cancel(2)),
    ]


def test_order_is_kept_on_a_connection_whatever_the_delays() -> None:
    network = ScriptedNetwork()
    world = a_stream_world(network=network)
    world.cluster.run(2.0)
    network.delays = [0.5, 0.001, 0.2]
    world.frontend.answers[ClientGone] = [Send("w1", cancel(i)) for i in range(3)]
    world.cluster.tell(world.process("f1"), GO)
    world.cluster.run(3.0)
    assert world.worker.events[1:] == [From("f1", cancel(i)) for i in range(3)]
    assert world.worker.times(From("f1", cancel(2))) == [2.5]


def test_a_message_that_cannot_pass_breaks_its_connection_at_both_ends() -> None:
    network = ScriptedNetwork()
    world = a_stream_world(network=network)
    world.cluster.run(2.0)
    network.delays = [0.01, None]
    world.frontend.answers[ClientGone] = [Send("w1", cancel(i)) for i in range(2)]
    world.cluster.tell(world.process("f1"), GO)
    world.cluster.run(3.0)
    assert world.worker.events == [FrontendUp(F1), FrontendDown(F1)]
    assert world.frontend.events[-1] == StreamDown(W1)


def test_a_new_stream_of_a_frontend_takes_the_place_of_its_old_one() -> None:
    world = a_stream_world()
    world.cluster.tell(world.process("f1"), GO, at=2.0)
    world.cluster.run(3.0)
    assert world.frontend.events == [GO, StreamUp(W1, 1), GO, StreamUp(W1, 1)]
    assert world.worker.events == [FrontendUp(F1), FrontendDown(F1), FrontendUp(F1)]


def test_a_killed_worker_is_seen_behind_what_it_sent_and_then_refuses() -> None:
    world = a_stream_world()
    world.worker.answers[ClientGone] = [Send("f1", WorkerLost(W1, 1))]
    world.cluster.run(2.0)
    world.cluster.tell(world.process("w1"), GO, at=2.0)
    worker = world.process("w1")
    world.cluster.call(2.0, lambda: world.cluster.kill(worker))
    world.cluster.tell(world.process("f1"), GO, at=3.0)
    world.cluster.run(4.0)
    assert world.frontend.events[2:] == [
        From("w1", WorkerLost(W1, 1)),
        StreamDown(W1),
        GO,
        StreamDown(W1, refused=True),
    ]
    assert world.worker.told[-1][0] == 2.0


def test_the_next_life_of_a_worker_refuses_who_wants_the_last_one() -> None:
    world = a_stream_world()
    world.cluster.kill(world.process("w1"))
    world.cluster.add_worker(a_register(epoch=2), Scripted(), [])
    world.cluster.run(2.0)
    assert world.frontend.events == [GO, StreamDown(W1, refused=True)]


def test_a_dial_without_an_answer_fails_in_the_end() -> None:
    world = a_stream_world()
    world.cluster.pause(world.process("w1"))
    world.cluster.run(10.0)
    assert world.frontend.times(StreamDown(W1)) == [1.0 + HANDSHAKE_S]
    world.cluster.resume(world.process("w1"))
    world.cluster.run(11.0)
    assert world.worker.events == []


def test_a_paused_process_gets_everything_when_it_goes_on() -> None:
    world = a_stream_world(sends=[Send("w1", cancel(1))])
    world.cluster.call(1.0005, lambda: world.cluster.pause(world.process("w1")))
    world.worker.deadlines = [1.5]
    world.cluster.call(2.5, lambda: world.cluster.resume(world.process("w1")))
    world.cluster.run(3.0)
    assert [at for at, _ in world.worker.told] == [2.5, 2.5, 2.502, 2.502]
    assert world.worker.events == [FrontendUp(F1), From("f1", cancel(1))]


def a_linked_world(term: int = 1) -> tuple[VirtualCluster, Scripted, Scripted, Scripted]:
    """A Master that dials who registers, a frontend and a worker."""
    cluster = VirtualCluster(Network(0.001))
    master, frontend, worker = Scripted(), Scripted(), Scripted()
    cluster.add_master(master, term=term)
    cluster.add_frontend(F1, frontend)
    cluster.add_worker(a_register(), worker, [])
    master.answers[From] = [dial()]
    cluster.run(0.05)
    del master.answers[From]
    return cluster, master, frontend, worker


def test_a_worker_registers_and_is_dialled_and_a_frontend_finds_the_master() -> None:
    cluster, master, frontend, worker = a_linked_world()
    cluster.run(5.0)
    assert master.events == [FrontendUp(F1), From("w1", a_register()), LinkUp(W1, 1)]
    assert worker.events == [MasterUp(1)]
    assert frontend.events == [MasterUp(1)]


def test_a_worker_without_a_link_registers_with_backoff() -> None:
    cluster = VirtualCluster(Network(0.0))
    master = Scripted()
    cluster.add_master(master)
    cluster.add_worker(a_register(), Scripted(), [])
    cluster.run(2.3)
    assert master.times(From("w1", a_register())) == [0.0, 0.1, 0.3, 0.7, 1.2, 1.7, 2.2]


def test_hanging_up_is_heard_by_the_worker_alone_who_registers_again() -> None:
    cluster, master, _, worker = a_linked_world()
    assert cluster.master is not None
    master.answers[ClientGone] = [HangUp(W1, 7), HangUp(W1, 1)]
    cluster.tell(cluster.master, GO, at=1.0)
    cluster.run(1.05)
    assert worker.events == [MasterUp(1), MasterDown()]
    assert master.events[-2:] == [GO, From("w1", a_register())]


def test_a_later_master_takes_over_and_an_earlier_one_is_refused() -> None:
    cluster, _, frontend, worker = a_linked_world(term=5)
    assert cluster.master is not None
    cluster.kill(cluster.master)
    cluster.run(1.0)
    assert frontend.events == [MasterUp(5), MasterDown()]
    older = Scripted({From: [dial()]})
    cluster.kill(cluster.add_master(older, term=4))
    cluster.add_master(older, term=4)
    cluster.run(2.2)
    assert LinkDown(W1, 1, refused=True) in older.events
    assert worker.events == [MasterUp(5), MasterDown()]
    assert cluster.master is not None
    cluster.kill(cluster.master)
    cluster.add_master(Scripted({From: [dial()]}), term=6)
    cluster.run(5.0)
    assert MasterUp(6) in worker.events
    assert frontend.events[-1] == MasterUp(6)


def test_a_frontend_in_the_masters_process_is_told_at_once() -> None:
    cluster = VirtualCluster(Network(0.1))
    master, frontend = Scripted(), Scripted({ClientGone: [Send("master", cancel(1))]})
    cluster.add_master(master)
    cluster.add_frontend(F1, frontend, with_master=True)
    cluster.tell(cluster.frontends["f1"], GO, at=1.0)
    cluster.run(2.0)
    assert master.times(From("f1", cancel(1))) == [1.0]


def test_the_same_input_is_the_same_run() -> None:
    runs = []
    for _ in range(2):
        world = a_stream_world(sends=[Send("w1", cancel(i)) for i in range(5)])
        world.cluster.run(3.0)
        runs.append((world.frontend.told, world.worker.told))
    assert runs[0] == runs[1]


def test_second_turn_returns_to_its_prefix() -> None:
    """The cores themselves, driven in virtual time."""
    cluster = a_cluster(workers=2, routing="predicted_ttft")
    first = cluster.run(a_request(tokens=range(3, 515), at=0.0))
    again = cluster.run(a_request(tokens=range(3, 643), at=1.0))
    assert again.rank_id == first.rank_id
    assert again.matched_tokens == again.cached_tokens == 512


def test_a_cluster_gives_every_choice_what_the_rule_says() -> None:
    cluster = a_cluster(runner={"eos_every": 5})
    planned = a_request(tokens=range(3, 50), max_tokens=12, n=3)
    outcome = cluster.run(planned)
    begin = planned.begin(outcome.request_id, 16)
    for number, right in enumerate(expected_choices(begin, sim.Rule(32000, (2,), 5))):
        choice = outcome.choices[number]
        got = Expected(tuple(choice.ids), choice.text, choice.finish, choice.stop_reason)
        assert got == right


def test_o03_a_client_that_leaves_frees_everything_within_a_second() -> None:
    cluster = a_cluster(workers=1)
    outcome = cluster.begin(a_request(tokens=range(3, 500), max_tokens=500))
    cluster.leave(outcome, at=2.0)
    cluster.pass_time(2.5)
    assert outcome.first_token_at is not None
    cluster.pass_time(0.5)
    assert cluster.master.idle()
    assert cluster.frontend.idle()
    assert cluster.workers[WorkerId("w0")].idle()


def test_o01_nothing_is_placed_on_a_worker_whose_step_hangs() -> None:
    """Its prefix draws everything there; a driver sees the step of 30 s hang after 2 s."""
    cluster = a_cluster(workers=2)
    first = cluster.run(a_request(tokens=range(3, 515), at=0.0))
    name = WorkerId(first.rank_id.partition("/")[0])
    process = cluster.world.workers[name]
    process.free_at[0] = cluster.world.now + 30.0
    stuck = cluster.begin(a_request(tokens=range(3, 600), at=cluster.now))
    cluster.pass_time(2.0)
    cluster.world.tell(process, Stalled(True))
    cluster.pass_time(0.01)
    assert cluster.master.overview(cluster.world.now)["workers"][name]["state"] == "hung"
    others = [
        cluster.run(a_request(tokens=range(3, 640 + i), at=cluster.now + 1.0)) for i in range(4)
    ]
    assert all(one.over and one.rank_id != first.rank_id for one in others)
    assert not stuck.over
    cluster.world.run_while(lambda: not stuck.over, cluster.world.now + 40)
    cluster.world.tell(process, Stalled(False))
    cluster.pass_time(0.01)
    assert stuck.rank_id == first.rank_id
    again = cluster.run(a_request(tokens=range(3, 700), at=cluster.now + 1.0))
    assert again.over
    assert cluster.master.overview(cluster.world.now)["workers"][name]["state"] == "live"
