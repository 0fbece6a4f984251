"""`python -m rtp.replay run --live URL` against a simulated cluster behind real HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from rtp.replay import main
from tests.support.live import live_cluster

ROWS = "".join(
    f'{{"timestamp":{30 * i},"input_length":600,"output_length":3,"hash_ids":[0,{i + 1}]}}\n'
    for i in range(8)
)


def body(text: str) -> bytes:
    """Of an HTTP reply, with the reply."""
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


async def test_a_trace_is_replayed_live_and_reported(tmp_path: Path):
    trace = tmp_path / "t.jsonl"
    trace.write_text(ROWS)
    options = ["--trace", str(trace), "--speed", "2", "--out", str(tmp_path / "r")]
    async with live_cluster(workers=2) as cluster:
        code = await asyncio.to_thread(main, ["run", "--live", cluster.url + "/v1", *options])
    assert code == 0
    result = msgspec.json.decode((tmp_path / "r.json").read_bytes())
    (live,) = result["policies"]
    figures = live["runs"][0]["stats"]
    assert (figures["requests"], figures["ended"], figures["failures"]) == (8, 8, {})
    assert figures["tpot_s"]["count"] == 8
    assert figures["hit_ratio"] > 0.3
    for name in ("phases", "queue_max", "queue_mean", "retried", "held", "imbalance"):
        assert figures[name] is None
    assert live["series"]["waiting"] is None
    assert live["series"]["prefilling"] is None
    assert max(live["series"]["decoding"]["y"]) > 0
    assert result["where"]["answers_without_usage"] == 0
    assert result["where"]["server"] == cluster.url + "/v1"
    assert "2 x" not in result["slo"]
    assert "live" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (body('{"data":[{}]}'), "required field `id`"),
        (body('{"data":{"a":1}}'), "Expected `array`"),
        (body('{"data":["x"]}'), "Expected `object`"),
        (body('{"data":[]}'), "lists no model"),
        (b"HELLO\r\n\r\n", "HELLO"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{", "IncompleteRead"),
        (b"", "closed connection without response"),
    ],
)
async def test_a_server_whose_models_cannot_be_read_is_told(
    reply: bytes, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    trace = tmp_path / "t.jsonl"
    trace.write_text(ROWS)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        code = await asyncio.to_thread(main, ["run", "--trace", str(trace), "--live", url])
    assert code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert url in line
    assert words in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--live", "http://127.0.0.1:9"], "127.0.0.1:9/v1/models: "),
        (["--live", "http://127.0.0.1:9", "--policy", "random"], "; policy would do nothing"),
        (
            ["--live", "http://127.0.0.1:9", "--workers", "8", "--set", "master.lead_s=1"],
            "; master, workers would do nothing",
        ),
        (
            ["--live", "http://127.0.0.1:9", "--slo-factor", "3", "--fault", "1:lost:w0"],
            "; fault, slo-factor would do nothing",
        ),
        (["--live", "http://127.0.0.1:9", "--end-id", "5"], "end_id 5 is not above first_id"),
        (
            ["--live-timeout-s", "5", "--first-id", "7"],
            "--live URL is missing; first-id, live-timeout-s would do nothing",
        ),
    ],
)
def test_mistakes_of_live_runs_are_told(
    options: list[str], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    trace = tmp_path / "t.jsonl"
    trace.write_text(ROWS)
    try:
        code = main(["run", "--trace", str(trace), *options])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert words in capfd.readouterr().err
