"""Shows the drafts' metrics, also where several API servers show theirs together from a registry for each request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import Metric

from vllm_eagle_mrv2 import patches, releases
from vllm_eagle_mrv2.config.method import Settings
from vllm_eagle_mrv2.patches.wrap import Function
from vllm_eagle_mrv2.telemetry import metrics


def offer(vllm_config: Any, settings: Settings) -> None:
    """Let this process show what the workers of an engine count."""
    metrics.offer(vllm_config, settings)
    patches.apply(patches.Scope.ENGINE, releases.installed_version())


def drafts_added(original: Function) -> Function:
    """Wrap ``MultiProcessCollector.collect``, which is called for each /metrics request: add the drafts' metrics."""

    def collect(self: Any) -> Iterator[Metric]:
        yield from original(self)
        yield from metrics.DraftMetrics().collect()

    return collect
