"""The kernels against their plain-torch references, and both against examples worked by hand.

Buffers start out full of sentinels and are compared whole, so that a stray write anywhere fails.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch

from vllm_eagle_mrv2.batch.buffers import DraftBatch, DraftBuffers, SlotTable, TargetStates
from vllm_eagle_mrv2.batch.queue import BatchQueue
from vllm_eagle_mrv2.kernels.decode_inputs import prepare_decode_inputs, prepare_decode_inputs_reference
from vllm_eagle_mrv2.kernels.greedy import argmax_keys
from vllm_eagle_mrv2.kernels.prefill_inputs import prepare_prefill_inputs, prepare_prefill_inputs_reference
from vllm_eagle_mrv2.kernels.step_update import update_after_step, update_after_step_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SENTINEL = -77
MAX_LEN = 4096  # max_model_len

needs_device = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="no GPU, and Triton is not interpreted"
)
pytestmark = [needs_device, pytest.mark.any_release, pytest.mark.slow]


def ints(values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(list(values), dtype=dtype, device=DEVICE)


def poisoned(
    max_num_reqs: int,
    max_num_tokens: int,
    *,
    num_draft_tokens: int = 3,
    hidden_size: int = 8,
    idx_dtype: torch.dtype = torch.int32,
    hidden_dtype: torch.dtype = torch.float32,
) -> DraftBuffers:
    """Buffers that hold nothing but sentinels, each the beginning of a longer tensor."""

    def full(length: int, *rest: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((length + 8, *rest), SENTINEL, dtype=dtype, device=DEVICE)[:length]

    return DraftBuffers(
        input_ids=full(max_num_tokens, dtype=torch.int32),
        positions=full(max_num_tokens, dtype=torch.int64),
        query_start_loc=full(max_num_reqs + 1, dtype=torch.int32),
        seq_lens=full(max_num_reqs, dtype=torch.int32),
        idx_mapping=full(max_num_reqs, dtype=idx_dtype),
        temperature=full(max_num_reqs, dtype=torch.float32),
        seeds=full(max_num_reqs, dtype=torch.int64),
        hidden_states=full(max_num_tokens, hidden_size, dtype=hidden_dtype),
        last_token_indices=full(max_num_reqs, dtype=torch.int64),
        sample_positions=full(max_num_reqs, dtype=torch.int64),
        draft_tokens=full(max_num_reqs, num_draft_tokens, dtype=torch.int64),
        draft_step=full(max_num_reqs, dtype=torch.int64),
        num_rejected=full(max_num_reqs, dtype=torch.int32),
        live_reqs=torch.tensor(SENTINEL, dtype=torch.int32, device=DEVICE),
        top_k=full(max_num_reqs, dtype=torch.int32),
        top_p=full(max_num_reqs, dtype=torch.float32),
    )


def whole(buffer: torch.Tensor) -> torch.Tensor:
    """A buffer with what lies behind it, where nobody may write."""
    return buffer if buffer._base is None else buffer._base


def clone(buffers: DraftBuffers) -> DraftBuffers:
    def copied(buffer: torch.Tensor) -> torch.Tensor:
        return whole(buffer).clone()[: len(buffer)] if buffer.dim() else buffer.clone()

    return DraftBuffers(**{field.name: copied(getattr(buffers, field.name)) for field in fields(DraftBuffers)})


def assert_same(actual: DraftBuffers, expected: DraftBuffers) -> None:
    for field in fields(DraftBuffers):
        found, wanted = whole(getattr(actual, field.name)), whole(getattr(expected, field.name))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=partial("{}: {}".format, field.name))


def target_batch(
    lengths: Sequence[int],
    *,
    rejected: Sequence[int] | None = None,
    sampled: Sequence[int] | None = None,
    max_num_reqs: int = 8,
    padding: int = 0,
    last_position: int | None = None,
    idx_dtype: torch.dtype = torch.int32,
    dummy_run: bool = False,
    seed: int = 0,
) -> DraftBatch:
    """A target batch of rows of these lengths, its tokens and request states drawn at random."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, size: tuple[int, ...], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(0, high, size, generator=generator).to(device=DEVICE, dtype=dtype)

    num_reqs, num_tokens = len(lengths), sum(lengths)
    starts = [0] * num_reqs if last_position is None else [last_position + 1 - length for length in lengths]
    if last_position is None:
        starts = draw(MAX_LEN - max(lengths), (num_reqs,)).tolist()
    positions = [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)]
    return DraftBatch(
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        num_tokens_padded=num_tokens + padding,
        num_draft_tokens=3,
        input_ids=draw(30_000, (num_tokens + padding,), torch.int32),
        positions=ints([*positions, *[0] * padding], torch.int64),
        query_start_loc=ints([sum(lengths[:row]) for row in range(num_reqs + 1)]),
        seq_lens=ints([start + length for start, length in zip(starts, lengths, strict=True)]),
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
        idx_mapping=torch.randperm(max_num_reqs, generator=generator)[:num_reqs].to(device=DEVICE, dtype=idx_dtype),
        target_states=TargetStates(torch.empty(0, device=DEVICE)),
        num_sampled=ints(sampled if sampled is not None else [1] * num_reqs),
        num_rejected=ints(rejected if rejected is not None else [0] * num_reqs),
        last_sampled=draw(30_000, (max_num_reqs, 1)),  # as the stock request states hold it
        next_prefill_tokens=draw(30_000, (2, max_num_reqs), torch.int32),  # two tokens of lookahead
        temperature=torch.rand(max_num_reqs, generator=generator).to(DEVICE),
        seeds=draw(2**60, (max_num_reqs,)),
        top_k=draw(1000, (max_num_reqs,), torch.int32) if seed % 2 == 0 else None,
        top_p=draw(2, (max_num_reqs,), torch.float32) if seed % 2 == 0 else None,
        dummy_run=dummy_run,
    )


