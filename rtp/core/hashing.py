"""The only block hash: 128 bits per whole block, chained, so that a hash names a whole prefix.

The chain starts from a namespace: a digest of the cluster secret, model revision, adapter, tenant
salt, each with its type, so that an adapter "X" and a salt "X" share nothing. Computed once, in the
frontend; workers continue the chain over generated tokens. The Master keys on the last 64 bits;
workers compare all 128."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import xxhash

from rtp.core.types import HASH_BYTES, Hashes, Ids

ID_BYTES = 4
Digest = Callable[[bytes], bytes]


def _xxh3(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:HASH_BYTES]


DIGESTS: dict[str, Digest] = {"xxh3-128": _xxh3, "sha256": _sha256}
"""xxh3-128 inside one trust domain; sha256 where several tenants have keys (design section 2)."""


def namespace(
    *, secret: bytes, revision: str, adapter: str = "", salt: str = "", algorithm: str = "xxh3-128"
) -> bytes:
    """The chain's seed, 32 bytes: the algorithm is part of it, so chains never mix."""
    digest = hashlib.blake2b(key=secret[:64], digest_size=31)
    for kind, value in (("revision", revision), ("adapter", adapter), ("salt", salt)):
        data = value.encode()
        digest.update(f"{kind}:{len(data)}:".encode() + data)
    return bytes([list(DIGESTS).index(algorithm)]) + digest.digest()


def block_hashes(ids: Ids, block_size: int, seed: bytes, parent: bytes = b"") -> Hashes:
    """Hashes of the whole blocks of `ids`; a trailing partial block has none.

    ids: int32 tokens.  seed: from namespace().  parent: hash of the block before ids[0], or b"" at
    the start of a prompt.  Returns 16 bytes per block.  Cost: one digest per block, 0.3 us each.
    """
    digest = list(DIGESTS.values())[seed[0]]
    size = block_size * ID_BYTES
    last = parent or seed
    out = []
    for start in range(0, len(ids) - size + 1, size):
        last = digest(last + ids[start : start + size])
        out.append(last)
    return b"".join(out)
