"""The Master's view of the caches: versions, gaps, snapshots."""

from __future__ import annotations

import random

from rtp.core.events import From
from rtp.core.messages import Delta, KeyChange, Poll, Snapshot
from rtp.core.types import Tier
from tests.support.fleet import Fleet, hashes_of
from tests.support.keys import low64

PROMPT = range(512)


def matched(fleet: Fleet, prompt: range = range(513)) -> int:
    """Tokens the next grant of this prompt expects; the request is taken back again."""
    request = fleet.ask(prompt)
    grant = fleet.grant(request)
    fleet.cancel(request)
    return grant.matched_tokens


def test_x14_a_skipped_delta_is_seen_as_a_gap_and_mended_by_a_snapshot():
    fleet = Fleet()
    worker = fleet.add()
    fleet.store(worker, hashes_of(PROMPT))
    worker.version += 1  # this delta is lost
    answer = fleet.store(worker, hashes_of(range(1000, 1032)))
    assert fleet.sent(Poll, answer)[-1].acked_version == -1
    assert matched(fleet) == 512, "served meanwhile"
    assert fleet.master.overview(fleet.now)["workers"]["w0"]["view"]["gaps"] == 1
    answer = fleet.snapshot(worker, hashes_of(range(256)))
    assert fleet.sent(Poll, answer)[-1].acked_version == worker.version
    assert matched(fleet) == 256
    assert fleet.notes("view.lost")
    assert len(fleet.notes("view.resynced")) == 2


def test_x03_all_cleared_leaves_no_credit():
    fleet = Fleet()
    worker = fleet.add()
    fleet.store(worker, hashes_of(PROMPT))
    assert matched(fleet) == 512
    change = KeyChange(0, Tier.DEVICE, b"", hashes_of(PROMPT))
    worker.version += 1
    fleet.tell(From("w0", Delta(worker.id, 1, worker.version - 1, worker.version, (change,))))
    assert matched(fleet) == 0
    fleet.store(worker, hashes_of(PROMPT))
    fleet.snapshot(worker)
    assert matched(fleet) == 0
    assert fleet.master.map.num_blocks == 0 or fleet.master.map.sweep(10_000)


def test_a_snapshot_in_slices_counts_when_its_last_slice_is_in():
    fleet = Fleet()
    worker = fleet.add()
    worker.version = 9
    halves = (hashes_of(PROMPT)[: 16 * 16], hashes_of(PROMPT)[16 * 16 :])
    frames = [
        Snapshot(worker.id, 1, 9, i, 2, (KeyChange(0, Tier.DEVICE, half, b""),))
        for i, half in enumerate(halves)
    ]
    first = fleet.tell(From("w0", frames[0]))
    assert fleet.sent(Poll, first)[-1].acked_version == -1
    last = fleet.tell(From("w0", frames[1]))
    assert fleet.sent(Poll, last)[-1].acked_version == 9
    assert matched(fleet) == 512


def test_a_snapshot_that_lost_a_slice_does_not_count():
    fleet = Fleet()
    worker = fleet.add()
    frames = [Snapshot(worker.id, 1, 5, i, 3, ()) for i in range(3)]
    fleet.tell(From("w0", frames[0]))
    out = fleet.tell(From("w0", frames[2]))
    assert fleet.sent(Poll, out)[-1].acked_version == -1
    fleet.tell(From("w0", frames[1]))
    assert fleet.master.overview(fleet.now)["workers"]["w0"]["view"]["version"] == -1


def test_a_change_of_a_rank_that_does_not_exist_costs_the_view_not_the_master():
    fleet = Fleet()
    worker = fleet.add()
    fleet.snapshot(worker)
    for change in (KeyChange(7, 0, hashes_of(PROMPT), b""), KeyChange(0, 9, b"", b"")):
        delta = Delta(worker.id, 1, worker.version, worker.version + 1, (change,))
        assert fleet.sent(Poll, fleet.tell(From("w0", delta)))[-1].acked_version == -1
        fleet.snapshot(worker)
    assert matched(fleet) == 0


def test_blocks_that_only_the_host_tier_holds_are_no_device_match():
    fleet = Fleet()
    host, device = fleet.add("host"), fleet.add("device")
    fleet.store(host, hashes_of(PROMPT), tier=Tier.HOST)
    fleet.store(device, hashes_of(PROMPT))
    grant = fleet.grant(fleet.ask(range(513)))
    assert grant.worker_id == "device"


def test_x15_predicted_and_actual_hits_are_counted_and_silent_mismatch_shows():
    fleet = Fleet()
    worker = fleet.add()
    fleet.store(worker, hashes_of(PROMPT))
    good = fleet.grant(fleet.ask(range(513)))
    fleet.first_token(good, 1, 512, 0.001)
    bad = fleet.grant(fleet.ask(range(513)))
    fleet.first_token(bad, 513, 0, 0.006)
    cache = fleet.master.overview(fleet.now)["cache"]
    assert cache == {
        "prompt_tokens": 1026,
        "hit_tokens": 512,
        "predicted_hit_tokens": 1024,
        "missed_predictions": 1,
    }


def test_x11_grants_deltas_and_evictions_mixed_leave_the_map_equal_to_the_truth():
    rng = random.Random(11)
    fleet = Fleet()
    workers = [fleet.add(f"w{i}") for i in range(4)]
    prompts = [hashes_of(range(1000 * i, 1000 * i + 320)) for i in range(12)]
    truth: dict[str, set[int]] = {w.id: set() for w in workers}
    for worker in workers:
        fleet.snapshot(worker)
    for _ in range(400):
        worker = rng.choice(workers)
        blocks = rng.choice(prompts)[: 16 * rng.randrange(1, 21)]
        kind = rng.randrange(5)
        if kind == 0:
            i = rng.randrange(12)
            fleet.ask(range(1000 * i, 1000 * i + 320))
        elif kind == 1 and fleet.grants():
            grant = rng.choice(fleet.grants())
            fleet.finish(grant, rng.choice(["done", "cancelled"]))
        else:
            add = kind > 2
            keys = set(low64(blocks))
            changed = keys - truth[worker.id] if add else keys & truth[worker.id]
            wanted = b"".join(
                blocks[i : i + 16]
                for i in range(0, len(blocks), 16)
                if low64(blocks[i : i + 16])[0] in changed
            )
            truth[worker.id] = truth[worker.id] | keys if add else truth[worker.id] - keys
            change = KeyChange(0, 0, wanted if add else b"", b"" if add else wanted)
            worker.version += 1
            fleet.tell(
                From(worker.id, Delta(worker.id, 1, worker.version - 1, worker.version, (change,)))
            )
        fleet.now += 0.01
    for grant in fleet.grants():
        fleet.finish(grant, "cancelled")
    fleet.wait(2.0)
    assert fleet.master.idle()
    for i, prompt in enumerate(prompts):
        match = fleet.master.map.match(prompt)
        for worker in workers:
            row = fleet.master.fleet.row_of((worker.id, 0))
            held = [key in truth[worker.id] for key in low64(prompt)]
            expected = held.index(False) if False in held else len(held)
            assert match.device[row] == expected, (i, worker.id)
