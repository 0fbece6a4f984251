"""One request through the frontend: every way it can run, stall and end."""

from __future__ import annotations

import pytest

from rtp.core.commands import Chunk, Connect, Deliver, Ended, Failed
from rtp.core.events import (
    ClientGone,
    ClientPaused,
    ClientReady,
    From,
    MasterDown,
    MasterUp,
    StreamDown,
    StreamUp,
)
from rtp.core.messages import (
    Ack,
    AckItem,
    Ask,
    Cancel,
    ChoiceState,
    Refuse,
    Rejected,
    Submit,
    Tokens,
    WorkerLost,
)
from rtp.core.steps import TokenLogprobs
from rtp.core.types import RequestId, SamplingParams, pack_ids
from tests.core.frontend.support import FIRST, SECOND, Hand, a_begin, a_frontend, a_grant, a_run

R = RequestId("r")


def letters(text: str) -> bytes:
    return pack_ids(map(ord, text))


def asked(hand: Hand) -> Ask:
    (ask,) = hand.sent("master")
    assert isinstance(ask, Ask)
    return ask


def test_a_request_runs_from_begin_to_ended() -> None:
    hand = Hand()
    hand.do(a_begin(timeout_s=60.0, tenant="t", chat_id="c", priority=2))
    assert asked(hand) == Ask("f0", R, 1, "m", "t", "c", 2, bytes(16), 10, 8, 1, 60.0)  # type: ignore[arg-type]

    hand.now = 1.0
    hand.do(From("master", a_grant(number=7)))
    assert hand.only(Connect) == Connect(FIRST, 1, "127.0.0.1:1")
    (submit,) = hand.sent(FIRST)
    assert isinstance(submit, Submit)
    assert (submit.number, submit.deadline_s) == (7, 59.0)
    assert submit.choices == (ChoiceState(0),)

    hand.do(StreamUp(FIRST, 1))
    assert hand.last == []
    hand.tokens(a_run(0, "ab", cached_tokens=4))
    assert hand.only(Deliver) == Deliver(R, (Chunk(0, "ab", (97, 98)),), 4, 2)
    assert hand.sent(FIRST) == [Ack((AckItem(R, 1, 0, 2),))]

    hand.tokens(a_run(2, "c", "length"))
    assert hand.only(Deliver).chunks == (Chunk(0, "c", (99,), finish="length"),)
    assert hand.only(Ended) == Ended(R, 10, 4, 3)
    assert hand.sent(FIRST) == [Ack((AckItem(R, 1, 0, -1),))]
    assert hand.sent("master") == []
    assert hand.frontend.idle()


def test_a_second_request_uses_the_open_stream() -> None:
    hand = Hand().running()
    hand.do(a_begin("s"))
    hand.do(From("master", a_grant(request_id="s", number=1)))
    assert hand.all(Connect) == []
    assert len(hand.sent(FIRST)) == 1


def test_many_runs_of_a_turn_are_one_delivery_and_one_ack_per_worker() -> None:
    hand = Hand().running(n=2)
    hand.tokens(a_run(0, "a"), a_run(0, "x", choice=1), a_run(1, "b"))
    assert hand.only(Deliver).chunks == (Chunk(0, "ab", (97, 98)), Chunk(1, "x", (120,)))
    assert hand.sent(FIRST) == [Ack((AckItem(R, 1, 0, 2), AckItem(R, 1, 1, 1)))]


def test_s14_nothing_is_delivered_before_the_first_token() -> None:
    hand = Hand().running()
    assert hand.frontend.next_deadline() == 600.0
    hand.do()
    assert hand.last == []


def test_v06_no_output_asked_for_gives_the_prompt_logprobs_and_length() -> None:
    values = (TokenLogprobs(1, -0.5),)
    hand = Hand().running(sampling=SamplingParams(max_tokens=0, prompt_logprobs=0))
    hand.tokens(a_run(0, "", "length", prompt_logprobs=values))
    assert hand.only(Deliver) == Deliver(R, (Chunk(0, "", finish="length"),), 0, 0, values)
    assert hand.only(Ended).generated == 0


def test_prompt_logprobs_are_delivered_once_and_not_computed_again() -> None:
    values = (TokenLogprobs(1, -0.5),)
    hand = Hand().running(n=2, sampling=SamplingParams(max_tokens=8, prompt_logprobs=1))
    hand.tokens(a_run(0, "a", prompt_logprobs=values), a_run(0, "a", choice=1))
    assert hand.only(Deliver).prompt_logprobs == values
    hand.tokens(a_run(1, "b"))
    assert hand.only(Deliver).prompt_logprobs == ()
    hand.do(From("master", WorkerLost(FIRST, 1)))
    hand.do(From("master", a_grant(2, SECOND)))
    (submit,) = hand.sent(SECOND)
    assert isinstance(submit, Submit)
    assert submit.sampling.prompt_logprobs is None


