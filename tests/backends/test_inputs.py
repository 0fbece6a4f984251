"""StepPlan -> flat arrays, on a plan small enough to write the arrays by hand."""

from rtp.backends.model.inputs import build_inputs
from rtp.core.steps import FromStep, Known, Row, StepPlan
from rtp.core.types import pack_ids


def test_prefill_chunk_and_decodes_become_one_page_table():
    plan = StepPlan(
        step=9,
        rows=(
            Row(1, 0, 5, Known(pack_ids([11, 12, 13, 14, 15])), pack_ids([7, 2]), 0),
            Row(2, 8, 1, FromStep(8, 3), pack_ids([0, 5, 6]), 4),
            Row(3, 3, 2, Known(pack_ids([21, 22])), pack_ids([4, 9]), -1),
            Row(4, 3, 1, Known(pack_ids([31])), pack_ids([8]), 1),
        ),
    )
    inputs = build_inputs(plan, block_size=4)
    assert inputs.ids.tolist() == [11, 12, 13, 14, 15, 0, 21, 22, 31]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 4, 8, 3, 4, 3]
    assert inputs.slot_mapping.tolist() == [28, 29, 30, 31, 8, 24, 19, 36, 35]
    assert inputs.qo_indptr.tolist() == [0, 5, 6, 8, 9]
    assert inputs.kv_indptr.tolist() == [0, 2, 5, 7, 8]
    assert inputs.kv_indices.tolist() == [7, 2, 0, 5, 6, 4, 9, 8]
    assert inputs.last_page_len.tolist() == [1, 1, 1, 4]
    assert inputs.seq_lens.tolist() == [5, 9, 5, 4]
    assert inputs.num_new.tolist() == [5, 1, 2, 1]
    assert inputs.borrowed == ((1, FromStep(8, 3)),)


def test_arrays_have_the_dtypes_kernels_read():
    plan = StepPlan(step=0, rows=(Row(1, 0, 1, Known(pack_ids([3])), pack_ids([0]), 0),))
    inputs = build_inputs(plan, block_size=16)
    for name in ("ids", "positions", "slot_mapping"):
        assert getattr(inputs, name).dtype == "int64"
    for name in ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "seq_lens"):
        assert getattr(inputs, name).dtype == "int32"