PREFILL_CASES: dict[str, dict[str, Any]] = {
    "one request": {"lengths": [5]},
    "one token": {"lengths": [1]},
    "decode rows that lost 0 to K tokens": {"lengths": [4] * 4, "rejected": [0, 1, 2, 3], "padding": 3},
    "K=1": {"lengths": [2, 2], "rejected": [1, 0]},
    "full batch": {"lengths": [4, 1, 2, 3, 4, 4, 1, 2], "rejected": [1, 0, 1, 2, 3, 0, 0, 0]},
    "chunked prefill beside decode": {
        "lengths": [7, 4, 1, 300, 4],
        "rejected": [0, 2, 0, 0, 3],
        "sampled": [0, 2, 1, 0, 1],
        "padding": 5,
    },
    "rows across the block": {"lengths": [1, 1023, 1024, 1025, 2049], "sampled": [1, 0, 1, 0, 1]},
    "rejection back across the block": {"lengths": [1027, 1027, 2050], "rejected": [2, 3, 1]},
    "last position of the model": {"lengths": [4, 1], "rejected": [1, 0], "last_position": MAX_LEN - 1},
    "more padded requests than a block": {"lengths": [3, 2], "max_num_reqs": 2100},
    "dummy run": {"lengths": [3, 3], "dummy_run": True},
}


def fill(buffers: DraftBuffers, batch: DraftBatch, num_rows: int | None = None, **options: Any) -> None:
    """`prepare_prefill_inputs` for a batch of its own."""
    queue = BatchQueue(torch.device(DEVICE), filters=batch.top_k is not None)
    queue.put(batch)
    prepare_prefill_inputs(buffers, queue, num_rows or batch.num_reqs, **options)


