"""Inputs of the draft prefill, from the target's batch."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_eagle_mrv2.batch.buffers import DraftBatch, DraftBuffers
from vllm_eagle_mrv2.batch.queue import FIELDS, INDEX_WIDTH, NUM_REQS, BatchQueue, place_of
from vllm_eagle_mrv2.kernels.launching import launch

_BLOCK = 1024

# Field numbers in an entry of the queue.
_NUM_REQS = tl.constexpr(NUM_REQS)
_INDEX_WIDTH = tl.constexpr(INDEX_WIDTH)
_IDX_MAPPING = tl.constexpr(place_of("idx_mapping"))
_NUM_SAMPLED = tl.constexpr(place_of("num_sampled"))
_NUM_REJECTED = tl.constexpr(place_of("num_rejected"))
_INPUT_IDS = tl.constexpr(place_of("input_ids"))
_POSITIONS = tl.constexpr(place_of("positions"))
_QUERY_START_LOC = tl.constexpr(place_of("query_start_loc"))
_SEQ_LENS = tl.constexpr(place_of("seq_lens"))
_LAST_SAMPLED = tl.constexpr(place_of("last_sampled"))
_NEXT_PREFILL_TOKENS = tl.constexpr(place_of("next_prefill_tokens"))
_TEMPERATURE = tl.constexpr(place_of("temperature"))
_SEEDS = tl.constexpr(place_of("seeds"))
_TOP_K = tl.constexpr(place_of("top_k"))
_TOP_P = tl.constexpr(place_of("top_p"))


@triton.jit
def _take_entry_kernel(entries_ptr, taken_ptr, seen_ptr, entry_ptr, depth, FIELDS: tl.constexpr):
    each = tl.arange(0, FIELDS)
    taken = tl.load(taken_ptr)
    # Volatile, to bypass the caches: the CPU has just written the entry.
    tl.store(entry_ptr + each, tl.load(entries_ptr + taken % depth * FIELDS + each, volatile=True))
    tl.debug_barrier()  # the CPU may overwrite the entry from here on
    tl.store(taken_ptr, taken + 1)
    tl.store(seen_ptr, taken + 1)


@triton.jit
def _address(entry_ptr, number: tl.constexpr, dtype: tl.constexpr):
    return tl.load(entry_ptr + number).to(tl.pointer_type(dtype))


# Specialized variants (1, multiples of 16) would be compiled for nothing.
@triton.jit(do_not_specialize=["max_num_reqs"])
def _prefill_inputs_kernel(
    entry_ptr,
    input_ids_ptr,
    positions_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    top_k_ptr,
    top_p_ptr,
    last_token_indices_ptr,
    sample_positions_ptr,
    draft_step_ptr,
    num_rejected_ptr,
    live_reqs_ptr,
    max_num_reqs,
    SAMPLE_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    num_reqs = tl.load(entry_ptr + _NUM_REQS).to(tl.int32)
    if row > num_reqs:
        return
    target_query_start_loc_ptr = _address(entry_ptr, _QUERY_START_LOC, tl.int32)
    if row == num_reqs:
        # Padding, which a replayed graph reads beyond the live requests.  An empty entry has no addresses.
        end = tl.load(target_query_start_loc_ptr + num_reqs, mask=num_reqs > 0, other=0)
        for first in range(num_reqs, max_num_reqs + 1, BLOCK):
            padded = first + lanes
            tl.store(query_start_loc_ptr + padded, end, mask=padded < max_num_reqs + 1)
            inside = padded < max_num_reqs
            tl.store(seq_lens_ptr + padded, 0, mask=inside)
            tl.store(last_token_indices_ptr + padded, 0, mask=inside)
            tl.store(sample_positions_ptr + padded, 0, mask=inside)
            tl.store(draft_step_ptr + padded, 0, mask=inside)
            tl.store(idx_mapping_ptr + padded, -1, mask=inside)
        tl.store(live_reqs_ptr, num_reqs)
        return

    # Of an int64 index this reads the low half.
    state = tl.load(_address(entry_ptr, _IDX_MAPPING, tl.int32) + row * tl.load(entry_ptr + _INDEX_WIDTH)).to(tl.int64)
    start = tl.load(target_query_start_loc_ptr + row)
    end = tl.load(target_query_start_loc_ptr + row + 1)
    num_rejected = tl.load(_address(entry_ptr, _NUM_REJECTED, tl.int32) + row)
    num_sampled = tl.load(_address(entry_ptr, _NUM_SAMPLED, tl.int32) + row)
    seq_len = tl.load(_address(entry_ptr, _SEQ_LENS, tl.int32) + row)
    # vLLM keeps some of these in host memory; nothing is stored before, so that they are fetched at the same time.
    temperature = tl.load(_address(entry_ptr, _TEMPERATURE, tl.float32) + state)
    seed = tl.load(_address(entry_ptr, _SEEDS, tl.int64) + state)
    filters = tl.load(entry_ptr + _TOP_K) != 0  # drafts honour top-k and top-p
    top_k = tl.load(_address(entry_ptr, _TOP_K, tl.int32) + state, mask=filters, other=0)
    top_p = tl.load(_address(entry_ptr, _TOP_P, tl.float32) + state, mask=filters, other=0.0)
    sampled = tl.load(_address(entry_ptr, _LAST_SAMPLED, tl.int64) + state, mask=num_sampled > 0, other=0)
    # A request in the middle of its prompt sampled nothing: its next prompt token follows.
    prompted = tl.load(_address(entry_ptr, _NEXT_PREFILL_TOKENS, tl.int32) + state, mask=num_sampled <= 0, other=0)
    length = end - start - num_rejected
    last = start + length - 1
    target_positions_ptr = _address(entry_ptr, _POSITIONS, tl.int64)
    last_position = tl.load(target_positions_ptr + last)

    # Tokens move one place to the left; the last place takes the token that follows.
    target_input_ids_ptr = _address(entry_ptr, _INPUT_IDS, tl.int32)
    for offset in range(0, length, BLOCK):
        token = offset + lanes
        inside = token < length
        shifted = tl.load(target_input_ids_ptr + start + token + 1, mask=token + 1 < length, other=0)
        positions = tl.load(target_positions_ptr + start + token, mask=inside)
        tl.store(input_ids_ptr + start + token, shifted, mask=token + 1 < length)
        tl.store(positions_ptr + start + token, positions, mask=inside)
    tl.store(input_ids_ptr + last, tl.where(num_sampled > 0, sampled.to(tl.int32), prompted))

    tl.store(query_start_loc_ptr + row, start)
    tl.store(seq_lens_ptr + row, seq_len)
    tl.store(num_rejected_ptr + row, num_rejected)
    tl.store(draft_step_ptr + row, 0)
    tl.store(last_token_indices_ptr + row, last)
    tl.store(sample_positions_ptr + row, last_position + SAMPLE_OFFSET)
    tl.store(idx_mapping_ptr + row, state)
    tl.store(temperature_ptr + state, temperature)
    tl.store(seeds_ptr + state, seed)
    tl.store(top_k_ptr + state, top_k, mask=filters)
    tl.store(top_p_ptr + state, top_p, mask=filters)


def prepare_prefill_inputs(buffers: DraftBuffers, queue: BatchQueue, num_rows: int, *, sample_offset: int = 0) -> None:
    """Fill the draft's buffers for the draft prefill of a queue's next batch, in two launches that a graph can contain.

    A draft sees the same tokens as the target, one place to the left (EAGLE, arXiv 2401.15077).  A row ``i`` with
    tokens ``t[0..n)``, the last ``num_rejected[i]`` of them rejected so that ``n'`` remain, gets ``t[1..n')`` and then
    the token that follows.  Rejected places keep their values, which no live row reads.  Beyond the live requests
    ``query_start_loc`` repeats its last value, ``seq_lens`` and ``last_token_indices`` are 0 (#39773) and
    ``idx_mapping`` is -1, so a padded row of a replayed graph touches no request.  ``num_rejected`` and ``live_reqs``
    are stored for the draft decodes, because a graph that contains them takes no arguments.

    One warp fetches the entry over the bus.  When each program fetched it, two programs took 9.4 us on an H200.

    Args:
        buffers: the draft's buffers, written.
        queue: its next entry is taken, on the device; an empty entry is a batch without requests.
        num_rows: the maximum number of requests of the batch.
        sample_offset: what this release's sampler adds to a position to key its random numbers (0 or 1).
    """
    launch(_take_entry_kernel, (1,))(
        queue.entries, queue.taken, queue.seen, queue.entry, len(queue.entries), FIELDS=FIELDS, num_warps=1
    )
    launch(_prefill_inputs_kernel, (num_rows + 1,))(
        queue.entry,
        buffers.input_ids,
        buffers.positions,
        buffers.query_start_loc,
        buffers.seq_lens,
        buffers.idx_mapping,
        buffers.temperature,
        buffers.seeds,
        buffers.top_k,
        buffers.top_p,
        buffers.last_token_indices,
        buffers.sample_positions,
        buffers.draft_step,
        buffers.num_rejected,
        buffers.live_reqs,
        buffers.max_num_reqs,
        SAMPLE_OFFSET=sample_offset,
        BLOCK=_BLOCK,
    )


def prepare_prefill_inputs_reference(buffers: DraftBuffers, batch: DraftBatch, *, sample_offset: int = 0) -> None:
    """`prepare_prefill_inputs` in plain torch."""
    live = 0 if batch.dummy_run else batch.num_reqs
    for row in range(live):
        start = int(batch.query_start_loc[row])
        end = int(batch.query_start_loc[row + 1]) - int(batch.num_rejected[row])
        state = int(batch.idx_mapping[row])
        sampled = int(batch.num_sampled[row]) > 0
        following = batch.last_sampled.view(-1)[state] if sampled else batch.next_prefill_tokens.view(-1)[state]
        buffers.input_ids[start : end - 1] = batch.input_ids[start + 1 : end]
        buffers.input_ids[end - 1] = following
        buffers.positions[start:end] = batch.positions[start:end]
        buffers.last_token_indices[row] = end - 1
        buffers.sample_positions[row] = batch.positions[end - 1] + sample_offset
        buffers.num_rejected[row] = batch.num_rejected[row]
        buffers.idx_mapping[row] = state
        buffers.temperature[state] = batch.temperature[state]
        buffers.seeds[state] = batch.seeds[state]
        if batch.top_k is not None and batch.top_p is not None:
            buffers.top_k[state], buffers.top_p[state] = batch.top_k[state], batch.top_p[state]
    buffers.query_start_loc[: live + 1] = batch.query_start_loc[: live + 1]
    buffers.query_start_loc[live:] = batch.query_start_loc[live]
    buffers.seq_lens[:live] = batch.seq_lens[:live]
    buffers.seq_lens[live:] = 0
    buffers.last_token_indices[live:] = 0
    buffers.sample_positions[live:] = 0
    buffers.idx_mapping[live:] = -1
    buffers.draft_step.fill_(0)
    buffers.live_reqs.fill_(live)
