"""Tenants and users' policies over HTTP: real sockets, the Master's own settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.live import LiveCluster, live_cluster

KEYS = "key-a team-a\nkey-b team-b\n"


@asynccontextmanager
async def a_cluster(
    tmp_path: Path, **master: Any
) -> AsyncIterator[tuple[LiveCluster, aiohttp.ClientSession]]:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    settings = {"api_key_file": keys, **master}
    async with (
        live_cluster(workers=1, master=settings) as cluster,
        aiohttp.ClientSession() as session,
    ):
        yield cluster, session


async def complete(
    cluster: LiveCluster, session: aiohttp.ClientSession, key: str, **body: Any
) -> tuple[int, dict[str, str], Any]:
    request = {"prompt": "abc", "max_tokens": 10, "ignore_eos": True, "seed": 1} | body
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{cluster.url}/v1/completions"
    async with session.post(url, json=request, headers=headers) as reply:
        return reply.status, dict(reply.headers), await reply.json()


async def metrics(cluster: LiveCluster, session: aiohttp.ClientSession) -> dict[str, float]:
    async with session.get(f"{cluster.url}/metrics") as reply:
        lines = [line for line in (await reply.text()).splitlines() if line[:1] != "#"]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def test_a03_a_tenant_over_its_rate_gets_a_429_and_its_neighbour_does_not(tmp_path: Path):
    terms = {"team-a": {"tokens_per_s": 0.05, "burst_tokens": 12}}
    async with a_cluster(tmp_path, tenants=terms) as (cluster, session):
        status, _, first = await complete(cluster, session, "key-a", max_tokens=20)
        assert status == 200, first
        status, headers, reply = await complete(cluster, session, "key-a")
        assert status == 429
        assert reply["error"]["code"] == "rate_limit_exceeded"
        assert "this tenant has used its 0.05 tokens per second" in reply["error"]["message"]
        owed = first["usage"]["prompt_tokens"] + 20 - 12
        assert owed / 0.05 < int(headers["Retry-After"]) <= (owed + 12) / 0.05
        assert (await complete(cluster, session, "key-b"))[0] == 200
        assert (await complete(cluster, session, "no-key"))[0] == 401
        found = await metrics(cluster, session)
    assert found['rtp_gate_refusals_total{gate="tenant_rate"}'] == 1
    assert found['rtp_tenant_refusals_total{tenant="team-a"}'] == 1
    used = first["usage"]["prompt_tokens"] + 20
    assert found['rtp_tenant_tokens_total{tenant="team-a"}'] == used
    assert found['rtp_tenant_requests_total{tenant="other"}'] == 1
    assert not any("team-b" in name for name in found)


async def test_one_switch_of_the_settings_turns_all_limits_off(tmp_path: Path):
    terms = {"tokens_per_s": 0.01, "burst_tokens": 1, "max_waiting": 1}
    master = {"default_tenant": terms, "max_queue_requests": 1, "limits": False}
    async with a_cluster(tmp_path, **master) as (cluster, session):
        replies = await asyncio.gather(*(complete(cluster, session, "key-a") for _ in range(8)))
    assert [status for status, _, _ in replies] == [200] * 8


async def test_a_client_that_leaves_pays_for_what_it_got(tmp_path: Path):
    terms = {"team-a": {"tokens_per_s": 1e-6, "burst_tokens": 5000}}
    async with a_cluster(tmp_path, tenants=terms) as (cluster, session):
        body = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        headers = {"Authorization": "Bearer key-a"}
        url = f"{cluster.url}/v1/completions"
        async with session.post(url, json=body, headers=headers) as reply:
            await reply.content.readline()
        async with asyncio.timeout(5):
            while cluster.master.overview()["bookings"]:  # noqa: ASYNC110 -- reports come
                await asyncio.sleep(0.005)
        shown = cluster.master.overview()["tenants"]["named"]["team-a"]
    assert 0 < shown["used_tokens"] < 4000
    assert shown["tokens_left"] == pytest.approx(5000 - shown["used_tokens"], abs=0.01)


async def test_a_users_policy_that_misbehaves_is_shown_and_requests_are_served(tmp_path: Path):
    routing = {"name": "tests.conformance.broken_policy"}
    async with a_cluster(tmp_path, routing=routing) as (cluster, session):
        for _ in range(3):
            assert (await complete(cluster, session, "key-a"))[0] == 200
        found = await metrics(cluster, session)
        policy = cluster.master.overview()["policy"]
        failed = [note for note in cluster.notes if note.event == "policy.failed"]
    assert found["rtp_policy_fallbacks_total"] == found["rtp_policy_looks_total"] == 3
    assert "read-only" in policy["last_fallback"]
    assert len(failed) == 1, "once per reason"
