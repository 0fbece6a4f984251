"""Server-sent events as a client reads them: bytes in, whole events out."""

from __future__ import annotations

from typing import NamedTuple


class Event(NamedTuple):
    """Its `data` fields, joined by newlines, and its `event` field."""

    data: bytes
    name: bytes = b""


class Events:
    """feed() what came, however it was cut."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._name = b""

    def feed(self, data: bytes) -> list[Event]:
        """Events that an empty line ends now; comments and other fields are passed over. Source:
        the HTML standard, section 9.2.6, but for lines that a lone CR ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        out = []
        for line in lines:
            field, _, value = line.removesuffix(b"\r").partition(b":")
            if field == b"data":
                self._data.append(value.strip())
            elif field == b"event":
                self._name = value.strip()
            elif line in (b"", b"\r"):
                if self._data or self._name:
                    out.append(Event(b"\n".join(self._data), self._name))
                self._data, self._name = [], b""
        return out
