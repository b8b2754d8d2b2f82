"""Drafts that continue an earlier place of a request's own text, found in one launch that a graph can contain."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from vllm_eagle_mrv2.batch.buffers import DraftBuffers, Lookup
from vllm_eagle_mrv2.kernels.launching import launch

LEAST_MATCH = 3
"""Tokens before an earlier place that must be those at the end of the text, if what stands there is the first draft."""
SURE_MATCH = 8
"""Likewise, whatever the first draft is: where the two differ, SmolLM2 goes on with the match four times as often."""
MOST_MATCH = 16
"""Matches are compared up to this length; of two equally long ones the later counts."""
_SPLITS = 8
_BLOCK = 1024
_LOGITS_BLOCK = 4096


# Batch sizes vary: specialized variants would be compiled during serving.
@triton.jit(do_not_specialize=["num_columns", "tokens_stride", "max_len"])
def _lookup_kernel(
    tokens_ptr,
    tokens_stride,
    lengths_ptr,
    idx_mapping_ptr,
    live_reqs_ptr,
    draft_tokens_ptr,
    draft_tokens_stride,
    input_ids_ptr,
    best_ptr,
    arrived_ptr,
    found_ptr,
    found_stride,
    num_columns,
    max_len,
    LEAST: tl.constexpr,
    SURE: tl.constexpr,
    MOST: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    out = found_ptr + row * found_stride + column
    request = tl.load(idx_mapping_ptr + row).to(tl.int64)
    if (row >= tl.load(live_reqs_ptr)) | (request < 0):
        if split == 0:
            tl.store(out, tl.full([COLUMNS], -1, tl.int64), mask=column < num_columns)
        return
    length = tl.minimum(tl.load(lengths_ptr + request), max_len)
    text = tokens_ptr + request * tokens_stride
    first = tl.load(draft_tokens_ptr + row * draft_tokens_stride)
    last = tl.load(text + length - 1, mask=length > 0, other=-1)

    # A key has the length of the match in its upper half, and in its lower one the place that follows it.
    best = tl.zeros([], tl.int64)
    share = tl.cdiv(length, SPLITS * BLOCK) * BLOCK
    for start in range(split * share, tl.minimum((split + 1) * share, length), BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = (place >= LEAST) & (place < length)
        same = inside & (tl.load(text + place - 1, mask=inside, other=-2) == last)
        if tl.max(same.to(tl.int32)) > 0:
            agrees = tl.load(text + place, mask=same, other=-1) == first
            matched = same.to(tl.int64)
            for back in tl.static_range(2, MOST + 1):
                same = same & (place >= back)
                now = tl.load(text + length - back, mask=length >= back, other=-1)
                same = same & (tl.load(text + place - back, mask=same, other=-2) == now)
                matched += same.to(tl.int64)
            keys = tl.where(matched >= tl.where(agrees, LEAST, SURE), (matched << 32) | place, 0)
            best = tl.maximum(best, tl.max(keys))
    if best > 0:
        tl.atomic_max(best_ptr + row, best)
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") != SPLITS - 1:
        return
    best = tl.load(best_ptr + row, cache_modifier=".cg")
    place = best & 0xFFFFFFFF
    # Where the earlier place reaches the end of the text, it goes on with the drafts: the text repeats itself.
    period = tl.maximum(length - place, 1)
    drafts = tl.load(text + place + column % period, mask=(best > 0) & (column < num_columns), other=-1)
    sure = (best >> 32) >= SURE
    tl.store(out, tl.where((column > 0) | sure, drafts.to(tl.int64), -1), mask=column < num_columns)
    token = tl.load(text + place, mask=sure, other=0)
    tl.store(draft_tokens_ptr + row * draft_tokens_stride, token.to(tl.int64), mask=sure)
    tl.store(input_ids_ptr + row, token, mask=sure)
    tl.store(best_ptr + row, best * 0)
    tl.store(arrived_ptr + row, 0)


def look_up_drafts(buffers: DraftBuffers, lookup: Lookup, num_rows: int) -> None:
    """Find drafts that continue the earlier place of a request's text that is most like its end.

    An earlier place counts where at least `SURE_MATCH` tokens before it are those at the end of the text, or at least
    `LEAST_MATCH` and the token there is the first draft.  The longest match counts, up to `MOST_MATCH` tokens, and of
    several the latest.  The tokens there are written to ``lookup.found``, -1 where there are none.  A sure match
    replaces the first draft as well; of another one the first token stays the head's, and counts as not found.

    Args:
        buffers: the draft's buffers with the first draft tokens, which are replaced where a match is sure, and the
            first draft decode's token ids likewise.
        lookup: the requests' texts; ``found`` is written.
        num_rows: number of rows to look up; in a graph, including padded rows, which find nothing.
    """
    num_columns = lookup.found.shape[1]
    launch(_lookup_kernel, (num_rows, _SPLITS))(
        lookup.tokens,
        lookup.tokens.stride(0),
        lookup.lengths,
        buffers.idx_mapping,
        buffers.live_reqs,
        buffers.draft_tokens,
        buffers.draft_tokens.stride(0),
        buffers.input_ids,
        lookup.best,
        lookup.arrived,
        lookup.found,
        lookup.found.stride(0),
        num_columns,
        lookup.tokens.shape[1],
        LEAST=LEAST_MATCH,
        SURE=SURE_MATCH,
        MOST=MOST_MATCH,
        SPLITS=_SPLITS,
        COLUMNS=triton.next_power_of_2(num_columns),
        BLOCK=_BLOCK,
    )


@triton.jit(do_not_specialize=["steps_ago", "found_stride", "vocab_size"])
def _found_logits_kernel(
    found_ptr,
    found_stride,
    draft_step_ptr,
    steps_ago,
    idx_mapping_ptr,
    temperature_ptr,
    logits_ptr,
    logits_stride,
    step_stride,
    vocab_size,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(idx_mapping_ptr + row).to(tl.int64)
    step = tl.load(draft_step_ptr + row) - steps_ago
    found = tl.load(found_ptr + row * found_stride + step, mask=step < COLUMNS, other=-1)
    if (request < 0) | (found < 0):
        return
    if tl.load(temperature_ptr + request) == 0.0:
        return  # nobody reads the logits of a greedy request
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.where(token == found, 0.0, float("-inf"))
    tl.store(logits_ptr + request * logits_stride + step * step_stride + token, logits, mask=token < vocab_size)


def store_found_logits(buffers: DraftBuffers, lookup: Lookup, num_rows: int, steps_ago: int = 0) -> None:
    """Make the stored logits of a draft step those of a draft that was found: no other token had a chance.

    The rejection sampler then accepts it with the target's own probability, and the output stays exact.

    Args:
        buffers: the draft's buffers; read only.
        lookup: with ``draft_logits``, of which the rows of found drafts are written where the temperature is not 0.
        num_rows: number of rows.
        steps_ago: 0 for the step at which the buffers are.
    """
    logits = lookup.draft_logits
    assert logits is not None
    vocab_size = logits.shape[2]
    launch(_found_logits_kernel, (num_rows, triton.cdiv(vocab_size, _LOGITS_BLOCK)))(
        lookup.found,
        lookup.found.stride(0),
        buffers.draft_step,
        steps_ago,
        buffers.idx_mapping,
        buffers.temperature,
        logits,
        *logits.stride()[:2],
        vocab_size,
        COLUMNS=lookup.found.shape[1],
        BLOCK=_LOGITS_BLOCK,
    )


def store_found_logits_reference(buffers: DraftBuffers, lookup: Lookup, num_rows: int, steps_ago: int = 0) -> None:
    """`store_found_logits` in plain torch."""
    logits = lookup.draft_logits
    assert logits is not None
    for row in range(num_rows):
        request, step = int(buffers.idx_mapping[row]), int(buffers.draft_step[row]) - steps_ago
        if request < 0 or step >= lookup.found.shape[1] or not buffers.temperature[request]:
            continue
        if (token := int(lookup.found[row, step])) >= 0:
            logits[request, step] = float("-inf")
            logits[request, step, token] = 0.0


def earlier_matches(text: list[int], fewest: int) -> Iterator[tuple[int, int]]:
    """(tokens matched, place after them) wherever at least so many earlier tokens are those at the end of the text."""
    for place in range(fewest, len(text)):
        matched = 0
        while matched < min(place, MOST_MATCH) and text[place - 1 - matched] == text[-1 - matched]:
            matched += 1
        if matched >= fewest:
            yield matched, place


def match_that_counts(
    text: list[int], first: int, sure: int = SURE_MATCH, least: int = LEAST_MATCH
) -> tuple[int, int] | None:
    """(tokens matched, place after them) of the match to draft from, if there is one.

    Args:
        text: of a request.
        first: the head's first draft.
        sure: tokens of a match that counts in any case.
        least: tokens of one that counts where the head's first draft agrees.
    """
    matches = earlier_matches(text, least)
    return max((one for one in matches if one[0] >= (least if text[one[1]] == first else sure)), default=None)


def what_follows(text: list[int], place: int, count: int) -> list[int]:
    """So many tokens from a place on; where the place reaches the end of the text, the text repeats itself."""
    return [text[place + step % (len(text) - place)] for step in range(count)]


def look_up_drafts_reference(buffers: DraftBuffers, lookup: Lookup, num_rows: int) -> None:
    """`look_up_drafts` in plain Python."""
    num_columns = lookup.found.shape[1]
    lookup.found[:num_rows] = -1
    for row in range(min(num_rows, int(buffers.live_reqs))):
        request = int(buffers.idx_mapping[row])
        if request < 0:
            continue
        text = lookup.tokens[request, : int(lookup.lengths[request])].tolist()
        first = int(buffers.draft_tokens[row, 0])
        match = match_that_counts(text, first)
        if match is None:
            continue
        matched, place = match
        lookup.found[row] = torch.tensor(what_follows(text, place, num_columns))
        if matched >= SURE_MATCH:
            buffers.draft_tokens[row, 0] = buffers.input_ids[row] = text[place]
        else:
            lookup.found[row, 0] = -1
