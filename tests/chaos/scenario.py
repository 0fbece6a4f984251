"""What a seed stands for: a cluster's shape, its clients, and the faults that befall it.

Everything is drawn from one Random before time starts: a seed repeats, whatever the cores do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from rtp.backends.sim import Rule, expected_tokens
from rtp.core.hashing import block_hashes
from rtp.core.master.tenants import Terms
from rtp.core.types import Hashes, RequestId, Role, SamplingParams, pack_ids
from tests.support.cluster import SEED, Planned, a_request
from tests.support.oracles import Expected, expected_choices

VOCAB_SIZE = 60
EOS = 2
MAX_MODEL_LEN = 160
ARRIVALS_S = 3.0
CALM_AT_S = 7.0
"""From here on the network is well, what was paused goes on and what died is started again."""
FAULTS = (
    "kill_worker",
    "pause_worker",
    "drain_worker",
    "fail_runner",
    "kill_master",
    "pause_master",
    "usurp_master",
    "kill_frontend",
    "pause_frontend",
    "cut",
    "partition",
    "register_again",
    "late_frame",
)
MOST_WHO = 16
MISBEHAVING = "misbehaving"
"""A user's policy that fails in every way (tests/chaos/policies.py)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the cluster and options of its cores."""

    workers: int
    ranks: int
    frontends: int
    with_master: bool
    """The one frontend lives in the Master's process."""
    routing: str
    block_size: int
    num_blocks: int
    eos_every: int
    step_s: float
    max_batch_tokens: int
    chunk_while_decoding: int
    max_rows: int
    steps_in_flight: int
    max_unacked: int
    max_attempts: int
    hang: float
    """Share of steps that take a hundred times as long."""
    lockstep: bool = False
    terms: Terms | None = None
    """Of tenant "t"; without them it is as all others."""
    roles: tuple[Role, ...] = (Role.FUSION,)
    """Of the workers, in turn."""
    transfer_s: float = 0.0
    """A pull of pages takes so long."""
    transfers_fail: float = 0.0
    """Share of pulls that never end."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What the network does until it calms down."""

    jitter_s: float
    spike: float
    """Share of messages that take up to 0.3 s."""
    drop: float
    """Share of messages that break their connection."""


@dataclass(frozen=True, slots=True)
class Fault:
    at: float
    kind: str
    who: int
    """Index of the process it befalls, modulo how many there are."""
    seconds: float
    """How long it lasts, or until the next life starts."""
    hard: bool
    """Of a partition: connections break; else messages wait. Of a drain: without grace. Of a late
    frame: the Master's own, to a worker."""
    one_way: bool = False
    """Of a partition: what the others send arrives."""


@dataclass(frozen=True, slots=True)
class Client:
    """A request and how its client behaves. Times in seconds after the request."""

    planned: Planned
    frontend: int
    expected: tuple[Expected, ...]
    chains: tuple[Hashes, ...]
    """Block hashes of prompt and whole output, stop strings aside, of each choice."""
    leaves: float | None
    pauses: tuple[float, float] | None
    """When it stops reading, and for how long."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request for a place for somebody else's engine (router-only mode)."""

    at: float
    hashes: Hashes
    num_tokens: int
    lease_s: float
    renewals: int
    """Times it is renewed, each at half its lease."""
    end: str
    """What the caller says at last: "done", "failed", "cancel" or nothing at all."""


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    shape: Shape
    trouble: Trouble
    skews: tuple[float, ...]
    """Clock offsets, dealt out to processes as they start; monotonic clocks are positive."""
    clients: tuple[Client, ...]
    faults: tuple[Fault, ...]
    calls: tuple[Call, ...]
    thorough: bool
    """Watched until the longest timer has run out, not only until all is as it should be."""

    @property
    def calm(self) -> bool:
        few = self.shape.max_attempts < len(self.clients)
        return not (self.faults or self.trouble.drop or self.shape.hang or few)

    def serial_s(self) -> float:
        """About what one rank would take for all requests, one after another."""
        shape, steps = self.shape, 0.0
        for client in self.clients:
            steps += max(len(choice.ids) for choice in client.expected)
            prompts = client.planned.fields["n"] * len(client.planned.tokens)
            steps += prompts / shape.chunk_while_decoding
        return 1.5 * shape.step_s * steps

    @property
    def rule(self) -> Rule:
        return Rule(VOCAB_SIZE, (EOS,), self.shape.eos_every)


