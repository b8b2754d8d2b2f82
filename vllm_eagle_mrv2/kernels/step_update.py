"""The update between two draft decode steps, in one launch that a graph can contain."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_eagle_mrv2.batch.buffers import DraftBuffers, Lookup, SlotTable
from vllm_eagle_mrv2.kernels.feedback import feedback_block, store_feedback
from vllm_eagle_mrv2.kernels.greedy import best_tokens, drafted_token, how_drafted
from vllm_eagle_mrv2.kernels.launching import launch
from vllm_eagle_mrv2.kernels.slots import look_up_slots_reference, slot_arguments, slot_of


# K varies where it is dynamic: specialized variants would be compiled during serving.
@triton.jit(do_not_specialize=["num_draft_tokens", "max_model_len", "found_stride", "blocks_stride", "block_size"])
def _step_update_kernel(
    drafted_ptr,
    feedback_ptr,
    feedback_stride,
    draft_tokens_ptr,
    draft_tokens_stride,
    input_ids_ptr,
    positions_ptr,
    seq_lens_ptr,
    sample_positions_ptr,
    hidden_states_ptr,
    hidden_states_stride,
    draft_step_ptr,
    query_start_loc_ptr,
    idx_mapping_ptr,
    hidden_size,
    num_draft_tokens,
    max_model_len,
    found_ptr,
    found_stride,
    blocks_ptr,
    blocks_stride,
    slots_ptr,
    block_size,
    LOOKS_UP: tl.constexpr,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
    PAIRS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # All loads are issued first, so that they overlap: the kernel is bound by their latency.
    # Each row has its own step counter: a shared one could not be advanced while other programs read it.
    step = tl.load(draft_step_ptr + row)
    sample_position = tl.load(sample_positions_ptr + row)
    position = tl.load(positions_ptr + row)
    seq_len = tl.load(seq_lens_ptr + row)
    if SLOTS:
        has_token = tl.load(query_start_loc_ptr + row + 1) > tl.load(query_start_loc_ptr + row)
        request = tl.load(idx_mapping_ptr + row).to(tl.int64)
    column = tl.arange(0, BLOCK)
    feedback = feedback_ptr + row * feedback_stride
    values = tl.load(feedback + column, mask=column < hidden_size)
    token = drafted_token(drafted_ptr, row, KEYS, LANES, PAIRS)
    if LOOKS_UP:
        found = tl.load(found_ptr + row * found_stride + step, mask=step < num_draft_tokens, other=-1)
        token = tl.where(found >= 0, found, token)

    # Nothing follows the last step.
    follows = step < num_draft_tokens - 1
    position = tl.minimum(position + 1, max_model_len - 1)
    if SLOTS:
        # The rows of a dummy run may have tokens, but map to no request.
        looked_up = follows & has_token & (request >= 0)
        slot = slot_of(blocks_ptr, blocks_stride, request, position, block_size, looked_up)
        tl.store(slots_ptr + row, slot, mask=looked_up)
    tl.store(draft_step_ptr + row, step + 1)
    tl.store(draft_tokens_ptr + row * draft_tokens_stride + step, token, mask=step < num_draft_tokens)
    tl.store(input_ids_ptr + row, token.to(tl.int32), mask=follows)
    tl.store(sample_positions_ptr + row, sample_position + 1, mask=follows)
    tl.store(positions_ptr + row, position, mask=follows)
    # A padded row stays at length 0: attention must not read its blocks.
    longer = tl.where(seq_len == 0, 0, tl.minimum(seq_len + 1, max_model_len))
    tl.store(seq_lens_ptr + row, longer, mask=follows)
    store_feedback(hidden_states_ptr + row * hidden_states_stride, feedback, values, hidden_size, follows, BLOCK)


def update_after_step(
    buffers: DraftBuffers,
    drafted: torch.Tensor,
    feedback: torch.Tensor,
    num_reqs: int,
    num_draft_tokens: int,
    max_model_len: int,
    slot_table: SlotTable | None = None,
    lookup: Lookup | None = None,
) -> None:
    """Record the tokens of draft step ``draft_step``, prepare the inputs of the next step, and advance the step.

    ``draft_step`` is data on the device, so one captured graph serves every step.

    Args:
        buffers: the draft's buffers, read and written.
        drafted: drafts of this step for num_reqs rows, in a form of `how_drafted`.
        feedback: [>= num_reqs, hidden_size], hidden states that the next step starts from.
        num_reqs: number of rows to update; in a graph, including padded rows.
        num_draft_tokens: K of this batch; the last step only records its tokens.
        max_model_len: positions and lengths are clamped to it.
        slot_table: if given, the slots of the next step's keys and values are written too, for rows that have a token
            of a request.
        lookup: if given, the drafts found in it replace the others.
    """
    hidden_size = feedback.shape[1]
    launch(_step_update_kernel, (num_reqs,))(
        drafted,
        feedback,
        feedback.stride(0),
        buffers.draft_tokens,
        buffers.draft_tokens.stride(0),
        buffers.input_ids,
        buffers.positions,
        buffers.seq_lens,
        buffers.sample_positions,
        buffers.hidden_states,
        buffers.hidden_states.stride(0),
        buffers.draft_step,
        buffers.query_start_loc,
        buffers.idx_mapping,
        hidden_size,
        num_draft_tokens,
        max_model_len,
        None if lookup is None else lookup.found,
        0 if lookup is None else lookup.found.stride(0),
        **slot_arguments(slot_table),
        LOOKS_UP=lookup is not None,
        **how_drafted(drafted),
        BLOCK=feedback_block(hidden_size),
    )


def update_after_step_reference(
    buffers: DraftBuffers,
    drafted: torch.Tensor,
    feedback: torch.Tensor,
    num_reqs: int,
    num_draft_tokens: int,
    max_model_len: int,
    slot_table: SlotTable | None = None,
    lookup: Lookup | None = None,
) -> None:
    """`update_after_step` in plain torch; all rows are at the same step."""
    step = int(buffers.draft_step[0])
    buffers.draft_step[:num_reqs] += 1
    if step >= num_draft_tokens:
        return
    tokens = best_tokens(drafted)
    if lookup is not None:
        found = lookup.found[:num_reqs, step]
        tokens = torch.where(found >= 0, found, tokens)
    buffers.draft_tokens[:num_reqs, step] = tokens
    if step == num_draft_tokens - 1:
        return
    buffers.input_ids[:num_reqs] = tokens.to(torch.int32)
    buffers.sample_positions[:num_reqs] += 1
    buffers.positions[:num_reqs] = (buffers.positions[:num_reqs] + 1).clamp(max=max_model_len - 1)
    lengths = buffers.seq_lens[:num_reqs]
    buffers.seq_lens[:num_reqs] = torch.where(lengths == 0, 0, (lengths + 1).clamp(max=max_model_len))
    buffers.hidden_states[:num_reqs] = feedback[:num_reqs]
    if slot_table is None:
        return
    has_token = buffers.query_start_loc[:num_reqs].diff(append=buffers.query_start_loc[num_reqs : num_reqs + 1]) > 0
    of_request = buffers.idx_mapping[:num_reqs] >= 0
    look_up_slots_reference(slot_table, buffers, (has_token & of_request).nonzero().flatten().tolist())
