"""Router-only mode over HTTP, against a whole Master with simulated workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.client import Client
from tests.support.live import LiveCluster, live_cluster

PATH = "/v1/schedule"
HASHES = [2**64 - 1, 7, 2**63]


async def send(
    cluster: LiveCluster, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any, Any]:
    """Status, JSON, headers, by the hot routes: aiohttp's client sends plain heads."""
    data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
    headers = {"Content-Type": "application/json"} | headers
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, cluster.url + path, data=data, headers=headers) as reply,
    ):
        return reply.status, await reply.json(), reply.headers


async def place(cluster: LiveCluster, **body: Any) -> dict[str, Any]:
    status, reply, _ = await send(
        cluster, "POST", PATH, {"hashes": HASHES, "num_tokens": 50, "max_tokens": 8} | body
    )
    assert status == 200, reply
    return reply


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 -- the Master has no event for it
            await asyncio.sleep(0.001)


def bookings(cluster: LiveCluster) -> int:
    return cluster.master.overview()["bookings"]


async def test_a_place_is_told_charged_and_settled():
    async with live_cluster(workers=2) as cluster:
        await cluster.ready()
        placed = await place(cluster)
        workers = {w["worker_id"]: w["address"] for w in cluster.master.overview()["workers"]}
        assert workers[placed["worker_id"]] == placed["address"]
        assert placed["rank"] == 0
        assert placed["decode_rank"] is None
        assert (placed["attempt"], placed["matched_tokens"], placed["lease_s"]) == (1, 0, 60.0)
        assert bookings(cluster) == 1
        status, why, _ = await send(cluster, "GET", placed["reasons"])
        assert (status, why["chosen"]["worker_id"]) == (200, placed["worker_id"])

        # The blocks count as arriving, so that an equal prompt meets them there.
        again = await place(cluster)
        assert (again["worker_id"], again["matched_tokens"]) == (placed["worker_id"], 48)

        done = f"{PATH}/{placed['request_id']}/done"
        told = {"prompt_tokens": 50, "cached_tokens": 16, "generated_tokens": 5}
        assert (await send(cluster, "POST", done, told))[:2] == (200, {"status": "settled"})
        assert (await send(cluster, "POST", done, told))[0] == 404
        status, reply, _ = await send(cluster, "DELETE", f"{PATH}/{again['request_id']}")
        assert (status, reply) == (200, {"status": "cancelled"})
        facts = cluster.master.overview()
        assert facts["bookings"] == 0
        assert facts["cache"]["hit_tokens"] == 16
        assert facts["requests"]["finished"]["done"] == 1


NONSENSE = [
    ({"hashes": [-1], "num_tokens": 20}, "hashes"),
    ({"hashes": [2**64], "num_tokens": 20}, "hashes"),
    ({"hashes": [1.5], "num_tokens": 20}, "hashes"),
    ({"hashes": [True], "num_tokens": 20}, "hashes"),
    ({"hashes": ["12"], "num_tokens": 20}, "hashes"),
    ({"hashes": ["0" * 16, 1], "num_tokens": 40}, "hashes"),
    ({"hashes": [1, "0" * 16], "num_tokens": 40}, "hashes"),
    ({"hashes": ["0" * 14 + " 0", "0" * 16], "num_tokens": 40}, "hashes"),
    ({"hashes": "!!!", "num_tokens": 20}, "hashes"),
    ({"hashes": "AAAA", "num_tokens": 20}, "hashes"),
    ({"hashes": [1], "token_ids": [1]}, "hashes"),
    ({"num_tokens": 20}, "hashes"),
    ({"hashes": [1, 2], "num_tokens": 20}, "num_tokens"),
    ({"hashes": []}, "num_tokens"),
    ({"hashes": [1], "num_tokens": "20"}, "num_tokens"),
    ({"hashes": [1], "num_tokens": 10**6}, "num_tokens"),
    ({"token_ids": [1, 2], "num_tokens": 3}, "num_tokens"),
    ({"token_ids": [10**9]}, "token_ids"),
    ({"token_ids": []}, "token_ids"),
    ({"hashes": [1], "n": 0}, "n"),
    ({"hashes": [1], "lease_s": 1e9}, "lease_s"),
    ({"hashes": [1], "wait": -1}, "wait"),
    ({"hashes": [1], "request_id": "nobody"}, "id"),
    ({"hashes": [1], "model": "nobody"}, "model"),
    ([], None),
    (b"{", None),
    (b"\xff", None),
]


