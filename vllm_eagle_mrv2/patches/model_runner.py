"""Patches of the target's model runner that give the speculator what vLLM does not pass to it."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_eagle_mrv2 import releases
from vllm_eagle_mrv2.config.draft_config import takes_auxiliary_states
from vllm_eagle_mrv2.drafting.drafter import drafter_of
from vllm_eagle_mrv2.patches.attention_splits import split_decodes_alone
from vllm_eagle_mrv2.patches.wrap import Function

_VERIFIES_PLACEHOLDERS = SpecifierSet(">=0.25,<0.31")
"""Releases that pad requests with placeholders, and verify these as drafts."""
_KEEPS_FIRST_MAX_TOKENS = SpecifierSet("<0.31")
"""Releases whose scheduler ends a session of streaming input by the ``max_tokens`` of its first chunk."""
_SESSIONS = 16
"""Of so many times the requests at a time it is known that they got further input."""
_COUNTS_ALL = Version("0.27")
"""The first release that counts what the runner allocates before it loads the model."""


def without_unread_states(original: Function) -> Function:
    """Wrap ``load_model``: the target returns no auxiliary hidden states if the head does not take them.

    The texts in which drafts are looked up then count as memory of the model.
    """

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = drafter_of(self.speculator)
        if drafter is not None and not takes_auxiliary_states(self.speculative_config):
            self.use_aux_hidden_state_outputs = False
        result = original(self, *args, **kwargs)
        if drafter is not None and drafter.loop.lookup is not None and releases.installed_version() < _COUNTS_ALL:
            self.model_memory_usage += drafter.loop.lookup.tokens.nbytes
        return result

    return load_model


def states_handed_over(original: Function) -> Function:
    """Wrap ``initialize_kv_cache``, which precedes graph capture: it passes the runner's states to the speculator."""

    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        drafter = drafter_of(self.speculator)
        if drafter is not None:
            keep_longest_lengths(self.req_states, self.sampler)
            draft_placeholders(self.req_states, drafter.adapter.stock.draft_logits)
            mark_sessions(self.req_states)
            drafter.adapter.req_states = self.req_states
            drafter.adapter.sampling_states = getattr(self.sampler, "sampling_states", None)
            drafter.graphs.target_graphs = lambda: self.cudagraph_manager  # elastic scaling replaces it
            if drafter.adapter.takes_target_inputs:
                self.speculator.target_input_buffers = self.input_buffers
                self.speculator.target_attn_groups = self.attn_groups
            split_decodes_alone(self)
            drafter.announce()
        return result

    return initialize_kv_cache


def keep_longest_lengths(req_states: Any, sampler: Any) -> None:
    """Add ``max_seq_len``, the final length of each request, to the runner's states, as 0.23 and later have it."""
    if sampler is None or hasattr(req_states, "max_seq_len"):
        return
    longest = req_states.max_seq_len = np.zeros(req_states.max_num_reqs, dtype=np.int64)
    original = sampler.add_request

    def add_request(req_idx: int, prompt_len: int, sampling_params: Any) -> Any:
        longest[req_idx] = prompt_len + sampling_params.max_tokens
        return original(req_idx, prompt_len, sampling_params)

    sampler.add_request = add_request


def draft_placeholders(req_states: Any, draft_logits: torch.Tensor | None) -> None:
    """Have the draft logits of a new request say that its draft is token 0, for sure.

    From 0.25 on vLLM pads a request that begins with one token to compute.  Below 0.31 these placeholders are verified
    as drafts of token 0, by the logits that the row's last request left.

    Args:
        req_states: the runner's states.
        draft_logits: [max_num_reqs, K, V]; None for greedy drafts, of which no logits are read.
    """
    if draft_logits is None or releases.installed_version() not in _VERIFIES_PLACEHOLDERS:
        return
    if "add_request" in vars(req_states):  # from 0.29 on the cache is made for a profile, too
        return
    original = req_states.add_request

    def add_request(req_id: str, *args: Any, **kwargs: Any) -> None:
        original(req_id, *args, **kwargs)
        with torch.inference_mode():
            rows = draft_logits[req_states.req_id_to_index[req_id]]
            rows.fill_(-torch.inf)[:, 0] = 0.0

    req_states.add_request = add_request


