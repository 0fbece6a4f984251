"""Numbers of lives only grow, whatever the clock and the disk do."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from rtp.io import ratchet
from rtp.io.ratchet import LARGEST, next_number

NOW = 1_700_000_000_000


class Time:
    """A clock that can be set back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ms = NOW
        monkeypatch.setattr(ratchet, "now_ms", lambda: self.ms)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def test_it_follows_the_clock_and_grows_when_that_is_set_back(time: Time, tmp_path: Path):
    path = tmp_path / "not" / "there" / "term"
    assert next_number(path) == (NOW, "")
    assert next_number(path) == (NOW + 1, ""), "twice in a millisecond"
    time.ms -= 3_600_000
    assert [next_number(path)[0] for _ in range(3)] == [NOW + 2, NOW + 3, NOW + 4]
    time.ms = NOW + 60_000
    assert next_number(path) == (NOW + 60_000, "")
    assert [entry.name for entry in path.parent.iterdir()] == ["term"], "nothing is left aside"
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_files_count_apart(time: Time, tmp_path: Path):
    assert next_number(tmp_path / "term") == next_number(tmp_path / "epoch") == (NOW, "")


@pytest.mark.parametrize(
    "text", [b"", b"x", b"-5", b"1.5", b"\xff" * 4, b"9" * 5000, b"%d" % LARGEST]
)
def test_a_file_without_a_number_is_told_of_and_mended(time: Time, tmp_path: Path, text: bytes):
    path = tmp_path / "term"
    path.write_bytes(text)
    number, reason = next_number(path)
    assert number == NOW
    assert "holds no number" in reason
    assert next_number(path) == (NOW + 1, "")


def test_a_place_that_cannot_be_is_told_of_and_the_time_counts(time: Time, tmp_path: Path):
    (tmp_path / "file").write_text("")
    number, reason = next_number(tmp_path / "file" / "term")
    assert number == NOW
    assert "file" in reason


def test_a_disk_that_takes_nothing_keeps_what_was_read(
    time: Time, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As with a directory mounted read-only after the last start, or a full disk."""
    path = tmp_path / "term"
    next_number(path)
    time.ms -= 1000

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        number, reason = next_number(path)
        assert number == NOW + 1
        assert "No space left" in reason
    assert [entry.name for entry in tmp_path.iterdir()] == ["term"]
    assert path.read_text() == f"{NOW}\n", "a crash or a full disk leaves the old number whole"


def test_starters_that_share_the_file_get_different_numbers(time: Time, tmp_path: Path):
    numbers: list[int] = []

    def start() -> None:
        numbers.extend(next_number(tmp_path / "epoch")[0] for _ in range(20))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(NOW, NOW + 80))
