"""Lines of trace files, gzipped or not, and a first look at one."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rtp.core.errors import ConfigError

BOM = b"\xef\xbb\xbf"


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
        except msgspec.DecodeError:
            return Head(path, frozenset())
    words = first.decode(errors="replace").split(",")
    return Head(path, frozenset(word.strip() for word in words))


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number from 1, and text without a byte order mark or space around it."""
    try:
        with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            for number, line in enumerate(file, 1):
                yield number, line.removeprefix(BOM).strip()
    except (gzip.BadGzipFile, EOFError) as error:
        raise ConfigError(f"{path}: damaged gzip file: {error}") from None


def columns(
    path: Path, wanted: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[int, list[str]]]:
    """The named columns of a CSV file with a header, in that order: line number and texts, "" for
    what a line or the header does not have; [] for a blank line. Raises ConfigError where a wanted
    column is not in the header."""
    places: list[int] = []
    for number, line in lines(path):
        if not line:
            yield number, []
            continue
        cells = [cell.strip() for cell in next(csv.reader([line.decode(errors="replace")]))]
        if places:
            yield number, [cells[at] if 0 <= at < len(cells) else "" for at in places]
            continue
        missing = [name for name in wanted if name not in cells]
        if missing:
            raise ConfigError(f"{path}: no column {', '.join(missing)} in line {number}")
        names = [*wanted, *optional]
        places = [cells.index(name) if name in cells else -1 for name in names]


def whole(text: str, name: str) -> int:
    """Raises ValueError for what is no whole number."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} {text!r} is no whole number") from None


def number(text: str, name: str) -> float:
    """Raises ValueError for what is no number."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} {text!r} is no number") from None
