"""Numbers of draft tokens that are noted on vLLM's objects: those that the scheduler planned, and those drafted."""

from __future__ import annotations

from typing import Any, NamedTuple

_PLAN = "eagle_mrv2_plan"
_DRAFTED = "eagle_mrv2_drafted"
_GRAPH_TIMES = "eagle_mrv2_graph_times"


class GraphTime(NamedTuple):
    """What the CUDA graphs of an iteration take, the target's and the draft's."""

    requests: int
    length: int  # drafts that each of them verifies, and has made
    seconds: float


class Plan(NamedTuple):
    """What this package notes in a ``SchedulerOutput``."""

    drafts: int  # to make for each request
    verified: int  # drafts of each decode, from the iteration before
    decodes: int
    prefilled: int  # tokens of other requests


def note_graph_times(vllm_config: Any, times: list[GraphTime]) -> None:
    """Note what the workers' graphs take in the configuration of their engine core."""
    vars(vllm_config)[_GRAPH_TIMES] = times


def graph_times_of(vllm_config: Any) -> list[GraphTime]:
    """Return what the workers' graphs take; nothing where that is not noted."""
    times: list[GraphTime] = vars(vllm_config).get(_GRAPH_TIMES, [])
    return times


def note_plan(noted: Any, plan: Plan) -> None:
    """Note a plan in a ``SchedulerOutput``, or in the batch made for it."""
    setattr(noted, _PLAN, plan)


def plan_of(noted: Any) -> Plan | None:
    """Return the plan noted in a ``SchedulerOutput``, or in the batch made for it."""
    plan: Plan | None = getattr(noted, _PLAN, None)
    return plan


def planned_drafts(noted: Any) -> int | None:
    """Return the number of draft tokens noted in a ``SchedulerOutput``, or in the batch made for it."""
    plan = plan_of(noted)
    return None if plan is None else plan.drafts


def mark_drafted(input_batch: Any, num_draft_tokens: int) -> None:
    """Record on a batch how many tokens were drafted for each of its requests."""
    setattr(input_batch, _DRAFTED, num_draft_tokens)


def drafted(input_batch: Any) -> int | None:
    """Return how many tokens were drafted for each request of a batch; None if that was not recorded."""
    number: int | None = getattr(input_batch, _DRAFTED, None)
    return number
