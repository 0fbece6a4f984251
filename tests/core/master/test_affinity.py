"""Where chats were served: scoped by tenant, bounded by count and age."""

from __future__ import annotations

from rtp.core.master.affinity import SHARD_CHATS, Affinity
from rtp.core.types import WorkerId

HERE, THERE = WorkerId("here"), WorkerId("there")


def test_a_chat_is_found_under_its_tenant_only():
    affinity = Affinity(10, 60.0)
    affinity.remember("a", "c", HERE, 1, now=0.0)
    assert affinity.find("a", "c", 1.0) == (HERE, 1)
    assert affinity.find("b", "c", 1.0) is None
    affinity.remember("a", "c", THERE, 0, now=2.0)
    assert affinity.find("a", "c", 2.0) == (THERE, 0)


def test_requests_without_a_chat_leave_no_entry():
    affinity = Affinity(10, 60.0)
    affinity.remember("a", "", HERE, 0, now=0.0)
    assert len(affinity) == 0
    assert affinity.find("a", "", 0.0) is None


def test_the_least_recently_used_chat_makes_room():
    affinity = Affinity(3, 60.0)
    for i, chat in enumerate("abc"):
        affinity.remember("t", chat, HERE, 0, now=float(i))
    affinity.remember("t", "a", HERE, 0, now=3.0)
    affinity.remember("t", "d", HERE, 0, now=4.0)
    assert [affinity.find("t", chat, 4.0) is not None for chat in "abcd"] == [1, 0, 1, 1]
    assert len(affinity) == 3


def test_an_old_chat_is_forgotten():
    affinity = Affinity(10, 60.0)
    affinity.remember("t", "old", HERE, 0, now=0.0)
    affinity.remember("t", "new", HERE, 0, now=30.0)
    assert affinity.find("t", "new", 61.0) == (HERE, 0)
    assert affinity.find("t", "old", 61.0) is None
    assert len(affinity) == 1


def test_many_chats_lie_in_small_tables_and_stay_bounded():
    """One large table would stop the Master whenever it is rebuilt."""
    affinity = Affinity(10_000, 60.0)
    for i in range(30_000):
        affinity.remember("t", f"chat {i}", HERE, i, now=0.0)
    assert max(map(len, affinity._shards)) <= 2 * SHARD_CHATS
    assert len(affinity) <= 10_000
    newest = [affinity.find("t", f"chat {i}", 1.0) for i in range(29_000, 30_000)]
    assert newest == [(HERE, i) for i in range(29_000, 30_000)]
    for i in range(30_000):
        affinity.find("t", f"chat {i}", 61.0)
    assert len(affinity) == 0


def test_where_a_chat_goes_on_is_kept_beside_where_it_began():
    affinity = Affinity(10, 60.0)
    affinity.remember("t", "c", HERE, 0, now=0.0)
    assert affinity.find_decode("t", "c", 0.0) is None
    affinity.remember("t", "c", HERE, 1, now=1.0, decode=(THERE, 2))
    assert affinity.find("t", "c", 1.0) == (HERE, 1)
    assert affinity.find_decode("t", "c", 1.0) == (THERE, 2)
    assert affinity.find_decode("t", "c", 62.0) is None
    assert len(affinity) == 0
