"""Each draft phase, graphs included, takes the batch that was left for it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

from vllm_eagle_mrv2.batch.buffers import DraftBatch, DraftBuffers
from vllm_eagle_mrv2.batch.queue import _TENSORS, BatchQueue
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.kernels.prefill_inputs import prepare_prefill_inputs, prepare_prefill_inputs_reference

from .test_kernels import DEVICE, assert_same, clone, ints, needs_device, poisoned, target_batch

pytestmark = [needs_device, pytest.mark.any_release]


def queue_of(*batches: DraftBatch, filters: bool = True, depth: int = 64) -> BatchQueue:
    queue = BatchQueue(torch.device(DEVICE), filters=filters, depth=depth)
    for batch in batches:
        queue.put(batch)
    return queue


def take(queue: BatchQueue, buffers: DraftBuffers | None = None) -> DraftBuffers:
    """What a replay does with the queue; the buffers after it."""
    buffers = poisoned(8, 64) if buffers is None else buffers
    prepare_prefill_inputs(buffers, queue, 8)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return buffers


def without_requests(buffers: DraftBuffers) -> DraftBuffers:
    """What a batch of none leaves behind."""
    expected = clone(buffers)
    for name in ("query_start_loc", "seq_lens", "last_token_indices", "sample_positions", "draft_step", "live_reqs"):
        getattr(expected, name).zero_()
    expected.idx_mapping.fill_(-1)
    return expected


def test_every_replay_takes_the_next_batch() -> None:
    """The adapter is three batches ahead, and goes round the entries several times."""
    queue, waiting = queue_of(depth=4), []
    for seed in range(0, 30, 2):
        waiting.append(target_batch([1 + seed % 4] * (1 + seed % 7), seed=seed))
        queue.put(waiting[-1])
        if len(waiting) == 4:
            expected = poisoned(8, 64)
            prepare_prefill_inputs_reference(expected, waiting[0])
            assert_same(take(queue), expected)
            waiting.pop(0)
            assert int(queue.taken) == int(queue.seen) == seed // 2 - 2


def test_a_full_queue_waits_for_the_gpu() -> None:
    first, second, third = (target_batch([2] * number) for number in (1, 2, 3))
    queue = queue_of(first, second, depth=2)
    behind = threading.Thread(target=queue.put, args=(third,), daemon=True)
    behind.start()
    time.sleep(0.2)
    assert behind.is_alive()
    assert take(queue).live_reqs == 1
    behind.join(10)
    assert not behind.is_alive()
    assert [int(take(queue).live_reqs) for _ in range(2)] == [2, 3]


def test_a_gpu_that_takes_nothing_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = target_batch([2])
    queue = queue_of(batch, batch, depth=2)
    monkeypatch.setattr("vllm_eagle_mrv2.batch.queue._PATIENCE_S", 0.05)
    with pytest.raises(EagleMRV2Error, match=r"the GPU has taken none of 2 waiting draft batches for 0\.05 s"):
        queue.put(batch)


def test_an_empty_queue_holds_no_requests() -> None:
    """As passes before a capture find it."""
    before = poisoned(8, 64)
    assert_same(take(queue_of(), clone(before)), without_requests(before))


def test_what_came_before_a_capture_is_forgotten() -> None:
    before, after = target_batch([2]), target_batch([2, 2])
    queue = queue_of(before, before, before, depth=4)
    for _ in range(5):
        take(queue)
    queue.clear()
    assert int(queue.taken) == int(queue.seen) == 0
    assert not queue.entries.any()
    queue.put(after)
    assert take(queue).live_reqs == 2


@pytest.mark.parametrize("name", _TENSORS)
def test_a_type_that_the_graph_does_not_read(name: str) -> None:
    batch = target_batch([2, 2])
    queue = queue_of(batch)  # that one was right
    wrong = replace(batch, **{name: getattr(batch, name).to(torch.int16)})
    with pytest.raises(EagleMRV2Error, match=rf"cannot read a batch with {name} torch.int16; go back to vLLM's own"):
        queue.put(wrong)
    queue.put(batch)
    assert [int(take(queue).live_reqs) for _ in range(3)] == [2, 2, 0]


def test_filters_that_are_missing() -> None:
    batch = replace(target_batch([2]), top_k=None, top_p=None)
    with pytest.raises(EagleMRV2Error, match="top_k None, top_p None"):
        queue_of(batch)
    queue_of(batch, filters=False)
    queue_of(replace(batch, dummy_run=True))  # profiling comes before there are sampling states


def test_the_tensors_may_lie_anywhere() -> None:
    """Addresses are of the batch at hand: none is kept from the first."""
    batch = target_batch([4, 2], rejected=[1, 0])
    names = [name for name in _TENSORS if name != "idx_mapping"]
    moved = replace(batch, **{name: getattr(batch, name).clone() for name in names}, idx_mapping=ints([7, 1]))
    queue = queue_of(batch, moved)
    take(queue)
    for name in names:
        getattr(batch, name).fill_(1)
    expected = poisoned(8, 64)
    prepare_prefill_inputs_reference(expected, moved)
    assert_same(take(queue), expected)
