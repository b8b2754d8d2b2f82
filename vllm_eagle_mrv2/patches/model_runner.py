"""What a speculator of ours needs of the target's runner beyond what vLLM hands it.

Five more seams, made only in processes that build our speculator:

* before ``GPUModelRunner.load_model``, the target is spared to return auxiliary hidden states that the draft does not
  take; below 0.33 stock has it return them for every EAGLE-3 head, and starts from them;
* after ``GPUModelRunner.initialize_kv_cache``, which comes before every capture, it is given the requests' states and
  sampling parameters and the target's graph manager, and below 0.26 the target's buffers and attention groups, which
  0.26 passes to ``set_attn`` (#48261); then all is known of how it will draft, and it says so;
* after ``GPUModelRunner.capture_model``, which returns without asking the speculator where the target has nothing to
  capture, as with an attention backend that has graphs for one token a request only: a draft decode has one;
* after ``warmup_kernels``, whose made-up requests are forgotten;
* around ``GPUModelRunner.post_kv_cache_wake_up`` (0.22 to 0.28), which puts new tensors in the place of those that slot
  mappings are computed from, while graphs of ours, and stock's own of 0.28, hold the addresses of the old ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

from vllm_eagle_mrv2.config.draft_config import takes_auxiliary_states
from vllm_eagle_mrv2.patches.engine_args import wrap
from vllm_eagle_mrv2.releases.common import StockAdapter
from vllm_eagle_mrv2.releases.unused_drafts import keep_longest_lengths

logger = init_logger("vllm.eagle_mrv2")


class TakesTargetInputs:
    """A speculator that needs the target's buffers and groups."""

    target_input_buffers: Any = None
    target_attn_groups: Any = None


def install() -> None:
    """Wrap the methods, once."""
    wrap(GPUModelRunner, "load_model", _without_unread_states)
    wrap(GPUModelRunner, "initialize_kv_cache", lambda original: _followed_by(original, _hand_over))
    wrap(GPUModelRunner, "capture_model", lambda original: _followed_by(original, _capture))
    wrap(gpu_worker, "warmup_kernels", lambda original: _followed_by(original, _forget))
    if hasattr(GPUModelRunner, "post_kv_cache_wake_up"):
        wrap(GPUModelRunner, "post_kv_cache_wake_up", _in_place)


def _followed_by(original: Callable[..., Any], after: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return after(self, result) if isinstance(self.speculator, StockAdapter) else result

    return wrapped


def _without_unread_states(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.speculator, StockAdapter) and not takes_auxiliary_states(self.speculative_config):
            self.use_aux_hidden_state_outputs = False
        return original(self, *args, **kwargs)

    return wrapped


def _hand_over(runner: Any, result: Any) -> Any:
    speculator = runner.speculator
    speculator.req_states = runner.req_states
    keep_longest_lengths(runner.req_states, runner.sampler)
    speculator.sampling_states = getattr(runner.sampler, "sampling_states", None)
    speculator.target_graphs = lambda: runner.cudagraph_manager  # another one after each scaling
    if isinstance(speculator, TakesTargetInputs):
        speculator.target_input_buffers = runner.input_buffers
        speculator.target_attn_groups = runner.attn_groups
    speculator.announce()
    return result


def _forget(runner: Any, result: Any) -> Any:
    runner.speculator.loop.counter.clear()
    return result


def _in_place(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have the block tables' new tensors written where the old ones lie, whose memory is mapped again by then."""

    def wrapped(self: Any) -> None:
        tables = self.block_tables
        old = {name: value for name, value in vars(tables).items() if isinstance(value, torch.Tensor)}
        original(self)
        if isinstance(self.speculator, StockAdapter):
            with torch.inference_mode():  # the old ones may have been made in it
                for name, tensor in old.items():
                    tensor.copy_(getattr(tables, name))
                    setattr(tables, name, tensor)

    return wrapped


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
        if is_workspace_manager_initialized():
            # Scratch memory of the graphs.  Stock forbids it to grow once there are graphs, and here it may: eager
            # passes that need more get new memory, and the graphs go on with this.
            speculator.graph_scratch = current_workspace_manager().get_simultaneous(((1,), torch.uint8))
    if hasattr(runner.kv_connector, "reset_capture_state"):
        runner.kv_connector.reset_capture_state()
    taken = int(free - torch.cuda.mem_get_info()[0])
    logger.info(
        "eagle_mrv2 captured the draft decodes of a target without graphs in %.0f s, %.2f GiB",
        time.perf_counter() - start,
        taken / 2**30,
    )
    return size + taken
