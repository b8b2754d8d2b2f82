"""The graphs of whole draft phases, and which batches they serve."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

from vllm_eagle_mrv2.drafting.protocols import Descriptor

if TYPE_CHECKING:
    from vllm_eagle_mrv2.batch.buffers import DraftBatch
    from vllm_eagle_mrv2.drafting.loop import GraphRun
    from vllm_eagle_mrv2.releases.adapter import ReleaseAdapter


class PhaseGraphs:
    """Draft prefill graphs that contain the draft decodes too; only where each rank dispatches on its own.

    Args:
        adapter: of the installed release.
        descriptors: of these graphs, captured or to be captured.
    """

    def __init__(self, adapter: ReleaseAdapter, descriptors: Set[Descriptor] = frozenset()) -> None:
        self.descriptors = frozenset(descriptors)
        self._adapter = adapter
        self._runs: dict[tuple[int, int, int], GraphRun] = {}
        """Dispatch results by a batch's query length, number of requests and padded tokens."""

    def __bool__(self) -> bool:
        return bool(self.descriptors)

    def run_for(self, batch: DraftBatch) -> GraphRun | None:
        """Return the graph of a batch's whole draft phase, or None.

        Each serves batches that verify as many draft tokens as they draft.
        """
        adapter, uniform = self._adapter, batch.num_draft_tokens + 1
        if not self.descriptors or batch.eager or adapter.query_len(batch, batch.num_tokens) != uniform:
            return None
        size = (uniform, batch.num_reqs, batch.num_tokens_padded)
        run = self._runs.get(size)
        if run is None or not adapter.stock.prefill_cudagraph_manager.graphs:  # vLLM may have dropped them
            run = adapter.dispatch_prefill(batch, batch.num_tokens, batch.num_tokens_padded)
            if not (run.full and run.descriptor in self.descriptors):
                return None
            self._runs[size] = run
        return run
