"""ServeGen's client parameters, from which a load is drawn: a folder or tar of one pair of files a
client.

`NAME-trace.csv`, no header: window's start in s, requests a second, coefficient of variation of the
gaps between them, the family fitted to the gaps (Gamma, Weibull or none) and its two parameters, of
which the shape is used: the window's own rate sets the scale. `NAME-dataset.json`: by the start of
a span, `input_tokens` and `output_tokens`, each the text of a map from length to probability. Every
client draws from a stream of its own, so leaving one out changes no other.

Source: alibaba/ServeGen, data/ and README; the families as in its paper (NSDI 2026).
"""

from __future__ import annotations

import ast
import gzip
import math
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BufferedReader
from itertools import accumulate
from pathlib import Path, PurePosixPath
from random import Random
from typing import Annotated

import msgspec
from msgspec import Meta

from rtp.core.errors import ConfigError
from rtp.io.traces.files import Head, number
from rtp.io.traces.rows import MOST_S, MOST_TOKENS, SMALL_BLOCK, OwnBlocks, Rows, Size, Trace

TRACE, DATASET = "-trace.csv", "-dataset.json"
COLUMNS = 6
LEAST_SHAPE = 0.01
GAMMA, WEIBULL = "Gamma", "Weibull"
WINDOW_S = 600.0
SPAN_S = 21_600.0
GZIP = b"\x1f\x8b"
CHUNK = 1 << 20
"""Bytes."""


class _Span(msgspec.Struct, frozen=True):
    input_tokens: str
    output_tokens: str


@dataclass(frozen=True, slots=True)
class _Window:
    """Ten minutes of one client."""

    start_s: float
    rate: float
    family: str
    shape: float


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Values to draw from, and their cumulated weights."""

    values: list[int]
    weights: list[float]

    def draw(self, random: Random) -> int:
        return random.choices(self.values, cum_weights=self.weights)[0]


@dataclass(slots=True)
class _Client:
    windows: list[_Window] = field(default_factory=list)
    spans: list[tuple[float, _Lengths, _Lengths]] = field(default_factory=list)
    """Start in s, tokens in, tokens out; those of which something is known."""

    def lengths(self, at: float, random: Random) -> tuple[int, int]:
        """As in the span of that time, or in the nearest one."""
        _, tokens, output = min(self.spans, key=lambda span: abs(span[0] + SPAN_S / 2 - at))
        return tokens.draw(random), output.draw(random)


def fits(head: Head) -> bool:
    return not head.keys and any(name.endswith(TRACE) for name, _ in _files(head.path))


def read(
    path: Path,
    *,
    seed: Annotated[int, Meta(description="Of everything that is drawn.")] = 0,
    start_s: Annotated[float, Meta(ge=0, description="Where in the recording to begin.")] = 0.0,
    seconds: Annotated[
        float, Meta(gt=0, le=MOST_S, description="How long a trace is drawn.")
    ] = 3600.0,
    rate: Annotated[float, Meta(ge=0, description="Mean requests a second; 0: as recorded.")] = 0.0,
    clients: Annotated[
        int, Meta(ge=0, description="Only so many, the busiest of the time drawn; 0: all.")
    ] = 0,
    lengths: Annotated[
        str, Meta(description="A set of clients whose lengths are used where there are none.")
    ] = "",
    block_size: Size = SMALL_BLOCK,
) -> Trace:
    """Rows of one client have its name as tenant. Raises ConfigError where nothing can be drawn."""
    rows, own = Rows(), OwnBlocks(block_size)
    known = _load(path, rows)
    lent = [c for c in _load(Path(lengths), Rows()).values() if c.spans] if lengths else []
    end_s = start_s + seconds
    load = {name: _expected(client.windows, start_s, end_s) for name, client in known.items()}
    chosen = sorted((name for name in load if load[name]), key=lambda name: (-load[name], name))
    chosen = chosen[: clients or None]
    if not chosen:
        raise ConfigError(f"{path}: no client sends anything from {start_s:g} to {end_s:g} s")
    sizes: dict[str, _Client] = {}
    """Whose lengths each client's are drawn from."""
    for place, name in enumerate(chosen):
        source = known[name] if known[name].spans or not lent else lent[place % len(lent)]
        if source.spans:
            sizes[name] = source
        else:
            rows.reject(f"client {name} has no lengths; option lengths names others' to use")
    factor = rate * seconds / sum(load[name] for name in sizes) if rate and sizes else 1.0
    for name, source in sizes.items():
        random = Random(f"{seed}:{name}")
        for at in _arrivals(known[name].windows, start_s, end_s, factor, random):
            tokens, output = source.lengths(at, random)
            rows.add(at - start_s, tokens, output, partial(own.of, tokens), tenant=name)
    return rows.trace(path, "servegen", block_size)


def _expected(windows: Sequence[_Window], start_s: float, end_s: float) -> float:
    """Requests between the two times."""
    return sum(w.rate * (until - begin) for w, begin, until in _within(windows, start_s, end_s))


def _within(
    windows: Sequence[_Window], start_s: float, end_s: float
) -> Iterator[tuple[_Window, float, float]]:
    """The windows of that time, and from when to when each counts."""
    for place, window in enumerate(windows):
        ends = windows[place + 1].start_s if place + 1 < len(windows) else math.inf
        begin = max(window.start_s, start_s)
        until = min(ends, window.start_s + WINDOW_S, end_s)
        if begin < until:
            yield window, begin, until