@pytest.mark.parametrize("sample_offset", [0, 1])
@pytest.mark.parametrize("idx_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("rows", ["live", "a graph's"])
@pytest.mark.parametrize("filters", [False, True], ids=["", "top-k and top-p"])
@pytest.mark.parametrize("case", PREFILL_CASES.values(), ids=PREFILL_CASES.keys())
def test_prefill_inputs(
    case: dict[str, Any], filters: bool, rows: str, idx_dtype: torch.dtype, sample_offset: int
) -> None:
    batch = target_batch(**case, idx_dtype=idx_dtype)
    if not filters:
        batch.top_k = batch.top_p = None
    max_num_reqs = case.get("max_num_reqs", 8)
    # The draft's own mapping may be of another width than the batch's.
    own_dtype = torch.int32 if sample_offset else idx_dtype
    before = poisoned(max_num_reqs, batch.num_tokens_padded + 16, idx_dtype=own_dtype)
    actual, expected = clone(before), clone(before)

    num_rows = batch.num_reqs if rows == "live" else min(max_num_reqs, 40)
    fill(actual, batch, num_rows, sample_offset=sample_offset)
    prepare_prefill_inputs_reference(expected, batch, sample_offset=sample_offset)

    assert_same(actual, expected)


def test_prefill_inputs_by_hand() -> None:
    """Decode of 4 that lost 2, a prompt's middle, a prompt's end; two requests of padding, two tokens of padding."""
    batch = replace(
        target_batch([4, 3, 2], rejected=[2, 0, 0], sampled=[2, 0, 1], max_num_reqs=5),
        num_tokens_padded=11,
        input_ids=ints([10, 11, 12, 13, 20, 21, 22, 30, 31, 98, 99]),
        positions=ints([50, 51, 52, 53, 0, 1, 2, 6, 7, 0, 0], torch.int64),
        seq_lens=ints([54, 3, 8]),
        idx_mapping=ints([4, 0, 2]),
        last_sampled=ints([900, 901, 902, 903, 904], torch.int64),
        next_prefill_tokens=ints([800, 801, 802, 803, 804]),
        temperature=torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4], device=DEVICE),
        seeds=ints([70, 71, 72, 73, 74], torch.int64),
    )
    buffers = poisoned(5, 13)
    fill(buffers, batch, sample_offset=1)

    gone = SENTINEL
    assert buffers.input_ids.tolist() == [11, 904, gone, gone, 21, 22, 800, 31, 902, gone, gone, gone, gone]
    assert buffers.positions.tolist() == [50, 51, gone, gone, 0, 1, 2, 6, 7, gone, gone, gone, gone]
    assert buffers.query_start_loc.tolist() == [0, 4, 7, 9, 9, 9]
    assert buffers.seq_lens.tolist() == [54, 3, 8, 0, 0]
    assert buffers.idx_mapping.tolist() == [4, 0, 2, -1, -1]
    assert buffers.last_token_indices.tolist() == [1, 6, 8, 0, 0]
    assert buffers.sample_positions.tolist() == [52, 3, 8, 0, 0]
    assert buffers.seeds.tolist() == [70, gone, 72, gone, 74]
    torch.testing.assert_close(buffers.temperature.cpu(), torch.tensor([0.0, gone, 0.2, gone, 0.4]))
    assert buffers.draft_step.tolist() == [0] * 5
    assert (buffers.draft_tokens == gone).all()
    assert (buffers.hidden_states == gone).all()


def test_dummy_prefill_leaves_request_states_alone() -> None:
    batch = target_batch([3, 3], dummy_run=True)
    buffers = poisoned(8, 16)
    fill(buffers, batch)

    assert buffers.idx_mapping.tolist() == [-1] * 8
    assert (buffers.temperature == SENTINEL).all()
    assert (buffers.seeds == SENTINEL).all()


def drafted(num_rows: int, form: str) -> torch.Tensor:
    """Draft tokens of rows, in a form of `how_drafted`."""
    generator = torch.Generator().manual_seed(1)
    if form == "tokens":
        return torch.randint(0, 30_000, (num_rows,), generator=generator).to(DEVICE)
    if form == "pairs":
        scores = torch.randint(-3, 3, (num_rows, 5), generator=generator)  # many are equal
        tokens = torch.stack([torch.randperm(30_000, generator=generator)[:5] for _ in range(num_rows)])
        return torch.stack((scores, tokens), dim=1).to(DEVICE)
    return argmax_keys(torch.randn(num_rows, 5 * 2048 + 1, generator=generator).to(DEVICE))


