"""Metrics: Prometheus text with bounded labels, second names, a recent window."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from rtp.io.clock import LoopTimes
from rtp.io.metrics import MAX_EVENTS, Metrics
from rtp.io.recent import WINDOW_S, Recent
from tests.support.scripted_frontend import an_api, says


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every series, parsed by Prometheus's own client."""
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for s in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, frozenset(labels.items())]


def rank(**columns: int) -> dict[str, int]:
    known = {"rank": 0, "running": 2, "waiting": 1, "kv_free": 25, "kv_total": 100}
    return known | {"prefill_tokens": 7} | columns


def worker(worker_id: str, *ranks: dict[str, int], state: str = "ready") -> dict[str, object]:
    return {"worker_id": worker_id, "model": "toy", "state": state, "ranks": list(ranks)}


async def test_a_request_is_counted_under_both_names():
    async with an_api(says("hello", cached=2)) as api:
        await api.complete(max_tokens=16)
        status, text = await api.get("/metrics")
        found = api.metrics
    assert status == 200
    assert "# TYPE rtp_time_to_first_token_seconds histogram" in text
    for prefix, suffix in (("rtp_", ""), ("vllm:", "")):
        assert value(found, f"{prefix}prompt_tokens_total{suffix}", model_name="toy") == 3
        assert value(found, f"{prefix}generation_tokens_total", model_name="toy") == 5
        assert value(found, f"{prefix}time_to_first_token_seconds_count", model_name="toy") == 1
    assert value(found, "rtp_inter_token_seconds_count", model_name="toy") == 4
    assert value(found, "vllm:inter_token_latency_seconds_count", model_name="toy") == 4
    assert value(found, "vllm:e2e_request_latency_seconds_count", model_name="toy") == 1
    assert value(found, "vllm:prefix_cache_queries_total", model_name="toy") == 3
    assert value(found, "vllm:prefix_cache_hits_total", model_name="toy") == 2
    success = {"model_name": "toy", "finished_reason": "stop"}
    assert value(found, "vllm:request_success_total", **success) == 1
    ok = {"route": "/v1/completions", "outcome": "ok", "status": "200"}
    assert value(found, "rtp_requests_total", **ok) == 1


async def test_b01_b04_no_client_text_becomes_a_label():
    async with an_api(says("x"), placement=lambda i: None) as api:

        async def one(i: int) -> None:
            await api.complete(chat_id=f"chat{i}", user=f"u{i}", seed=i)
            await api.refused(status=404, prompt="a", model=f"model{i}")
            await api.get(f"/v1/models/model{i}")
            await api.get(f"/v1/requests/{i}/placement")
            await api.get(f"/path{i}")

        await one(0)
        before = set(samples(api.metrics))
        for i in range(1, 20):
            await one(i)
        assert set(samples(api.metrics)) == before
        assert value(api.metrics, "rtp_refusals_total", code="model_not_found") == 40


def test_b03_gauges_of_a_gone_worker_go_with_it():
    metrics = Metrics()
    workers = [worker("a", rank()), worker("b", rank(), rank(rank=1)), worker("c", state="lost")]
    gates = {"queue_requests": 3, "ttft": 0}
    metrics.watch(lambda: {"workers": workers, "queue": {"requests": 7}, "refused": gates})
    labels = {"worker": "b", "rank": "1", "model_name": "toy"}
    assert value(metrics, "rtp_requests_running", **labels) == 2
    assert value(metrics, "vllm:num_requests_waiting", **labels) == 1
    assert value(metrics, "vllm:kv_cache_usage_perc", **labels) == 0.75
    assert value(metrics, "rtp_workers", state="ready") == 2
    assert value(metrics, "rtp_queue_requests") == 7
    assert value(metrics, "rtp_gate_refusals_total", gate="queue_requests") == 3
    del workers[1]
    assert not any(("worker", "b") in labels for _, labels in samples(metrics))
    assert value(metrics, "rtp_workers", state="ready") == 1


def test_notes_are_counted_by_name_within_bounds():
    metrics = Metrics()
    for i in range(2 * MAX_EVENTS):
        metrics.note("worker.joined")
        metrics.note(f"made.up{i}")
    events = {labels for name, labels in samples(metrics) if name == "rtp_events_total"}
    assert len(events) == MAX_EVENTS + 1
    assert value(metrics, "rtp_events_total", event="worker.joined") == 2 * MAX_EVENTS


def test_a_refusal_with_an_unknown_code_shares_a_series():
    metrics = Metrics()
    for code in ("timeout", "made-up", "more", None):
        metrics.refused(code)
    assert value(metrics, "rtp_refusals_total", code="other") == 3


def test_the_loops_lateness_is_told():
    metrics = Metrics()
    times = LoopTimes(samples=4, late_s=0.5, max_late_s=0.25)
    metrics.watch(loop=times)
    assert value(metrics, "rtp_loop_late_seconds_total") == 0.5
    assert value(metrics, "rtp_loop_late_max_seconds") == 0.25


def test_recent_forgets_after_its_window():
    clock = [1000.0]
    recent = Recent(lambda: clock[0])
    for i in range(100):
        recent.ttft(i / 1000)
    recent.tokens(5)
    recent.request(ok=True)
    clock[0] += 1
    recent.tokens(7)
    recent.prompt(10, 4)
    clock[0] += 1
    now = recent.snapshot()
    assert now["series"]["tokens"][-2:] == [5, 7]
    assert sum(now["series"]["requests"]) == 1
    assert now["hit_rate"] == 0.4
    assert (now["ttft_ms"]["p50"], now["ttft_ms"]["p95"]) == (50, 95)
    assert now["tpot_ms"]["p50"] is None
    clock[0] += WINDOW_S
    later = recent.snapshot()
    assert sum(later["series"]["tokens"]) == 0
    assert later["ttft_ms"]["p50"] is None
    assert later["hit_rate"] is None
