"""The adapter of vLLM 0.26 and 0.27."""

from __future__ import annotations

import inspect
from typing import Any

from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture

from vllm_eagle_mrv2.releases import v0_26
from vllm_eagle_mrv2.releases.per_step import PerStepAdapter
from vllm_eagle_mrv2.releases.speculators import speculator_class

# 0.27 builds metadata for PIECEWISE captures too, and takes an argument for FULL graphs (#49364).
_ASKS_FOR_FULL = "full_cudagraph" in inspect.signature(prepare_inputs_to_capture).parameters


class Adapter(PerStepAdapter):
    """vLLM 0.26 and 0.27."""

    release = v0_26.RELEASE
    stock_class = staticmethod(speculator_class)

    def capture_options(self, piecewise: bool, manager: Any) -> dict[str, bool]:
        return {"full_cudagraph": not piecewise} if _ASKS_FOR_FULL else super().capture_options(piecewise, manager)
