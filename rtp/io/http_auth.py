"""Who may do what over HTTP: API keys for the models, the admin key for what shows the inside."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
from collections.abc import Mapping

from aiohttp import web

from rtp.io.errors_http import ApiError

FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Real-IP")


class Keys:
    """The keys of this server; only digests are kept.

    api_key: needed for the model routes when set.  tenants: further keys, each with its tenant's
    name.  admin_key: needed for admin routes off loopback; without one they are closed there.
    """

    def __init__(
        self, api_key: str | None, admin_key: str | None, tenants: Mapping[str, str]
    ) -> None:
        named = dict(tenants)
        if api_key:
            named[api_key] = ""
        self._tenants = {_digest(key): tenant for key, tenant in named.items()}
        self._admin = _digest(admin_key) if admin_key else None

    def tenant(self, request: web.Request) -> str:
        """Whose key this is; "" for the one key and where none is needed. Raises ApiError 401."""
        return self.tenant_of(request.headers.get("Authorization", ""))

    def tenant_of(self, authorization: str) -> str:
        """The same, from the Authorization header."""
        if not self._tenants:
            return ""
        # Digests are looked up, so that what that takes tells nothing of any key, nor grows with
        # their number.
        found = self._tenants.get(_digest(_credential(authorization)))
        if found is None:
            raise _unauthorised()
        return found

    def check_admin(self, request: web.Request) -> None:
        """Raises ApiError 401 off loopback without the admin key."""
        if is_local(request):
            return
        given = _digest(_credential(request.headers.get("Authorization", "")))
        if self._admin is None or not hmac.compare_digest(self._admin, given):
            raise _unauthorised()

    def check_metrics(self, request: web.Request) -> None:
        """Scrapers may use either key."""
        try:
            self.check_admin(request)
        except ApiError:
            if not self._tenants:
                raise
            self.tenant(request)


def is_local(request: web.Request) -> bool:
    """Whether someone on this machine asked this machine.

    A proxy here speaks for others, and a name that is not ours may be a web page reaching into
    the browser's own machine (DNS rebinding): neither counts.
    """
    peer = request.transport and request.transport.get_extra_info("peername")
    if not peer or any(name in request.headers for name in FORWARDED):
        return False
    try:
        host = request.url.host
    except ValueError:  # a Host header that is no host and port
        return False
    return _is_loopback(peer[0]) and _is_loopback(host or "")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _credential(authorization: str) -> str:
    """The key from `Bearer KEY`, or from the password of `Basic`, which browsers can send."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _unauthorised() -> ApiError:
    return ApiError(401, "The API key is missing or incorrect", code="invalid_api_key")