def make_scenario(seed: int) -> Scenario:
    random = Random(seed)
    shape = _in_groups(_shape(random), Random(f"{seed} groups"))
    more = Random(f"{seed} more")
    shape = replace(shape, terms=_terms(more))
    shape = _in_roles(shape, Random(f"{seed} roles"))
    if more.random() < 0.08:
        shape = replace(shape, routing=MISBEHAVING)
    quiet_times = random.random() < 0.15
    trouble = Trouble(0.0005, 0.0, 0.0)
    faults: tuple[Fault, ...] = ()
    if not quiet_times:
        trouble = Trouble(
            jitter_s=random.choice([0.0005, 0.003, 0.03]),
            spike=random.choice([0.0, 0.0, 0.01, 0.1]),
            drop=random.choice([0.0, 0.0, 0.002, 0.02]),
        )
        faults = tuple(replace(fault, one_way=more.random() < 0.4) for fault in _faults(random))
    rule = Rule(VOCAB_SIZE, (EOS,), shape.eos_every)
    families = _families(random, shape.block_size)
    span_s = random.choice([0.3, ARRIVALS_S])
    clients = [_client(random, shape, rule, families, span_s) for _ in range(random.randint(6, 24))]
    return Scenario(
        seed=seed,
        shape=shape,
        trouble=trouble,
        skews=tuple(random.choice([0.0, random.uniform(0.0, 1e6)]) for _ in range(64)),
        clients=tuple(sorted(clients, key=lambda client: client.planned.at)),
        faults=faults,
        calls=_calls(more, clients),
        thorough=more.random() < 0.1,
    )


