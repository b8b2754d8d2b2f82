"""vLLM's own counters of speculative decoding."""

from __future__ import annotations

from typing import Any

_PREFIX = "vllm:spec_decode_num_"
Counters = dict[str, list[int]]


def read_counters(llm: Any) -> Counters:
    """Every counter as a list: one value, or one for each draft position."""
    return {
        metric.name.removeprefix(_PREFIX): list(metric.values) if hasattr(metric, "values") else [metric.value]
        for metric in llm.get_metrics()
        if metric.name.startswith(_PREFIX)
    }


def counted_since(before: Counters, llm: Any) -> dict[str, Any]:
    """The counts since an earlier reading, under vLLM's names."""
    counters = {
        name: [now - then for now, then in zip(values, before.get(name, [0] * len(values)), strict=True)]
        for name, values in read_counters(llm).items()
    }
    return {
        "num_drafts": sum(counters.get("drafts", [])),
        "num_draft_tokens": sum(counters.get("draft_tokens", [])),
        "num_accepted_tokens": sum(counters.get("accepted_tokens", [])),
        "num_accepted_tokens_per_pos": counters.get("accepted_tokens_per_pos", []),
    }
