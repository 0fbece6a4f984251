"""Lines of trace files, gzipped or not, and a first look at one."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import msgspec

from rtp.core.errors import ConfigError

BOM = b"\xef\xbb\xbf"
TOLD = 40
"""Of a text that is wrong, so many characters are told."""


@dataclass(frozen=True, slots=True)
class Head:
    """How a file begins. keys: of the first line's JSON object, else its comma separated words;
    none of a folder or an archive."""

    path: Path
    keys: frozenset[str]


def look(path: Path) -> Head:
    """Raises OSError."""
    if path.is_dir() or path.name.endswith((".tar", ".tar.gz", ".tgz")):
        return Head(path, frozenset())
    first = next((line for _, line in lines(path) if line), b"")
    if first.startswith(b"{"):
        try:
            return Head(path, frozenset(msgspec.json.decode(first, type=dict[str, msgspec.Raw])))
        except (msgspec.DecodeError, RecursionError):
            return Head(path, frozenset())
    words = first.decode(errors="replace").split(",")
    return Head(path, frozenset(word.strip() for word in words))


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number from 1, and text without a byte order mark or space around it."""
    try:
        with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            for number, line in enumerate(file, 1):
                yield number, line.removeprefix(BOM).strip()
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ConfigError(f"{path}: damaged gzip file: {error}") from None


def columns(
    path: Path, header: bytes, wanted: Sequence[str], optional: Sequence[str] = ()
) -> Callable[[bytes], list[str]]:
    """What cuts a line of a CSV file into the named columns, in that order: texts, "" for what the
    line or the header does not have. It raises ValueError where a line is none of a CSV file.
    Raises ConfigError where a wanted column is not in the header."""
    try:
        heads = _cells(header)
    except ValueError as error:
        raise ConfigError(f"{path}: header: {error}") from None
    missing = [name for name in wanted if name not in heads]
    if missing:
        raise ConfigError(f"{path}: no column {', '.join(missing)} in the header")
    places = [heads.index(name) if name in heads else -1 for name in [*wanted, *optional]]

    def cut(line: bytes) -> list[str]:
        cells = _cells(line)
        return [cells[at] if 0 <= at < len(cells) else "" for at in places]

    return cut


def whole(text: str, name: str) -> int:
    """Raises ValueError for what is no whole number."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} {text[:TOLD]!r} is no whole number") from None


def number(text: str, name: str) -> float:
    """Raises ValueError for what is no finite number."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} {text[:TOLD]!r} is no number") from None
    if not isfinite(value):
        raise ValueError(f"{name} {text[:TOLD]!r} is no number")
    return value


def _cells(line: bytes) -> list[str]:
    """Raises ValueError."""
    try:
        return [cell.strip() for cell in next(csv.reader([line.decode(errors="replace")]), [])]
    except csv.Error as error:
        raise ValueError(f"no line of a CSV file: {error}") from None
