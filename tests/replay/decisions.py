"""Decisions of a run as bytes: python -m tests.replay.decisions ROUTING SEED prints a digest."""

from __future__ import annotations

import hashlib
import sys
from random import Random

import msgspec

from rtp.core.commands import Command, Ended, Failed, Note, Send
from rtp.core.messages import Grant, Refuse
from tests.chaos.simulation import Simulation
from tests.support.cluster import Planned, a_cluster, a_request, random_tokens

NUM_REQUESTS = 40


def a_load(seed: int) -> list[Planned]:
    """Chats with shared heads, more than the workers can serve at once."""
    random = Random(seed)
    heads = [random_tokens(random, 128) for _ in range(4)]
    return [
        a_request(
            tokens=random.choice(heads) + random_tokens(random, random.randint(1, 300)),
            at=random.uniform(0.0, 2.0),
            max_tokens=random.randint(1, 24),
            chat_id=random.choice(["", "a", "b", "c"]),
            priority=random.choice([0, 0, 4]),
        )
        for _ in range(NUM_REQUESTS)
    ]


def decision_log(routing: str, seed: int) -> bytes:
    """Everything decided, when and with which numbers, in order."""
    cluster = a_cluster(workers=3, ranks=2, routing=routing, seed=seed, runner={"num_blocks": 160})
    cluster.run_all(a_load(seed))
    return b"\n".join(
        _line(at, name, command) for at, name, command in cluster.commands if _decides(command)
    )


def fault_log(seed: int) -> bytes:
    """What became of every request of a run under faults."""
    simulation = Simulation(seed).run()
    outcomes = simulation.witness.outcomes.by_id.values()
    return "\n".join(map(repr, outcomes)).encode() + repr(simulation.checks.num_events).encode()


def _decides(command: Command) -> bool:
    if isinstance(command, Send):
        return isinstance(command.message, Grant | Refuse)
    return isinstance(command, Note | Ended | Failed)


def _line(at: float, name: str, command: Command) -> bytes:
    return f"{at!r} {name} {type(command).__name__} ".encode() + msgspec.json.encode(command)


def digest(routing: str, seed: int) -> str:
    """routing: a policy, or "faults"."""
    log = fault_log(seed) if routing == "faults" else decision_log(routing, seed)
    return f"{len(log)} {hashlib.sha256(log).hexdigest()}"


if __name__ == "__main__":
    print(digest(sys.argv[1], int(sys.argv[2])))
