"""Who may speak: proofs of the cluster secret for registrations, links and streams.

The secret is a file only its owner reads; its key id, a digest, may travel, the secret never does.
A connection is proved from both sides, each over both sides' nonces and over everything that gives
the connection its meaning (kind, worker, epoch, term or frontend), so that no proof can be
replayed or turned around:

    dialler -> GET /link  Upgrade: rtp/1, RTP-* headers with its claim and its nonce
    worker  -> 101        RTP-Nonce, RTP-Proof = HMAC(secret, "worker" | claim | about | nonces)
    dialler -> 32 raw bytes           HMAC(secret, "dialler" | claim | about | nonces), then frames
    both ways

A frontend dials the Master in the same way ("ask"): it claims the highest term it knows, and
RTP-About of the answer is the Master's own.

A registration carries the Master's challenge, which is new with each Master process; within one
Master an older epoch of a worker is refused. So no clock is compared.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from rtp.core.errors import ConfigError, ProtocolError
from rtp.io.codec import WIRE_VERSION

UPGRADE = "rtp/1"
ASK_KIND = "ask"
MASTER = "master"
"""Whom an "ask" claims to speak to; there is one, wherever it is."""
PATHS = {"link": "/link", "stream": "/stream", ASK_KIND: "/internal/ask"}
"""Where each kind of connection is asked for."""
PROOF_BYTES = 32
SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Claim:
    """What a connection is to be, as the dialler says and both prove."""

    kind: str
    """"link", "stream" or "ask"."""
    worker_id: str
    """Who is dialled: a worker, or MASTER (ask)."""
    epoch: int
    """Of the worker; the highest term of a Master the frontend has met (ask)."""
    peer: str
    """Term of the Master (link), or frontend id (stream, ask)."""
    nonce: str

    def headers(self) -> dict[str, str]:
        return {
            "Upgrade": UPGRADE,
            "Connection": "Upgrade",
            "RTP-Wire": str(WIRE_VERSION),
            "RTP-Worker": self.worker_id,
            "RTP-Epoch": str(self.epoch),
            "RTP-Peer": self.peer,
            "RTP-Nonce": self.nonce,
        }


def read_claim(kind: str, headers: dict[str, str]) -> Claim:
    """The dialler's claim from lower-cased headers. Raises ProtocolError naming what is missing."""
    try:
        if headers["upgrade"] != UPGRADE or headers["rtp-wire"] != str(WIRE_VERSION):
            raise ProtocolError(f"this side speaks {UPGRADE}, wire version {WIRE_VERSION}")
        epoch = int(headers["rtp-epoch"])
        nonce = headers["rtp-nonce"]
        if len(nonce) != 32 or not headers["rtp-peer"]:
            raise ProtocolError("a nonce of 32 hex digits and a peer are needed")
        "".join((headers["rtp-worker"], headers["rtp-peer"], nonce)).encode()  # proofs do this
        return Claim(kind, headers["rtp-worker"], epoch, headers["rtp-peer"], nonce)
    except KeyError as error:
        raise ProtocolError(f"header {error.args[0]} is missing") from None
    except UnicodeEncodeError:
        raise ProtocolError("the claim is not UTF-8") from None
    except ValueError:
        raise ProtocolError("RTP-Epoch is not a number") from None


def new_nonce() -> str:
    return secrets.token_hex(16)


def connection_proof(
    secret: bytes, side: str, claim: Claim, answer_nonce: str, about: str = ""
) -> bytes:
    """32 bytes; side is "worker" (who is dialled, a Master too) or "dialler". about: what the
    dialled side says of itself."""
    parts = [side, claim.kind, claim.worker_id, str(claim.epoch), claim.peer]
    parts += [about] if about else []
    return _proof(secret, *(p.encode() for p in [*parts, claim.nonce, answer_nonce]))


def body_proof(secret: bytes, purpose: str, nonce: str, body: bytes) -> str:
    """Hex proof over an HTTP body; purpose is "register" or "registration"."""
    return _proof(secret, purpose.encode(), nonce.encode(), body).hex()


def same(given: str | bytes, expected: str | bytes) -> bool:
    """Constant-time comparison of two proofs."""
    as_bytes = [
        x.encode("utf-8", "replace") if isinstance(x, str) else x for x in (given, expected)
    ]
    return hmac.compare_digest(*as_bytes)


def key_id(secret: bytes) -> str:
    """Eight hex digits that name the secret without giving it away."""
    return hashlib.blake2b(secret, digest_size=4, person=b"rtp key id").hexdigest()


def read_secret(path: Path, create: bool) -> bytes:
    """The cluster secret of a 0600 file, made when missing and `create`.

    Raises ConfigError when it is missing, may be read by others, or is too short to be one.
    """
    if create and not path.exists():
        _make_secret(path)
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise ConfigError(
                    f"{path} is open to others (mode {mode:04o}); run: chmod 600 {path}"
                )
            secret = file.read().strip()
    except FileNotFoundError:
        raise ConfigError(
            f"secret_file {path} does not exist; copy the one of the other machines, or make it:"
            f" (umask 077; head -c 32 /dev/urandom | base64 > {path})"
        ) from None
    except OSError as error:
        raise ConfigError(f"secret_file {path}: {error.strerror}") from None
    if len(secret) < SECRET_BYTES:
        raise ConfigError(f"secret_file {path} holds {len(secret)} bytes; at least 32 are needed")
    return secret


def _make_secret(path: Path) -> None:
    """Written aside and linked in place, so that two starters agree on one whole secret."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_hex(SECRET_BYTES).encode() + b"\n")
        os.link(aside, path)
    except FileExistsError:
        pass  # another process was first; its secret counts
    finally:
        os.unlink(aside)


def _proof(secret: bytes, *parts: bytes) -> bytes:
    digest = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(len(part).to_bytes(4, "big") + part)
    return digest.digest()
