"""What a speculator of ours needs of the target's runner beyond what vLLM hands it.

Two more seams, made only in processes that build our speculator:

* after ``GPUModelRunner.initialize_kv_cache``, which comes before every capture, it is given the requests' sampling
  parameters, and below 0.26 the target's buffers and attention groups, which 0.26 passes to ``set_attn`` (#48261);
* after ``GPUModelRunner.capture_model``, which returns without asking the speculator where the target has nothing to
  capture, as with an attention backend that has graphs for one token a request only: a draft decode has one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_eagle_mrv2.hosts.common import StockHost
from vllm_eagle_mrv2.seams import wrap

logger = init_logger("vllm.eagle_mrv2")


class TakesTargetInputs:
    """A speculator that needs the target's buffers and groups."""

    target_input_buffers: Any = None
    target_attn_groups: Any = None


def install() -> None:
    """Wrap the two methods, once."""
    wrap(GPUModelRunner, "initialize_kv_cache", lambda original: _followed_by(original, _hand_over))
    wrap(GPUModelRunner, "capture_model", lambda original: _followed_by(original, _capture))


def _followed_by(original: Callable[..., Any], after: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return after(self, result) if isinstance(self.speculator, StockHost) else result

    return wrapped


def _hand_over(runner: Any, result: Any) -> Any:
    speculator = runner.speculator
    speculator.sampling_states = getattr(runner.sampler, "sampling_states", None)
    if isinstance(speculator, TakesTargetInputs):
        speculator.target_input_buffers = runner.input_buffers
        speculator.target_attn_groups = runner.attn_groups
    return result


def _draft_workspace(runner: Any) -> AbstractContextManager[None]:
    """Where the draft's kernels take scratch memory from, apart from the target's; from 0.28 on."""
    if not hasattr(runner, "_draft_workspace_lane"):
        return nullcontext()
    from vllm.v1.worker.workspace import use_workspace_lane

    lane: AbstractContextManager[None] = use_workspace_lane(runner._draft_workspace_lane)
    return lane


def _capture(runner: Any, size: int) -> int:
    """Capture the draft decodes of a target without graphs; bytes that all graphs take on the device."""
    speculator = runner.speculator
    if (
        runner.cudagraph_manager.needs_capture()
        or speculator.num_speculative_steps == 1
        or not speculator.decode_cudagraph_manager.needs_capture()
    ):
        return size
    start, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
    with _draft_workspace(runner):
        speculator.capture()
    taken = int(free - torch.cuda.mem_get_info()[0])
    logger.info(
        "eagle_mrv2 captured the draft decodes of a target without graphs in %.0f s, %.2f GiB",
        time.perf_counter() - start,
        taken / 2**30,
    )
    return size + taken
