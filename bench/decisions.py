"""Decisions over HTTP, beside Dynamo's select_service (ai-dynamo-runtime, Rust).

    python -m bench.decisions [--rounds 5] [--concurrency 8] [--new-blocks 4]

Both know the same 64 workers and the same cached blocks, and get the same block hashes as JSON; a
decision is a place that is charged, and given back: POST /v1/schedule (`"wait": false`) and its
/done here, POST /select_and_reserve and DELETE /reservations/{id} there. (Its API also wants a list
of `sequence_hashes`, which it books by and answers with; it is given the same ones.) Prompts
continue a cached conversation by --new-blocks. Every answer must tell the overlap of the worker it
names; how many name the worker with the conversation is shown.

Each server runs on core 0, the one client on core 1, over kept connections; rounds alternate.
Logging per request is off in both. select_service binds every address, so all of it runs in a
network namespace of its own. What it does not show: cache changes streaming in, misses, a network.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import uvloop

from bench import peers, servers
from bench.decision_client import Client, Step
from bench.report import ROOT, Claim, finish, machine, median, spread

WORKERS = 64
BLOCK = 16
CHAIN = 2000
CHAINS = 2 * WORKERS
"""Cached conversations, two a worker."""
COUNTS = {32: 2000, 256: 1500, 2000: 400}
"""Blocks of a prompt: decisions a round."""
ALONE = 200
"""Decisions of a round with one in flight."""
TARGETS = {32: 0.9, 256: 0.9, 2000: 1.5}
MOST_P50 = 1.2
SERVER_CORE, CLIENT_CORE = 0, 1
CACHE_REPORT = 20_000
"""Hashes in one report to rtp."""


def owner(chain: int) -> int:
    return chain % WORKERS


@dataclass
class Figures:
    """All rounds of one server at one length."""

    rate: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    """Share of places with the conversation's worker."""
    cpu_us: list[float] = field(default_factory=list)
    p50_us: list[float] = field(default_factory=list)


class Side:
    """One server, and how to speak to it. Each prompt is (chain, its hashes)."""

    name: str

    def __init__(self, server: servers.Server) -> None:
        self.server = server
        self.port = int(server.url.rpartition(":")[2])
        self.hits = 0

    def place(self, number: int, hashes: Sequence[int]) -> bytes:
        """A whole request."""
        raise NotImplementedError

    def placed(self, body: bytes) -> tuple[int, int, bytes]:
        """(worker, matched tokens, the request that gives the place back) of an answer."""
        raise NotImplementedError

    def cpu_s(self) -> float:
        """Of all its threads."""
        tasks = Path(f"/proc/{self.server.process.pid}/task").iterdir()
        return sum(int((t / "schedstat").read_text().split()[0]) for t in tasks) / 1e9


class Rtp(Side):
    name = "rtp"

    def place(self, number: int, hashes: Sequence[int]) -> bytes:
        body = {"hashes": hashes, "num_tokens": len(hashes) * BLOCK + 1}
        return post("/v1/schedule", {"model": "m", "max_tokens": 16, "wait": False} | body)

    def placed(self, body: bytes) -> tuple[int, int, bytes]:
        told = json.loads(body)
        done = post(f"/v1/schedule/{told['request_id']}/done", {"outcome": "done"})
        return int(told["worker_id"]), told["matched_tokens"], done


class Dynamo(Side):
    name = "select_service"

    def place(self, number: int, hashes: Sequence[int]) -> bytes:
        body = {
            "block_hashes": hashes,
            "sequence_hashes": hashes,
            "isl_tokens": len(hashes) * BLOCK + 1,
        }
        return post("/select_and_reserve", {"model_name": "m", "selection_id": f"s{number}"} | body)

    def placed(self, body: bytes) -> tuple[int, int, bytes]:
        told = json.loads(body)
        free = request("DELETE", f"/reservations/{told['selection_id']}", b"")
        return told["worker_id"], told["overlap"]["gpu"], free


