"""Slots of draft decodes' keys and values, looked up by the kernel that computes their positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import triton
import triton.language as tl

from vllm_eagle_mrv2.batch.buffers import DraftBuffers, SlotTable


@triton.jit
def slot_of(blocks_ptr, blocks_stride, request, position, block_size, known):
    """Return the slot of a request's token at a position; the block is looked up only where `known`."""
    block = tl.load(blocks_ptr + request * blocks_stride + position // block_size, mask=known, other=0)
    return block.to(tl.int64) * block_size + position % block_size


def slot_arguments(slot_table: SlotTable | None) -> dict[str, Any]:
    """Return the slot arguments of a kernel that may write slots."""
    if slot_table is None:
        return {"blocks_ptr": None, "blocks_stride": 0, "slots_ptr": None, "block_size": 1, "SLOTS": False}
    return {
        "blocks_ptr": slot_table.blocks,
        "blocks_stride": slot_table.blocks.stride(0),
        "slots_ptr": slot_table.slots,
        "block_size": slot_table.block_size,
        "SLOTS": True,
    }


def look_up_slots_reference(slot_table: SlotTable, buffers: DraftBuffers, rows: Iterable[int]) -> None:
    """Write the slots of rows that have a token of a request, at the positions in the buffers; in plain torch."""
    for row in rows:
        block, offset = divmod(int(buffers.positions[row]), slot_table.block_size)
        first = int(slot_table.blocks[int(buffers.idx_mapping[row]), block]) * slot_table.block_size
        slot_table.slots[row] = first + offset
