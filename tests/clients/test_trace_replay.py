"""aiperf replays a trace at wall-clock speed: against simulated ranks behind real HTTP, and against
the real model. Nobody fails, and its mean TTFT is what the server's own histogram says."""

from __future__ import annotations

import json
import sys
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bench.servers import Server, free_port, rtp, run
from rtp.core.ports import Capacity
from rtp.core.trace import TraceRow
from rtp.io.traces import write_mooncake
from rtp.rank import byte_card
from tests.clients import hub
from tests.clients.tools import program
from tests.support.traces import conversation

pytestmark = pytest.mark.clients
LONGEST = 160_000
VOCAB = 32_000
LONGEST_REAL, FASTER = 1024, 4.0
"""Prompts that two CPU workers can compute, and how much faster they come."""
SIMULATED = {
    "contents": False,
    "realtime": True,
    "num_blocks": 40_000,
    "max_model_len": LONGEST,
    "vocab_size": VOCAB,
    "a": 0.005,
    "b": 15e-6,
    "c": 0.0,
    "d": 0.02,
    "e": 0.0005,
    "f": 0.0,
}
"""Two such ranks are half busy with the trace's first 90 s."""


@dataclass
class Measured:
    """One run, as both ends saw it."""

    requests: float
    errors: float
    client_ttft_s: float
    server_ttft_s: float
    server_requests: float


def first_tokens(server: Server) -> tuple[float, float]:
    """Sum and count of the server's histogram of TTFT."""
    with urllib.request.urlopen(f"{server.url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    found = []
    for end in ("sum", "count"):
        name = f"rtp_time_to_first_token_seconds_{end}"
        found.append(sum(float(li.rpartition(" ")[2]) for li in lines if li.startswith(name)))
    return found[0], found[1]


def replay(
    server: Server, tokenizer: Path, out: Path, rows: list[TraceRow], *extra: str
) -> Measured:
    trace = out / "rows.jsonl"
    write_mooncake(trace, rows)
    command = [str(program("aiperf", "aiperf")), "profile", "-m", server.model]
    command += ["--url", server.url, "--endpoint-type", "chat", "--streaming"]
    command += ["--tokenizer", "local/tok", "--ui", "none", "--artifact-dir", str(out / "a")]
    command += ["--input-file", str(trace), "--custom-dataset-type", "mooncake_trace"]
    command += ["--fixed-schedule", "--extra-inputs", "ignore_eos:true", *extra]
    before = first_tokens(server)
    hub.run(command, tokenizer)
    after = first_tokens(server)
    (path,) = out.rglob("profile_export_aiperf.json")
    report = json.loads(path.read_text())
    count = after[1] - before[1]
    measured = Measured(
        requests=report["request_count"]["avg"],
        errors=report.get("error_request_count", {"avg": 0})["avg"],
        client_ttft_s=report["time_to_first_token"]["avg"] / 1000,
        server_ttft_s=(after[0] - before[0]) / count,
        server_requests=count,
    )
    print(measured)
    return measured


def check(measured: Measured, requests: int) -> None:
    assert (measured.requests, measured.errors) == (requests, 0)
    assert measured.server_requests == requests
    server = measured.server_ttft_s
    assert abs(measured.client_ttft_s - server) <= 0.10 * server + 0.005


def test_300_rows_of_the_conversation_on_simulated_ranks(tmp_path: Path):
    rows = conversation()[:300]
    card = byte_card("sim", Capacity(1, 16, LONGEST, VOCAB, (2,), "sim"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    template = {"chat_template": card.chat_template}
    home = hub.write(tmp_path / "hf", card.tokenizer_json, special | template)
    port = free_port()
    command = [sys.executable, "-m", "rtp.local", "--workers", "2", "--port", str(port)]
    command += ["--backend", "sim", "--set", f"params={json.dumps(SIMULATED)}"]
    command += ["--max-batch-tokens", "8192", "--chunk-while-decoding", "4096"]
    command += ["--block-size", "512", "--ask", "false"]
    with run("rtp-sim", command, port, "sim") as server:
        check(replay(server, home, tmp_path, rows), 300)


def test_100_rows_on_the_real_model(tmp_path: Path):
    """aiperf leaves out what is longer than it is told; so much of the trace has 100 others."""
    rows = conversation()
    short = [index for index, row in enumerate(rows) if row.num_tokens <= LONGEST_REAL]
    home = hub.of_model(tmp_path / "hf", "smollm2-135m")
    sent = [replace(row, arrival_s=row.arrival_s / FASTER) for row in rows[: short[99] + 1]]
    with rtp(workers=2, extra=["--ask", "false"]) as server:
        check(replay(server, home, tmp_path, sent, "--synthesis-max-isl", str(LONGEST_REAL)), 100)
