"""Keys and values of all layers in pages: memory, addressing, copy in and out."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PageShape:
    """What one page of one model holds."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of one page over all layers, keys and values."""
        numbers = 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim
        return numbers * self.dtype.itemsize


class KVPool:
    """Pages 0 .. num_pages-1, and one more that is always zero: `null_page`, for padding.

    A layer is [2 * Hkv, num_pages + 1, block_size, D], key planes before value planes: the pages of
    one head, gathered in a sequence's order, are that head's keys as one dense matrix.
    Invariant: every number in the pool that a kernel may read behind a mask is finite. Hence
    `clear` on a page that a step begins and does not fill.
    """

    def __init__(self, shape: PageShape, num_pages: int):
        self.shape = shape
        self.null_page = num_pages
        planes = 2 * shape.num_kv_heads
        size = (shape.num_layers, planes, num_pages + 1, shape.block_size, shape.head_dim)
        # Anonymous memory is zero, and is not taken before it is written; torch.zeros writes it.
        memory = mmap.mmap(-1, math.prod(size) * shape.dtype.itemsize)
        self._all = torch.frombuffer(memory, dtype=shape.dtype).view(size)
        self._slots = list(self._all.flatten(2, 3).unbind(0))
        self._pages = list(self._all.flatten(1, 2).flatten(2, 3).unbind(0))

    def write(self, layer: int, slots: Tensor, heads: Tensor) -> None:
        """Stores heads [N, 2 * Hkv, D], keys before values, at slots [N] int64."""
        self._slots[layer].index_copy_(1, slots, heads.transpose(0, 1))

    def page_rows(self, pages: Tensor) -> Tensor:
        """Index for `gather`: int64 [2, B, Hkv, P] for a page table [B, P]. Good for all layers."""
        planes = torch.arange(2 * self.shape.num_kv_heads).view(2, 1, -1, 1)
        return planes * (self.null_page + 1) + pages[None, :, None, :]

    def gather(self, layer: int, rows: Tensor, out: Tensor) -> Tensor:
        """Keys and values [2, B, Hkv, P * block_size, D] of a page table, copied into out (flat, at
        least that large)."""
        kinds, batch, heads, pages = rows.shape
        row_size = self.shape.block_size * self.shape.head_dim
        flat = out[: rows.numel() * row_size].view(-1, row_size)
        torch.index_select(self._pages[layer], 0, rows.view(-1), out=flat)
        return flat.view(kinds, batch, heads, pages * self.shape.block_size, self.shape.head_dim)

    def clear(self, pages: Tensor) -> None:
        """Zeroes pages [P] int64 in all layers."""
        self._all.index_fill_(2, pages, 0)

    def export_pages(self, pages: Tensor) -> Tensor:
        """A copy of pages [P] int64, page by page: [P, num_layers, 2 * Hkv, block_size, D]."""
        return self._all.index_select(2, pages).permute(2, 0, 1, 3, 4).contiguous()

    def import_pages(self, pages: Tensor, data: Tensor) -> None:
        """Stores what export_pages gave, perhaps of another pool of the same kv_format."""
        self._all.index_copy_(2, pages, data.permute(1, 2, 0, 3, 4))