def request(method: str, path: str, body: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def post(path: str, body: object) -> bytes:
    return request("POST", path, json.dumps(body, separators=(",", ":")).encode())


# ---------------------------------------------------------------- the servers


@contextmanager
def rtp(chains: Sequence[Sequence[int]]) -> Iterator[Rtp]:
    """A Master whose workers are told of over HTTP."""
    port = servers.free_port()
    with tempfile.TemporaryDirectory() as state:
        command = [*pinned(), sys.executable, "-m", "rtp.master", "--port", str(port)]
        command += ["--state", state, "--log-level", "warning", "--frontend", "false"]
        with servers.run("rtp-decisions", command, port, "m", path="/live") as server:
            for worker in range(WORKERS):
                body = {
                    "model": "m",
                    "address": f"127.0.0.1:{9000 + worker}",
                    "block_size": BLOCK,
                    "kv_tokens": 10_000_000,
                    "max_model_len": 1_000_000,
                    "cache_events": True,
                    "tails_leave_first": True,
                    "silence_s": 3600,
                }
                call(server, "PUT", f"/v1/schedule/workers/{worker}", body)
            for number, chain in enumerate(chains):
                for i in range(0, len(chain), CACHE_REPORT):
                    changes = [{"stored": chain[i : i + CACHE_REPORT]}]
                    path = f"/v1/schedule/workers/{owner(number)}/cache"
                    call(server, "POST", path, {"changes": changes})
            yield Rtp(server)


@contextmanager
def dynamo(chains: Sequence[Sequence[int]], python: str) -> Iterator[Dynamo]:
    """select_service takes cached blocks from another one's dump when it starts: from ours."""
    events = [
        {
            "worker_id": owner(number),
            "event": {
                "event_id": number,
                "dp_rank": 0,
                "data": {
                    "stored": {
                        "parent_hash": None,
                        "blocks": [{"block_hash": h, "tokens_hash": h} for h in chain],
                    }
                },
            },
            "storage_tier": "device",
        }
        for number, chain in enumerate(chains)
    ]
    dump = json.dumps({"m:default": {"block_size": BLOCK, "events": events}}).encode()
    port = servers.free_port()
    with dumping(dump) as url:
        command = [*pinned(), python, "-m", "dynamo.select_service", "--port", str(port)]
        command += ["--threads", "1", "--indexer-peers", url]
        env = {**os.environ, "DYN_LOG": "warn"}
        with servers.run("select_service", command, port, "m", env=env) as server:
            for worker in range(WORKERS):
                body = {
                    "worker_id": worker,
                    "model_name": "m",
                    "endpoint": f"127.0.0.1:{9000 + worker}",
                    "block_size": BLOCK,
                    "data_parallel_size": 1,
                    "kv_events_endpoint": f"tcp://127.0.0.1:{20000 + worker}",
                    "max_num_batched_tokens": 8192,
                    "total_kv_blocks": 10_000_000 // BLOCK,
                }
                call(server, "POST", "/workers", body)
            for chain in chains:  # its index fills behind its back
                body = {"model_name": "m", "block_hashes": chain, "sequence_hashes": chain}
                body["isl_tokens"] = len(chain) * BLOCK + 1
                while call(server, "POST", "/select", body)["overlap"]["gpu"] < len(chain) * BLOCK:
                    time.sleep(0.01)
            yield Dynamo(server)


def pinned() -> list[str]:
    return ["taskset", "-c", str(SERVER_CORE)]


def call(server: servers.Server, method: str, path: str, body: object) -> Any:  # Any: JSON
    wanted = urllib.request.Request(
        server.url + path,
        method=method,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(wanted, timeout=60) as reply:
        return json.loads(reply.read())


@contextmanager
def dumping(dump: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(dump)))
            self.end_headers()
            self.wfile.write(dump)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


# ---------------------------------------------------------------- rounds


class Prompts:
    """The next turn of some cached conversation: its first blocks, and new ones behind them."""

    def __init__(self, chains: Sequence[Sequence[int]], new_blocks: int, seed: int) -> None:
        self._chains = chains
        self._new = new_blocks
        self._source = Random(seed)
        self.number = 0

    def draw(self, blocks: int) -> tuple[int, int, list[int]]:
        """(its worker, blocks cached there, hashes)"""
        self.number += 1
        chain = self._source.randrange(len(self._chains))
        cached = blocks - self._new
        fresh = [self._source.getrandbits(63) for _ in range(self._new)]
        return owner(chain), cached, [*self._chains[chain][:cached], *fresh]


def steps(side: Side, prompts: Prompts, blocks: int, count: int) -> list[Step]:
    """Requests made beforehand; each answer is checked before its place is given back."""

    def settle(worker: int, cached: int) -> Callable[[bytes], bytes]:
        def check(body: bytes) -> bytes:
            at, matched, back = side.placed(body)
            if matched != (cached * BLOCK if at == worker else 0):
                raise RuntimeError(f"{side.name}: {matched} tokens on {at}, not on {worker}")
            side.hits += at == worker
            return back

        return check

    out = []
    for _ in range(count):
        worker, cached, hashes = prompts.draw(blocks)
        out.append(Step(side.place(prompts.number, hashes), settle(worker, cached)))
    return out


async def one_round(
    side: Side, prompts: Prompts, blocks: int, figures: Figures, concurrency: int
) -> None:
    """Many in flight, then one."""
    many = steps(side, prompts, blocks, COUNTS[blocks])
    alone = steps(side, prompts, blocks, ALONE)
    client = await Client.connect(side.port, concurrency)
    side.hits = 0
    cpu, start = side.cpu_s(), time.perf_counter()
    await client.run(many)
    elapsed = time.perf_counter() - start
    figures.rate.append(len(many) / elapsed)
    figures.cpu_us.append((side.cpu_s() - cpu) / len(many) * 1e6)
    figures.hits.append(side.hits / len(many))
    client.close()
    client = await Client.connect(side.port, 1)
    latencies = await client.run(alone)
    client.close()
    figures.p50_us.append(median(latencies) * 1e6)


def table(found: dict[int, dict[str, Figures]]) -> str:
    lines = [f"{'':40}{'ratio':>7}  {Rtp.name:>24}  {Dynamo.name:>24}"]
    rows: dict[str, Callable[[Figures], list[float]]] = {
        "decisions/s": lambda f: f.rate,
        "CPU us a decision": lambda f: f.cpu_us,
        "p50 us of a place, one in flight": lambda f: f.p50_us,
        "% with the conversation's worker": lambda f: [100 * share for share in f.hits],
    }
    for blocks, sides in found.items():
        for what, values in rows.items():
            a, b = values(sides[Rtp.name]), values(sides[Dynamo.name])
            ratio = median(a) / median(b)
            lines.append(f"{blocks:5} {what:34}{ratio:7.2f}  {spread(a):>24}  {spread(b):>24}")
    return "\n".join(lines)


def claims(found: dict[int, dict[str, Figures]]) -> list[Claim]:
    out = []
    for blocks, sides in found.items():
        ours, theirs = sides[Rtp.name], sides[Dynamo.name]
        rate = median(ours.rate) / median(theirs.rate)
        out.append(
            Claim(f"{blocks} hashes, decisions/s, rtp / Dynamo", rate, TARGETS[blocks], "higher")
        )
    for blocks, sides in found.items():
        p50 = median(sides[Rtp.name].p50_us) / median(sides[Dynamo.name].p50_us)
        out.append(
            Claim(f"{blocks} hashes, p50 of one in flight, rtp / Dynamo", p50, MOST_P50, "lower")
        )
    return out


def compare(options: argparse.Namespace, python: str) -> None:
    os.sched_setaffinity(0, {CLIENT_CORE})
    source = Random(options.seed)
    chains = [[source.getrandbits(63) for _ in range(CHAIN)] for _ in range(CHAINS)]
    prompts = Prompts(chains, options.new_blocks, options.seed + 1)
    print(f"bench.decisions: {machine()}")
    print(
        f"{WORKERS} workers, {CHAINS * CHAIN} cached blocks, prompts with {options.new_blocks} new"
        f" ones, {options.concurrency} connections, {options.rounds} rounds",
        flush=True,
    )
    found: dict[int, dict[str, Figures]] = {}
    with rtp(chains) as ours, dynamo(chains, python) as theirs:
        for blocks in COUNTS:
            found[blocks] = {side.name: Figures() for side in (ours, theirs)}
            for number in range(options.rounds + 1):
                for side in (ours, theirs):
                    kept = found[blocks][side.name] if number else Figures()  # 0 warms up
                    uvloop.run(one_round(side, prompts, blocks, kept, options.concurrency))
    print(table(found))
    finish("decisions", claims(found))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--new-blocks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)  # the peer's Python
    options = parser.parse_args(argv)
    if options.inside:
        compare(options, options.inside)
        return
    python = str(peers.python("dynamo", peers.DYNAMO))
    again = [sys.executable, "-m", "bench.decisions", *(sys.argv[1:] if argv is None else argv)]
    script = 'ip link set lo up && exec "$@"'
    command = ["unshare", "-rn", "sh", "-c", script, "sh", *again, "--inside", python]
    sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
