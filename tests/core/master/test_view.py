"""Columns of a round: patched rows equal a fresh look; a policy's columns are made on demand."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from rtp.core.master.booking import Booking
from rtp.core.master.columns import COLUMN, MIXED, Rows
from rtp.core.master.offer import Offer
from rtp.core.master.prefix_map import Match
from rtp.core.master.ranks import Ranks
from rtp.core.master.view import View
from rtp.core.messages import STATUS_COLUMNS, Grant
from rtp.core.policy import Candidates
from rtp.core.types import FrontendId, RequestId, WorkerId

NOW, LEAD_S, NUM = 50.0, 0.03, 24
SCATTERED = np.array([0, 2, 3, 7, 11, 12, 20, 23])
CLOSE = np.arange(4, 14)

NOT_COLUMNS = ("at", "read_only", "touched", "num_ready", "num_offered")


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
    ranks.settle_reports()
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
        view = ranks.view(at, NOW, LEAD_S)
        for _ in range(8):
            view.reread(charge_somewhere(ranks, random, rows))
        fresh = ranks.view(at, NOW, LEAD_S)
        for name in View.__slots__:
            if not name.startswith("_") and name not in NOT_COLUMNS:
                np.testing.assert_array_equal(getattr(view, name), getattr(fresh, name), name)


def test_a_grant_beyond_what_a_status_can_count_closes_the_row():
    ranks = loaded_ranks(Random(1))
    row = 5
    ranks.reported[:, row] = 0
    ranks.most_requests[:] = np.inf
    ranks.busy_until[row] = 0
    view = ranks.view(Rows(CLOSE, ranks.classes[CLOSE]), NOW, LEAD_S)
    index = view.at.index(row)
    for _ in range(64):
        assert view.ready[index]
        ranks.charge(a_booking(ranks, row, 0))
        view.reread(row)
    assert not view.ready[index]
    assert view.open[index]


def test_reports_of_one_turn_settle_together_and_the_last_of_a_rank_counts():
    ranks, alone = Ranks(8), Ranks(8)
    tables = [np.full((4, len(STATUS_COLUMNS)), i, dtype=np.int64) for i in (1, 2, 3)]
    for one in (ranks, alone):
        first, second = one.take((100,) * 4, 64), one.take((100,) * 4, 64)
        assert first is not None
        assert second is not None
        one.profiles[0] = 1e-3
        for rows, table, now in zip((first, second, first), tables, (1.0, 2.0, 3.0), strict=True):
            one.report(rows, table, now)
            if one is alone:
                one.settle_reports()
    assert not ranks.reported[COLUMN["running"]].any()  # nothing was taken in yet
    ranks.settle_reports()
    for name in ("reported", "busy_until", "seen_upto", "reported_at"):
        np.testing.assert_array_equal(getattr(ranks, name), getattr(alone, name))


def an_offer(rows: np.ndarray, offered: np.ndarray | None = None) -> tuple[Offer, View]:
    ranks = loaded_ranks(Random(3))
    view = ranks.view(Rows(rows, ranks.classes[rows]), NOW, LEAD_S)
    blocks = np.arange(NUM, dtype=np.float64)
    match = Match(device=blocks, host=blocks + 1, best=30)
    matched = np.minimum(view.at.of(blocks) * 16, 320)
    if offered is None:
        offered = np.ones(len(rows), dtype=np.bool_)
    at = None if offered.all() else offered.nonzero()[0]
    return Offer(
        view,
        at,
        None,
        match,
        matched,
        most=320,
        block_size=16,
        affine_row=7,
        num_candidates=int(offered.sum()),
    ), view


@pytest.mark.parametrize("rows", [CLOSE, SCATTERED], ids=["consecutive", "scattered"])
@pytest.mark.parametrize("some", [False, True])
def test_an_offer_has_every_documented_column_read_only(rows: np.ndarray, some: bool):
    offered = np.arange(len(rows)) % 2 == 0 if some else None
    offer, view = an_offer(rows, offered)
    chosen = rows if offered is None else rows[offered]
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


def test_an_offer_of_the_whole_ignores_what_a_policy_thinks_of_the_others():
    view = an_offer(CLOSE)[1]
    offered = np.arange(len(CLOSE)) % 3 == 0
    match = Match(device=np.zeros(NUM), host=np.zeros(NUM), best=0)
    num = int(offered.sum())
    common = {"most": 320, "block_size": 16, "affine_row": -1, "num_candidates": num}
    whole = Offer(view, None, offered, match, np.zeros(len(CLOSE)), **common)
    cut = Offer(view, offered.nonzero()[0], None, match, np.zeros(len(CLOSE)), **common)
    assert (len(whole), len(cut)) == (len(CLOSE), offered.sum())
    assert whole.num_candidates == cut.num_candidates == offered.sum()
    scores = np.where(offered, -1.0, np.nan)
    masked = whole.masked(scores)
    assert masked is not scores
    np.testing.assert_array_equal(masked, np.where(offered, -1.0, -np.inf))
    ties = offered.nonzero()[0]
    assert CLOSE[whole.least(ties)] == cut.rank_ids[cut.least(np.arange(len(cut)))]


def test_of_equal_candidates_a_ready_one_the_chats_own_the_least_loaded_then_the_first():
    offer, view = an_offer(CLOSE)
    ties = np.arange(len(CLOSE))
    view.load[:] = 5
    view.ready[:] = True
    assert offer.least(ties) == 7 - CLOSE[0]  # the chat's
    view.ready[7 - CLOSE[0]] = False
    assert offer.least(ties) == 0
    view.load[4:6] = 4
    assert offer.least(ties) == 4
    view.ready[:] = False
    view.ready[8] = True
    assert offer.least(ties) == 8
