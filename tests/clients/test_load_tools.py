"""aiperf and guidellm drive a served model: 200 requests at concurrency 8, none fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.servers import Server, rtp
from tests.clients import hub
from tests.clients.tools import program

pytestmark = pytest.mark.clients
REQUESTS, STREAMS = 200, 8


@pytest.fixture(scope="module")
def server():
    with rtp(workers=2) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hub.of_model(tmp_path_factory.mktemp("hf"), "smollm2-135m")


def test_aiperf_chat_streams(server: Server, tokenizer: Path, tmp_path: Path):
    command = [str(program("aiperf", "aiperf")), "profile", "-m", server.model]
    command += ["--url", server.url, "--endpoint-type", "chat", "--streaming"]
    command += ["--tokenizer", "local/tok", "--ui", "none", "--artifact-dir", str(tmp_path)]
    command += ["--request-count", str(REQUESTS), "--concurrency", str(STREAMS)]
    command += ["--isl", "64", "--osl", "16", "--extra-inputs", "ignore_eos:true"]
    hub.run(command, tokenizer)
    (path,) = tmp_path.rglob("profile_export_aiperf.json")
    report = json.loads(path.read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert report.get("error_request_count", {"avg": 0})["avg"] == 0


def test_guidellm_completions(server: Server, tokenizer: Path, tmp_path: Path):
    out = tmp_path / "guidellm.json"
    folder = next((tokenizer / "hub" / "models--local--tok" / "snapshots").iterdir())
    command = [str(program("guidellm", "guidellm")), "run"]
    command += ["--backend", f"kind=openai_http,target={server.url},model={server.model}"]
    command += ["--profile", f"kind=concurrent,streams={STREAMS}"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={folder}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"]
    command += ["--output", f"kind=json,path={out}", "--disable-progress"]
    hub.run(command, tokenizer)
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == REQUESTS
    assert totals["errored"] == 0
    assert totals["incomplete"] == 0
