"""What the Master knows, as metrics: views, predictions, policy, tenants; all labels bounded."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import generate_latest

from rtp.core.master.tenants import Tenants, Terms
from rtp.core.messages import Delta, GroupCost
from rtp.io.metrics import SLICE, Metrics
from rtp.io.metrics_facts import WithAliases
from rtp.io.metrics_master import Overview
from tests.io.test_metrics import samples, value
from tests.support.fleet import Fleet, Worker, hashes_of

PROMPT = range(512)


def watched(fleet: Fleet) -> Metrics:
    """Metrics that read the fleet's Master as the Master's process lets them."""

    def overview() -> Overview:
        facts = fleet.master.overview(fleet.now)
        workers = facts["workers"]
        assert isinstance(workers, dict)
        listed = [
            {**w, "worker_id": id, "ranks": [{"rank": i, **r} for i, r in enumerate(w["ranks"])]}
            for id, w in workers.items()
        ]
        return {**facts, "workers": listed}

    metrics = Metrics()
    metrics.watch(overview)
    return metrics


def test_a_view_tells_its_age_its_source_and_what_mended_it():
    fleet = Fleet()
    metrics, worker = watched(fleet), fleet.add()
    assert value(metrics, "rtp_view_source", worker="w0", source="none") == 1
    fleet.snapshot(worker)
    assert value(metrics, "rtp_view_source", worker="w0", source="snapshot") == 1
    fleet.store(worker, hashes_of(PROMPT))
    fleet.now += 2.5
    assert value(metrics, "rtp_view_source", worker="w0", source="delta") == 1
    assert value(metrics, "rtp_view_source", worker="w0", source="snapshot") == 0
    assert value(metrics, "rtp_view_age_seconds", worker="w0") == 2.5
    worker.version += 1  # a delta is lost
    fleet.store(worker, hashes_of(range(600)))
    fleet.snapshot(worker)
    assert value(metrics, "rtp_view_gaps_total", worker="w0") == 1
    assert value(metrics, "rtp_view_resyncs_total", worker="w0") == 2


def test_x12_late_messages_of_an_earlier_life_are_counted_by_worker():
    fleet = Fleet()
    metrics, old = watched(fleet), fleet.add()
    fleet.add("w0", epoch=2, address=old.register.address)
    late = Worker(old.register)
    fleet.report(late)
    fleet.tell(Delta(late.id, late.epoch, 0, 1, ()))
    assert value(metrics, "rtp_view_late_messages_total", worker="w0") == 2
    assert value(metrics, "rtp_stale_messages_total") >= 2


def test_x15_expected_and_confirmed_hits_are_counted_apart():
    fleet = Fleet()
    metrics, worker = watched(fleet), fleet.add()
    fleet.store(worker, hashes_of(PROMPT))
    good, bad = (fleet.grant(fleet.ask(range(513))) for _ in range(2))
    fleet.first_token(good, 1, 512, 0.001)
    fleet.first_token(bad, 513, 0, 0.006)
    assert value(metrics, "rtp_predicted_hit_tokens_total") == 1024
    assert value(metrics, "rtp_confirmed_hit_tokens_total") == 512
    assert value(metrics, "rtp_missed_predictions_total") == 1
    assert value(metrics, "rtp_grants_total") == 2
    assert value(metrics, "rtp_predictor_samples_total", worker="w0", phase="prefill") == 2
    assert value(metrics, "rtp_predictor_error_ratio", worker="w0", phase="prefill") > 0


def test_blocks_on_their_way_are_shown_until_they_are_settled():
    fleet = Fleet()
    metrics, _ = watched(fleet), fleet.add()
    grant = fleet.grant(fleet.ask(160))
    assert value(metrics, "rtp_arriving_blocks") == 10
    fleet.finish(grant, "failed")
    assert value(metrics, "rtp_arriving_blocks") == 0


def test_a_policy_that_fails_is_counted():
    class Broken:
        def score(self, query: object, candidates: object, predict: object) -> np.ndarray:
            return np.array([float("nan")])

    fleet = Fleet(Broken())
    metrics, _ = watched(fleet), fleet.add()
    assert fleet.grant(fleet.ask()) is not None
    assert value(metrics, "rtp_policy_fallbacks_total") == 1
    assert value(metrics, "rtp_policy_looks_total") == 1


def test_a03_every_gate_is_a_series_from_the_start():
    fleet = Fleet()
    metrics = watched(fleet)
    gates = {
        dict(labels)["gate"] for n, labels in samples(metrics) if n == "rtp_gate_refusals_total"
    }
    assert {"tenant_rate", "tenant_queue", "queue_share", "queue_requests", "deadline"} <= gates
    fleet.ask()
    assert value(metrics, "rtp_gate_refusals_total", gate="no_worker") == 1


def test_b01_named_tenants_have_series_and_all_others_share_one():
    fleet = Fleet(tenants=Tenants({"team": Terms(tokens_per_s=1.0, burst_tokens=150.0)}))
    metrics = watched(fleet)
    fleet.add()
    before = set(samples(metrics))
    fleet.finish(fleet.grant(fleet.ask(100, tenant="team")), generated=10)
    assert fleet.refusal(fleet.ask(100, tenant="team")).status == 429
    for i in range(300):
        fleet.finish(fleet.grant(fleet.ask(20, tenant=f"t{i}", chat_id=f"c{i}")), generated=10)
        fleet.now += 0.01
    assert set(samples(metrics)) == before
    assert value(metrics, "rtp_tenant_tokens_total", tenant="team") == 110
    assert value(metrics, "rtp_tenant_refusals_total", tenant="team") == 1
    assert value(metrics, "rtp_tenant_requests_total", tenant="other") == 300
    assert value(metrics, "rtp_tenant_requests_waiting", tenant="team") == 0


@pytest.mark.parametrize("num_named", [10, 100])
def test_b01_no_more_tenants_are_labels_than_are_shown(num_named: int):
    named = {f"team-{i:03d}": Terms() for i in range(num_named)}
    fleet = Fleet(tenants=Tenants(named))
    metrics = watched(fleet)
    fleet.add()
    for tenant in named:
        fleet.finish(fleet.grant(fleet.ask(20, tenant=tenant)), generated=0)
        fleet.now += 0.01
    labels = {dict(x)["tenant"] for n, x in samples(metrics) if n == "rtp_tenant_requests_total"}
    assert len(labels) == min(num_named, 32) + 1
    counts = [v for (n, _), v in samples(metrics).items() if n == "rtp_tenant_requests_total"]
    assert sum(counts) == num_named


def test_b03_series_of_a_worker_go_with_it():
    fleet = Fleet()
    metrics = watched(fleet)
    for name in ("w0", "w1"):
        fleet.snapshot(fleet.add(name))
    assert value(metrics, "rtp_view_resyncs_total", worker="w1") == 1
    fleet.unlink(fleet.workers.pop("w1"))
    fleet.wait(4.0)
    assert not any(("worker", "w1") in labels for _, labels in samples(metrics))
    assert value(metrics, "rtp_view_resyncs_total", worker="w0") == 1


def test_what_stepping_together_costs_is_told_by_worker():
    fleet = Fleet()
    metrics = watched(fleet)
    group = fleet.add("g", ranks=2, lockstep=True)
    fleet.add("single", ranks=2)
    group.group = GroupCost(steps=3, dummy_steps=2, step_s=1.5, wait_s=0.5)
    fleet.report(group)
    for _ in range(2):
        fleet.ask(range(30_000), tick=False)
    fleet.tick()
    told = {"steps": 3, "dummy_steps": 2, "step_seconds": 1.5, "wait_seconds": 0.5}
    for name, number in told.items():
        assert value(metrics, f"rtp_group_{name}_total", worker="g") == number
    labels = [dict(labels) for name, labels in samples(metrics) if name == "rtp_group_steps_total"]
    assert labels == [{"worker": "g"}]
    assert value(metrics, "rtp_group_rounds_total") == 1
    assert value(metrics, "rtp_group_grants_total") == 2
    assert fleet.master.overview(fleet.now)["workers"]["g"]["group"]["wait_share"] == 1 / 3


def test_a_large_exposition_comes_in_small_parts_that_make_a_whole():
    fleet = Fleet(check=False, max_ranks=1024)
    for i in range(100):
        fleet.add(f"w{i:03d}", ranks=8)
    metrics = watched(fleet)
    parts = list(metrics.slices())
    assert max(part.count(b"\n") for part in parts) <= SLICE + 2
    found = samples(metrics)
    assert sum(name == "rtp_kv_free_tokens" for name, _ in found) == 800
    labels = {"worker": "w099", "rank": "7", "model_name": "m"}
    assert value(metrics, "rtp_kv_free_tokens", **labels) == 100_000
    described = [line for line in b"".join(parts).splitlines() if line[:6] == b"# TYPE"]
    assert len(described) == len(set(described)), "each family is described once"
    assert b"".join(parts) == generate_latest(WithAliases(metrics.registry))
