"""The HTTP side against what is not quite HTTP: broken framing, odd hosts, packed bodies."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib

import pytest

from tests.support.scripted_frontend import Api, an_api, says

BODY = b'{"prompt":"a"}'
JSON = "Content-Type: application/json\r\n"


async def wire(api: Api, *pieces: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to these bytes, sent one piece after the other."""
    host, port = api.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        body = await reader.readexactly(int(headers["Content-Length"]))
    finally:
        writer.close()
    return int(lines[0].split()[1]), headers, body


def post(extra: str = "", body: bytes = BODY, *, length: object = None) -> bytes:
    size = len(body) if length is None else length
    framing = "" if "Transfer-Encoding" in extra else f"Content-Length: {size}\r\n"
    return f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{extra}{framing}\r\n".encode() + body


def error_of(headers: dict[str, str], body: bytes) -> dict[str, object]:
    assert headers["Content-Type"].startswith("application/json")
    reply = json.loads(body)
    assert set(reply) == {"error"}
    assert set(reply["error"]) == {"message", "type", "param", "code"}
    error: dict[str, object] = reply["error"]
    return error


@pytest.mark.parametrize(
    "sent",
    [
        b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x00\xf5garbage\r\n\r\n",
        post(length=-5),
        post(length="many"),
        post("Content-Length: 3\r\n"),
        post("X-Long: " + "a" * 20000 + "\r\n"),
        post("X-Nul: a\0b\r\n"),
        post("Transfer-Encoding: chunked\r\n", b"zz\r\na\r\n0\r\n\r\n"),
    ],
)
async def test_what_is_not_http_gets_an_error_object_and_no_traceback(
    sent: bytes, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    async with an_api(says("x")) as api:
        status, headers, body = await wire(api, sent)
        assert status == 400
        error = error_of(headers, body)
        assert error["type"] == "invalid_request_error"
        assert "\n" not in str(error["message"])
        assert (await api.get("/live"))[0] == 200
    shown = capfd.readouterr()
    assert "Traceback" not in shown.out + shown.err + caplog.text


async def test_an_expectation_nobody_can_meet_gets_an_error_object():
    async with an_api(says("x")) as api:
        status, headers, body = await wire(api, post(f"{JSON}Expect: 42-tea\r\n"))
    assert status == 417
    assert error_of(headers, body)["type"] == "invalid_request_error"


@pytest.mark.parametrize("broken", [b"", b"zz\r\nabc\r\n"])
async def test_a_body_that_does_not_come_to_its_end_is_not_waited_for(
    broken: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rtp.io.http_body.BODY_S", 0.05)
    async with an_api(says("x")) as api:
        head = post(f"{JSON}Transfer-Encoding: chunked\r\n", b"5\r\n{ pro\r\n")
        status, headers, body = await wire(api, head, broken)
    assert status == 408
    assert error_of(headers, body)["code"] == "timeout"


@pytest.mark.parametrize("host", ["a:b:c:d", "localhost:99999999", "", "x" * 3000])
async def test_hosts_that_are_no_hosts_are_not_local(host: str):
    sent = f"GET /dashboard/data.json HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    async with an_api(says("x")) as api:
        status, headers, body = await wire(api, sent)
    assert status == 401
    assert error_of(headers, body)["code"] == "invalid_api_key"


RAW = zlib.compressobj(wbits=-15)
PACKED = [
    ("gzip", gzip.compress(BODY, mtime=0)),
    ("x-gzip", gzip.compress(BODY, mtime=0)),
    ("GZIP", gzip.compress(BODY, mtime=0)),
    ("deflate", zlib.compress(BODY)),
    ("deflate", RAW.compress(BODY) + RAW.flush()),
    ("identity", BODY),
]


@pytest.mark.parametrize(("coding", "data"), PACKED, ids=range(len(PACKED)))
async def test_packed_bodies_are_read(coding: str, data: bytes):
    async with an_api(says("x")) as api:
        sent = post(f"{JSON}Content-Encoding: {coding}\r\n", data)
        assert (await wire(api, sent))[0] == 200


@pytest.mark.parametrize(
    ("coding", "data", "status"),
    [
        ("gzip", b"nonsense", 400),
        ("gzip", b"", 400),
        ("gzip", gzip.compress(BODY, mtime=0)[:-9], 400),
        ("gzip", gzip.compress(BODY, mtime=0) + b"more", 400),
        ("deflate", b"\xff\xff\xff", 400),
        ("br", BODY, 415),
        ("zstd", BODY, 415),
        ("tea", BODY, 415),
        ("gzip, gzip", gzip.compress(BODY, mtime=0), 415),
        ("gzip", gzip.compress(b" " * 50_000_000, mtime=0), 413),
    ],
)
async def test_packed_bodies_that_cannot_be_read_are_refused(coding: str, data: bytes, status: int):
    async with an_api(says("x")) as api:
        sent = post(f"{JSON}Content-Encoding: {coding}\r\n", data)
        got, headers, body = await wire(api, sent)
        assert got == status
        error_of(headers, body)
        assert api.frontend.begins == []


async def test_o08_a_bomb_is_not_unpacked_even_for_a_caller_without_key():
    """What is refused unread is thrown away as it came: unpacking it would hold up everyone."""
    bomb = gzip.compress(b" " * (64 << 20), compresslevel=1)
    async with an_api(says("x"), api_key="k") as api:
        sent = post(f"{JSON}Content-Encoding: gzip\r\n", bomb)
        before = zlib.decompressobj
        unpacked: list[int] = []

        def counting(*args: int) -> object:
            unpacked.append(1)
            return before(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zlib, "decompressobj", counting)
            assert (await wire(api, sent))[0] == 401
        assert unpacked == []


async def test_a_connection_that_sends_no_whole_head_is_closed(monkeypatch: pytest.MonkeyPatch):
    """Slow loris. One that has sent a request before may be idle for longer."""
    monkeypatch.setattr("rtp.io.http_server.FIRST_REQUEST_S", 0.05)
    async with an_api(says("a")) as api, asyncio.timeout(20):
        host, port = api.url.removeprefix("http://").split(":")
        used, to_used = await asyncio.open_connection(host, int(port))
        to_used.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        await used.readuntil(b'"alive"}')
        for head in (b"", b"GET /live HTTP/1.1\r\nX-Slow: "):
            slow, to_slow = await asyncio.open_connection(host, int(port))
            to_slow.write(head)
            assert await slow.read() == b""
            to_slow.close()
        to_used.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        await used.readuntil(b'"alive"}')
        to_used.close()