def mark_sessions(req_states: Any) -> None:
    """Add ``sessions`` to the runner's states, [max_num_reqs] bool: requests that got further input.

    The runner removes such a request and adds it again, with the ``max_tokens`` of the new input.  Below 0.31 that does
    not say when it ends, nor does it after a preemption.
    """
    if hasattr(req_states, "sessions") or releases.installed_version() not in _KEEPS_FIRST_MAX_TOKENS:
        return
    sessions = req_states.sessions = np.zeros(req_states.max_num_reqs, dtype=bool)
    add, remove, removed = req_states.add_request, req_states.remove_request, ""
    continued: dict[str, None] = {}  # the latest of them

    def remove_request(req_id: str) -> Any:
        nonlocal removed
        removed = req_id if req_id in req_states.req_id_to_index else ""
        return remove(req_id)

    def add_request(req_id: str, *args: Any, **kwargs: Any) -> None:
        add(req_id, *args, **kwargs)
        if req_id == removed:
            continued[req_id] = None
            if len(continued) > _SESSIONS * len(sessions):
                del continued[next(iter(continued))]
        sessions[req_states.req_id_to_index[req_id]] = req_id in continued

    req_states.add_request, req_states.remove_request = add_request, remove_request


def draft_captured(original: Function) -> Function:
    """Wrap ``capture_model``: it also captures the draft decodes if the target has no graphs.

    The wrapped function returns the device memory in bytes that all graphs take.
    """

    def capture_model(self: Any, *args: Any, **kwargs: Any) -> int:
        size: int = original(self, *args, **kwargs)
        return size if drafter_of(self.speculator) is None else size + _capture_draft(self)

    return capture_model


def warm_up_forgotten(original: Function) -> Function:
    """Wrap ``warmup_kernels``: its dummy requests are removed from the counters."""

    def warmup_kernels(runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, *args, **kwargs)
        drafter = drafter_of(runner.speculator)
        if drafter is not None:
            drafter.loop.counter.clear()
        return result

    return warmup_kernels


def tables_in_place(original: Function) -> Function:
    """Wrap ``post_kv_cache_wake_up``: the new block tables are copied into the memory of the old ones.

    That memory is mapped again by the time it is called.
    """

    def post_kv_cache_wake_up(self: Any) -> None:
        tables = self.block_tables
        old = {name: value for name, value in vars(tables).items() if isinstance(value, torch.Tensor)}
        original(self)
        if drafter_of(self.speculator) is not None:
            with torch.inference_mode():  # the old tensors may be inference tensors
                for name, tensor in old.items():
                    tensor.copy_(getattr(tables, name))
                    setattr(tables, name, tensor)

    return post_kv_cache_wake_up


def _draft_workspace(runner: Any) -> AbstractContextManager[None]:
    """The workspace of the draft's kernels, which is separate from the target's from 0.28 on."""
    if not hasattr(runner, "_draft_workspace_lane"):
        return nullcontext()
    from vllm.v1.worker.workspace import use_workspace_lane

    lane: AbstractContextManager[None] = use_workspace_lane(runner._draft_workspace_lane)
    return lane


def _capture_draft(runner: Any) -> int:
    """Capture the draft decodes of a target without graphs; return the device memory in bytes that the graphs take."""
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
            # Keep the workspace that the graphs were captured with.  Stock locks the workspace after capture; here it
            # may still grow: eager passes that need more get new memory, and the graphs keep using this one.
            speculator.drafter.graphs.scratch = current_workspace_manager().get_simultaneous(((1,), torch.uint8))
    if hasattr(runner.kv_connector, "reset_capture_state"):
        runner.kv_connector.reset_capture_state()
    taken = int(free - torch.cuda.mem_get_info()[0])
    logging.getLogger("vllm.eagle_mrv2").info(
        "eagle_mrv2 captured the draft decodes of a target without graphs in %.0f s, %.2f GiB",
        time.perf_counter() - start,
        taken / 2**30,
    )
    return taken
