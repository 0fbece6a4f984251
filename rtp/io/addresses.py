"""host:port as people write it <-> one normal form, IPv6 in brackets."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from rtp.core.errors import ConfigError


def normal(address: str, default_port: int | None = None) -> str:
    """`http://[FD00::1]:8000/`, `fd00::1` with default_port 8000 and `[fd00::1]:8000` are all
    `[fd00::1]:8000`. Raises ConfigError when a host or a port is missing or wrong."""
    host, port = split(address, default_port)
    return join(host, port)


def split(address: str, default_port: int | None = None) -> tuple[str, int]:
    """Host without brackets, port."""
    text = address.strip()
    if "://" in text:
        scheme, _, text = text.partition("://")
        if scheme.lower() not in ("http", "https"):
            raise ConfigError(f"address {address!r}: only http and https are spoken here")
        text = text.partition("/")[0]
    text = text.rstrip("/")
    if _is_ipv6(text):
        text = f"[{text}]"
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"address {address!r}: {error}") from None
    port = port if port is not None else default_port
    if not host or port is None or parts.path or parts.username is not None:
        raise ConfigError(f"address {address!r} is not host:port")
    if not 0 < port < 65536:
        raise ConfigError(f"address {address!r}: port {port} is not between 1 and 65535")
    if ":" in host:
        if not _is_ipv6(host):
            raise ConfigError(f"address {address!r}: {host!r} is no IPv6 address")
        host = str(ipaddress.IPv6Address(host))
    return host, port


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text.partition("%")[0])
    except ValueError:
        return False
    return True
