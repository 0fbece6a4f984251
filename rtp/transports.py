"""Which Transport a worker moves its KV pages by, and what it tells the Master of it."""

from __future__ import annotations

from math import isinf

from rtp.config import WorkerConfig
from rtp.core import plugins
from rtp.core.errors import ConfigError
from rtp.core.ports import Transport
from rtp.core.types import Role


def transport_of(config: WorkerConfig) -> tuple[str, Transport | None]:
    """Name of the transport for this backend's pages, and it; ("", None) where there is none.
    Raises ConfigError where the role needs one, or the one that was named cannot move them."""
    able = [name for name in plugins.names("transport") if _moves(name, config.backend)]
    name = config.transport.name or next(iter(able), "")
    if name and not _moves(name, config.backend):
        raise ConfigError(f"transport {name} cannot move the KV pages of backend {config.backend}")
    if name:
        return name, plugins.build("transport", name, **config.transport.params)
    if config.role in (Role.PREFILL, Role.DECODE):
        raise ConfigError(
            f"role {config.role} needs a transport for KV pages, and there is none for backend"
            f" {config.backend}; role fusion needs none"
        )
    return "", None


def transfer(transport: Transport | None) -> tuple[float, float]:
    """Its seconds and tokens per second, as Register tells them."""
    if transport is None:
        return 0.0, 0.0
    endless = isinf(transport.tokens_per_s)
    return transport.latency_s, 0.0 if endless else transport.tokens_per_s


def _moves(transport: str, backend: str) -> bool:
    return backend in getattr(plugins.module("transport", transport), "BACKENDS", ())