@pytest.mark.parametrize("odd", [{}, {"Content-Encoding": "identity"}])
async def test_what_makes_no_sense_is_refused_by_field(odd: dict[str, str]):
    """On the hot route and, with a header that is not plain, on aiohttp's."""
    async with live_cluster(workers=1) as cluster:
        await cluster.ready()
        for body, param in NONSENSE:
            status, reply, _ = await send(cluster, "POST", PATH, body, **odd)
            assert status in (400, 404), (body, reply)
            assert reply["error"]["param"] == param, (body, reply)
        assert bookings(cluster) == 0
        assert len(cluster.master.desk) == 0


async def test_only_paths_of_these_routes_are_answered_by_them():
    async with live_cluster(workers=1) as cluster:
        await cluster.ready()
        for path in ("/v1/other/x/done", f"{PATH}/x/y/done", f"{PATH}/x/done/", f"{PATH}s"):
            status, reply, _ = await send(cluster, "POST", path)
            assert (status, reply["error"]["code"]) != (404, "grant_not_found"), path
        assert (await send(cluster, "POST", f"{PATH}/x/done"))[0] == 404


async def test_a_header_that_is_no_text_is_the_clients_mistake():
    async with live_cluster(workers=1) as cluster:
        await cluster.ready()
        host, port = cluster.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"hashes": [], "num_tokens": 9}'
        writer.write(
            b"POST /v1/schedule HTTP/1.1\r\nHost: a\r\nX-Request-Timeout: \xff\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()


@pytest.mark.parametrize(
    ("told", "field"),
    [
        ({"prompt_tokens": 2**31 - 1}, "prompt_tokens"),
        ({"prompt_tokens": 5, "cached_tokens": 6}, "cached_tokens"),
        ({"cached_tokens": 1}, "cached_tokens"),
        ({"generated_tokens": 2**31 - 1}, "generated_tokens"),
    ],
)
async def test_what_cannot_have_happened_teaches_nothing(told: dict[str, int], field: str):
    """One report must not make all others look longer; what is refused is not settled either."""
    async with live_cluster(workers=1) as cluster:
        await cluster.ready()
        one = f"{PATH}/{(await place(cluster))['request_id']}"
        before = cluster.master.overview()
        status, reply, _ = await send(cluster, "POST", f"{one}/done", told)
        assert (status, reply["error"]["param"]) == (400, field)
        after = cluster.master.overview()
        assert (after["models"], after["cache"]) == (before["models"], before["cache"])
        assert (await send(cluster, "POST", f"{one}/done", {}))[0] == 200
        assert bookings(cluster) == 0


async def test_the_model_may_be_left_out_again_once_the_other_is_gone():
    async with live_cluster(workers=1) as cluster:
        await cluster.ready()
        other = {
            "model": "other",
            "address": "http://10.0.0.7:8001",
            "block_size": 16,
            "kv_tokens": 4096,
            "max_model_len": 1024,
        }
        assert (await send(cluster, "PUT", f"{PATH}/workers/o", other))[0] == 200
        status, reply, _ = await send(cluster, "POST", PATH, {"hashes": [], "num_tokens": 9})
        assert (status, reply["error"]["param"]) == (400, "model")
        assert (await send(cluster, "DELETE", f"{PATH}/workers/o"))[0] == 200
        await place(cluster)


async def test_token_ids_are_hashed_as_a_frontend_hashes_them():
    """What was generated here is found by ids alone (X15)."""
    async with live_cluster(workers=1) as cluster, Client(cluster.url, "sim") as client:
        await cluster.ready()
        ids = list(range(40, 90))
        await client.complete(ids, max_tokens=2)
        await until(lambda: cluster.master.overview()["prefix_map"]["blocks"] > 0)
        placed = await place(cluster, hashes=None, token_ids=ids, num_tokens=None)
        assert placed["matched_tokens"] == 48


async def test_who_does_not_wait_is_placed_or_refused_at_once():
    async with live_cluster(workers=1, worker={"kv_tokens": 256, "max_rows": 64}) as cluster:
        await cluster.ready()
        first = await place(cluster, hashes=[], num_tokens=200, wait=False, max_tokens=1)
        status, reply, headers = await send(
            cluster, "POST", PATH, {"hashes": [], "num_tokens": 200, "max_tokens": 1, "wait": False}
        )
        assert (status, reply["error"]["code"]) == (503, "overloaded")
        assert headers["Retry-After"] == "1"
        status, reply, _ = await send(
            cluster, "POST", PATH, {"hashes": [], "num_tokens": 200, "max_tokens": 1, "wait": 0.05}
        )
        assert (status, reply["error"]["code"]) == (504, "timeout")
        waiting = asyncio.create_task(place(cluster, hashes=[], num_tokens=200, max_tokens=1))
        await until(lambda: len(cluster.master.desk) > 0)
        await send(cluster, "POST", f"{PATH}/{first['request_id']}/done", {"outcome": "failed"})
        assert (await waiting)["rank"] == 0


async def test_a_place_can_be_asked_for_anew_elsewhere():
    async with live_cluster(workers=2) as cluster:
        await cluster.ready()
        first = await place(cluster)
        second = await place(cluster, request_id=first["request_id"])
        assert (second["request_id"], second["attempt"]) == (first["request_id"], 2)
        assert second["worker_id"] != first["worker_id"]
        assert bookings(cluster) == 1
        done = f"{PATH}/{first['request_id']}/done"
        assert (await send(cluster, "POST", done, {"attempt": 1}))[0] == 404
        assert (await send(cluster, "POST", done, {"attempt": 2}))[0] == 200
        assert bookings(cluster) == 0


async def test_a_lease_ends_by_itself_unless_it_is_renewed():
    async with live_cluster(workers=1) as cluster:
        await cluster.ready()
        kept = await place(cluster, lease_s=0.1)
        one = f"{PATH}/{kept['request_id']}"
        status, reply, _ = await send(
            cluster, "POST", f"{one}/renew", {"lease_s": 600, "prefilled": True}
        )
        assert (status, reply["lease_s"]) == (200, 600)
        lost = await place(cluster, lease_s=0.1)
        note = await cluster.noted(lambda note: note.event == "schedule.lapsed")
        assert note.fields["request_id"] == lost["request_id"]
        assert bookings(cluster) == 1
        assert (await send(cluster, "POST", f"{PATH}/{lost['request_id']}/renew"))[0] == 404
        assert (await send(cluster, "DELETE", one))[0] == 200
        facts = cluster.master.overview()
        assert (facts["bookings"], facts["requests"]["external_lapsed"]) == (0, 1)


async def test_a_client_that_leaves_while_it_waits_leaves_nothing():
    """On both kinds of route."""
    async with live_cluster(workers=1, worker={"kv_tokens": 256}) as cluster:
        await cluster.ready()
        await place(cluster, hashes=[], num_tokens=200, max_tokens=1)
        for odd in ({}, {"Content-Encoding": "identity"}):
            wanted = {"hashes": [], "num_tokens": 200, "max_tokens": 1}
            asking = asyncio.create_task(send(cluster, "POST", PATH, wanted, **odd))
            await until(lambda: cluster.master.overview()["waiting"] > 0)
            asking.cancel()
            await until(lambda: cluster.master.overview()["waiting"] == 0)
        assert bookings(cluster) == 1


async def test_keys_and_tenants_are_kept_apart(tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("one a\ntwo b\n")
    async with live_cluster(workers=1, master={"api_key_file": keys}) as cluster:
        await cluster.ready()
        body = {"hashes": HASHES, "num_tokens": 50}
        for key in ({}, {"Authorization": "Bearer none"}):
            status, reply, _ = await send(cluster, "POST", PATH, body, **key)
            assert (status, reply["error"]["code"]) == (401, "invalid_api_key")
        mine, theirs = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
        placed = (await send(cluster, "POST", PATH, body, **mine))[1]
        one = f"{PATH}/{placed['request_id']}"
        assert (await send(cluster, "DELETE", one, **theirs))[0] == 404
        assert (await send(cluster, "DELETE", one, **mine))[0] == 200
