"""Block hashes: chained, namespaced, the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rtp.core.hashing import DIGESTS, block_hashes, namespace
from rtp.core.types import pack_ids, split_hashes

SEED = namespace(secret=b"s", revision="r")
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=70)


@given(IDS, IDS)
def test_equal_hashes_mean_equal_prefixes(a: list[int], b: list[int]):
    both = zip(
        split_hashes(block_hashes(pack_ids(a), 4, SEED)),
        split_hashes(block_hashes(pack_ids(b), 4, SEED)),
        strict=False,
    )
    for i, (x, y) in enumerate(both):
        assert (x == y) == (a[: 4 * i + 4] == b[: 4 * i + 4])


@given(IDS, st.integers(0, 17))
def test_a_chain_can_be_continued_at_any_block(ids: list[int], blocks: int):
    whole = block_hashes(pack_ids(ids), 4, SEED)
    cut = min(blocks, len(ids) // 4)
    head = block_hashes(pack_ids(ids[: 4 * cut]), 4, SEED)
    tail = block_hashes(pack_ids(ids[4 * cut :]), 4, SEED, parent=head[-16:])
    assert head + tail == whole


def test_a_partial_block_has_no_hash():
    assert block_hashes(pack_ids(range(15)), 16, SEED) == b""
    assert len(block_hashes(pack_ids(range(47)), 16, SEED)) == 2 * 16


def test_f02_two_processes_make_the_same_keys_and_a_secret_keeps_deployments_apart():
    code = (
        "from rtp.core.hashing import *; from rtp.core.types import pack_ids;"
        "print(block_hashes(pack_ids(range(64)), 16, namespace(secret=b's', revision='r')).hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1")
    }
    ids = pack_ids(range(64))
    assert found == {block_hashes(ids, 16, SEED).hex()}
    other = block_hashes(ids, 16, namespace(secret=b"t", revision="r"))
    assert not set(split_hashes(other)) & set(split_hashes(block_hashes(ids, 16, SEED)))


def test_f03_adapter_and_salt_of_one_name_share_nothing():
    spaces = [
        namespace(secret=b"s", revision="r"),
        namespace(secret=b"s", revision="r", adapter="X"),
        namespace(secret=b"s", revision="r", salt="X"),
        namespace(secret=b"s", revision="r", adapter="X", salt="X"),
        namespace(secret=b"s", revision="rX"),
        namespace(secret=b"s", revision="r", adapter="salt:1:X"),
    ]
    ids = pack_ids(range(16))
    assert len({block_hashes(ids, 16, space) for space in spaces}) == len(spaces)


@pytest.mark.parametrize("algorithm", DIGESTS)
def test_the_algorithm_is_part_of_the_namespace(algorithm: str):
    seed = namespace(secret=b"s", revision="r", algorithm=algorithm)
    hashes = block_hashes(pack_ids(range(32)), 16, seed)
    assert len(hashes) == 32
    others = [namespace(secret=b"s", revision="r", algorithm=a) for a in DIGESTS if a != algorithm]
    assert all(block_hashes(pack_ids(range(32)), 16, other) != hashes for other in others)


def test_hashes_do_not_depend_on_how_ids_were_packed():
    ids = [5, 49151, 0, 7] * 4
    assert pack_ids(ids) == np.array(ids, dtype="<i4").tobytes()
    assert block_hashes(pack_ids(iter(ids)), 16, SEED) == block_hashes(pack_ids(ids), 16, SEED)
