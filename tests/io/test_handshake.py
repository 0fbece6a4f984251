"""Who may speak: the secret file, proofs, addresses."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from rtp.core.errors import ConfigError, ProtocolError
from rtp.io import addresses
from rtp.io.handshake import (
    Claim,
    connection_proof,
    key_id,
    new_nonce,
    read_claim,
    read_secret,
)
from rtp.io.upgrade import Refused, read_answer, request_head


def test_the_secret_is_made_once_and_only_for_its_owner(tmp_path: Path):
    path = tmp_path / "state" / "cluster.secret"
    secret = read_secret(path, create=True)
    assert len(secret) >= 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_secret(path, create=True) == secret
    assert os.listdir(path.parent) == [path.name]


def test_a_missing_secret_that_was_named_is_not_made_but_told_how_to(tmp_path: Path):
    path = tmp_path / "none"
    with pytest.raises(ConfigError, match="does not exist") as error:
        read_secret(path, create=False)
    assert not path.exists()
    command = re.search(r"\(umask.*\)$", str(error.value))
    assert command
    subprocess.run(["sh", "-c", command[0]], check=True)
    assert len(read_secret(path, create=False)) >= 32


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_secret_that_others_may_read_is_refused(tmp_path: Path, mode: int):
    path = tmp_path / "secret"
    read_secret(path, create=True)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="open to others"):
        read_secret(path, create=True)


def test_a_short_secret_is_refused(tmp_path: Path):
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text("letmein")
    with pytest.raises(ConfigError, match="at least 32"):
        read_secret(path, create=True)


def test_the_key_id_names_the_secret():
    assert key_id(b"a" * 32) != key_id(b"b" * 32)
    assert len(key_id(b"a" * 32)) == 8


CLAIM = Claim("link", "w1", 5, "3", new_nonce())


def test_a_proof_depends_on_everything_it_is_for():
    base = connection_proof(b"s" * 32, "worker", CLAIM, "n")
    others = [
        connection_proof(b"t" * 32, "worker", CLAIM, "n"),
        connection_proof(b"s" * 32, "dialler", CLAIM, "n"),
        connection_proof(b"s" * 32, "worker", CLAIM, "m"),
        *(
            connection_proof(b"s" * 32, "worker", claim, "n")
            for claim in (
                Claim("stream", "w1", 5, "3", CLAIM.nonce),
                Claim("link", "w2", 5, "3", CLAIM.nonce),
                Claim("link", "w1", 6, "3", CLAIM.nonce),
                Claim("link", "w1", 5, "4", CLAIM.nonce),
                Claim("link", "w1", 5, "3", new_nonce()),
            )
        ),
    ]
    assert base not in others
    assert len(set(others)) == len(others)


def test_a_claim_survives_its_headers():
    head = request_head(CLAIM, "127.0.0.1:1").decode()
    lines = head.split("\r\n")[1:-2]
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
    assert read_claim("link", headers) == CLAIM
    for name in ("upgrade", "rtp-wire", "rtp-epoch", "rtp-nonce", "rtp-peer", "rtp-worker"):
        with pytest.raises(ProtocolError):
            read_claim("link", {k: v for k, v in headers.items() if k != name})
    with pytest.raises(ProtocolError, match="wire version"):
        read_claim("link", headers | {"rtp-wire": "999"})
    for name in ("rtp-nonce", "rtp-peer", "rtp-worker"):  # bytes that are no UTF-8, as aiohttp
        with pytest.raises(ProtocolError, match="UTF-8"):
            read_claim("link", headers | {name: 32 * "\udcff"})


def test_a_claim_cannot_smuggle_a_header():
    with pytest.raises(ProtocolError):
        request_head(Claim("link", "w\r\nX: y", 5, "3", new_nonce()), "127.0.0.1:1")


def test_an_answer_without_the_secret_is_not_believed():
    for proof in ("", "00" * 32, connection_proof(b"x" * 32, "worker", CLAIM, "n").hex()):
        head = f"HTTP/1.1 101 X\r\nRTP-Nonce: n\r\nRTP-Proof: {proof}".encode()
        with pytest.raises(ProtocolError, match="secret"):
            read_answer(head, b"s" * 32, CLAIM)
    with pytest.raises(Refused):
        read_answer(b"HTTP/1.1 409 Conflict\r\nX: y", b"s" * 32, CLAIM)


@pytest.mark.parametrize(
    ("written", "port", "normal"),
    [
        ("http://[fd00::1]:8000", None, "[fd00::1]:8000"),
        ("fd00::1", 8000, "[fd00::1]:8000"),
        ("[::1]", 8000, "[::1]:8000"),
        ("[FD00:0::1]:9", 8000, "[fd00::1]:9"),
        ("http://Host.Example:80/", None, "host.example:80"),
        (" 127.0.0.1:8000 ", None, "127.0.0.1:8000"),
    ],
)
def test_r01_addresses_have_one_normal_form(written: str, port: int | None, normal: str):
    assert addresses.normal(written, port) == normal
    assert addresses.join(*addresses.split(normal)) == normal


@pytest.mark.parametrize(
    "written",
    ["", "host", "[::1]", "h:0", "h:65536", "h:x", "ftp://h:1", "h:1/p", "u@h:1", "[x]:1"],
)
def test_what_is_no_address_is_refused(written: str):
    with pytest.raises(ConfigError):
        addresses.normal(written)


def test_loopback_is_known():
    assert all(map(addresses.is_loopback, ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"]))
    assert not any(map(addresses.is_loopback, ["0.0.0.0", "::", "10.0.0.1", "example.org", ""]))
