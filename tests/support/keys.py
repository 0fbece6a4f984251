"""Keys of blocks, as the Master's prefix map reads them out of hashes."""

from __future__ import annotations

import sys

from rtp.core.types import Hashes, split_hashes


def low64(hashes: Hashes) -> list[int]:
    """The last 64 bits of each hash, in the machine's byte order."""
    return [int.from_bytes(block[8:], sys.byteorder) for block in split_hashes(hashes)]