def test_v06_a_lost_worker_does_not_take_the_prompt_logprobs_along() -> None:
    """Another choice has ended, so all have the no tokens that were asked for."""
    values = (TokenLogprobs(1, -0.5),)
    hand = Hand().running(n=2, sampling=SamplingParams(max_tokens=0, prompt_logprobs=0))
    hand.tokens(a_run(0, "", "length", choice=1))
    hand.do(From("master", WorkerLost(FIRST, 1)))
    assert not hand.all(Ended)
    hand.do(From("master", a_grant(2, SECOND)))
    hand.tokens(a_run(0, "", "length", attempt=2, prompt_logprobs=values), peer=SECOND)
    assert hand.only(Deliver).prompt_logprobs == values
    assert hand.only(Ended).generated == 0


def test_a_stop_string_ends_the_choice_and_tells_the_worker() -> None:
    hand = Hand().running(stop=("END",))
    hand.tokens(a_run(0, "xEN"))
    assert hand.text() == "x"
    hand.tokens(a_run(3, "Dzz"))
    (chunk,) = hand.only(Deliver).chunks
    assert chunk == Chunk(0, "", tuple(map(ord, "END")), finish="stop", stop_reason="END")
    assert hand.sent(FIRST) == [Ack((AckItem(R, 1, 0, -1, stop=True),))]
    assert hand.only(Ended).generated == 4
    hand.tokens(a_run(6, "w"))  # was in flight
    assert hand.last == []


@pytest.mark.parametrize(
    ("stop_token_ids", "reason"), [((), None), ((ord("!"),), ord("!"))], ids=["eos", "stop id"]
)
def test_a_stop_token_shows_no_text(stop_token_ids: tuple[int, ...], reason: int | None) -> None:
    hand = Hand().running(sampling=SamplingParams(max_tokens=8, stop_token_ids=stop_token_ids))
    hand.tokens(a_run(0, "a!", "stop", stop_token=ord("!")))
    assert hand.only(Deliver).chunks == (Chunk(0, "a", (97, 33), (), "stop", reason),)


def test_duplicates_are_dropped_and_acknowledged_again() -> None:
    hand = Hand().running()
    hand.tokens(a_run(0, "abc"))
    hand.tokens(a_run(0, "abc"))
    assert hand.all(Deliver) == []
    assert hand.sent(FIRST) == [Ack((AckItem(R, 1, 0, 3),))]
    hand.tokens(a_run(1, "bcd"))
    assert hand.text() == "d"
    assert hand.frontend.counters.duplicates == 1


def test_a_gap_is_asked_for_again_and_never_delivered() -> None:
    hand = Hand().running()
    hand.tokens(a_run(0, "a"))
    hand.tokens(a_run(2, "c"))
    assert hand.all(Deliver) == []
    ack, submit = hand.sent(FIRST)
    assert ack == Ack((AckItem(R, 1, 0, 1),))
    assert isinstance(submit, Submit)
    assert submit.attempt == 1
    hand.tokens(a_run(3, "d"), a_run(4, "e"))
    assert len(hand.sent(FIRST)) == 2
    hand.tokens(a_run(1, "bcd"))
    assert hand.text() == "bcd"
    assert hand.frontend.counters.gaps == 3


def test_a_lost_worker_is_replaced_and_the_stream_continues() -> None:
    hand = Hand().running(n=2, stop=("yz",))
    hand.tokens(a_run(0, "ab"), a_run(0, "x", "length", choice=1))
    hand.now = 5.0
    hand.do(From("master", WorkerLost(FIRST, 1)))
    ask = asked(hand)
    assert (ask.attempt, ask.exclude, ask.failed) == (2, (FIRST,), True)
    assert (ask.num_tokens, ask.max_tokens, ask.n, ask.deadline_s) == (12, 6, 1, 595.0)
    assert hand.sent(FIRST) == [Cancel(R, 1, "worker_lost")]

    hand.do(From("master", a_grant(2, SECOND)), StreamUp(SECOND, 1))
    (submit,) = hand.sent(SECOND)
    assert isinstance(submit, Submit)
    assert submit.choices == (ChoiceState(0, letters("ab")),)
    hand.tokens(a_run(2, "STALE"))
    assert (hand.all(Deliver), hand.sent(FIRST)) == ([], [])
    hand.tokens(a_run(2, "c", "length", attempt=2), peer=SECOND)
    assert hand.text() == "c"
    assert hand.only(Ended).generated == 4
    assert hand.frontend.counters.resumes == 1


