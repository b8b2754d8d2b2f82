"""Patches for a number of draft tokens that is chosen at run time (``draft_length: auto``).

The scheduler makes room for the drafts that an iteration will make, and has them verified in the next one.  It asks a
`DraftLength` for their number, and the output of the scheduler carries that number to every worker.
"""

from __future__ import annotations

import bisect
from collections import Counter
from typing import Any

from vllm_eagle_mrv2.config.draft_lengths import lengths_to_choose_from
from vllm_eagle_mrv2.draft_length.chooser import DraftLength
from vllm_eagle_mrv2.draft_length.notes import Plan, graph_times_of, note_plan, plan_of
from vllm_eagle_mrv2.patches.wrap import Function
from vllm_eagle_mrv2.telemetry.counters import DraftCounter

_CHOOSER = "_eagle_mrv2_draft_length"


# In the engine core


def chooser_of(scheduler: Any) -> DraftLength | None:
    """Return what chooses the number of draft tokens for a scheduler; None if the number is not chosen."""
    known: dict[str, Any] = vars(scheduler)
    if _CHOOSER not in known:
        config = scheduler.vllm_config
        lengths = lengths_to_choose_from(config)
        known[_CHOOSER] = None
        if lengths:
            counter = DraftCounter.of_rank(config.parallel_config.data_parallel_index)
            sizes = config.compilation_config.cudagraph_capture_sizes
            known[_CHOOSER] = DraftLength(
                lengths, max(sizes or [0]), counter=counter, graph_times=graph_times_of(config)
            )
    chooser: DraftLength | None = known[_CHOOSER]
    return chooser


def padded_as_verified(original: Function) -> Function:
    """Wrap ``Scheduler.schedule``: new decodes are padded to as many tokens as the running ones verify (from 0.25)."""

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        chooser = chooser_of(self)
        if chooser is None:
            return original(self, *args, **kwargs)
        most, self.num_spec_tokens = self.num_spec_tokens, chooser.length
        try:
            return original(self, *args, **kwargs)
        finally:
            self.num_spec_tokens = most

    return schedule


def number_chosen(original: Function) -> Function:
    """Wrap ``Scheduler._update_after_schedule``: the number of draft tokens is chosen and noted in the output."""

    def update_after_schedule(self: Any, scheduler_output: Any) -> None:
        chooser = chooser_of(self)
        if chooser is not None:
            plan = _plan(chooser, self.requests, scheduler_output.num_scheduled_tokens)
            note_plan(scheduler_output, plan)
            scheduler_output.num_spec_tokens_to_schedule = plan.drafts  # read from 0.24 on
            self._spec_token_placeholders = [-1] * plan.drafts  # read before
        original(self, scheduler_output)

    return update_after_schedule


def _plan(chooser: DraftLength, requests: Any, scheduled: dict[str, int]) -> Plan:
    """Plan an iteration, given the tokens scheduled for each request."""
    verified = chooser.length
    others = {request: tokens for request, tokens in scheduled.items() if tokens > 1 + verified}
    decodes = len(scheduled) - len(others)
    ending = sum(
        requests[one].num_computed_tokens + tokens >= requests[one].num_tokens for one, tokens in others.items()
    )
    drafts = chooser.choose(decodes + ending) if decodes + ending else verified
    return Plan(drafts, verified, decodes, sum(others.values()))


def outcome_learned(original: Function) -> Function:
    """Wrap ``Scheduler.update_from_output``: the chooser learns what was accepted and how long the iteration took."""

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        plan, chooser = plan_of(scheduler_output), chooser_of(self)
        if plan is not None and chooser is not None:
            sampled, place = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
            # Of a new request vLLM verifies placeholders, which nobody drafted (from 0.25 on).
            new = {request.req_id for request in scheduler_output.scheduled_new_reqs}
            outcomes = Counter(
                (len(drafts), len(sampled[place[request]]) - 1)
                for request, drafts in scheduler_output.scheduled_spec_decode_tokens.items()
                if request in place and request not in new and sampled
            )
            chooser.learn(plan.decodes, plan.verified, plan.prefilled, outcomes.items())
        return original(self, scheduler_output, model_runner_output)

    return update_from_output


# In the workers


def plan_passed_on(original: Function) -> Function:
    """Wrap ``GPUModelRunner.prepare_inputs``: the batch carries the plan to ``propose`` (below 0.32)."""

    def prepare_inputs(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        batch = original(self, scheduler_output, *args, **kwargs)
        plan = plan_of(scheduler_output)
        if plan is not None and batch is not None:
            note_plan(batch, plan)
        return batch

    return prepare_inputs


def graphs_of_every_length(original: Function) -> Function:
    """Wrap ``CudaGraphManager._init_candidates``: batches that verify fewer drafts have FULL graphs of their own."""

    def init_candidates(self: Any) -> None:
        original(self)
        lengths = lengths_to_choose_from(self.vllm_config)
        if lengths and self.decode_query_len == 1 + lengths[-1]:
            for length in lengths[:-1]:
                _add_graphs(self, 1 + length, original)

    return init_candidates


def _add_graphs(manager: Any, query_len: int, original: Function) -> None:
    """Add FULL graphs for decodes of ``query_len`` tokens each, as ``original`` would make them."""
    compilation, whole = manager.compilation_config, dict(vars(manager))
    sizes = compilation.cudagraph_capture_sizes
    if not sizes:
        return
    manager.decode_query_len, manager._capture_descs = query_len, {}
    manager._candidates = type(manager._candidates)()
    compilation.cudagraph_capture_sizes = _sizes(query_len, manager.max_num_reqs, max(sizes))
    try:
        original(manager)
        found = manager._capture_descs
    finally:
        compilation.cudagraph_capture_sizes = sizes
        vars(manager).update(whole)
    for mode, descriptors in found.items():
        added = [one for one in descriptors if one.uniform_token_count == query_len]
        if added:
            known = manager._capture_descs.setdefault(mode, [])
            known += added
            known.sort(key=lambda one: one.num_tokens, reverse=True)
            _put_first(manager, added)


def _put_first(manager: Any, added: list[Any]) -> None:
    """Have a batch of each number of tokens look at the smallest added graph that holds it first."""
    candidates = manager._candidates
    by_tokens = not isinstance(candidates, dict)  # below 0.24 a list, after it by the number of LoRAs too
    for loras in {getattr(one, "num_active_loras", 0) for one in added}:
        graphs = sorted(
            (one for one in added if getattr(one, "num_active_loras", 0) == loras), key=lambda one: one.num_tokens
        )
        ends = [one.num_tokens for one in graphs]
        for tokens in range(1, ends[-1] + 1):
            place = tokens if by_tokens else (tokens, loras)
            if by_tokens:
                candidates.extend([] for _ in range(tokens + 1 - len(candidates)))
            first = bisect.bisect_left(ends, tokens)
            fits = [one for one in graphs if one.num_tokens == ends[first]]
            # Several places may hold the same list.
            known = candidates[place] if by_tokens else candidates.get(place, [])
            candidates[place] = [*fits, *known]


def _sizes(query_len: int, most_requests: int, most_tokens: int) -> list[int]:
    """Return the numbers of tokens to capture: of few requests closely, of many in steps of an eighth to a quarter."""
    requests, most = 1, min(most_requests, most_tokens // query_len)
    sizes = []
    while requests < most:
        sizes.append(requests * query_len)
        requests += max(1, 2 ** (requests.bit_length() - 3))
    return [*sizes, most * query_len] if most else []
