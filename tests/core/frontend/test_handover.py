"""A request that begins on one worker and goes on at another: one stream to its client."""

from __future__ import annotations

import pytest

from rtp.core.commands import Chunk, Connect, Deliver, Ended
from rtp.core.events import ClientGone, From, StreamDown, StreamUp
from rtp.core.messages import (
    Ack,
    AckItem,
    Ask,
    Cancel,
    ChoiceState,
    Place,
    Rejected,
    Source,
    Submit,
    TokenRun,
    WorkerLost,
)
from rtp.core.types import RequestId, WorkerId, pack_ids
from tests.core.frontend.support import FIRST, SECOND, Hand, a_begin, a_grant, a_run

R = RequestId("r")
THIRD = WorkerId("w2")
PLACE = Place(SECOND, 4, "127.0.0.1:2", 1, 9)
SOURCE = Source(FIRST, 1, "127.0.0.1:1", 0, b"ticket", 8)
RELEASED = Cancel(R, 1, "handed_over")


def handed(text: str = "a", choice: int = 0) -> TokenRun:
    return a_run(0, text, "handover", choice=choice, source=SOURCE)


def split(**fields: object) -> Hand:
    """Submitted to FIRST, with SECOND to go on; both streams are up."""
    hand = Hand()
    hand.do(a_begin(**fields))  # type: ignore[arg-type]
    hand.do(From("master", a_grant(decode=PLACE)))
    assert hand.all(Connect) == [
        Connect(FIRST, 1, "127.0.0.1:1"),
        Connect(SECOND, 4, "127.0.0.1:2"),
    ]
    (submit,) = hand.sent(FIRST)
    assert isinstance(submit, Submit)
    assert submit.handover == PLACE
    hand.do(StreamUp(FIRST, 1), StreamUp(SECOND, 4))
    return hand


def asked(hand: Hand) -> Ask:
    (ask,) = [m for m in hand.sent("master") if isinstance(m, Ask)]
    return ask


def test_the_decode_worker_goes_on_with_the_next_token() -> None:
    hand = split()
    hand.now = 1.0
    hand.tokens(handed())
    assert hand.only(Deliver).chunks == (Chunk(0, "a", (97,)),), "at once"
    submit, _ = hand.sent(SECOND)
    assert isinstance(submit, Submit)
    assert (submit.attempt, submit.rank, submit.number, submit.handover) == (1, 1, 9, None)
    assert submit.choices == (ChoiceState(0, pack_ids([97]), SOURCE),)
    assert submit.deadline_s == 599.0
    assert hand.sent(FIRST) == hand.sent("master") == []

    hand.tokens(a_run(1, "b"), peer=SECOND)
    assert hand.only(Deliver).chunks == (Chunk(0, "b", (98,)),)
    assert hand.sent(FIRST) == [RELEASED], "its pages have been used"
    hand.tokens(a_run(2, "c", "length"), peer=SECOND)
    assert hand.only(Ended).generated == 3
    assert hand.sent("master") == hand.sent(FIRST) == []
    assert hand.frontend.idle()
    assert hand.frontend.counters.handovers == 1


def test_all_choices_go_together_and_those_that_ended_stay() -> None:
    hand = split(n=3)
    hand.tokens(handed("a"), a_run(0, "b", "stop", choice=1, stop_token=ord("b")))
    assert hand.sent(SECOND) == [], "the third has no token yet"
    hand.tokens(handed("c", choice=2))
    submit = hand.sent(SECOND)[0]
    assert isinstance(submit, Submit)
    assert [(c.choice, c.output) for c in submit.choices] == [
        (0, pack_ids([97])),
        (2, pack_ids([99])),
    ]
    hand.tokens(a_run(1, "x"), peer=SECOND)
    assert hand.sent(FIRST) == [], "the other one may still be pulling"
    hand.tokens(a_run(1, "y", choice=2), peer=SECOND)
    assert hand.sent(FIRST) == [RELEASED]


def test_a_stop_string_in_the_first_token_needs_nobody_else() -> None:
    """Its worker has told the Master of a hand-over that does not come: the frontend says so."""
    hand = split(stop=("a",))
    hand.tokens(handed("a"))
    assert hand.only(Ended)
    assert hand.sent(SECOND) == []
    assert hand.sent(FIRST) == [Ack((AckItem(R, 1, 0, -1),))]
    assert hand.sent("master") == [Cancel(R, 1, "finished", generated=1)]


def test_a_request_that_ends_at_once_is_not_handed_over() -> None:
    hand = split(max_tokens=1)
    hand.tokens(a_run(0, "a", "length"))
    assert hand.only(Ended)
    assert hand.sent(SECOND) == hand.sent("master") == []


