"""Adds the draft's metrics to vLLM's /metrics: what drafts, and what the workers count."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from vllm_eagle_mrv2 import __version__
from vllm_eagle_mrv2.config.draft_lengths import lengths_to_choose_from
from vllm_eagle_mrv2.config.method import Settings
from vllm_eagle_mrv2.telemetry import counters

_info: dict[str, str] = {}  # of the latest engine in this process that asked for eagle_mrv2
_lengths: list[int] = []  # that it chooses from


def offer(vllm_config: Any, settings: Settings) -> None:
    """Let the workers of an engine share their counts, and let this process show them in /metrics."""
    import vllm

    counters.share_folder()
    _lengths[:] = lengths_to_choose_from(vllm_config)
    _info.update(
        model_name=str(vllm_config.model_config.served_model_name),  # as in the labels of vLLM's own metrics
        version=__version__,
        vllm=vllm.__version__,
        family=settings.family,
        num_speculative_tokens=str(vllm_config.speculative_config.num_speculative_tokens),
        draft_length="auto" if _lengths else "constant",
    )
    _show()


@functools.cache
def _show() -> None:
    """Add the drafts' metrics to this process's registry."""
    REGISTRY.register(DraftMetrics())


class DraftMetrics(Collector):
    """Metrics of the drafts, read from the counters at each collection."""

    def collect(self) -> Iterator[Metric]:
        """Yield what drafts and, for each data-parallel rank, what it counts."""
        yield InfoMetricFamily("vllm_eagle_mrv2", "What drafts, on which vLLM.", value=_info)
        paths = "; ".join(f"{path}, {how}" for path, how in counters.PATHS.items())
        labels = ["model_name", "engine"]
        phases = CounterMetricFamily(
            "vllm_eagle_mrv2_draft_phases", f"Draft phases, one a batch, by path ({paths}).", labels=[*labels, "path"]
        )
        length = GaugeMetricFamily(
            "vllm_eagle_mrv2_draft_length", "Draft tokens a request in the latest batch.", labels=labels
        )
        changes = CounterMetricFamily(
            "vllm_eagle_mrv2_draft_length_changes", "Changes of the number of draft tokens in force.", labels=labels
        )
        by_length = CounterMetricFamily(
            "vllm_eagle_mrv2_draft_length_seconds",
            "Seconds of iterations by the draft tokens that they verified for a request.",
            labels=[*labels, "draft_length"],
        )
        seconds = CounterMetricFamily(
            "vllm_eagle_mrv2_iteration_seconds",
            "Seconds of iterations with a chosen number of draft tokens, as measured and as expected.",
            labels=[*labels, "kind"],
        )
        tokens = CounterMetricFamily(
            "vllm_eagle_mrv2_iteration_tokens",
            "Tokens that these iterations made, as measured and as expected.",
            labels=[*labels, "kind"],
        )
        for rank, counts in counters.read_counts():
            of_engine = [_info["model_name"], str(rank)]
            if any(counts.phases.values()) or not counts.seconds:  # otherwise its worker counts elsewhere (Ray)
                for path, count in counts.phases.items():
                    phases.add_metric([*of_engine, path], count)
                length.add_metric(of_engine, counts.draft_length)
            changes.add_metric(of_engine, counts.changes)
            for number, spent in zip(_lengths, counts.seconds_by_length, strict=False):
                by_length.add_metric([*of_engine, str(number)], spent)
            seconds.add_metric([*of_engine, "measured"], counts.seconds)
            seconds.add_metric([*of_engine, "expected"], counts.expected_seconds)
            tokens.add_metric([*of_engine, "measured"], counts.tokens)
            tokens.add_metric([*of_engine, "expected"], counts.expected_tokens)
        yield from (phases, length, changes, by_length, seconds, tokens)
