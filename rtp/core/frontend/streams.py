"""Streams to workers: which life of a worker each belongs to, whether it is up, who is on it."""

from __future__ import annotations

from collections.abc import Iterator

from rtp.core.commands import Connect
from rtp.core.frontend.lifecycle import Request
from rtp.core.messages import Grant, Place
from rtp.core.types import RequestId, WorkerId


class Stream:
    """The connection to one life of a worker, and the requests submitted on it."""

    __slots__ = ("address", "epoch", "reopening", "requests", "since", "up", "worker_id")

    def __init__(self, worker_id: WorkerId, epoch: int, address: str) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.address = address
        self.up = False
        self.reopening = False
        """It broke and is being opened again: what was in flight will have to be asked for."""
        self.since = 0.0
        """When it was last asked to open."""
        self.requests: dict[RequestId, Request] = {}

    def connect(self, now: float) -> Connect:
        self.since = now
        return Connect(self.worker_id, self.epoch, self.address)


class Streams:
    """At most one stream per worker, of the latest life heard of."""

    __slots__ = ("_by_worker",)

    def __init__(self) -> None:
        self._by_worker: dict[WorkerId, Stream] = {}

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._by_worker.values())

    def get(self, worker_id: WorkerId) -> Stream | None:
        return self._by_worker.get(worker_id)

    def of(self, request: Request) -> Stream:
        """The stream that a placed request is on."""
        assert request.grant is not None
        return self._by_worker[request.grant.worker_id]

    def open(self, place: Grant | Place) -> Stream:
        """A new stream, not up yet, in place of any other to that worker."""
        stream = Stream(place.worker_id, place.epoch, place.address)
        self._by_worker[place.worker_id] = stream
        return stream

    def close(self, stream: Stream) -> list[Request]:
        """Forgets a stream; returns the requests that were on it."""
        if self._by_worker.get(stream.worker_id) is stream:
            del self._by_worker[stream.worker_id]
        return list(stream.requests.values())

    def remove(self, request: Request) -> None:
        """Takes a request off the stream it is on, if any."""
        stream = self._by_worker.get(request.grant.worker_id) if request.grant else None
        if stream is not None:
            stream.requests.pop(request.begin.request_id, None)
