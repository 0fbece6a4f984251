"""How decode rows are grouped by length, and how pages are addressed."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rtp.backends.model.attention import like_lengths
from rtp.backends.model.kv_pool import KVPool, PageShape

SHAPE = PageShape(num_layers=2, num_kv_heads=3, head_dim=4, block_size=2, dtype=torch.float32)


def test_like_rows_stay_together_in_their_order():
    pages = np.array([9, 8, 7, 9])
    (group,) = like_lengths(np.array([0, 2, 3]), pages)
    assert group.tolist() == [0, 2, 3]
    assert like_lengths(np.array([], dtype=np.int64), pages) == []


def test_a_long_row_does_not_pad_the_short_ones():
    groups = like_lengths(np.arange(5), np.array([2, 500, 3, 2, 1]))
    assert [group.tolist() for group in groups] == [[1], [0, 2, 3, 4]]


@given(st.lists(st.integers(1, 600), min_size=1, max_size=64))
def test_every_row_is_in_one_group_and_no_further_split_is_worth_it(lengths: list[int]):
    pages = np.array(lengths)
    groups = like_lengths(np.arange(len(lengths)), pages, worth=64)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    for group in groups:
        ordered = np.sort(pages[group])
        for count in range(1, len(ordered)):
            assert (ordered[-1] - ordered[count - 1]) * count < 64


def test_gathered_pages_are_what_was_written_in_sequence_order():
    pool = KVPool(SHAPE, num_pages=5)
    heads = torch.arange(4 * 6 * 4, dtype=torch.float32).view(4, 6, 4) + 1
    pool.write(1, torch.tensor([8, 9, 2, 3]), heads)
    table = torch.tensor([[4, 1], [1, pool.null_page]])
    out = torch.empty(2 * 2 * 3 * 2 * 2 * 4)
    keys, values = pool.gather(1, pool.page_rows(table), out)
    assert torch.equal(keys[0], heads[:, :3].transpose(0, 1))
    assert torch.equal(values[0], heads[:, 3:].transpose(0, 1))
    assert torch.equal(keys[1, :, :2], heads[2:, :3].transpose(0, 1))
    assert not keys[1, :, 2:].any()
    assert not pool.gather(0, pool.page_rows(table), out).any()


def test_cleared_pages_are_zero_in_all_layers():
    pool = KVPool(SHAPE, num_pages=3)
    for layer in range(2):
        pool.write(layer, torch.arange(6), torch.ones(6, 6, 4))
    pool.clear(torch.tensor([1]))
    exported = pool.export_pages(torch.arange(3))
    assert exported.shape == (3, 2, 6, 2, 4)
    assert exported.numel() * 4 == 3 * SHAPE.num_bytes
    assert exported.sum((1, 2, 3, 4)).tolist() == [96, 0, 96]
