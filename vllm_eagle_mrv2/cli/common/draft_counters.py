"""vLLM's own counters of speculative decoding, as its front-end in this process keeps them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

_PREFIX = "vllm:spec_decode_num_"
Counters = dict[str, dict[int, int]]


def read_counters() -> Counters:
    """Every counter by its name; the values by draft position, 0 where a counter has none."""
    from prometheus_client import REGISTRY

    counters: Counters = {}
    for metric in REGISTRY.collect():
        if metric.name.startswith(_PREFIX):
            values = counters.setdefault(metric.name.removeprefix(_PREFIX), defaultdict(int))
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    values[int(sample.labels.get("position", 0))] += int(sample.value)
    return counters


def counted_since(before: Counters) -> dict[str, Any]:
    """The counts since an earlier reading, under vLLM's names."""
    counted: dict[str, list[int]] = {}
    for name, values in read_counters().items():
        earlier = before.get(name, {})
        counted[name] = [value - earlier.get(place, 0) for place, value in sorted(values.items())]
    return {
        "num_drafts": sum(counted.get("drafts", [])),
        "num_draft_tokens": sum(counted.get("draft_tokens", [])),
        "num_accepted_tokens": sum(counted.get("accepted_tokens", [])),
        "num_accepted_tokens_per_pos": counted.get("accepted_tokens_per_pos", []),
    }
