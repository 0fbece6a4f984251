"""A Transport that takes its time and moves nothing.

The pages of the sim backend follow from the tokens, which the worker knows: only the seconds of a
transfer have to be simulated. While they pass, a connection to the source's worker is held: a
transfer from a process that dies breaks off, as a real one would.
"""

from __future__ import annotations

import asyncio
from math import inf

from rtp.core.errors import ConfigError, TransferFailed
from rtp.core.messages import Source

BACKENDS = ("sim",)


def build(*, latency_s: float = 0.002, tokens_per_s: float = 1.0e6) -> SimTransport:
    """Defaults: 10 GB/s at 10 kB a token. Raises ConfigError for speeds there are not."""
    if not (0 <= latency_s < inf and tokens_per_s > 0):
        raise ConfigError("latency_s must be at least 0, tokens_per_s more than 0")
    return SimTransport(latency_s, tokens_per_s)


class SimTransport:
    """See the module's text."""

    def __init__(self, latency_s: float, tokens_per_s: float) -> None:
        self.latency_s = latency_s
        self.tokens_per_s = tokens_per_s

    async def pull(self, source: Source, start: int, num_tokens: int, pages: bytes) -> None:
        """Raises TransferFailed where the source's worker is not there for all of it."""
        host, _, port = source.address.rpartition(":")
        try:
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except OSError as error:
            raise TransferFailed(f"{source.worker_id} is not reached: {error}") from None
        try:
            async with asyncio.timeout(self.latency_s + num_tokens / self.tokens_per_s):
                await reader.read(1)
        except TimeoutError:
            return
        except OSError:
            pass
        finally:
            writer.close()
        raise TransferFailed(f"{source.worker_id} broke the transfer off")