def test_a_choice_with_all_its_tokens_ends_although_its_finish_was_lost() -> None:
    hand = Hand().running(max_tokens=2)
    hand.tokens(a_run(0, "ab"))
    hand.do(From("master", WorkerLost(FIRST, 1)))
    assert hand.only(Deliver).chunks == (Chunk(0, "", finish="length"),)
    assert hand.only(Ended).generated == 2
    assert hand.sent("master") == [Cancel(R, 1, "worker_lost", 2)]


def test_a_broken_stream_is_opened_again_and_goes_on() -> None:
    hand = Hand().running()
    hand.tokens(a_run(0, "a"))
    hand.do(StreamDown(FIRST))
    assert hand.only(Connect) == Connect(FIRST, 1, "127.0.0.1:1")
    hand.do(StreamUp(FIRST, 1))
    ack, submit = hand.sent(FIRST)
    assert ack == Ack((AckItem(R, 1, 0, 1),))
    assert isinstance(submit, Submit)
    assert submit.attempt == 1
    hand.tokens(a_run(1, "b", "length"))
    assert hand.only(Ended).generated == 2
    assert hand.frontend.counters.replacements == 0


@pytest.mark.parametrize("how", ["refused", "again", "other life", "too late"])
def test_a_stream_that_does_not_come_back_moves_its_requests(how: str) -> None:
    hand = Hand().running()
    hand.do(StreamDown(FIRST, refused=how == "refused"))
    if how == "again":
        hand.do(StreamDown(FIRST))
    elif how == "other life":
        hand.do(StreamUp(FIRST, 2))
    elif how == "too late":
        assert hand.frontend.next_deadline() == 1.0
        hand.now = 1.0
        hand.do()
        assert hand.sent(FIRST) == [Cancel(R, 1, "stream_slow")]
    ask = asked(hand)
    assert (ask.attempt, ask.exclude) == (2, () if how == "other life" else (FIRST,))


def test_a_stream_slower_than_the_lease_asks_again_without_blame() -> None:
    hand = Hand()
    hand.do(a_begin())
    hand.do(From("master", a_grant()))
    hand.now = 0.25
    hand.do()
    assert (asked(hand).attempt, asked(hand).exclude) == (2, ())


def test_a_broken_stream_without_requests_is_left_alone() -> None:
    hand = Hand().running()
    hand.tokens(a_run(0, "a", "stop"))
    hand.do(StreamDown(FIRST))
    assert hand.last == []


def test_a_grant_by_a_later_life_of_a_worker_moves_the_requests_of_the_earlier() -> None:
    hand = Hand().running()
    hand.do(a_begin("s"))
    hand.do(From("master", a_grant(epoch=2, request_id="s")))
    assert hand.only(Connect) == Connect(FIRST, 2, "127.0.0.1:1")
    assert asked(hand).request_id == R


def test_a_grant_by_a_life_that_is_over_is_asked_again() -> None:
    hand = Hand().running()
    hand.do(From("master", WorkerLost(FIRST, 1)))
    hand.do(From("master", a_grant(2, FIRST, epoch=3)))
    hand.do(a_begin("s"))
    hand.do(From("master", a_grant(request_id="s")))
    assert (asked(hand).request_id, asked(hand).attempt) == ("s", 2)


@pytest.mark.parametrize(
    ("reason", "blamed"),
    [
        ("tombstone", False),
        ("preempted", False),
        ("unknown", False),
        ("full", True),
        ("draining", True),
        ("shutdown", True),
    ],
)
def test_a_worker_that_gives_up_is_replaced(reason: str, blamed: bool) -> None:
    hand = Hand().running()
    hand.do(From(FIRST, Rejected(R, 1, reason, True)))
    assert asked(hand).exclude == ((FIRST,) if blamed else ())
    hand.do(From(FIRST, Rejected(R, 1, reason, True)))
    assert hand.last == []


@pytest.mark.parametrize(
    ("reason", "status", "kind", "code"),
    [
        ("too_long", 400, "invalid_request_error", "context_length_exceeded"),
        ("deadline", 504, "server_error", "timeout"),
        ("slow_reader", 499, "invalid_request_error", "slow_reader"),
        ("non_finite", 500, "server_error", "numeric_fault"),
        ("anything else", 500, "server_error", "internal_error"),
    ],
)
def test_a_final_rejection_fails_the_request(
    reason: str, status: int, kind: str, code: str
) -> None:
    hand = Hand().running()
    hand.do(From(FIRST, Rejected(R, 1, reason, False)))
    failure = hand.only(Failed)
    assert (failure.status, failure.type, failure.code) == (status, kind, code)
    assert hand.frontend.idle()


