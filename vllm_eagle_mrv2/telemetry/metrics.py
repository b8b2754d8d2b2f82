"""Shows in vLLM's /metrics what is drafted with, and what the workers of the engine count."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from vllm_eagle_mrv2 import __version__
from vllm_eagle_mrv2.config.method import Settings
from vllm_eagle_mrv2.patches.engine_args import wrap
from vllm_eagle_mrv2.telemetry import counters

_info: dict[str, str] = {}  # of the latest engine of this process that asked for eagle_mrv2


def offer(vllm_config: Any, settings: Settings) -> None:
    """Have the workers of an engine count, and this process show it."""
    import vllm

    counters.share_folder()
    _info.update(
        model_name=str(vllm_config.model_config.served_model_name),  # as vLLM labels its own
        version=__version__,
        vllm=vllm.__version__,
        family=settings.family,
        num_speculative_tokens=str(vllm_config.speculative_config.num_speculative_tokens),
    )
    _show()


@functools.cache
def _show() -> None:
    """Add the drafts' metrics to those of this process, and to what several API servers show of all of them."""
    drafts = DraftMetrics()
    REGISTRY.register(drafts)

    def collect(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def wrapped(self: Any) -> Any:
            yield from original(self)
            yield from drafts.collect()

        return wrapped

    wrap(MultiProcessCollector, "collect", collect)  # one is made for each request, for a registry of its own


class DraftMetrics(Collector):
    """Metrics of the drafts, read when they are asked for."""

    def collect(self) -> Iterator[Metric]:
        """What drafts, and of each data-parallel rank the draft phases and the draft length in force."""
        yield InfoMetricFamily("vllm_eagle_mrv2", "What drafts, on which vLLM.", value=_info)
        paths = "; ".join(f"{path}, {how}" for path, how in counters.PATHS.items())
        labels = ["model_name", "engine"]
        phases = CounterMetricFamily(
            "vllm_eagle_mrv2_draft_phases",
            f"Draft phases, one a batch, by path ({paths}).",
            labels=[*labels, "path"],
        )
        length = GaugeMetricFamily(
            "vllm_eagle_mrv2_draft_length", "Draft tokens a request in the latest batch.", labels=labels
        )
        for rank, counts in counters.read_counts():
            of_engine = [_info["model_name"], str(rank)]
            for path, count in counts.phases.items():
                phases.add_metric([*of_engine, path], count)
            length.add_metric(of_engine, counts.draft_length)
        yield phases
        yield length