@pytest.mark.parametrize("how", ["lost", "stream"])
def test_a_decode_worker_lost_before_it_is_needed_is_found_out_at_the_hand_over(how: str) -> None:
    hand = split()
    lost = From("master", WorkerLost(SECOND, 4)) if how == "lost" else StreamDown(SECOND)
    hand.do(lost)
    assert hand.last == [], "the prefill goes on"
    hand.tokens(handed())
    assert hand.only(Deliver).chunks == (Chunk(0, "a", (97,)),)
    ask = asked(hand)
    assert (ask.attempt, ask.num_tokens, ask.max_tokens, ask.exclude) == (2, 11, 7, ())
    assert hand.sent(FIRST) == [Cancel(R, 1, "decode_lost")]
    assert hand.sent(SECOND) == []


def test_a_prefill_worker_lost_before_the_hand_over_is_replaced_once() -> None:
    hand = split()
    hand.do(From("master", WorkerLost(FIRST, 1)))
    assert asked(hand).attempt == 2
    hand.do(From("master", a_grant(2, THIRD)))
    (submit,) = hand.sent(THIRD)
    assert isinstance(submit, Submit)
    assert (submit.handover, submit.choices) == (None, (ChoiceState(0),))


def test_a_prefill_worker_lost_after_the_hand_over_is_not_missed() -> None:
    hand = split()
    hand.tokens(handed())
    hand.do(From("master", WorkerLost(FIRST, 1)))
    assert hand.last == []
    hand.tokens(a_run(1, "b"), peer=SECOND)
    assert hand.only(Deliver).chunks == (Chunk(0, "b", (98,)),)


@pytest.mark.parametrize("how", ["lost", "preempted", "stream"])
def test_a_decode_worker_lost_on_the_way_is_replaced_from_the_next_token(how: str) -> None:
    hand = split()
    hand.tokens(handed())
    if how == "lost":
        hand.do(From("master", WorkerLost(SECOND, 4)))
    elif how == "stream":
        hand.do(StreamDown(SECOND, refused=True))
    else:
        hand.do(From(SECOND, Rejected(R, 1, "preempted", True)))
    ask = asked(hand)
    assert (ask.attempt, ask.num_tokens) == (2, 11)
    assert ask.exclude == (() if how == "preempted" else (SECOND,))
    assert hand.sent(FIRST) == [RELEASED], "nobody comes for them"
    hand.do(From("master", a_grant(2, THIRD)))
    (submit,) = hand.sent(THIRD)
    assert isinstance(submit, Submit)
    assert submit.choices == (ChoiceState(0, pack_ids([97])),), "no ticket of another attempt"


def test_what_the_prefill_worker_repeats_does_not_end_its_pages() -> None:
    """After a reconnect it sends again what was not acknowledged."""
    hand = split()
    hand.tokens(handed())
    hand.do(StreamDown(FIRST))
    hand.do(StreamUp(FIRST, 1))
    hand.tokens(handed())
    assert hand.last == []


def test_a_repeated_hand_over_is_taken_once() -> None:
    hand = split(n=2)
    hand.tokens(handed("a"))
    hand.tokens(handed("a"))
    assert hand.all(Deliver) == []
    hand.tokens(handed("b", choice=1))
    assert len([m for m in hand.sent(SECOND) if isinstance(m, Submit)]) == 1
    assert hand.frontend.counters.handovers == 1


def test_a_stream_that_breaks_after_the_hand_over_repeats_it() -> None:
    hand = split()
    hand.tokens(handed())
    hand.do(StreamDown(SECOND))
    hand.do(StreamUp(SECOND, 4))
    submits = [m for m in hand.sent(SECOND) if isinstance(m, Submit)]
    assert [s.choices[0].source for s in submits] == [SOURCE]


@pytest.mark.parametrize("handed_over", [False, True])
def test_a_client_that_leaves_frees_both_workers(handed_over: bool) -> None:
    hand = split()
    if handed_over:
        hand.tokens(handed())
    hand.do(ClientGone(R))
    gone = Cancel(R, 1, "client_gone")
    assert hand.sent("master") == [Cancel(R, 1, "client_gone", generated=int(handed_over))]
    assert hand.sent(FIRST) == [RELEASED if handed_over else gone]
    assert hand.sent(SECOND) == ([gone] if handed_over else [])
    assert hand.frontend.idle()


def test_a_later_life_of_the_decode_worker_is_not_the_one_that_was_reserved() -> None:
    hand = split()
    later = Place(SECOND, 5, "127.0.0.1:2", 0, 0)
    hand.do(a_begin("s"))
    hand.do(From("master", a_grant(request_id="s", number=1, decode=later)))
    assert hand.all(Connect) == [Connect(SECOND, 5, "127.0.0.1:2")]
    hand.tokens(handed())
    assert asked(hand).attempt == 2
