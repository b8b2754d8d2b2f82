"""The update between two draft decode steps, in one launch that a graph can hold."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_eagle_mrv2.buffers import DraftBuffers
from vllm_eagle_mrv2.kernels.greedy import best_tokens, drafted_token, padded_keys

_BLOCK = 1024


# K varies where it is dynamic: a variant per value would be compiled in the middle of serving.
@triton.jit(do_not_specialize=["num_draft_tokens", "max_model_len"])
def _step_update_kernel(
    drafted_ptr,
    num_keys,
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
    hidden_size,
    num_draft_tokens,
    max_model_len,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # A counter for each row: one for all could not be advanced while other programs read it.
    step = tl.load(draft_step_ptr + row)
    tl.store(draft_step_ptr + row, step + 1)
    if step >= num_draft_tokens:
        return
    token = drafted_token(drafted_ptr, row, num_keys, KEYS)
    tl.store(draft_tokens_ptr + row * draft_tokens_stride + step, token)
    if step == num_draft_tokens - 1:
        # Nothing follows the last step.
        return

    tl.store(input_ids_ptr + row, token.to(tl.int32))
    tl.store(sample_positions_ptr + row, tl.load(sample_positions_ptr + row) + 1)
    position = tl.load(positions_ptr + row) + 1
    tl.store(positions_ptr + row, tl.minimum(position, max_model_len - 1))
    seq_len = tl.load(seq_lens_ptr + row)
    # A padded row stays at length 0: attention must not look at its blocks.
    tl.store(seq_lens_ptr + row, tl.where(seq_len == 0, 0, tl.minimum(seq_len + 1, max_model_len)))
    for start in range(0, hidden_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < hidden_size
        values = tl.load(feedback_ptr + row * feedback_stride + column, mask=inside)
        tl.store(hidden_states_ptr + row * hidden_states_stride + column, values, mask=inside)


def update_after_step(
    buffers: DraftBuffers,
    drafted: torch.Tensor,
    feedback: torch.Tensor,
    num_reqs: int,
    num_draft_tokens: int,
    max_model_len: int,
) -> None:
    """Record the tokens of draft step ``draft_step``, make the inputs of the next one, and advance the step.

    ``draft_step`` is data on the device, so that one captured graph serves every step.

    Args:
        buffers: the draft's buffers, read and written.
        drafted: [num_reqs] int64 tokens of this step, or [num_reqs, m] int64 keys of `argmax_keys`.
        feedback: [>= num_reqs, hidden_size], hidden states that the next step starts from.
        num_reqs: rows to update; in a graph, padded ones included.
        num_draft_tokens: K of this batch; the last step only records its tokens.
        max_model_len: positions and lengths are clamped to it.
    """
    _step_update_kernel[(num_reqs,)](
        drafted,
        drafted.stride(0),
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
        feedback.shape[1],
        num_draft_tokens,
        max_model_len,
        KEYS=padded_keys(drafted),
        BLOCK=_BLOCK,
    )


def update_after_step_reference(
    buffers: DraftBuffers,
    drafted: torch.Tensor,
    feedback: torch.Tensor,
    num_reqs: int,
    num_draft_tokens: int,
    max_model_len: int,
) -> None:
    """`update_after_step` in plain torch; all rows are at the same step."""
    step = int(buffers.draft_step[0])
    buffers.draft_step[:num_reqs] += 1
    if step >= num_draft_tokens:
        return
    tokens = best_tokens(drafted)
    buffers.draft_tokens[:num_reqs, step] = tokens
    if step == num_draft_tokens - 1:
        return
    buffers.input_ids[:num_reqs] = tokens.to(torch.int32)
    buffers.sample_positions[:num_reqs] += 1
    buffers.positions[:num_reqs] = (buffers.positions[:num_reqs] + 1).clamp(max=max_model_len - 1)
    lengths = buffers.seq_lens[:num_reqs]
    buffers.seq_lens[:num_reqs] = torch.where(lengths == 0, 0, (lengths + 1).clamp(max=max_model_len))
    buffers.hidden_states[:num_reqs] = feedback[:num_reqs]