@pytest.mark.parametrize("sample_offset", [0, 1])
@pytest.mark.parametrize("case", PREFILL_CASES.values(), ids=PREFILL_CASES.keys())
@pytest.mark.parametrize("num_draft_tokens", [1, 3], ids="K={}".format)
@pytest.mark.parametrize("rows", ["live", "a graph's", "fewer"])
@pytest.mark.parametrize("form", ["tokens", "keys", "pairs"])
def test_decode_inputs(case: dict[str, Any], num_draft_tokens: int, sample_offset: int, rows: str, form: str) -> None:
    batch = target_batch(**case)
    max_num_reqs = case.get("max_num_reqs", 8)
    num_rows = {"live": batch.num_reqs, "a graph's": min(max_num_reqs, 40), "fewer": max(batch.num_reqs - 1, 1)}[rows]
    before = poisoned(max_num_reqs, batch.num_tokens_padded + 48, num_draft_tokens=num_draft_tokens, hidden_size=1027)
    prepare_prefill_inputs_reference(before, batch, sample_offset=sample_offset)
    before.query_start_loc.fill_(SENTINEL)
    before.last_token_indices[batch.num_reqs :] = 0
    feedback = torch.randn(batch.num_tokens_padded, 2060, device=DEVICE)[:, 3:1030]
    first = drafted(num_rows, form)
    actual, expected = clone(before), clone(before)

    prepare_decode_inputs(actual, first, feedback, num_rows, MAX_LEN, sample_offset=sample_offset)
    prepare_decode_inputs_reference(expected, first, feedback, num_rows, MAX_LEN, sample_offset=sample_offset)

    assert_same(actual, expected)


