"""Engines of others as workers: told of over HTTP, placed on, never submitted to."""

from __future__ import annotations

from typing import Any

import pytest

from rtp.core.types import HASH_BYTES, split_hashes
from rtp.io.http_outside import AssumedCache
from tests.io.test_http_schedule import PATH, place, send, until
from tests.support.live import LiveCluster, live_cluster

WORKERS = f"{PATH}/workers"
ENGINE = {
    "model": "theirs",
    "block_size": 16,
    "kv_tokens": 4096,
    "max_model_len": 2048,
    "cache_events": True,
}


async def add(cluster: LiveCluster, name: str, **body: Any) -> dict[str, Any]:
    body = ENGINE | {"address": f"http://{name}:8000"} | body
    status, reply, _ = await send(cluster, "PUT", f"{WORKERS}/{name}", body)
    assert status == 200, reply
    return reply


async def cache(cluster: LiveCluster, name: str, **body: Any) -> None:
    status, reply, _ = await send(cluster, "POST", f"{WORKERS}/{name}/cache", body)
    assert status == 200, reply


def key(i: int) -> bytes:
    return i.to_bytes(HASH_BYTES, "big")


async def test_a_request_goes_to_the_engine_that_has_its_prefix():
    async with live_cluster(workers=0) as cluster:
        for name in ("a", "b"):
            assert (await add(cluster, name, ranks=2))["new"]
        await cache(cluster, "b", changes=[{"rank": 1, "stored": [1, 2, 3]}])
        wanted = {"hashes": [1, 2, 3], "num_tokens": 60, "max_tokens": 8}
        placed = await place(cluster, **wanted)
        assert (placed["worker_id"], placed["rank"]) == ("b", 1)
        assert (placed["address"], placed["matched_tokens"]) == ("http://b:8000", 48)
        await send(cluster, "DELETE", f"{PATH}/{placed['request_id']}")
        await cache(cluster, "b", changes=[{"rank": 1, "removed": [3]}])
        placed = await place(cluster, **wanted)
        assert placed["matched_tokens"] == 32
        await send(cluster, "DELETE", f"{PATH}/{placed['request_id']}")
        await cache(cluster, "b", cleared=True)
        assert (await place(cluster, **wanted))["matched_tokens"] == 0


async def test_repeating_the_registration_keeps_it_and_a_change_replaces_it():
    async with live_cluster(workers=0) as cluster:
        await add(cluster, "a")
        await cache(cluster, "a", changes=[{"stored": [1]}])
        assert not (await add(cluster, "a"))["new"]
        assert (await place(cluster, hashes=[1], num_tokens=20))["matched_tokens"] == 16
        assert (await add(cluster, "a", kv_tokens=8192))["new"]
        assert cluster.master.overview()["bookings"] == 0
        assert (await place(cluster, hashes=[1], num_tokens=20))["matched_tokens"] == 0


async def test_an_engine_of_which_nobody_tells_any_more_is_given_up():
    async with live_cluster(workers=0) as cluster:
        await add(cluster, "a", silence_s=1)
        await place(cluster, hashes=[1], num_tokens=20)
        note = await cluster.noted(lambda note: note.event == "worker.lost")
        assert note.fields["reason"] == "silent"
        assert cluster.master.overview()["bookings"] == 0
        status, reply, _ = await send(cluster, "POST", f"{WORKERS}/a/cache", {"changes": []})
        assert (status, reply["error"]["code"]) == (404, "worker_not_found")
        assert (await add(cluster, "a", silence_s=1))["new"]


async def test_an_engine_that_signs_off_gets_nothing_more():
    async with live_cluster(workers=0) as cluster:
        await add(cluster, "a")
        await add(cluster, "b")
        assert (await send(cluster, "DELETE", f"{WORKERS}/a"))[0] == 200
        assert (await send(cluster, "DELETE", f"{WORKERS}/a"))[0] == 404
        assert (await place(cluster))["worker_id"] == "b"


async def test_an_engine_that_tells_of_no_cache_is_assumed_to_keep_what_ran_on_it():
    async with live_cluster(workers=0) as cluster:
        for name in ("a", "b"):
            await add(cluster, name, cache_events=False)
        ids = list(range(100))
        first = await place(cluster, hashes=None, token_ids=ids, num_tokens=None)
        await send(cluster, "POST", f"{PATH}/{first['request_id']}/done", {"prefill_s": 0.1})
        await until(lambda: not cluster.master.overview()["bookings"])
        again = await place(cluster, hashes=None, token_ids=[*ids, 7], num_tokens=None)
        assert (again["worker_id"], again["matched_tokens"]) == (first["worker_id"], 96)
        status, _, _ = await send(cluster, "POST", f"{WORKERS}/a/cache", {"changes": []})
        assert status == 400


async def test_nobody_is_submitted_to_an_engine_and_no_worker_is_replaced_by_one():
    async with live_cluster(workers=1) as cluster:
        await cluster.ready()
        own = cluster.master.overview()["workers"][0]["worker_id"]
        body = ENGINE | {"address": "x"}
        assert (await send(cluster, "PUT", f"{WORKERS}/{own}", body))[0] == 409
        status, reply, _ = await send(cluster, "PUT", f"{WORKERS}/c", body | {"model": "sim"})
        assert (status, reply["error"]["code"]) == (409, "worker_refused")
        await add(cluster, "a")
        status, _, _ = await send(
            cluster, "POST", "/v1/completions", {"model": "theirs", "prompt": "x"}
        )
        assert status == 404


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"model": "m"}, None),
        ("", ENGINE | {"address": ""}, "address"),
        ("", ENGINE | {"address": "x", "block_size": 0}, "block_size"),
        ("", ENGINE | {"address": "x", "profile": [1, 2]}, "profile"),
        ("", ENGINE | {"address": "x", "profile": [-1, 0, 0, 0, 0, 0]}, "profile"),
        ("/cache", {"changes": [{"rank": 1, "stored": [1]}]}, "changes"),
        ("/cache", {"changes": [{"stored": ["xyz"]}]}, "hashes"),
        ("/cache", {"changes": [{"tier": "moon"}]}, "changes"),
    ],
)
async def test_what_makes_no_sense_is_refused(path: str, body: dict[str, Any], param: str | None):
    async with live_cluster(workers=0) as cluster:
        await add(cluster, "a")
        method = "POST" if path else "PUT"
        status, reply, _ = await send(cluster, method, f"{WORKERS}/a{path}", body)
        assert (status, reply["error"]["param"]) == (400, param)


def test_an_assumed_cache_loses_what_was_used_longest_ago_tails_first():
    cache = AssumedCache(4)
    assert cache.use(key(1) + key(2)) == (key(1) + key(2), b"")
    assert cache.use(key(3) + key(4)) == (key(3) + key(4), b"")
    assert cache.use(key(1) + key(2)) == (b"", b"")
    gained, lost = cache.use(key(5))
    assert (gained, split_hashes(lost)) == (key(5), [key(4)])
    gained, lost = cache.use(b"".join(map(key, range(10, 20))))
    assert split_hashes(gained) == [key(i) for i in range(10, 14)]
    assert split_hashes(lost) == [key(3), key(2), key(1), key(5)]