def test_replacements_are_bounded() -> None:
    hand = Hand(a_frontend(max_replacements=2)).running()
    for attempt in (1, 2):
        displaced(hand, attempt)
    hand.do(From(FIRST, Rejected(R, 3, "preempted", True)))
    failure = hand.only(Failed)
    assert (failure.status, failure.code) == (503, "service_unavailable")
    assert failure.retry_after_s == 1.0


def displaced(hand: Hand, attempt: int) -> float:
    """A worker rejects the attempt; seconds until the next one is asked for, and it is granted."""
    began = hand.now
    hand.do(From(FIRST, Rejected(R, attempt, "full", True)))
    while not hand.sent("master"):
        wanted = hand.frontend.next_deadline()
        assert wanted is not None
        assert wanted > hand.now
        hand.now = wanted
        hand.do()
    assert asked(hand).attempt == attempt + 1
    hand.do(From("master", a_grant(attempt + 1)))
    return hand.now - began


def test_places_are_asked_for_with_growing_pauses() -> None:
    hand = Hand().running()
    pauses = [displaced(hand, attempt) for attempt in range(1, 9)]
    assert pauses == pytest.approx([0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0])


def test_a_new_token_ends_the_pauses() -> None:
    hand = Hand().running()
    assert [displaced(hand, attempt) > 0 for attempt in (1, 2)] == [False, True]
    hand.tokens(a_run(0, "a", attempt=3))
    assert displaced(hand, 3) == 0


def test_a_pause_does_not_outlast_the_deadline() -> None:
    hand = Hand().running(timeout_s=0.02)
    displaced(hand, 1)
    hand.do(From(FIRST, Rejected(R, 2, "full", True)))
    assert hand.frontend.next_deadline() == 0.02
    hand.now = 0.02
    hand.do()
    assert hand.only(Failed).code == "timeout"


def test_a_master_that_returns_is_not_asked_during_a_pause() -> None:
    hand = Hand().running()
    displaced(hand, 1)
    hand.do(From(FIRST, Rejected(R, 2, "full", True)))
    hand.do(MasterUp(2))
    assert hand.sent("master") == []


def test_a_client_may_leave_during_a_pause() -> None:
    hand = Hand().running()
    displaced(hand, 1)
    hand.do(From(FIRST, Rejected(R, 2, "full", True)))
    hand.do(ClientGone(R))
    assert hand.sent("master") == [Cancel(R, 3, "client_gone")]
    assert hand.frontend.idle()


def test_a_numeric_fault_in_one_choice_fails_the_request_after_what_was_made() -> None:
    hand = Hand().running(n=2)
    hand.tokens(a_run(0, "a"), a_run(0, "", "error", choice=1))
    assert [type(command) for command in hand.last[-1:]] == [Failed]
    assert hand.text() == "a"
    assert (hand.only(Failed).status, hand.only(Failed).type) == (500, "server_error")
    assert hand.sent(FIRST) == [Cancel(R, 1, "failed")]
    assert hand.sent("master") == [Cancel(R, 1, "failed", 1)]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "invalid_request_error"),
        (429, "rate_limit_error"),
        (503, "server_error"),
        (504, "server_error"),
    ],
)
def test_a_refusal_is_told_as_it_is(status: int, kind: str) -> None:
    hand = Hand()
    hand.do(a_begin())
    hand.do(From("master", Refuse(R, 1, status, "code", "why", 2.0)))
    assert hand.last == [Failed(R, status, kind, "code", "why", 2.0)]
    hand.do(From("master", Refuse(R, 1, status, "code", "why", 2.0)))
    assert hand.last == []


def test_a_refusal_of_an_earlier_attempt_is_ignored() -> None:
    hand = Hand().running()
    hand.do(From("master", WorkerLost(FIRST, 1)))
    hand.do(From("master", Refuse(R, 1, 503, "code", "why")))
    assert hand.last == []


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_the_deadline_ends_a_request_in_every_phase(phase: str) -> None:
    hand = Hand()
    hand.do(a_begin(timeout_s=10.0))
    if phase != "queued":
        hand.do(From("master", a_grant()), StreamUp(FIRST, 1))
    if phase == "decode":
        hand.tokens(a_run(0, "a"))
    assert hand.frontend.next_deadline() == 10.0
    hand.now = 10.0
    hand.do()
    assert (hand.only(Failed).status, hand.only(Failed).code) == (504, "timeout")
    assert hand.sent("master") == [Cancel(R, 1, "failed", int(phase == "decode"))]
    assert hand.sent(FIRST) == ([] if phase == "queued" else [Cancel(R, 1, "failed")])
    assert hand.frontend.next_deadline() is None


