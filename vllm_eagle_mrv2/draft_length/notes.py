"""Numbers of draft tokens that are noted on vLLM's objects: those that the scheduler planned, and those drafted."""

from __future__ import annotations

from typing import Any, NamedTuple

_PLAN = "eagle_mrv2_plan"
_DRAFTED = "eagle_mrv2_drafted"


class Plan(NamedTuple):
    """What this package notes in a ``SchedulerOutput``."""

    drafts: int  # to make for each request
    verified: int  # drafts of each decode, from the iteration before
    decodes: int
    prefilled: int  # tokens of other requests


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
