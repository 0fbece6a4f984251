"""Master, frontend and workers over real sockets: joining, leaving, restarts."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import aiohttp
import msgspec
import pytest

from rtp.core.events import Begin
from rtp.core.hashing import block_hashes, namespace
from rtp.core.messages import Register
from rtp.core.types import RequestId, SamplingParams, pack_ids
from rtp.io import ratchet
from rtp.io.frontend_loop import Handle
from rtp.io.handshake import body_proof, key_id, new_nonce
from rtp.io.registration import CHALLENGE, PROOF, REGISTER_PATH, ask_headers
from tests.support.client import Client
from tests.support.live import LiveCluster, live_cluster
from tests.support.sockets import a_register


def begin(cluster: LiveCluster, request_id: str = "r1", prompt: int = 40, **sampling) -> Handle:
    ids = pack_ids(range(100, 100 + prompt))
    seed = namespace(secret=cluster.secret, revision="r")
    return cluster.master.frontend.begin(
        Begin(
            request_id=RequestId(request_id),
            model="sim",
            prompt=ids,
            hashes=block_hashes(ids, 16, seed),
            namespace=seed,
            sampling=SamplingParams(temperature=0.0, **({"max_tokens": 8} | sampling)),
            timeout_s=30.0,
        )
    )


async def output(handle: Handle) -> tuple[list[int], str]:
    """Ids, and the type name of the last word."""
    ids: list[int] = []
    async for command in handle:
        for chunk in getattr(command, "chunks", ()):
            ids += chunk.ids
    return ids, type(command).__name__


async def test_a_request_goes_out_and_its_tokens_come_back():
    async with live_cluster(workers=2) as cluster:
        ids, end = await output(begin(cluster))
        assert end == "Ended"
        assert len(ids) == 8
        assert (await output(begin(cluster, "r2")))[0] == ids


async def test_the_card_of_a_worker_is_fetched_and_offered():
    async with live_cluster(workers=2) as cluster:
        card = cluster.master.frontend.models["sim"]
        assert card.model == "sim"
        assert card.digest() == cluster.workers[0].server.loop.register.card


async def test_a_cancelled_request_is_freed_on_its_worker():
    slow = {"d": 0.01, "e": 0.0, "a": 1e-4, "b": 1e-6}
    async with live_cluster(workers=1, params=slow) as cluster:
        core = cluster.workers[0].server.loop.core
        handle = begin(cluster, max_tokens=5000)
        await anext(handle)
        assert not core.idle()
        handle.cancel()
        async with asyncio.timeout(1.0):
            while not core.idle():  # noqa: ASYNC110  the core has no event for it
                await asyncio.sleep(0.005)


async def test_a_request_outlives_the_worker_that_ran_it():
    slow = {"d": 0.005, "e": 0.0, "a": 1e-4, "b": 1e-6}
    async with live_cluster(workers=2, params=slow) as cluster:
        whole, _ = await output(begin(cluster, "r0", max_tokens=60))
        handle = begin(cluster, "r1", max_tokens=60)
        first = await anext(handle)
        busy = [i for i, w in enumerate(cluster.workers) if not w.server.loop.core.idle()]
        assert len(busy) == 1
        await cluster.kill(busy[0])
        rest, end = await output(handle)
        assert end == "Ended"
        assert [i for c in first.chunks for i in c.ids] + rest == whole


async def test_a_restarted_worker_comes_back_with_a_new_epoch():
    async with live_cluster(workers=2) as cluster:
        epoch = cluster.workers[0].server.loop.register.epoch
        await cluster.kill(0)
        await cluster.start_worker(0)
        await cluster.ready(2)
        assert cluster.workers[0].server.loop.register.epoch > epoch
        seen = {w["worker_id"]: w["epoch"] for w in cluster.master.overview()["workers"]}
        assert seen["worker-0"] == cluster.workers[0].server.loop.register.epoch


async def test_lives_that_start_after_the_clock_was_set_back_are_still_the_later_ones(
    monkeypatch: pytest.MonkeyPatch,
):
    async with live_cluster(workers=1) as cluster:
        term, epoch = cluster.master.loop.term, cluster.workers[0].server.loop.register.epoch
        real = ratchet.now_ms
        monkeypatch.setattr(ratchet, "now_ms", lambda: real() - 3_600_000)
        await cluster.stop_master()
        await cluster.start_master()
        await cluster.ready(1)
        assert cluster.master.loop.term == term + 1
        await cluster.kill(0)
        await cluster.start_worker(0)
        await cluster.ready(1)
        assert cluster.workers[0].server.loop.register.epoch == epoch + 1
        assert (await output(begin(cluster)))[1] == "Ended"


async def test_a_state_directory_that_cannot_be_written_is_noted_and_all_works(tmp_path: Path):
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    state = {"state": nowhere}
    async with live_cluster(workers=1, master=state, worker=state) as cluster:
        noted = {note.event: note.fields for note in cluster.notes if "not_kept" in note.event}
        assert set(noted) == {"term.not_kept", "epoch.not_kept"}
        assert all("file" in str(fields["reason"]) for fields in noted.values())
        assert (await output(begin(cluster)))[1] == "Ended"


async def test_a_worker_restarts_on_the_same_port():
    async with live_cluster(workers=1) as cluster:
        port = int(cluster.workers[0].server.address.rpartition(":")[2])
        await cluster.kill(0)
        worker = cluster.workers[0]
        worker.config = worker.config.model_copy(update={"port": port})
        await cluster.start_worker(0)
        await cluster.ready(1)
        assert (await output(begin(cluster)))[1] == "Ended"


async def test_x09_all_eight_workers_return_to_a_restarted_master():
    async with live_cluster(workers=8) as cluster:
        await output(begin(cluster))
        await cluster.stop_master()
        async with asyncio.timeout(2.0):
            await cluster.start_master()
            await cluster.ready(8)
        assert (await output(begin(cluster, "r2")))[1] == "Ended"


async def test_x08_one_dead_address_of_four_delays_nobody():
    """The Master is given four addresses; a listener that never answers stands at one of them."""
    with socket.create_server(("127.0.0.1", 0)) as dead:
        nowhere = {"master": "http://127.0.0.1:1"}
        async with live_cluster(workers=3, worker=nowhere, start=False) as cluster:
            for i in range(3):
                await cluster.start_worker(i)
            addresses = [worker.server.address for worker in cluster.workers]
            addresses.insert(0, f"127.0.0.1:{dead.getsockname()[1]}")
            cluster._master_config = cluster._master_config.model_copy(
                update={"workers": tuple(addresses)}
            )
            async with asyncio.timeout(2.0):
                await cluster.start_master()
                await cluster.ready(3)
            assert (await output(begin(cluster)))[1] == "Ended"


async def test_a_worker_whose_runner_dies_says_so_and_is_left_out():
    """Cases O01: not ready, and the Master routes to the other one."""
    async with live_cluster(workers=2) as cluster:
        dying = cluster.workers[0]
        dying.runners[0].break_down("out of memory")
        assert dying.server.stopped.is_set()
        assert "out of memory" in dying.server.failed
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{dying.server.address}/health") as answer:
                assert answer.status == 503
                assert "out of memory" in (await answer.json())["reason"]
            async with session.get(f"http://{dying.server.address}/live") as answer:
                assert answer.status == 200
        await cluster.kill(0)
        for i in range(4):
            assert (await output(begin(cluster, f"r{i}", prompt=40 + i)))[1] == "Ended"


async def test_a_draining_worker_finishes_and_gets_no_more():
    slow = {"d": 0.005, "e": 0.0, "a": 1e-4, "b": 1e-6}
    async with live_cluster(workers=1, params=slow, worker={"drain_s": 20.0}) as cluster:
        handle = begin(cluster, max_tokens=40)
        await anext(handle)
        draining = asyncio.create_task(cluster.workers[0].server.drain())
        _, end = await output(handle)
        assert end == "Ended"
        await draining
        assert cluster.num_ready() == 0


@pytest.mark.parametrize("lockstep", [False, True])
async def test_both_ranks_of_a_worker_serve(lockstep):
    async with live_cluster(workers=1, worker={"dp": 2, "lockstep": lockstep}) as cluster:
        core = cluster.workers[0].server.loop.core
        handles = [begin(cluster, f"r{i}", prompt=40 + i, max_tokens=64) for i in range(8)]
        ends = await asyncio.gather(*map(output, handles))
        assert {end for _, end in ends} == {"Ended"}
        assert [rank["cached_blocks"] > 0 for rank in core.overview()["ranks"]] == [True, True]


async def test_r01_a_worker_at_an_ipv6_address():
    async with live_cluster(workers=1, worker={"host": "::1"}) as cluster:
        assert cluster.workers[0].server.address.startswith("[::1]:")
        assert (await output(begin(cluster)))[1] == "Ended"


async def test_what_a_worker_shows_to_whom():
    async with live_cluster(workers=1) as cluster, aiohttp.ClientSession() as session:
        server = cluster.workers[0].server
        url = f"http://{server.address}"

        async def get(path: str, **headers: str) -> tuple[int, str]:
            async with session.get(url + path, headers=headers) as answer:
                return answer.status, await answer.text("latin-1")

        for path in ("/live", "/health"):
            assert (await get(path))[0] == 200
            assert (await get(path, **{"X-Forwarded-For": "10.0.0.1"}))[0] == 200
        for path in ("/status", "/cache", "/metrics"):
            assert (await get(path))[0] == 200
            assert (await get(path, **{"X-Forwarded-For": "10.0.0.1"}))[0] == 401
        assert "rtp_worker_ranks_0_kv_total 32768.0" in (await get("/metrics"))[1]
        assert '"worker_id":"worker-0"' in (await get("/status"))[1]
        for path in ("/card", "/registration"):
            assert (await get(path))[0] == 401
            assert (await get(path, **ask_headers(b"x" * 32, "c", path)))[0] == 401
            assert (await get(path, **ask_headers(cluster.secret, "c", path)))[0] == 200
        for path in ("/link", "/stream"):
            assert (await get(path))[0] == 400


async def test_a_stopping_master_lets_streams_end_and_cuts_them_with_an_error_at_last():
    slow = {"d": 0.005, "e": 0.0, "a": 1e-4, "b": 1e-6}
    async with live_cluster(workers=1, params=slow, master={"drain_s": 0.5}) as cluster:
        started = [asyncio.Event(), asyncio.Event()]
        async with Client(cluster.url, "sim") as client:
            short, long = (
                asyncio.create_task(
                    client.stream([5, i], max_tokens=n, on_chunk=lambda _, i=i: started[i].set())
                )
                for i, n in enumerate((40, 5000))
            )
            await asyncio.gather(*(event.wait() for event in started))
            await cluster.master.drain()
            late = begin(cluster)
            assert [c.status async for c in late] == [503]
            first, second = await short, await long
            assert first.done
            assert first.finish == "length"
            assert second.error["code"] == "service_unavailable"
            async with asyncio.timeout(1.0):
                while not cluster.workers[0].server.loop.core.idle():  # noqa: ASYNC110  as above
                    await asyncio.sleep(0.005)


# ---------------------------------------------------------------- registration


async def post(
    cluster: LiveCluster,
    register: Register | bytes,
    secret: bytes | None = None,
    challenge: str | None = None,
    kind: str = "application/msgpack",
) -> tuple[int, str]:
    body = register if isinstance(register, bytes) else msgspec.msgpack.encode(register)
    challenge = cluster.master.loop._challenge if challenge is None else challenge
    proof = body_proof(cluster.secret if secret is None else secret, "register", challenge, body)
    headers = {CHALLENGE: challenge, PROOF: proof, "Content-Type": kind}
    async with (
        aiohttp.ClientSession() as session,
        session.post(cluster.url + REGISTER_PATH, data=body, headers=headers) as answer,
    ):
        return answer.status, await answer.text()


@pytest.fixture
async def alone():
    async with live_cluster(workers=0, start=False) as cluster:
        await cluster.start_master()
        yield cluster


async def test_only_a_proved_registration_is_taken(alone: LiveCluster):
    register = msgspec.structs.replace(a_register(), key_id=_key_id(alone))
    assert (await post(alone, register, secret=b"x" * 32))[0] == 401
    assert (await post(alone, register, challenge=""))[0] == 401
    assert (await post(alone, register, challenge=new_nonce()))[0] == 401
    assert alone.master.overview()["workers"] == []
    assert (await post(alone, register))[0] == 200
    assert [w["worker_id"] for w in alone.master.overview()["workers"]] == ["w1"]
    assert b"/internal/" not in alone.master.metrics.text(), "no requests of clients"
    async with aiohttp.ClientSession() as session, session.get(alone.url) as answer:
        assert "/internal/" not in await answer.text()


async def test_a_malformed_registration_does_not_reach_the_core(alone: LiveCluster):
    good = msgspec.structs.replace(a_register(), key_id=_key_id(alone))
    bad = [
        b"",
        b"junk",
        msgspec.msgpack.encode([1, 2, 3]),
        msgspec.structs.replace(good, kv_total=()),
        msgspec.structs.replace(good, address="nowhere"),
        msgspec.structs.replace(good, address="[::1"),
    ]
    for register in bad:
        status, text = await post(alone, register)
        assert status == 400, text
        assert "registration" in text
    assert alone.master.overview()["workers"] == []
    assert (await post(alone, msgspec.structs.replace(good, key_id="00000000")))[0] == 401


async def test_a_registration_may_be_json(alone: LiveCluster):
    register = msgspec.structs.replace(a_register(), key_id=_key_id(alone))
    status, text = await post(alone, msgspec.json.encode(register), kind="application/json")
    assert status == 200, text
    assert [w["worker_id"] for w in alone.master.overview()["workers"]] == ["w1"]


async def test_r01_r02_an_address_has_one_worker_however_it_is_written(alone: LiveCluster):
    for worker_id, address in (("a", "http://127.0.0.1:9/"), ("b", "127.0.0.1:9")):
        register = msgspec.structs.replace(
            a_register(worker_id), key_id=_key_id(alone), address=address
        )
        assert (await post(alone, register))[0] == 200
    assert [w["worker_id"] for w in alone.master.overview()["workers"]] == ["b"]


async def test_a_worker_with_another_secret_never_joins(alone: LiveCluster):
    async with live_cluster(workers=1, worker={"master": alone.url}, start=False) as other:
        await other.start_worker(0)
        told = await other.noted(lambda note: note.event == "registration.failed")
        assert "secret" in str(told.fields["reason"])
        assert told.fields["next"] == "will retry"
        assert alone.master.overview()["workers"] == []
        await other.kill(0)


async def test_a_worker_that_does_not_fit_is_told_and_tries_again():
    """Its card counts for nothing: the model that is served keeps its own."""
    async with live_cluster(workers=2, start=False) as cluster:
        await cluster.start_master()
        await cluster.start_worker(0)
        await cluster.ready(1)
        served = cluster.master.frontend.models["sim"]
        misfit = cluster.workers[1]
        misfit.config = misfit.config.model_copy(update={"block_size": 32})
        await cluster.start_worker(1)
        told = await cluster.noted(lambda note: note.event == "registration.failed")
        assert "block_size 32 differs from 16 of worker-0" in str(told.fields["reason"])
        assert await cluster.noted(lambda note: note.event == "worker.refused")
        register = misfit.server.loop.register
        assert (await post(cluster, register))[0] == 409
        assert cluster.master.frontend.models["sim"] == served
        await cluster.kill(0)
        async with asyncio.timeout(10):
            await misfit.server.loop.linked.wait()


def _key_id(cluster: LiveCluster) -> str:
    return key_id(cluster.secret)
