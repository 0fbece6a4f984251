"""What steps cost: the formula that simulated ranks take their time by, and profiles of hardware.

Seconds (design section 4): a step with prompt chunks costs `a + sum(b*new + c*new*(cached +
new/2))`, one with decode rows `d + e*rows + f*context`, one with both the sum. A move of KV takes
`transfer_latency_s` and its tokens over `transfer_tokens_per_s`.

A profile either was measured, or follows from data sheets by roofline().
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from rtp.core.steps import Row
from rtp.core.types import FloatArray

Number = TypeVar("Number", float, FloatArray)
"""One or a column."""
Coefficients = tuple[float, float, float, float, float, float]
OverZero = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True, slots=True)
class Cost:
    """Coefficients of a step, in seconds."""

    a: float
    b: float
    c: float
    d: float
    e: float
    f: float

    @property
    def empty_s(self) -> float:
        """Of a step whatever its rows, and so of a dummy step."""
        return min(self.a, self.d)

    @property
    def coefficients(self) -> Coefficients:
        return self.a, self.b, self.c, self.d, self.e, self.f

    def prefill_s(self, new: Number, cached: Number | float = 0.0) -> Number:
        """Of a prompt in one step, alone."""
        return self.a + new * (self.b + self.c * (cached + 0.5 * new))

    def decode_s(self, rows: float, context: float) -> float:
        """Of a step of `rows` tokens with `context` tokens in all their pages together."""
        return self.d + self.e * rows + self.f * context

    def step_s(self, rows: Sequence[Row]) -> float:
        """A row of one token is taken for a decode."""
        seconds = 0.0
        chunks = [row for row in rows if row.num_new > 1]
        if chunks:
            seconds += self.a
            for row in chunks:
                seconds += self.b * row.num_new
                seconds += self.c * row.num_new * (row.start + row.num_new / 2)
        decodes = [row for row in rows if row.num_new == 1]
        if decodes:
            context = sum(row.start + 1 for row in decodes)
            seconds += self.d + self.e * len(decodes) + self.f * context
        return seconds


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of machine with a model on it, as one rank."""

    name: str
    source: str
    """Where each figure is from, for people."""
    a: float
    b: float
    c: float
    d: float
    e: float
    f: float
    kv_tokens: int = 0
    """That fit beside the weights; 0: not known."""
    transfer_latency_s: float = 0.002
    transfer_tokens_per_s: float = 0.0
    """KV from rank to rank; 0: not known, no pairs can be made of it."""

    @property
    def cost(self) -> Cost:
        return Cost(self.a, self.b, self.c, self.d, self.e, self.f)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What of a model decides what its steps cost."""

    parameters: OverZero
    active_parameters: OverZero
    """Of a token; less than all in a mixture of experts."""
    layers: Annotated[int, Meta(gt=0)]
    width: Annotated[int, Meta(gt=0)]
    """Query heads times head size."""
    kv_width: Annotated[int, Meta(gt=0)]
    """Key heads times head size."""
    weight_bytes: OverZero = 2.0
    kv_bytes: OverZero = 2.0


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Accelerators of one rank, from their data sheet, and how much of that is reached."""

    count: Annotated[int, Meta(gt=0)]
    flops: OverZero
    """Dense, a second, each, in the type the model computes in."""
    memory_bytes: OverZero
    memory_bytes_per_s: OverZero
    network_bytes_per_s: OverZero
    """Of the rank, all cards together."""
    compute_share: OverZero = 0.5
    memory_share: OverZero = 0.8
    overhead_s: float = 0.007
    """Of a step whatever its rows: launches, collectives, sampling."""


def roofline(name: str, shape: Shape, machine: Machine, source: str) -> Profile:
    """Prefill is bound by arithmetic, decode by reading weights and pages (Williams, Waterman,
    Patterson: Roofline, 2009; two operations a parameter and token, four a layer, head dimension
    and pair of positions in attention)."""
    flops = machine.count * machine.flops * machine.compute_share
    bandwidth = machine.count * machine.memory_bytes_per_s * machine.memory_share
    token_bytes = 2 * shape.layers * shape.kv_width * shape.kv_bytes
    weights = shape.parameters * shape.weight_bytes
    free = 0.9 * machine.count * machine.memory_bytes - weights
    return Profile(
        name=name,
        source=source,
        a=machine.overhead_s,
        b=2 * shape.active_parameters / flops,
        c=4 * shape.layers * shape.width / flops,
        d=machine.overhead_s + weights / bandwidth,
        e=2 * shape.active_parameters / flops,
        f=token_bytes / bandwidth,
        kv_tokens=int(max(free, 0.0) / token_bytes),
        transfer_tokens_per_s=machine.network_bytes_per_s / token_bytes,
    )