def _arrivals(
    windows: Sequence[_Window], start_s: float, end_s: float, factor: float, random: Random
) -> Iterator[float]:
    """Times, increasing. Gaps are drawn with mean 1 and stretched by the rate of the time they lie
    in; the first is what is left of one under way, so that no window sends more than its rate."""
    due = None
    for window, begin, until in _within(windows, start_s, end_s):
        rate = window.rate * factor
        if not rate:
            continue
        if due is None:
            due = _rest(window, random)
        room = rate * (until - begin)
        while due < room:
            yield begin + due / rate
            due += _gap(window, random)
        due -= room


def _gap(window: _Window, random: Random) -> float:
    """Between two arrivals; mean 1."""
    shape = window.shape
    if window.family == WEIBULL:
        return random.weibullvariate(1 / math.gamma(1 + 1 / shape), shape)
    return random.gammavariate(shape, 1 / shape)


def _rest(window: _Window, random: Random) -> float:
    """From a random time to the next arrival: an even share of a gap drawn by its length."""
    shape = window.shape
    if window.family == WEIBULL:
        long: float = random.gammavariate(1 + 1 / shape, 1.0) ** (1 / shape)
        return random.random() * long / math.gamma(1 + 1 / shape)
    long = random.gammavariate(shape + 1, 1 / shape)
    return random.random() * long


# ---------------------------------------------------------------- files


def _load(path: Path, rows: Rows) -> dict[str, _Client]:
    """By name, in its order; those of one name in several folders have their folders' before it.
    What cannot be used is told in `rows`."""
    found: dict[PurePosixPath, _Client] = {}
    for name, data in _files(path):
        is_trace = name.endswith(TRACE)
        stem = PurePosixPath(name.removesuffix(TRACE if is_trace else DATASET))
        client = found.setdefault(stem, _Client())
        if is_trace:
            _load_windows(name, data, client, rows)
        else:
            try:
                client.spans = _parse_spans(data)
            except (ValueError, msgspec.DecodeError) as error:
                rows.reject(f"{name}: {error}")
    folders = Counter(stem.name for stem in found)
    clients = {s.name if folders[s.name] == 1 else str(s): client for s, client in found.items()}
    return dict(sorted(clients.items()))


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Clients' files: name in the folder or archive, content. Raises OSError, ConfigError for a
    damaged archive."""
    if path.is_dir():
        for found in sorted(path.rglob("*")):
            if found.name.endswith((TRACE, DATASET)) and found.is_file():
                yield found.relative_to(path).as_posix(), found.read_bytes()
        return
    try:
        with path.open("rb") as raw:
            gzipped = raw.peek(len(GZIP)).startswith(GZIP)
            yield from _members(gzip.GzipFile(fileobj=raw) if gzipped else raw)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ConfigError(f"{path}: damaged archive: {error}") from None


def _members(file: gzip.GzipFile | BufferedReader) -> Iterator[tuple[str, bytes]]:
    """Of a tar, which is read to its end: only there is a gzip file's checksum compared, and a tar
    seems to end where a header is damaged. Raises TarError."""
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            if member.isfile() and member.name.endswith((TRACE, DATASET)):
                content = archive.extractfile(member)
                assert content is not None
                yield member.name, content.read()
        file.seek(archive.offset)
        while chunk := file.read(CHUNK):
            if chunk.strip(b"\0"):
                raise tarfile.ReadError("there is more behind its end")


def _load_windows(name: str, data: bytes, client: _Client, rows: Rows) -> None:
    def take(text: str) -> None:
        try:
            client.windows.append(_window(text.split(",")))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    texts = data.decode(errors="replace").splitlines()
    rows.take_all(enumerate(map(str.strip, texts), 1), take)
    client.windows.sort(key=lambda window: window.start_s)


def _window(cells: list[str]) -> _Window:
    """Raises ValueError for a line that is no window."""
    if len(cells) != COLUMNS:
        raise ValueError(f"{len(cells)} columns where {COLUMNS} are wanted")
    start_s, rate, cv = (number(cells[i], what) for i, what in enumerate(("start", "rate", "cv")))
    family = cells[3].strip()
    if rate < 0:
        raise ValueError(f"rate {rate:g}: no window")
    if not rate:
        return _Window(start_s, 0.0, "", 1.0)
    if family not in ("", GAMMA, WEIBULL):
        raise ValueError(f"family {family!r} is neither {GAMMA} nor {WEIBULL}")
    shape = number(cells[4], "shape") if family else 1 / cv / cv if cv > 0 else 1.0
    if not LEAST_SHAPE <= shape < math.inf:
        raise ValueError(f"shape {shape:g} is below {LEAST_SHAPE} or without an end")
    return _Window(start_s, rate, family, shape)


def _parse_spans(data: bytes) -> list[tuple[float, _Lengths, _Lengths]]:
    """Those with both maps filled. Raises ValueError, DecodeError."""
    spans = msgspec.json.decode(data, type=dict[str, _Span])
    both = [
        (number(s, "span"), _map(x.input_tokens), _map(x.output_tokens)) for s, x in spans.items()
    ]
    return [(s, tokens, output) for s, tokens, output in both if tokens.values and output.values]


def _map(text: str) -> _Lengths:
    """Raises ValueError."""
    try:
        shares = ast.literal_eval(text)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"no map of lengths: {error}") from None
    if not isinstance(shares, dict):
        raise ValueError("no map of lengths")
    for length, share in shares.items():
        if not (isinstance(length, int) and 1 <= length <= MOST_TOKENS):
            raise ValueError(f"length {length!r} is not within 1 and {MOST_TOKENS}")
        if not (isinstance(share, int | float) and 0 <= share < math.inf):
            raise ValueError(f"{share!r} is the probability of no length")
    lengths = _Lengths(list(shares), list(accumulate(shares.values())))
    if shares and not 0 < lengths.weights[-1] < math.inf:
        raise ValueError("the probabilities of its lengths have no sum to draw by")
    return lengths
