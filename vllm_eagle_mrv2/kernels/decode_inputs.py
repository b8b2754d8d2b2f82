"""Inputs of the first draft decode from the first draft tokens, in one launch that a graph can contain."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_eagle_mrv2.batch.buffers import DraftBuffers, SlotTable
from vllm_eagle_mrv2.kernels.feedback import feedback_block, store_feedback
from vllm_eagle_mrv2.kernels.greedy import best_tokens, drafted_token, how_drafted
from vllm_eagle_mrv2.kernels.launching import launch
from vllm_eagle_mrv2.kernels.slots import look_up_slots_reference, slot_arguments, slot_of


# Batch sizes vary: specialized variants (1, multiples of 16) would be compiled during serving.
@triton.jit(do_not_specialize=["num_rows", "max_num_reqs", "max_model_len", "blocks_stride", "block_size"])
def _decode_inputs_kernel(
    drafted_ptr,
    feedback_ptr,
    feedback_stride,
    num_rejected_ptr,
    live_reqs_ptr,
    last_token_indices_ptr,
    draft_tokens_ptr,
    draft_tokens_stride,
    input_ids_ptr,
    positions_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    sample_positions_ptr,
    hidden_states_ptr,
    hidden_states_stride,
    draft_step_ptr,
    idx_mapping_ptr,
    hidden_size,
    num_rows,
    max_num_reqs,
    max_model_len,
    blocks_ptr,
    blocks_stride,
    slots_ptr,
    block_size,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
    PAIRS: tl.constexpr,
    SLOTS: tl.constexpr,
    SAMPLE_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    live = tl.minimum(tl.load(live_reqs_ptr), num_rows)
    column = tl.arange(0, BLOCK)
    if row == num_rows:
        for start in range(0, max_num_reqs + 1, BLOCK):
            each = start + column
            tl.store(query_start_loc_ptr + each, tl.minimum(each, live), mask=each < max_num_reqs + 1)
            inside = each < max_num_reqs
            tl.store(seq_lens_ptr + each, 0, mask=inside & (each >= live))
            tl.store(draft_step_ptr + each, 1, mask=inside)
        return

    # All loads are issued first, as in the update after a step.
    last = tl.load(last_token_indices_ptr + row)
    sample_position = tl.load(sample_positions_ptr + row)
    seq_len = tl.load(seq_lens_ptr + row) - tl.load(num_rejected_ptr + row) + 1
    if SLOTS:
        request = tl.load(idx_mapping_ptr + row).to(tl.int64)
    feedback = feedback_ptr + last * feedback_stride
    values = tl.load(feedback + column, mask=column < hidden_size)
    token = drafted_token(drafted_ptr, row, KEYS, LANES, PAIRS)

    has_token = row < live
    # Drafts past max_model_len are never accepted; the clamp keeps their memory accesses inside the block table.
    position = tl.minimum(sample_position - SAMPLE_OFFSET + 1, max_model_len - 1)
    if SLOTS:
        # The rows of a dummy run, and those of padding, map to no request.
        slot = slot_of(blocks_ptr, blocks_stride, request, position, block_size, request >= 0)
        tl.store(slots_ptr + row, tl.where(request >= 0, slot, -1))
    tl.store(draft_tokens_ptr + row * draft_tokens_stride, token)
    tl.store(input_ids_ptr + row, token.to(tl.int32), mask=has_token)
    tl.store(sample_positions_ptr + row, sample_position + 1, mask=has_token)
    tl.store(positions_ptr + row, position, mask=has_token)
    tl.store(seq_lens_ptr + row, tl.minimum(seq_len, max_model_len), mask=has_token)
    store_feedback(hidden_states_ptr + row * hidden_states_stride, feedback, values, hidden_size, True, BLOCK)


def prepare_decode_inputs(
    buffers: DraftBuffers,
    drafted: torch.Tensor,
    feedback: torch.Tensor,
    num_rows: int,
    max_model_len: int,
    slot_table: SlotTable | None = None,
    *,
    sample_offset: int = 0,
) -> None:
    """Record the first draft tokens and prepare the inputs of the first draft decode.

    Row ``i`` then holds one token: the first draft token, at the position after the request's last accepted token, with
    the hidden state of that last token.  Beyond the live requests ``query_start_loc`` repeats their number and
    ``seq_lens`` is 0.  ``draft_step`` becomes 1.  The number of live requests is read on the device, so a graph can
    contain this for batches of any size up to its own.

    Args:
        buffers: the draft's buffers as `prepare_prefill_inputs` left them; read and written.
        drafted: drafts for num_rows rows, in a form of `how_drafted`.
        feedback: [n, hidden_size], hidden states of the draft prefill that the next step starts from; must not be
            ``buffers.hidden_states``.
        num_rows: number of rows to prepare; requests beyond them count as padding.
        max_model_len: positions and lengths are clamped to it.
        slot_table: if given, the slots of the rows' keys and values are written too, -1 for padding.
        sample_offset: as for `prepare_prefill_inputs`.
    """
    launch(_decode_inputs_kernel, (num_rows + 1,))(
        drafted,
        feedback,
        feedback.stride(0),
        buffers.num_rejected,
        buffers.live_reqs,
        buffers.last_token_indices,
        buffers.draft_tokens,
        buffers.draft_tokens.stride(0),
        buffers.input_ids,
        buffers.positions,
        buffers.query_start_loc,
        buffers.seq_lens,
        buffers.sample_positions,
        buffers.hidden_states,
        buffers.hidden_states.stride(0),
        buffers.draft_step,
        buffers.idx_mapping,
        feedback.shape[1],
        num_rows,
        buffers.max_num_reqs,
        max_model_len,
        **slot_arguments(slot_table),
        **how_drafted(drafted),
        SAMPLE_OFFSET=sample_offset,
        BLOCK=feedback_block(feedback.shape[1]),
    )


def prepare_decode_inputs_reference(
    buffers: DraftBuffers,
    drafted: torch.Tensor,
    feedback: torch.Tensor,
    num_rows: int,
    max_model_len: int,
    slot_table: SlotTable | None = None,
    *,
    sample_offset: int = 0,
) -> None:
    """`prepare_decode_inputs` in plain torch."""
    live = min(int(buffers.live_reqs), num_rows)
    buffers.draft_tokens[:num_rows, 0] = best_tokens(drafted)
    buffers.hidden_states[:num_rows] = feedback[buffers.last_token_indices[:num_rows]]
    last_positions = buffers.sample_positions[:live] - sample_offset
    buffers.input_ids[:live] = buffers.draft_tokens[:live, 0].to(torch.int32)
    buffers.positions[:live] = (last_positions + 1).clamp(max=max_model_len - 1)
    buffers.sample_positions[:live] += 1
    lengths = buffers.seq_lens[:live] - buffers.num_rejected[:live] + 1
    buffers.seq_lens[:live] = lengths.clamp(max=max_model_len)
    buffers.seq_lens[live:] = 0
    steps = torch.arange(buffers.max_num_reqs + 1, device=buffers.query_start_loc.device)
    buffers.query_start_loc.copy_(steps.clamp(max=live))
    buffers.draft_step.fill_(1)
    if slot_table is None:
        return
    slot_table.slots[:num_rows] = -1
    look_up_slots_reference(slot_table, buffers, (buffers.idx_mapping[:live] >= 0).nonzero().flatten().tolist())
