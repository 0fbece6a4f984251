"""What every Transport owes a worker: all pages, or TransferFailed, and an end in any case."""

from __future__ import annotations

import asyncio

import pytest

from rtp.core import plugins
from rtp.core.errors import ConfigError, TransferFailed
from rtp.core.messages import Source
from rtp.core.ports import Transport
from rtp.core.types import WorkerId, pack_ids

NAMES = plugins.names("transport")
PAGES = pack_ids(range(4))


def built(name: str, **params: float) -> Transport:
    reasons = plugins.check("transport", name)
    if reasons:
        pytest.skip(f"{name}: {'; '.join(reasons)}")
    transport: Transport = plugins.build("transport", name, **params)
    return transport


def source(port: int) -> Source:
    return Source(WorkerId("w"), 1, f"127.0.0.1:{port}", 0, b"ticket", 64)


async def listening(on_connect) -> tuple[asyncio.Server, int]:
    server = await asyncio.start_server(on_connect, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


async def stays(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def goes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_takes_and_whose_pages_it_moves(name: str) -> None:
    transport = built(name)
    assert transport.latency_s >= 0
    assert transport.tokens_per_s > 0
    assert set(plugins.module("transport", name).BACKENDS) <= set(plugins.names("backend"))


@pytest.mark.parametrize("name", NAMES)
def test_a_source_that_is_not_there_is_a_failed_transfer(name: str) -> None:
    async def run() -> None:
        server, port = await listening(stays)
        server.close()
        await server.wait_closed()
        with pytest.raises(TransferFailed, match="w"):
            await built(name).pull(source(port), 0, 64, PAGES)

    asyncio.run(run())


@pytest.mark.parametrize("name", NAMES)
def test_a_source_that_dies_on_the_way_is_a_failed_transfer(name: str) -> None:
    """Case P12."""

    async def run() -> None:
        server, port = await listening(goes)
        async with server:
            with pytest.raises(TransferFailed, match="w"):
                await built(name, latency_s=60.0).pull(source(port), 0, 64, PAGES)

    asyncio.run(run())


def test_the_simulated_one_takes_its_time_and_ends_when_cancelled() -> None:
    async def run() -> None:
        server, port = await listening(stays)
        async with server:
            await built("sim", latency_s=0.0, tokens_per_s=1e9).pull(source(port), 0, 64, PAGES)
            pull = asyncio.create_task(built("sim", latency_s=60.0).pull(source(port), 0, 1, PAGES))
            await asyncio.sleep(0)
            pull.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pull

    asyncio.run(run())


@pytest.mark.parametrize("params", [{"latency_s": -1.0}, {"tokens_per_s": 0.0}])
def test_speeds_there_are_not_are_refused(params: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="latency_s"):
        built("sim", **params)
