"""lm-eval's `local-completions` against a served model equals a direct transformers computation."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from bench.servers import rtp
from tests.clients.tools import program
from tests.support.reference import Reference

pytestmark = pytest.mark.clients
TASKS = Path(__file__).resolve().parent / "lm_tasks"
UNTIL = ["\n\n", "###", "Q:", "</s>", "END"]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """Runs lm-eval once on both tasks; its per-sample log, by task, in the order of the files."""
    home = tmp_path_factory.mktemp("lm_eval")
    for yaml in TASKS.glob("*.yaml"):
        (home / yaml.name).write_text(yaml.read_text().replace("DATA", str(TASKS)))
    with rtp(workers=2, extra=["--dtype", "fp32"]) as server:
        args = f"model={server.model},base_url={server.url}/v1/completions"
        command = [str(program("lmeval", "lm_eval")), "--model", "local-completions"]
        command += ["--model_args", f"{args},tokenizer_backend=remote,num_concurrent=4"]
        command += ["--tasks", "rtp_capitals,rtp_continue", "--include_path", str(home)]
        command += ["--output_path", str(home / "out"), "--log_samples"]
        env = {**os.environ, "HF_HOME": str(home / "hf"), "HF_DATASETS_OFFLINE": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = {}
    for task in ("rtp_capitals", "rtp_continue"):
        (path,) = (home / "out").rglob(f"samples_{task}_*.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found[task] = sorted(rows, key=lambda row: row["doc_id"])
    return found


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference("smollm2-135m")


def test_scores_equal_transformers(samples, reference):
    """Case L01: the log-probabilities of every choice, and which of them is greedy."""
    rows = samples["rtp_capitals"]
    assert len(rows) == 10
    for row in rows:
        for choice, ((logprob, greedy),) in zip(row["doc"]["choices"], row["resps"], strict=True):
            context = reference.encode(row["doc"]["question"])
            whole = reference.encode(f"{row['doc']['question']} {choice}")
            want, want_greedy = reference.score(whole, len(context))
            assert float(logprob) == pytest.approx(want, abs=2e-3)
            assert str(greedy) == str(want_greedy)
    assert sum(row["acc"] for row in rows) >= 5, "a trained model beats chance (2.5 of 10)"


def test_generations_equal_transformers(samples, reference):
    rows = samples["rtp_continue"]
    assert len(rows) == 10
    for row in rows:
        ids = reference.encode(row["doc"]["text"])
        text = reference.decode(reference.greedy(ids, 24))
        ends = [text.find(stop) for stop in UNTIL if stop in text]
        assert row["resps"][0][0] == (text[: min(ends)] if ends else text)
