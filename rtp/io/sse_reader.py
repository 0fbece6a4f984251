"""Server-sent events as a client reads them: bytes in, whole `data` fields out."""

from __future__ import annotations


class Events:
    """feed() what came, however it was cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that is complete now. Comments and other fields are passed
        over."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [
            line[5:].strip() for line in lines if line.startswith(b"data:") and line[5:].strip()
        ]
