"""Attention over paged keys and values: the seam to kernels, and the one in plain PyTorch.

The plain one knows two cases. Decode rows (one new token) are batched: rows of like length are
gathered page by page into one dense, padded tensor, and each group of query heads that shares a KV
head is one small matrix. Longer rows run one by one, in blocks of queries with the group folded
into the rows, over keys straight from the step where there is no history. All that depends on the
plan alone (indices, masks) is built once per step; a layer only computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rtp.backends.model.inputs import Int64, StepInputs
from rtp.backends.model.kv_pool import KVPool


class AttentionBackend(Protocol):
    """Keeps keys and values of a model's layers and attends over them."""

    def plan(self, inputs: StepInputs) -> None:
        """Prepares a step; before its first layer."""
        ...

    def forward(self, layer: int, qkv: Tensor) -> Tensor:
        """Causal attention of the step's new tokens over all of their sequences.

        qkv: [N, Hq + 2 * Hkv, D], rotated; queries, keys, values. Stores keys and values at the
        step's slots. Returns [N, Hq * D] in the same dtype.
        """
        ...


@dataclass(slots=True)
class _DecodeGroup:
    """Decode rows of like length, padded to the longest."""

    tokens: Tensor | None
    """int64 [B]: their places among the step's N tokens; None: all N, in order."""
    rows: Tensor
    """KVPool.page_rows of their page table."""
    bias: dict[int | None, Tensor]
    """By window: [B * Hkv, G, S], 0 where the query may look, else -inf."""


@dataclass(slots=True)
class _Block:
    """Queries first .. last-1 of a row over its keys low .. high-1."""

    first: int
    last: int
    low: int
    high: int
    bias: Tensor | None
    """[last - first, high - low] under a window; None: causal, the last square masked."""


@dataclass(slots=True)
class _LongRow:
    """A row with several new tokens, at first .. last-1 among the step's N."""

    first: int
    last: int
    rows: Tensor | None
    """KVPool.page_rows of its page table; None: no history, the step's own keys are all."""
    blocks: dict[int | None, list[_Block]]


