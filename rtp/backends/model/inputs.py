"""StepPlan -> the flat arrays that a model and an attention kernel read.

numpy only: no device, no state. The page table has FlashInfer's form. Work per token is vectorised;
per row it is a few list items.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rtp.core.steps import FromStep, StepPlan

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

_UNKNOWN = b"\0\0\0\0"


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step. N = new tokens of all B rows, rows back to back in the plan's order."""

    ids: Int64
    """[N] token ids; 0 where the token is still to be taken from an earlier step (`borrowed`)."""
    positions: Int64
    """[N] position of each token in its sequence."""
    slot_mapping: Int64
    """[N] page * block_size + offset: where its key and value go."""
    qo_indptr: Int32
    """[B+1] row bounds in the arrays above."""
    kv_indptr: Int32
    """[B+1] row bounds in kv_indices."""
    kv_indices: Int32
    """[kv_indptr[-1]] page ids of each row, new tokens included."""
    last_page_len: Int32
    """[B] tokens in each row's last page, 1 .. block_size."""
    seq_lens: Int32
    """[B] tokens of each sequence, new ones included."""
    borrowed: tuple[tuple[int, FromStep], ...]
    """(row, where its single id comes from)."""

    @property
    def num_new(self) -> Int32:
        """[B] new tokens of each row."""
        return np.diff(self.qo_indptr)


def build_inputs(plan: StepPlan, block_size: int) -> StepInputs:
    """Arrays of a plan that has rows. Cost O(rows) list items + O(tokens + pages) vectorised."""
    rows = plan.rows
    starts = np.array([row.start for row in rows], dtype=np.int64)
    num_new = np.array([row.num_new for row in rows], dtype=np.int64)
    borrowed = tuple(
        (index, row.inputs) for index, row in enumerate(rows) if isinstance(row.inputs, FromStep)
    )
    packed = b"".join(
        _UNKNOWN if isinstance(row.inputs, FromStep) else row.inputs.ids for row in rows
    )
    seq_lens = starts + num_new
    num_pages = -(-seq_lens // block_size)
    qo_indptr, kv_indptr = _indptr(num_new), _indptr(num_pages)
    kv_indices = np.frombuffer(b"".join(row.pages for row in rows), dtype="<i4")
    positions = np.arange(qo_indptr[-1]) + np.repeat(starts - qo_indptr[:-1], num_new)
    page_at = np.repeat(kv_indptr[:-1], num_new) + positions // block_size
    return StepInputs(
        ids=np.frombuffer(packed, dtype="<i4").astype(np.int64),
        positions=positions,
        slot_mapping=kv_indices[page_at].astype(np.int64) * block_size + positions % block_size,
        qo_indptr=qo_indptr.astype(np.int32),
        kv_indptr=kv_indptr.astype(np.int32),
        kv_indices=kv_indices,
        last_page_len=((seq_lens - 1) % block_size + 1).astype(np.int32),
        seq_lens=seq_lens.astype(np.int32),
        borrowed=borrowed,
    )


def _indptr(counts: Int64) -> Int64:
    """Exclusive prefix sums, [B+1]."""
    bounds = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=bounds[1:])
    return bounds
