"""The gates: what is refused, with which status and code, and how it is counted."""

from __future__ import annotations

import pytest

from rtp.core.errors import ConfigError
from rtp.core.messages import Refuse
from tests.support.fleet import Fleet


def gate_counts(fleet: Fleet) -> dict[str, int]:
    counts: dict[str, int] = fleet.master.overview(fleet.now)["refused"]
    return {gate: count for gate, count in counts.items() if count}


def busy(fleet: Fleet) -> None:
    """One worker with two seconds of prefill before it."""
    worker = fleet.add()
    fleet.report(worker, prefill_tokens=100_000, running=1)


@pytest.mark.parametrize("limit", [0, -1, "abc", 1.5, True, None])
def test_a01_a_queue_limit_that_means_nothing_is_an_error_at_the_start(limit: object):
    for name in ("max_queue_requests", "max_queue_tokens"):
        with pytest.raises(ConfigError, match=name):
            Fleet(**{name: limit})


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf"), "abc"])
def test_a01_a_ttft_limit_that_means_nothing_is_an_error_at_the_start(limit: object):
    with pytest.raises(ConfigError, match="ttft_limit_s"):
        Fleet(ttft_limit_s=limit)


def test_a03_a_full_queue_answers_429_with_retry_after_and_is_counted():
    fleet = Fleet(max_queue_requests=2)
    busy(fleet)
    for _ in range(2):
        assert fleet.refusal(fleet.ask()) is None
    refusal = fleet.refusal(fleet.ask())
    assert (refusal.status, refusal.code) == (429, "rate_limit_exceeded")
    assert refusal.retry_after_s >= 1.0
    assert gate_counts(fleet) == {"queue_requests": 1}
    assert fleet.notes("request.refused")[0].fields["code"] == "rate_limit_exceeded"


def test_a03_a_queue_full_of_tokens_answers_429_and_one_large_request_still_gets_in():
    fleet = Fleet(max_queue_tokens=1000)
    busy(fleet)
    assert fleet.refusal(fleet.ask(5000)) is None
    assert fleet.refusal(fleet.ask(10)).code == "rate_limit_exceeded"
    assert gate_counts(fleet) == {"queue_tokens": 1}


@pytest.mark.parametrize("own", [True, False])
def test_a03_a_predicted_ttft_over_its_limit_answers_503_overloaded(own: bool):
    fleet = Fleet(ttft_limit_s=None if own else 0.5)
    busy(fleet)
    refusal = fleet.refusal(fleet.ask(ttft_timeout_s=0.5 if own else None))
    assert (refusal.status, refusal.code) == (503, "overloaded")
    assert refusal.retry_after_s >= 1.0
    assert gate_counts(fleet) == {"predicted_ttft": 1}


def test_a03_one_switch_turns_the_limits_off_but_not_the_facts():
    fleet = Fleet(max_queue_requests=1, max_queue_tokens=1, ttft_limit_s=0.001, limits=False)
    busy(fleet)
    for _ in range(5):
        assert fleet.refusal(fleet.ask(500)) is None
    assert fleet.refusal(fleet.ask(40_000)).status == 400
    assert gate_counts(fleet) == {"context_length": 1}


def test_a04_without_any_worker_503_at_once_with_a_code_of_its_own():
    fleet = Fleet()
    refusal = fleet.refusal(fleet.ask())
    assert (refusal.status, refusal.code) == (503, "service_unavailable")
    assert refusal.retry_after_s >= 1.0
    assert gate_counts(fleet) == {"no_worker": 1}


def test_a04_when_the_last_worker_is_lost_what_waits_is_refused():
    fleet = Fleet()
    worker = fleet.add()
    fleet.unlink(worker)
    del fleet.workers["w0"]
    waiting = fleet.ask()
    assert fleet.refusal(waiting) is None, "it may be back in a moment"
    fleet.wait(3.5)
    assert fleet.refusal(waiting).code == "service_unavailable"
    assert fleet.refusal(fleet.ask()).code == "service_unavailable"
    assert fleet.master.idle()


def test_b04_unknown_models_answer_404_and_leave_no_trace_per_name():
    fleet = Fleet()
    fleet.add()
    for i in range(300):
        refusal = fleet.refusal(fleet.ask(5, model=f"no-such-model-{i}"))
        assert (refusal.status, refusal.code) == (404, "model_not_found")
    assert gate_counts(fleet) == {"model_not_found": 300}
    assert list(fleet.master.overview(fleet.now)["models"]) == ["m"]


def test_what_exceeds_the_context_is_refused_as_such():
    fleet = Fleet()
    fleet.add(max_model_len=1000)
    assert fleet.grant(fleet.ask(984, max_tokens=16)) is not None
    refusal = fleet.refusal(fleet.ask(985, max_tokens=16))
    assert (refusal.status, refusal.code) == (400, "context_length_exceeded")
    assert refusal.retry_after_s is None


def test_a07_what_can_never_fit_the_pool_is_refused_and_others_flow():
    fleet = Fleet()
    fleet.add(kv_total=(1024,), max_model_len=4096)
    refusal = fleet.refusal(fleet.ask(2000))
    assert (refusal.status, refusal.code) == (400, "context_length_exceeded")
    assert fleet.grant(fleet.ask(500)) is not None
    assert gate_counts(fleet) == {"kv_capacity": 1}


def test_a_request_whose_expected_output_does_not_fit_beside_it_runs_alone():
    fleet = Fleet()
    fleet.add(kv_total=(1024,), max_model_len=4096)
    first = fleet.ask(1000, max_tokens=2000)
    assert fleet.grant(first) is not None
    second = fleet.ask(100, max_tokens=2000)
    assert fleet.grant(second) is None
    fleet.finish(fleet.grant(first))
    assert fleet.grant(second) is not None


def test_a_deadline_that_passes_while_waiting_answers_504_once():
    fleet = Fleet()
    busy(fleet)
    late, later = fleet.ask(deadline_s=0.5), fleet.ask(deadline_s=0.7, ttft_timeout_s=600.0)
    assert fleet.refusal(fleet.ask(deadline_s=0.0)).status == 504
    fleet.wait(1.0)
    for request in (late, later):
        assert (fleet.refusal(request).status, fleet.refusal(request).code) == (504, "timeout")
    assert len(fleet.sent(Refuse)) == 3
    assert fleet.master.idle()


def test_a_resumed_request_passes_a_full_queue():
    """A stream that a lost worker cut must not end because the queue is full meanwhile."""
    fleet = Fleet(max_queue_requests=1)
    busy(fleet)
    fleet.ask()
    assert fleet.refusal(fleet.ask()).status == 429
    assert fleet.refusal(fleet.ask(attempt=2, failed=True)) is None


def test_b01_labels_stay_bounded_whatever_chats_tenants_and_requests_come():
    fleet = Fleet(affinity_chats=50, kept_placements=10, check=False)
    fleet.add()
    for i in range(400):
        request = fleet.ask(20, chat_id=f"chat-{i}", tenant=f"tenant-{i}")
        fleet.finish(fleet.grant(request))
        fleet.now += 0.01
    overview = fleet.master.overview(fleet.now)
    assert overview["affinity_chats"] == 50
    assert len(overview["placements"]) == 10
    assert set(overview["models"]) == {"m"}
    assert "tenant-" not in repr(overview)
