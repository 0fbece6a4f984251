"""Columns of a round: patched rows equal a fresh look; a policy's columns are made on demand."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from rtp.core.master.booking import Booking
from rtp.core.master.columns import MIXED, MOST_REQUESTS, Rows
from rtp.core.master.contenders import ANY, NO_NUMBER, NONE, candidates, ranking, winner
from rtp.core.master.load import FLAGS, VIEW
from rtp.core.master.offer import EVERYBODY, Offer
from rtp.core.master.prefix_map import Match
from rtp.core.master.ranks import Ranks
from rtp.core.master.view import View
from rtp.core.messages import STATUS_COLUMNS, Grant
from rtp.core.policy import Candidates
from rtp.core.types import FrontendId, RequestId, WorkerId

NOW, LEAD_S, NUM = 50.0, 0.03, 24
SCATTERED = np.array([0, 2, 3, 7, 11, 12, 20, 23])
CLOSE = np.arange(4, 14)


def a_view(ranks: Ranks, at: Rows, now: float, lead_s: float) -> View:
    view = View(ranks, at)
    view.begin(now, lead_s)
    return view


def a_booking(ranks: Ranks, row: int, new_tokens: int) -> Booking:
    number = int(ranks.next_number[row])
    grant = Grant(RequestId(f"{row}-{number}"), 1, number, WorkerId("w"), 1, "a", row, 0, 0.25)
    return Booking(
        grant, row, FrontendId("f"), "m", "", 1, new_tokens, 16, 1e-5 * new_tokens, NOW, NOW
    )


def loaded_ranks(random: Random) -> Ranks:
    ranks = Ranks(NUM)
    rows = ranks.take((10_000,) * NUM, 512, max_rows=8)
    assert rows is not None
    ranks.classes[::2] = 1
    ranks.profiles[:2] = [[1e-3, 1e-5, 1e-10, 1e-3, 1e-4, 1e-8], [2e-3, 1e-5, 0, 1e-3, 1e-4, 0]]
    table = np.zeros((NUM, len(STATUS_COLUMNS)), dtype=np.int64)
    for rank in range(NUM):
        facts = {
            "running": random.choice([0, 2, 9]),
            "prefill_tokens": random.choice([0, 0, 500, 4000]),
            "decode_rows": random.choice([0, 2]),
            "context_tokens": random.randrange(2000),
            "kv_free": random.randrange(10_000),
            "kv_total": 10_000,
            "granted_upto": -1,
        }
        table[rank] = [facts.get(name, 0) for name in STATUS_COLUMNS]
    ranks.report(rows, table, NOW - 0.001)
    ranks.refuse(3)
    return ranks


def charge_somewhere(ranks: Ranks, random: Random, rows: np.ndarray) -> int:
    row = int(random.choice(rows.tolist()))
    if random.random() < 0.7:
        ranks.charge(a_booking(ranks, row, random.choice([1, 300, 5000])))
    elif ranks.held[row] < 3:
        ranks.hold(row, 0.25)
    return row


@pytest.mark.parametrize("rows", [CLOSE, SCATTERED], ids=["consecutive", "scattered"])
def test_a_row_that_the_round_charged_reads_as_in_a_new_view(rows: np.ndarray):
    random = Random(len(rows))
    for _ in range(20):
        ranks = loaded_ranks(random)
        at = Rows(rows, ranks.classes[rows])
        view = a_view(ranks, at, NOW, LEAD_S)
        for _ in range(8):
            view.reread(charge_somewhere(ranks, random, rows))
        fresh = a_view(ranks, at, NOW, LEAD_S)
        for name in (*VIEW, *FLAGS, "coefficients"):
            np.testing.assert_array_equal(getattr(view, name), getattr(fresh, name), name)


def test_a_grant_beyond_what_a_status_can_count_closes_the_row():
    ranks = loaded_ranks(Random(1))
    row = 5
    ranks.reported[:, row] = 0
    ranks.table[:, MOST_REQUESTS] = np.inf
    ranks.busy_until[row] = 0
    view = a_view(ranks, Rows(CLOSE, ranks.classes[CLOSE]), NOW, LEAD_S)
    index = view.at.index(row)
    for _ in range(64):
        assert view.ready[index]
        ranks.charge(a_booking(ranks, row, 0))
        view.reread(row)
    assert not view.ready[index]
    assert view.open[index]


def test_a_view_is_written_over_by_the_next_round():
    ranks = loaded_ranks(Random(2))
    view = a_view(ranks, Rows(CLOSE, ranks.classes[CLOSE]), NOW, LEAD_S)
    busy_s = view.busy_s
    view.begin(NOW + 100.0, LEAD_S)
    assert busy_s is view.busy_s
    assert not busy_s.any()


def test_the_last_report_of_a_rank_counts():
    ranks = Ranks(8)
    first, second = ranks.take((100,) * 4, 64), ranks.take((100,) * 4, 64)
    assert first is not None
    assert second is not None
    ranks.profiles[0] = 1e-3
    for rows, value, now in ((first, 1, 1.0), (second, 2, 2.0), (first, 3, 3.0)):
        ranks.report(rows, np.full((4, len(STATUS_COLUMNS)), value, dtype=np.int64), now)
    assert ranks.reported[:, first].min() == ranks.reported[:, first].max() == 3
    assert ranks.reported[:, second].min() == ranks.reported[:, second].max() == 2
    assert ranks.reported_at[:4].tolist() == [3.0] * 4
    assert ranks.seen_upto[4:].tolist() == [2.0] * 4
    assert (ranks.busy_until[:4] > 3.0).all()


def an_offer(rows: np.ndarray, at: np.ndarray = EVERYBODY) -> tuple[Offer, View]:
    ranks = loaded_ranks(Random(3))
    view = a_view(ranks, Rows(rows, ranks.classes[rows]), NOW, LEAD_S)
    blocks = np.arange(NUM, dtype=np.float64)
    match = Match(device=blocks, host=blocks + 1, best=30)
    view.match(match.device, 16, 320)
    return Offer(view, at, match, most=320, affine_row=7), view


@pytest.mark.parametrize("rows", [CLOSE, SCATTERED], ids=["consecutive", "scattered"])
@pytest.mark.parametrize("some", [False, True])
def test_an_offer_has_every_documented_column_read_only(rows: np.ndarray, some: bool):
    at = np.arange(0, len(rows), 2) if some else EVERYBODY
    offer, view = an_offer(rows, at)
    chosen = rows[at] if some else rows
    assert len(offer) == len(chosen)
    for name in Candidates.__dataclass_fields__:
        column = getattr(offer, name)
        if name == "best_tokens":
            assert column == 320
            continue
        assert len(column) == len(chosen)
        with pytest.raises(ValueError):
            column[0] = 1
    np.testing.assert_array_equal(offer.rank_ids, chosen)
    np.testing.assert_array_equal(offer.matched_tokens, np.minimum(chosen * 16, 320))
    np.testing.assert_array_equal(offer.host_tokens, np.minimum((chosen + 1) * 16, 320))
    np.testing.assert_array_equal(offer.affine, chosen == 7)
    np.testing.assert_array_equal(offer.kv_free, view.kv_free[np.isin(rows, chosen)])
    with pytest.raises(AttributeError):
        offer.no_such_column  # noqa: B018


def test_a_column_is_made_once_and_only_if_it_is_read():
    offer, _ = an_offer(SCATTERED)
    made = object.__getattribute__
    with pytest.raises(AttributeError):
        made(offer, "kv_free")
    assert offer.kv_free is offer.kv_free is made(offer, "kv_free")


def test_rows_know_whether_all_are_of_one_hardware():
    assert Rows(CLOSE, np.full(len(CLOSE), 4)).hardware == 4
    assert Rows(CLOSE, np.arange(len(CLOSE))).hardware == MIXED
    assert Rows(CLOSE[:0], CLOSE[:0]).hardware == MIXED


def test_what_a_policy_thinks_of_those_that_are_no_candidates_counts_for_nothing():
    view = an_offer(CLOSE)[1]
    mask = np.arange(len(CLOSE)) % 3 == 0
    facts = mask, EVERYBODY, ANY, view.columns, view.flags, -1
    scores = np.where(mask, -1.0, np.nan)
    scores[3] = -0.5
    assert winner(scores, EVERYBODY, *facts) == 3
    some = mask.nonzero()[0]
    assert some[winner(scores[some], some, *facts)] == 3
    scores[6] = np.nan
    assert winner(scores, EVERYBODY, *facts) == NO_NUMBER
    mask[:] = False
    assert winner(scores, EVERYBODY, *facts) == NONE


def test_of_equal_candidates_a_ready_one_the_chats_own_the_least_loaded_then_the_first():
    view = an_offer(CLOSE)[1]
    own = 7 - CLOSE[0]
    equal = np.full(len(CLOSE), -2.0) + 1e-8 * np.arange(len(CLOSE))  # of one microsecond
    mask = np.ones(len(CLOSE), dtype=np.bool_)

    def first() -> int:
        return winner(equal, EVERYBODY, mask, EVERYBODY, ANY, view.columns, view.flags, own)

    view.load[:] = 5
    view.ready[:] = True
    assert first() == own
    view.ready[own] = False
    assert first() == 0
    view.load[4:6] = 4
    assert first() == 4
    view.ready[:] = False
    view.ready[8] = True
    assert first() == 8


def test_a_winner_is_of_the_kind_that_is_asked_for():
    view = an_offer(CLOSE)[1]
    kinds = np.arange(len(CLOSE)) % 2
    mask = np.ones(len(CLOSE), dtype=np.bool_)
    scores = np.arange(len(CLOSE), dtype=np.float64)
    found = [
        winner(scores, EVERYBODY, mask, kinds, kind, view.columns, view.flags, -1)
        for kind in (0, 1, 2, ANY)
    ]
    assert found == [8, 9, NONE, 9]


def test_the_best_are_told_in_order_the_chosen_one_first():
    scores = np.array([3.0, np.nan, 5.0, 4.0, -np.inf, 9.0])
    mask = np.array([True, False, True, True, True, False])
    told = np.zeros(4, dtype=np.int64)
    count = ranking(scores, EVERYBODY, mask, 3, told)
    assert told[:count].tolist() == [3, 2, 0, 4]
    few = np.array([0, 3])
    count = ranking(scores[few], few, mask, 0, told)
    assert told[:count].tolist() == [0, 1]


@pytest.mark.parametrize("rows", [CLOSE, SCATTERED], ids=["consecutive", "scattered"])
@pytest.mark.parametrize("holds", [False, True])
def test_candidates_and_contenders_are_those_of_the_formulas(rows: np.ndarray, holds: bool):
    """Beside whole columns, which say the same in words of numpy."""
    random = Random(11)
    pruned = 0
    for _ in range(200):
        ranks = loaded_ranks(random)
        quiet = random.sample(range(NUM), random.randrange(NUM))
        ranks.reported[:5, quiet] = 0
        ranks.busy_until[quiet] = 0
        view = a_view(ranks, Rows(rows, ranks.classes[rows]), NOW, LEAD_S)
        blocks = np.array([random.choice([0, 0, 4, 20, 40]) for _ in range(NUM)], dtype=np.float64)
        view.match(blocks, 16, 320)
        allowed = view.open & np.array([random.random() < 0.9 for _ in rows])
        own = random.randrange(-1, len(rows))
        whole = random.choice([100, 3000, 9000])
        num_ready, num, count = candidates(
            view.columns,
            view.flags,
            view.matched_tokens,
            allowed,
            whole,
            holds,
            True,
            own,
            view.mask,
            view.few,
        )
        matched = np.minimum(blocks[rows] * 16, 320)
        fits = allowed & (view.room >= whole - matched)
        mask = fits & (view.offered if holds else view.ready)
        np.testing.assert_array_equal(view.mask, mask)
        assert (num_ready, num) == ((fits & view.ready).sum(), mask.sum())
        idle = mask & view.idle
        if not idle.any():
            assert count == NONE
            continue
        pruned += 1
        best = int(np.where(idle, matched, -1).argmax())
        contends = mask & (matched > matched[best])
        contends[best] = True
        contends[own] |= own >= 0 and mask[own]
        assert view.few[:count].tolist() == contends.nonzero()[0].tolist()
    assert pruned > 50
