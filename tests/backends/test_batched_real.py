"""The real batcher over the real Runner: smollm2-135m in float32, all 20 references at once."""

from __future__ import annotations

from collections import deque

import pytest

from rtp.backends.torch_cpu import build
from rtp.core.hashing import block_hashes, namespace
from rtp.core.messages import ChoiceState, Submit
from rtp.core.types import RequestId, SamplingParams, pack_ids
from rtp.core.worker.batcher import Batcher
from rtp.core.worker.sequence import sequences
from rtp.core.worker.stats import Stats
from tests.backends.make_references import MODEL, NUM_OUTPUTS
from tests.support.references import stored

pytestmark = pytest.mark.slow
SEED = namespace(secret=b"s", revision="r")


def submit(number: int, prompt: list[int], output: list[int]) -> Submit:
    """A request of NUM_OUTPUTS greedy tokens, of which `output` exist already."""
    ids = pack_ids(prompt)
    return Submit(
        request_id=RequestId(f"r{number}"),
        attempt=1,
        rank=0,
        number=number,
        prompt=ids,
        hashes=block_hashes(ids, 16, SEED),
        namespace=SEED,
        sampling=SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0, ignore_eos=True),
        choices=(ChoiceState(0, pack_ids(output)),),
        deadline_s=600.0,
    )


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize(
    ("num_blocks", "resumed", "preempted"),
    [(400, 0, False), (40, 0, True), (400, 23, False)],
    ids=["ample", "preempted", "resumed"],
)
def test_every_token_is_that_of_transformers(
    num_blocks: int, resumed: int, preempted: bool, steps_in_flight: int
):
    """resumed: tokens of each answer that another worker has already produced."""
    runner = build(checkpoint=MODEL, dtype="fp32", num_blocks=num_blocks)
    stats = Stats()
    batcher = Batcher(
        runner.capacity,
        max_batch_tokens=96,
        chunk_while_decoding=48,
        max_rows=16,
        steps_in_flight=steps_in_flight,
        stats=stats,
    )
    outputs: dict[str, list[int]] = {}
    for number, reference in enumerate(stored()):
        head = reference.output[:resumed]
        (sequence,) = sequences(submit(number, reference.prompt, head), runner.capacity)
        outputs[sequence.request_id] = list(head)
        assert batcher.add(sequence)
    in_flight = deque()
    while not batcher.idle():
        while (plan := batcher.next_plan()) is not None:
            in_flight.append(plan)
        assert not batcher.take_dropped(), "a sequence was preempted too often"
        for gain in batcher.complete(runner.execute(in_flight.popleft())).gains:
            outputs[gain.sequence.request_id] += gain.ids
    batcher.check()
    assert (stats.preemptions > 0) == preempted
    assert list(outputs.values()) == [reference.output for reference in stored()]
