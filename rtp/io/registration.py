"""How a worker becomes known: it registers with the Master, or a Master that has its address asks
it.

Either way the Master gets a Register with a proof over a nonce of the Master's own, so that a
recorded one is worth nothing to a later Master; within one, an older epoch is refused by the core.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable

import aiohttp
import msgspec
from aiohttp import web

from rtp.core.errors import ConfigError, ProtocolError
from rtp.core.messages import Register
from rtp.io import addresses
from rtp.io.codec import malformed
from rtp.io.handshake import body_proof, key_id, same
from rtp.io.reminder import Reminder

REGISTER_PATH = "/internal/register"
ASK_PATH = "/registration"
CHALLENGE = "RTP-Challenge"
PROOF = "RTP-Proof"
MAX_BODY_BYTES = 1 << 20
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 0.5
TIMEOUT = aiohttp.ClientTimeout(total=3.0)


def read(body: bytes, content_type: str = "application/msgpack") -> Register:
    """A well-formed Register with a normalised address, from msgpack or, for people, JSON.
    Raises ProtocolError saying what is wrong."""
    decode = msgspec.json.decode if "json" in content_type else msgspec.msgpack.decode
    try:
        register = decode(body, type=Register)
        address = addresses.normal(register.address)
    except (msgspec.DecodeError, UnicodeDecodeError, ConfigError) as error:
        raise ProtocolError(f"not a registration: {error}") from None
    fault = malformed(register)
    if fault:
        raise ProtocolError(f"not a registration: {fault}")
    return msgspec.structs.replace(register, address=address)


# ---------------------------------------------------------------- the worker's side


async def keep_registered(
    session: aiohttp.ClientSession,
    *,
    master: str,
    register: Register,
    secret: bytes,
    unlinked: asyncio.Event,
    on_change: Callable[[str], None],
) -> None:
    """Registers whenever no link is up, until cancelled. master: URL or host:port.
    on_change(trouble) is told each new outcome, not each try: "" where the Master took it, else why
    not; that again once a minute."""
    url = master if "://" in master else f"http://{master}"
    body = msgspec.msgpack.encode(register)
    challenge, wait, last = "", FIRST_RETRY_S, "not asked yet"
    reminder = Reminder()
    while True:
        if not unlinked.is_set():
            await unlinked.wait()
            wait = FIRST_RETRY_S
        proof = body_proof(secret, "register", challenge, body)
        headers = {CHALLENGE: challenge, PROOF: proof, "Content-Type": "application/msgpack"}
        try:
            async with session.post(
                url.rstrip("/") + REGISTER_PATH, data=body, headers=headers, timeout=TIMEOUT
            ) as answer:
                said = (await answer.text())[:200]
                if answer.status == 401 and answer.headers.get(CHALLENGE, challenge) != challenge:
                    challenge = answer.headers[CHALLENGE]
                    continue  # a Master we have not met: prove it again for this one
                trouble = "" if answer.status == 200 else f"{url} refused: {answer.status} {said}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            number = getattr(error, "errno", None)
            reason = os.strerror(number) if number and number > 0 else str(error)
            trouble = f"{url} does not answer: {reason or type(error).__name__}"
        if not trouble:
            reminder.over()
        if reminder.due(trouble) if trouble else last:
            on_change(trouble)
        last = trouble
        # The dial follows a registration at once; asking again sooner would only disturb it.
        await asyncio.sleep(wait * random.uniform(0.8, 1.2))
        wait = min(2 * wait, LAST_RETRY_S)


def asked_by_one_of_us(request: web.Request, secret: bytes) -> bool:
    """Whether a GET carries the proof of ask_headers()."""
    expected = body_proof(secret, "ask", request.headers.get(CHALLENGE, ""), request.path.encode())
    return same(request.headers.get(PROOF, ""), expected)


def answer_ask(request: web.Request, register: Register, secret: bytes) -> web.Response:
    """GET /registration: this worker's Register, proved over the asker's challenge."""
    if not asked_by_one_of_us(request, secret):
        return web.Response(status=401, text="not proved")
    body = msgspec.msgpack.encode(register)
    proof = body_proof(secret, "registration", request.headers[CHALLENGE], body)
    return web.Response(body=body, content_type="application/msgpack", headers={PROOF: proof})


# ---------------------------------------------------------------- the Master's side


async def receive(request: web.Request, secret: bytes, challenge: str) -> Register | web.Response:
    """A proved, well-formed Register of POST /internal/register, or the answer that refuses it."""
    body = await request.read()
    if len(body) > MAX_BODY_BYTES:
        return web.Response(status=413, text="too large")
    proof = body_proof(secret, "register", challenge, body)
    headers = {CHALLENGE: challenge}
    if request.headers.get(CHALLENGE, "") != challenge:
        return web.Response(status=401, text="prove it over this challenge", headers=headers)
    if not same(request.headers.get(PROOF, ""), proof):
        text = f"wrong cluster secret (the Master's key id is {key_id(secret)})"
        return web.Response(status=401, text=text, headers=headers)
    try:
        register = read(body, request.content_type)
    except ProtocolError as error:
        return web.Response(status=400, text=str(error))
    if register.key_id != key_id(secret):
        return web.Response(status=401, text="another key id", headers=headers)
    return register


def ask_headers(secret: bytes, challenge: str, path: str) -> dict[str, str]:
    """Proof that this GET comes from one of us. One who records it can have the same answer again,
    which he has seen already."""
    return {CHALLENGE: challenge, PROOF: body_proof(secret, "ask", challenge, path.encode())}


async def ask(
    session: aiohttp.ClientSession, address: str, secret: bytes, challenge: str
) -> Register:
    """The Register of the worker at `address`. Raises ProtocolError, OSError, TimeoutError or
    aiohttp.ClientError."""
    url = f"http://{address}{ASK_PATH}"
    headers = ask_headers(secret, challenge, ASK_PATH)
    async with session.get(url, headers=headers, timeout=TIMEOUT) as answer:
        body = await answer.read()
        if answer.status != 200:
            raise ProtocolError(f"{address} answered {answer.status}")
        expected = body_proof(secret, "registration", challenge, body)
        if not same(answer.headers.get(PROOF, ""), expected):
            raise ProtocolError(f"{address} does not hold this cluster's secret")
    # Where it was found counts, not what it believes its address to be.
    return msgspec.structs.replace(read(body), address=address)
