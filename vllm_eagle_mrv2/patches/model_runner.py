"""What the speculator needs of the target's runner beyond what vLLM hands it."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from vllm_eagle_mrv2.config.draft_config import takes_auxiliary_states
from vllm_eagle_mrv2.patches.wrap import Function
from vllm_eagle_mrv2.releases.common import StockAdapter
from vllm_eagle_mrv2.releases.unused_drafts import keep_longest_lengths


class TakesTargetInputs:
    """A speculator that needs the target's buffers and groups."""

    target_input_buffers: Any = None
    target_attn_groups: Any = None


def without_unread_states(original: Function) -> Function:
    """``load_model`` after which the target returns no auxiliary hidden states that the head does not take."""

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.speculator, StockAdapter) and not takes_auxiliary_states(self.speculative_config):
            self.use_aux_hidden_state_outputs = False
        return original(self, *args, **kwargs)

    return load_model


def states_handed_over(original: Function) -> Function:
    """``initialize_kv_cache``, which comes before every capture, and after which the speculator knows the runner."""

    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        speculator = self.speculator
        if isinstance(speculator, StockAdapter):
            speculator.req_states = self.req_states
            keep_longest_lengths(self.req_states, self.sampler)
            speculator.sampling_states = getattr(self.sampler, "sampling_states", None)
            speculator.target_graphs = lambda: self.cudagraph_manager  # another one after each scaling
            if isinstance(speculator, TakesTargetInputs):
                speculator.target_input_buffers = self.input_buffers
                speculator.target_attn_groups = self.attn_groups
            speculator.announce()
        return result

    return initialize_kv_cache


def draft_captured(original: Function) -> Function:
    """``capture_model`` that captures the draft decodes of a target without graphs, too.

    Its result is the memory in bytes that all graphs take on the device.
    """

    def capture_model(self: Any, *args: Any, **kwargs: Any) -> int:
        size: int = original(self, *args, **kwargs)
        return size + _capture_draft(self) if isinstance(self.speculator, StockAdapter) else size

    return capture_model


def warm_up_forgotten(original: Function) -> Function:
    """``warmup_kernels``, whose made-up requests are not counted."""

    def warmup_kernels(runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, *args, **kwargs)
        if isinstance(runner.speculator, StockAdapter):
            runner.speculator.loop.counter.clear()
        return result

    return warmup_kernels


def tables_in_place(original: Function) -> Function:
    """``post_kv_cache_wake_up`` that has new tensors of the block tables written where the old ones lie.

    Their memory is mapped again by then.
    """

    def post_kv_cache_wake_up(self: Any) -> None:
        tables = self.block_tables
        old = {name: value for name, value in vars(tables).items() if isinstance(value, torch.Tensor)}
        original(self)
        if isinstance(self.speculator, StockAdapter):
            with torch.inference_mode():  # the old ones may have been made in it
                for name, tensor in old.items():
                    tensor.copy_(getattr(tables, name))
                    setattr(tables, name, tensor)

    return post_kv_cache_wake_up


def _draft_workspace(runner: Any) -> AbstractContextManager[None]:
    """Where the draft's kernels take scratch memory from, apart from the target's; from 0.28 on."""
    if not hasattr(runner, "_draft_workspace_lane"):
        return nullcontext()
    from vllm.v1.worker.workspace import use_workspace_lane

    lane: AbstractContextManager[None] = use_workspace_lane(runner._draft_workspace_lane)
    return lane


def _capture_draft(runner: Any) -> int:
    """Capture the draft decodes of a target without graphs; bytes that their graphs take on the device."""
    speculator = runner.speculator
    if (
        runner.cudagraph_manager.needs_capture()
        or speculator.num_speculative_steps == 1
        or not speculator.decode_cudagraph_manager.needs_capture()
    ):
        return 0
    from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

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
    logging.getLogger("vllm.eagle_mrv2").info(
        "eagle_mrv2 captured the draft decodes of a target without graphs in %.0f s, %.2f GiB",
        time.perf_counter() - start,
        taken / 2**30,
    )
    return taken