def _shape(random: Random) -> Shape:
    block_size = random.choice([4, 8])
    with_master = random.random() < 0.3
    return Shape(
        workers=random.randint(1, 4),
        ranks=random.choice([1, 1, 2]),
        frontends=1 if with_master else random.randint(1, 3),
        with_master=with_master,
        routing=random.choice(["predicted_ttft"] * 3 + ["round_robin", "least_loaded", "random"]),
        block_size=block_size,
        num_blocks=-(-MAX_MODEL_LEN // block_size) + random.choice([0, 0, 2, 20, 100]),
        eos_every=random.choice([0, 4, 12, 40]),
        step_s=random.choice([0.002, 0.01, 0.04]),
        max_batch_tokens=random.choice([8, 32, 256]),
        chunk_while_decoding=random.choice([4, 16]),
        max_rows=random.choice([2, 8, 64]),
        steps_in_flight=random.choice([1, 2]),
        max_unacked=random.choice([2, 16, 1024]),
        max_attempts=random.choice([3, 64, 64]),
        hang=random.choice([0.0, 0.0, 0.0, 0.01]),
    )


def _in_groups(shape: Shape, random: Random) -> Shape:
    """One in five has workers whose ranks step together; all else is as it would be without."""
    if random.random() < 0.8:
        return shape
    return replace(shape, ranks=random.randint(2, 4), lockstep=True)


def _in_roles(shape: Shape, random: Random) -> Shape:
    """One in four has workers that only prefill, and others that decode."""
    if random.random() < 0.75:
        return shape
    prefill, decode, fusion = Role.PREFILL, Role.DECODE, Role.FUSION
    return replace(
        shape,
        workers=random.randint(2, 4),
        roles=random.choice(
            [(prefill, decode), (prefill, decode, decode), (fusion, prefill, decode)]
        ),
        transfer_s=random.choice([0.0, 0.002, 0.05]),
        transfers_fail=random.choice([0.0, 0.0, 0.1, 1.0]),
    )


def _terms(random: Random) -> Terms | None:
    """One in four limits tenant "t", whom half the requests belong to."""
    if random.random() < 0.75:
        return None
    return Terms(
        weight=random.choice([0.2, 1.0, 5.0]),
        tokens_per_s=random.choice([None, 50.0, 500.0]),
        max_waiting=random.choice([None, 1, 4]),
    )


def _calls(random: Random, clients: list[Client]) -> tuple[Call, ...]:
    """One in five has a caller that asks for places only."""
    if random.random() < 0.8:
        return ()
    prompts = [(c.chains[0], len(c.planned.tokens)) for c in clients]
    calls = []
    for _ in range(random.choice([1, 4, 12])):
        hashes, num_tokens = random.choice(prompts)
        calls.append(
            Call(
                at=random.uniform(0.0, ARRIVALS_S),
                hashes=hashes,
                num_tokens=num_tokens,
                lease_s=random.choice([0.1, 0.5, 2.0]),
                renewals=random.choice([0, 0, 3]),
                end=random.choice(["done", "failed", "cancel", ""]),
            )
        )
    return tuple(calls)


def _faults(random: Random) -> tuple[Fault, ...]:
    kinds = random.sample(FAULTS, random.randint(1, 5))
    faults = [
        Fault(
            at=random.uniform(0.0, CALM_AT_S - 1.0),
            kind=random.choice(kinds),
            who=random.randrange(MOST_WHO),
            seconds=random.choice([0.02, 0.2, 0.7, 1.5, 4.0]) * random.uniform(0.5, 1.5),
            hard=random.random() < 0.5,
        )
        for _ in range(random.choice([1, 2, 4, 8, 12]))
    ]
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _families(random: Random, block_size: int) -> list[list[int]]:
    """Long prompts whose beginnings are shared. Half the time they are made of the same few blocks
    in different orders: equal tokens behind different prefixes."""
    count = random.randint(1, 4)
    if random.random() < 0.5:
        return [_tokens(random, 60) for _ in range(count)]
    blocks = [_tokens(random, block_size) for _ in range(3)]
    return [[token for _ in range(12) for token in random.choice(blocks)] for _ in range(count)]


def _client(
    random: Random, shape: Shape, rule: Rule, families: list[list[int]], span_s: float
) -> Client:
    head = random.choice(families)[: random.choice([0, 5, 16, 33, 60])]
    prompt = head + _tokens(random, random.choice([1, 3, 9, 40]))
    sampling = _sampling(random)
    fields: dict[str, Any] = {
        "n": random.choice([1, 1, 2, 3, 4]),
        "include_stop": random.random() < 0.3,
        "priority": random.choice([0, 0, -3, 5, 16]),
        "chat_id": random.choice(["", "a", "b"]),
        "tenant": random.choice(["", "t"]),
        "timeout_s": random.choice([20.0, 20.0, 20.0, random.uniform(0.05, 3.0)]),
        "ttft_timeout_s": random.choice([None, None, None, random.uniform(0.05, 3.0)]),
    }
    planned = a_request(tokens=prompt, at=random.uniform(0.0, span_s), sampling=sampling, **fields)
    expected = expected_choices(planned.begin(RequestId(""), shape.block_size), rule)
    if random.random() < 0.3 and len(expected[0].text) > 2:
        start = random.randrange(len(expected[0].text) - 1)
        planned.fields["stop"] = (expected[0].text[start : start + 2], "\u0e01\u0e02")
        expected = expected_choices(planned.begin(RequestId(""), shape.block_size), rule)
    outputs = [expected_tokens(rule, prompt, sampling, choice) for choice in range(fields["n"])]
    return Client(
        planned=planned,
        frontend=random.randrange(3),
        expected=tuple(expected),
        chains=tuple(
            block_hashes(pack_ids([*prompt, *output]), shape.block_size, SEED) for output in outputs
        ),
        leaves=random.choice([0.0, 0.005, 0.05, 0.3, 2.0]) if random.random() < 0.15 else None,
        pauses=(random.uniform(0.0, 0.5), random.choice([0.1, 1.0, 100.0]))
        if random.random() < 0.15
        else None,
    )


def _sampling(random: Random) -> SamplingParams:
    max_tokens = random.choice([1, 8, 24, 60, 60])
    prompt_logprobs = random.choice([0, 2]) if random.random() < 0.1 else None
    if prompt_logprobs is not None and random.random() < 0.3:
        max_tokens = 0
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=random.choice([0, 0, min(3, max_tokens)]),
        temperature=random.choice([0.0, 1.0]),
        seed=random.getrandbits(63),
        logprobs=random.choice([None, None, 0, 2]),
        prompt_logprobs=prompt_logprobs,
        ignore_eos=random.random() < 0.3,
        stop_token_ids=(random.randrange(3, VOCAB_SIZE),) if random.random() < 0.2 else (),
    )


def _tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(3, VOCAB_SIZE) for _ in range(count)]
