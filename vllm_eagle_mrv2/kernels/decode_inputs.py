"""Inputs of the first draft decode from the outcome of the draft prefill, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_eagle_mrv2.buffers import DraftBuffers

_BLOCK = 1024


# Batch sizes vary: a variant per value (1, multiples of 16) would be compiled in the middle of serving.
@triton.jit(do_not_specialize=["num_reqs", "max_num_reqs", "max_model_len"])
def _decode_inputs_kernel(
    draft_tokens_ptr,
    draft_tokens_stride,
    target_seq_lens_ptr,
    num_rejected_ptr,
    input_ids_ptr,
    positions_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    sample_positions_ptr,
    draft_step_ptr,
    num_reqs,
    max_num_reqs,
    max_model_len,
    SAMPLE_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if row == num_reqs:
        for start in range(0, max_num_reqs + 1, BLOCK):
            each = start + tl.arange(0, BLOCK)
            tl.store(query_start_loc_ptr + each, tl.minimum(each, num_reqs), mask=each < max_num_reqs + 1)
            padded = (each >= num_reqs) & (each < max_num_reqs)
            tl.store(seq_lens_ptr + each, 0, mask=padded)
        tl.store(draft_step_ptr, 1)
        return

    tl.store(input_ids_ptr + row, tl.load(draft_tokens_ptr + row * draft_tokens_stride).to(tl.int32))
    sample_position = tl.load(sample_positions_ptr + row)
    tl.store(sample_positions_ptr + row, sample_position + 1)
    # Drafts past max_model_len are never accepted; the clamp keeps their memory accesses inside the block table.
    position = tl.minimum(sample_position - SAMPLE_OFFSET + 1, max_model_len - 1)
    tl.store(positions_ptr + row, position)
    seq_len = tl.load(target_seq_lens_ptr + row) - tl.load(num_rejected_ptr + row) + 1
    tl.store(seq_lens_ptr + row, tl.minimum(seq_len, max_model_len))


def prepare_decode_inputs(
    buffers: DraftBuffers,
    target_seq_lens: torch.Tensor,
    num_rejected: torch.Tensor,
    num_reqs: int,
    max_model_len: int,
    *,
    sample_offset: int = 0,
) -> None:
    """Turn the state after a draft prefill into the input of the first draft decode.

    Row ``i`` holds one token: the first draft, at the position after the request's last accepted token.  Beyond the
    live requests ``query_start_loc`` repeats ``num_reqs`` and ``seq_lens`` is 0.  ``draft_step`` becomes 1.

    Args:
        buffers: the draft's buffers, read and written.
        target_seq_lens: [num_reqs] int32, lengths that the target's batch ran with, rejected tokens included.
        num_rejected: [num_reqs] int32.
        num_reqs: live requests.
        max_model_len: positions and lengths are clamped to it.
        sample_offset: as for `prepare_prefill_inputs`.
    """
    _decode_inputs_kernel[(num_reqs + 1,)](
        buffers.draft_tokens,
        buffers.draft_tokens.stride(0),
        target_seq_lens,
        num_rejected,
        buffers.input_ids,
        buffers.positions,
        buffers.query_start_loc,
        buffers.seq_lens,
        buffers.sample_positions,
        buffers.draft_step,
        num_reqs,
        buffers.max_num_reqs,
        max_model_len,
        SAMPLE_OFFSET=sample_offset,
        BLOCK=_BLOCK,
    )


def prepare_decode_inputs_reference(
    buffers: DraftBuffers,
    target_seq_lens: torch.Tensor,
    num_rejected: torch.Tensor,
    num_reqs: int,
    max_model_len: int,
    *,
    sample_offset: int = 0,
) -> None:
    """`prepare_decode_inputs` in plain torch."""
    last_positions = buffers.sample_positions[:num_reqs] - sample_offset
    buffers.input_ids[:num_reqs] = buffers.draft_tokens[:num_reqs, 0].to(torch.int32)
    buffers.positions[:num_reqs] = (last_positions + 1).clamp(max=max_model_len - 1)
    buffers.sample_positions[:num_reqs] += 1
    lengths = target_seq_lens[:num_reqs] - num_rejected[:num_reqs] + 1
    buffers.seq_lens[:num_reqs] = lengths.clamp(max=max_model_len)
    buffers.seq_lens[num_reqs:] = 0
    steps = torch.arange(buffers.max_num_reqs + 1, device=buffers.query_start_loc.device)
    buffers.query_start_loc.copy_(steps.clamp(max=num_reqs))
    buffers.draft_step.fill_(1)
