"""Graphs of draft decodes on a CPU: a graph is the pass itself, run again on what was captured."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import speculator_of

SIZES = [1, 2, 4, 8]
Draw = Callable[[Any], list[Any]]


@pytest.fixture
def draft_decode_graphs(monkeypatch: pytest.MonkeyPatch) -> Draw:
    """Captures the draft decodes of an engine; returns the descriptors of the graphs replayed from then on."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils

    replayed: list[Any] = []

    def capture(self: Any, create_forward_fn: Any, progress_bar_desc: str) -> None:
        for descriptor in self._capture_descs.get(CUDAGraphMode.FULL, ()):
            create_forward_fn(descriptor, warmup=True)(CUDAGraphMode.NONE)
            captured = create_forward_fn(descriptor, warmup=False)
            captured(CUDAGraphMode.NONE)

            def replay(descriptor: Any = descriptor, captured: Any = captured) -> None:
                replayed.append(descriptor)
                captured(CUDAGraphMode.NONE)

            self.graphs[descriptor] = SimpleNamespace(replay=replay)
        self._graphs_captured = True

    def draw(llm: Any) -> list[Any]:
        speculator = speculator_of(llm)
        compilation = speculator.vllm_config.compilation_config
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = SIZES, SIZES[-1]
        monkeypatch.setattr(cudagraph_utils.CudaGraphManager, "capture", capture)
        monkeypatch.setattr(cudagraph_utils, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None))
        speculator.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
        # The target has none here, and its metadata is not made for a graph.
        speculator.prefill_cudagraph_manager = speculator.drafter.adapter.managers.prefill(
            speculator.vllm_config, speculator.device, CUDAGraphMode.NONE, speculator.num_speculative_steps + 1
        )
        with torch.inference_mode():
            speculator.capture()
        replayed.clear()
        return replayed

    return draw