@pytest.mark.parametrize("rows", ["live", "a graph's", "fewer"])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("idx_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("case", PREFILL_CASES.values(), ids=PREFILL_CASES.keys())
def test_decode_inputs_look_up_the_first_slots(
    case: dict[str, Any], idx_dtype: torch.dtype, block_size: int, rows: str
) -> None:
    batch = target_batch(**case)
    max_num_reqs = case.get("max_num_reqs", 8)
    num_rows = {"live": batch.num_reqs, "a graph's": min(max_num_reqs, 40), "fewer": max(batch.num_reqs - 1, 1)}[rows]
    before = poisoned(max_num_reqs, batch.num_tokens_padded + 48)
    prepare_prefill_inputs_reference(before, batch)
    before = replace(before, idx_mapping=before.idx_mapping.to(idx_dtype))
    before.last_token_indices[batch.num_reqs :] = 0
    feedback = torch.randn(batch.num_tokens_padded, before.hidden_states.shape[1], device=DEVICE)
    num_blocks = -(-MAX_LEN // block_size)
    states = int(before.idx_mapping.max()) + 1
    blocks = torch.randperm(max(states, 1) * num_blocks, device=DEVICE).to(torch.int32).view(-1, num_blocks)
    tables = [SlotTable(blocks, torch.full((max_num_reqs + 2,), SENTINEL, device=DEVICE), block_size) for _ in range(2)]
    actual, expected = clone(before), clone(before)

    prepare_decode_inputs(actual, drafted(num_rows, "tokens"), feedback, num_rows, MAX_LEN, tables[0])
    prepare_decode_inputs_reference(expected, drafted(num_rows, "tokens"), feedback, num_rows, MAX_LEN, tables[1])

    assert_same(actual, expected)
    assert tables[0].slots.tolist() == tables[1].slots.tolist()
    live = 0 if case.get("dummy_run") else min(batch.num_reqs, num_rows)
    assert (tables[0].slots >= 0).tolist() == [row < live for row in range(max_num_reqs + 2)]
    assert (tables[0].slots[num_rows:] == SENTINEL).all()


@pytest.mark.parametrize("sample_offset", [0, 1])
@pytest.mark.parametrize("num_rows", [3, 4, 5])
@pytest.mark.parametrize("hidden_size", [2, 9000])
def test_decode_inputs_by_hand(hidden_size: int, num_rows: int, sample_offset: int) -> None:
    """Three requests of a model of 100 positions: one that lost 2 tokens, one at the very end, one just before it."""
    buffers = poisoned(5, 8, hidden_size=hidden_size)
    buffers.live_reqs.fill_(3)
    buffers.seq_lens[:3], buffers.num_rejected[:3] = ints([54, 100, 99]), ints([2, 0, 0])
    buffers.last_token_indices[:] = ints([1, 4, 5, 0, 0], torch.int64)
    buffers.sample_positions[:3] = ints([51, 99, 98], torch.int64) + sample_offset
    first = ints([7, 8, 9, 10, 11][:num_rows], torch.int64)
    feedback = torch.arange(6.0, device=DEVICE)[:, None].repeat(1, hidden_size)
    prepare_decode_inputs(buffers, first, feedback, num_rows, 100, sample_offset=sample_offset)

    gone = SENTINEL
    padded = [gone] * (5 - num_rows)
    assert buffers.draft_tokens.tolist() == [[token, gone, gone] for token in [*first.tolist(), *padded]]
    states = ints([1, 4, 5, 0, 0][:num_rows] + padded + [gone] * 3)
    assert (buffers.hidden_states == states[:, None]).all()
    assert buffers.input_ids.tolist() == [7, 8, 9] + [gone] * 5
    assert buffers.positions.tolist() == [52, 99, 99] + [gone] * 5
    assert buffers.seq_lens.tolist() == [53, 100, 100, 0, 0]
    assert buffers.query_start_loc.tolist() == [0, 1, 2, 3, 3, 3]
    assert buffers.sample_positions.tolist() == [
        52 + sample_offset,
        100 + sample_offset,
        99 + sample_offset,
        gone,
        gone,
    ]
    assert buffers.draft_step.tolist() == [1] * 5


def decoding(
    num_rows: int,
    step: int,
    *,
    hidden_size: int = 8,
    hidden_dtype: torch.dtype = torch.float32,
    form: str = "tokens",
) -> tuple[DraftBuffers, torch.Tensor, torch.Tensor]:
    """Buffers in the middle of decodes, draft tokens, and hidden states of two rows more than needed."""
    buffers = poisoned(8, 12, hidden_size=hidden_size, hidden_dtype=hidden_dtype)
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(1, MAX_LEN, (num_rows,), generator=generator)
    lengths[: num_rows // 2] = MAX_LEN  # at the limit
    buffers.seq_lens[:num_rows] = lengths.to(DEVICE, torch.int32)
    buffers.positions[:num_rows] = lengths.to(DEVICE) - 1
    buffers.sample_positions[:num_rows] = lengths.to(DEVICE)
    buffers.draft_step.fill_(step)
    feedback = torch.randn(num_rows + 2, hidden_size, generator=generator).to(DEVICE, hidden_dtype)
    return buffers, drafted(num_rows, form), feedback


@pytest.mark.parametrize("num_rows", [1, 3, 8])
@pytest.mark.parametrize("step", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3], ids="K={}".format)
@pytest.mark.parametrize("form", ["tokens", "keys", "pairs"])
def test_update(num_rows: int, step: int, num_draft_tokens: int, form: str) -> None:
    before, sampled, feedback = decoding(num_rows, step, form=form)
    before.seq_lens[num_rows - 1] = 0  # a padded row
    actual, expected = clone(before), clone(before)

    update_after_step(actual, sampled, feedback, num_rows, num_draft_tokens, MAX_LEN)
    update_after_step_reference(expected, sampled, feedback, num_rows, num_draft_tokens, MAX_LEN)

    assert_same(actual, expected)


@pytest.mark.parametrize("live", [0, 1, 2, 6])
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 16, 400])
@pytest.mark.parametrize("idx_dtype", [torch.int32, torch.int64], ids=str)
def test_update_looks_up_the_next_slots(live: int, step: int, block_size: int, idx_dtype: torch.dtype) -> None:
    """Live requests, three of them at the limit, a row of a dummy run, which names no request, and padding."""
    num_rows = 7
    before, sampled, feedback = decoding(num_rows, step)
    before = replace(before, idx_mapping=torch.full((8,), -1, dtype=idx_dtype, device=DEVICE))
    before.idx_mapping[:live] = ints(range(7, 7 - live, -1), idx_dtype)
    before.idx_mapping[live + 1 :] = 3
    before.query_start_loc.copy_(ints([min(row, live + 1) for row in range(9)]))
    num_blocks = -(-MAX_LEN // block_size)
    blocks = torch.arange(8 * num_blocks, dtype=torch.int32, device=DEVICE).view(8, num_blocks)
    tables = [SlotTable(blocks, torch.full((12,), -1, device=DEVICE), block_size) for _ in range(2)]
    actual, expected = clone(before), clone(before)

    update_after_step(actual, sampled, feedback, num_rows, 3, MAX_LEN, tables[0])
    update_after_step_reference(expected, sampled, feedback, num_rows, 3, MAX_LEN, tables[1])

    assert_same(actual, expected)
    assert tables[0].slots.tolist() == tables[1].slots.tolist()
    assert (tables[0].slots >= 0).tolist() == [step == 1 and row < live for row in range(12)]


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hidden_size", [1, 7, 1023, 1024, 1025, 2880, 4096, 4097, 12288])
def test_update_copies_every_hidden_column(hidden_size: int, hidden_dtype: torch.dtype) -> None:
    before, sampled, feedback = decoding(3, 1, hidden_size=hidden_size, hidden_dtype=hidden_dtype)
    actual, expected = clone(before), clone(before)
    update_after_step(actual, sampled, feedback, 3, 3, MAX_LEN)
    update_after_step_reference(expected, sampled, feedback, 3, 3, MAX_LEN)

    assert_same(actual, expected)
    torch.testing.assert_close(actual.hidden_states[:3], feedback[:3], rtol=0, atol=0)


def test_update_reads_feedback_by_its_stride() -> None:
    """Hidden states may be slices of wider tensors, the buffer's as well."""
    before, sampled, _ = decoding(3, 1, hidden_size=16)
    wide = torch.arange(5 * 24, dtype=torch.float32, device=DEVICE).view(5, 24)
    buffers = replace(before, hidden_states=before.hidden_states[:, :8])
    update_after_step(buffers, sampled, wide[:, 8:16], 3, 3, MAX_LEN)

    torch.testing.assert_close(before.hidden_states[:3, :8], wide[:3, 8:16], rtol=0, atol=0)
    assert (before.hidden_states[:, 8:] == SENTINEL).all()
    assert (before.hidden_states[3:] == SENTINEL).all()


def test_update_by_hand() -> None:
    """Rows in the middle, at the limit and padded, of a model of 100 positions."""
    buffers = poisoned(4, 6, hidden_size=2)
    buffers.positions[:3] = ints([9, 99, 0], torch.int64)
    buffers.sample_positions[:3] = ints([10, 102, 0], torch.int64)
    buffers.seq_lens[:3] = ints([10, 100, 0])
    buffers.draft_step.fill_(1)
    update_after_step(buffers, ints([5, 6, 7], torch.int64), torch.ones(3, 2, device=DEVICE), 3, 3, 100)

    gone = SENTINEL
    assert buffers.draft_tokens.tolist() == [[gone, 5, gone], [gone, 6, gone], [gone, 7, gone], [gone] * 3]
    assert buffers.input_ids.tolist() == [5, 6, 7, gone, gone, gone]
    assert buffers.positions.tolist() == [10, 99, 1, gone, gone, gone]
    assert buffers.sample_positions.tolist() == [11, 103, 1, gone]
    assert buffers.seq_lens.tolist() == [11, 100, 0, gone]
    assert buffers.hidden_states[:4].tolist() == [[1, 1]] * 3 + [[gone, gone]]
    assert buffers.draft_step.tolist() == [2, 2, 2, 1]


def test_last_step_only_records() -> None:
    before, sampled, feedback = decoding(3, 2)
    actual = clone(before)
    update_after_step(actual, sampled, feedback, 3, 3, MAX_LEN)

    expected = clone(before)
    expected.draft_tokens[:3, 2] = sampled
    expected.draft_step[:3] += 1
    assert_same(actual, expected)


@pytest.mark.parametrize("step", [3, 4])
def test_steps_beyond_the_last_write_nothing_else(step: int) -> None:
    before, sampled, feedback = decoding(3, step)
    actual = clone(before)
    update_after_step(actual, sampled, feedback, 3, 3, MAX_LEN)

    before.draft_step[:3] += 1
    assert_same(actual, before)