def test_the_first_token_has_its_own_deadline() -> None:
    hand = Hand()
    hand.do(a_begin(ttft_timeout_s=2.0))
    assert asked(hand).ttft_timeout_s == 2.0
    hand.now = 2.0
    hand.do()
    assert hand.only(Failed).status == 504

    hand = Hand().running(ttft_timeout_s=2.0)
    hand.tokens(a_run(0, "a"))
    hand.now = 3.0
    hand.do()
    assert hand.last == []
    hand.do(From("master", WorkerLost(FIRST, 1)))
    assert asked(hand).ttft_timeout_s is None


def test_tokens_that_finish_at_the_deadline_count() -> None:
    hand = Hand().running(timeout_s=10.0)
    hand.now = 10.0
    hand.tokens(a_run(0, "a", "length"))
    assert hand.only(Ended).generated == 1


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_a_client_that_leaves_is_cancelled_everywhere_at_once(phase: str) -> None:
    hand = Hand()
    hand.do(a_begin())
    if phase != "queued":
        hand.do(From("master", a_grant()), StreamUp(FIRST, 1))
    if phase == "decode":
        hand.tokens(a_run(0, "a"))
    hand.do(ClientGone(R), tick=False)
    gone = Cancel(R, 1, "client_gone")
    assert hand.sent("master") == [Cancel(R, 1, "client_gone", int(phase == "decode"))]
    assert hand.sent(FIRST) == ([] if phase == "queued" else [gone])
    assert hand.frontend.idle()
    if phase != "queued":
        hand.tokens(a_run(1, "b"))  # was in flight
        assert hand.last == []


def test_a_stranger_is_cancelled_once_until_its_stream_breaks() -> None:
    hand = Hand().running()
    hand.do(a_begin("s"))
    hand.do(ClientGone(R))
    hand.do(StreamDown(FIRST))
    hand.do(From("master", a_grant(request_id="s")))
    hand.do(StreamUp(FIRST, 1))
    hand.tokens(a_run(0, "a"))
    assert hand.sent(FIRST) == [Cancel(R, 1, "stale")]
    hand.tokens(a_run(1, "b"))
    assert hand.last == []


def test_a_late_grant_is_given_back() -> None:
    hand = Hand()
    hand.do(a_begin())
    hand.do(ClientGone(R))
    hand.do(From("master", a_grant()))
    assert hand.sent("master") == [Cancel(R, 1, "stale_grant")]

    hand = Hand().running()
    hand.do(From("master", WorkerLost(FIRST, 1)))
    hand.do(From("master", a_grant(1, SECOND)))
    assert hand.sent("master") == [Cancel(R, 1, "stale_grant")]


def test_a_repeated_grant_is_not_submitted_again() -> None:
    hand = Hand().running()
    hand.do(From("master", a_grant()))
    assert hand.last == []


def test_a_slow_client_withholds_acknowledgements() -> None:
    hand = Hand().running(n=2)
    hand.do(ClientPaused(R))
    hand.tokens(a_run(0, "a"), a_run(0, "b", "length", choice=1))
    assert hand.text() == "ab"
    assert hand.sent(FIRST) == [Ack((AckItem(R, 1, 1, -1),))]
    hand.do(ClientReady(R))
    assert hand.sent(FIRST) == [Ack((AckItem(R, 1, 0, 1), AckItem(R, 1, 1, -1)))]


def test_a_master_that_returns_is_asked_again_with_the_same_attempt() -> None:
    hand = Hand()
    hand.do(a_begin())
    ask = asked(hand)
    hand.do(MasterDown())
    assert hand.last == []
    hand.do(MasterUp(2))
    assert asked(hand) == ask

    hand = Hand().running()
    hand.do(MasterDown(), MasterUp(2))
    assert hand.last == []


def test_the_end_of_a_turn_is_wanted_at_once() -> None:
    hand = Hand().running()
    hand.now = 3.0
    hand.do(From(FIRST, Tokens((a_run(0, "a"),))), tick=False)
    assert hand.frontend.next_deadline() == 3.0
    assert not hand.frontend.idle()