class TorchAttention:
    """AttentionBackend in PyTorch operators, for any CPU.

    windows: per layer, how many positions a token sees, itself included; None for all.
    """

    def __init__(self, pool: KVPool, num_heads: int, scale: float, windows: tuple[int | None, ...]):
        shape = pool.shape
        self._pool = pool
        self._num_heads, self._num_kv_heads = num_heads, shape.num_kv_heads
        self._group = num_heads // shape.num_kv_heads
        self._scale = scale
        self._windows = windows
        self._block = 128 if shape.dtype == torch.bfloat16 else 64
        square = torch.full((self._block, self._block), -torch.inf, dtype=shape.dtype)
        self._causal = square.triu_(1)
        self._zero = torch.zeros((), dtype=shape.dtype)
        self._workspace = torch.empty(0, dtype=shape.dtype)
        self._slots = torch.empty(0, dtype=torch.int64)
        self._decodes: list[_DecodeGroup] = []
        self._longs: list[_LongRow] = []

    def plan(self, inputs: StepInputs) -> None:
        self._slots = torch.from_numpy(inputs.slot_mapping)
        self._clear_begun_pages(inputs)
        num_new = inputs.num_new
        decodes = np.flatnonzero(num_new == 1)
        pages = np.diff(inputs.kv_indptr).astype(np.int64)
        self._decodes = [
            self._decode_group(inputs, members) for members in like_lengths(decodes, pages)
        ]
        self._longs = [self._long_row(inputs, int(row)) for row in np.flatnonzero(num_new > 1)]
        tables = [group.rows for group in self._decodes]
        tables += [row.rows for row in self._longs if row.rows is not None]
        largest = max((table.numel() for table in tables), default=0)
        needed = largest * self._pool.shape.block_size * self._pool.shape.head_dim
        if needed > self._workspace.numel():
            self._workspace = torch.empty(needed * 5 // 4, dtype=self._pool.shape.dtype)

    def forward(self, layer: int, qkv: Tensor) -> Tensor:
        self._pool.write(layer, self._slots, qkv[:, self._num_heads :])
        window = self._windows[layer]
        if len(self._decodes) == 1 and self._decodes[0].tokens is None:
            return self._decode(layer, self._decodes[0], window, qkv)
        out = qkv.new_empty(qkv.shape[0], self._num_heads * qkv.shape[2])
        for group in self._decodes:
            assert group.tokens is not None
            out[group.tokens] = self._decode(layer, group, window, qkv[group.tokens])
        for row in self._longs:
            self._long(layer, row, window, qkv[row.first : row.last], out[row.first : row.last])
        return out

    def _decode(self, layer: int, group: _DecodeGroup, window: int | None, qkv: Tensor) -> Tensor:
        """[B, Hq * D] for the qkv of a group's tokens."""
        keys, values = self._pool.gather(layer, group.rows, self._workspace).flatten(1, 2)
        queries = qkv[:, : self._num_heads].reshape(keys.shape[0], self._group, -1)
        scores = torch.baddbmm(group.bias[window], queries, keys.transpose(1, 2), alpha=self._scale)
        return torch.bmm(torch.softmax(scores, -1), values).view(qkv.shape[0], -1)

    def _long(
        self, layer: int, row: _LongRow, window: int | None, qkv: Tensor, out: Tensor
    ) -> None:
        """Fills out [T, Hq * D] for one row's qkv [T, Hq + 2 * Hkv, D]."""
        heads, group = self._num_kv_heads, self._group
        if row.rows is None:
            keys, values = qkv[:, self._num_heads :].unflatten(1, (2, heads)).permute(1, 2, 0, 3)
            keys, values = keys.contiguous(), values.contiguous()
        else:
            keys, values = self._pool.gather(layer, row.rows, self._workspace)[:, 0]
        queries = qkv[:, : self._num_heads].unflatten(1, (heads, group)).permute(1, 2, 0, 3)
        results = out.view(len(qkv), heads, group, -1).permute(1, 2, 0, 3)
        for block in row.blocks[window]:
            size = block.last - block.first
            folded = queries[:, :, block.first : block.last].reshape(heads, group * size, -1)
            scores = torch.baddbmm(
                self._zero,
                folded,
                keys[:, block.low : block.high].transpose(1, 2),
                beta=0,
                alpha=self._scale,
            )
            by_query = scores.view(heads, group, size, -1)
            if block.bias is None:
                by_query[..., -size:].add_(self._causal[:size, :size])
            else:
                by_query.add_(block.bias)
            mixed = torch.bmm(torch.softmax(scores, -1), values[:, block.low : block.high])
            results[:, :, block.first : block.last] = mixed.view(heads, group, size, -1)

    def _clear_begun_pages(self, inputs: StepInputs) -> None:
        """Zeroes pages that the step begins and leaves part empty: what an earlier owner left there
        would be read behind the mask, and 0 * NaN is NaN."""
        begun = inputs.num_new >= inputs.last_page_len
        begun &= inputs.last_page_len < self._pool.shape.block_size
        if begun.any():
            last = inputs.kv_indices[inputs.kv_indptr[1:][begun] - 1]
            self._pool.clear(torch.from_numpy(last.astype(np.int64)))

    def _decode_group(self, inputs: StepInputs, members: Int64) -> _DecodeGroup:
        first, last = inputs.kv_indptr[members], inputs.kv_indptr[members + 1]
        at = first[:, None] + np.arange((last - first).max())
        held = at < last[:, None]
        table = np.where(held, inputs.kv_indices[np.where(held, at, 0)], self._pool.null_page)
        tokens = inputs.qo_indptr[members].astype(np.int64)
        lens = torch.from_numpy(inputs.seq_lens[members].astype(np.int64))
        width = table.shape[1] * self._pool.shape.block_size
        return _DecodeGroup(
            tokens=None if len(tokens) == inputs.qo_indptr[-1] else torch.from_numpy(tokens),
            rows=self._pool.page_rows(torch.from_numpy(table.astype(np.int64))),
            bias={window: self._decode_bias(lens, width, window) for window in {*self._windows}},
        )

    def _decode_bias(self, lens: Tensor, width: int, window: int | None) -> Tensor:
        keys = torch.arange(width)[None]
        hidden = keys >= lens[:, None]
        if window is not None:
            hidden |= keys < lens[:, None] - window
        bias = torch.zeros(hidden.shape, dtype=self._pool.shape.dtype)
        bias.masked_fill_(hidden, -torch.inf)
        shape = (len(lens), self._num_kv_heads, self._group, width)
        return bias[:, None, None].expand(shape).flatten(0, 1)

    def _long_row(self, inputs: StepInputs, row: int) -> _LongRow:
        first, last = (int(bound) for bound in inputs.qo_indptr[row : row + 2])
        start = int(inputs.seq_lens[row]) - (last - first)
        rows = None
        if start > 0:
            pages = inputs.kv_indices[inputs.kv_indptr[row] : inputs.kv_indptr[row + 1]]
            rows = self._pool.page_rows(torch.from_numpy(pages.astype(np.int64))[None])
        blocks = {
            window: list(self._blocks(start, last - first, window)) for window in {*self._windows}
        }
        return _LongRow(first=first, last=last, rows=rows, blocks=blocks)

    def _blocks(self, start: int, num_new: int, window: int | None) -> Iterator[_Block]:
        for first in range(0, num_new, self._block):
            last = min(first + self._block, num_new)
            high = start + last
            if window is None or high <= window:
                yield _Block(first, last, 0, high, None)
                continue
            low = max(0, start + first - window + 1)
            queries = torch.arange(start + first, high)[:, None]
            keys = torch.arange(low, high)[None]
            hidden = (keys > queries) | (keys <= queries - window)
            bias = torch.zeros(hidden.shape, dtype=self._pool.shape.dtype)
            yield _Block(first, last, low, high, bias.masked_fill_(hidden, -torch.inf))


def like_lengths(members: Int64, pages: Int64, worth: int = 64) -> list[Int64]:
    """Splits rows into groups so that padding each to its longest wastes little.

    members: row numbers; pages: page count of every row. A group is split where that saves the most
    padded pages, as long as it saves `worth` of them: about what another group costs per layer.
    Groups keep rows in the order of `members` where nothing is split.
    """
    if len(members) == 0:
        return []
    order = members[np.argsort(-pages[members], kind="stable")]
    lengths = pages[order]
    saved = (lengths[0] - lengths) * (len(lengths) - np.arange(len(lengths)))
    cut = int(saved.argmax())
    if saved[cut] < worth:
        return [members]
    keep = np.isin(members, order[:cut])
    return [*like_lengths(members[keep], pages, worth), *like_lengths(members[~keep], pages, worth)]
