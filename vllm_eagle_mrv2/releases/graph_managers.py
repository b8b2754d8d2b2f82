"""The draft's CUDA graph managers: those of the installed release, mixed with what the draft captures otherwise."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from vllm_eagle_mrv2.drafting.capture import DecodeCapture, GraphManagers, PrefillCapture


def graph_managers(*mixins: type, **attributes: Any) -> GraphManagers:
    """Make the classes of both managers, whose graphs are in the target's memory pool.

    Args:
        mixins: for the capture loop of a release; they come first.
        attributes: what the release's manager lacks.
    """
    prefill: Any = type("PrefillEagleCudaGraphManager", (*mixins, PrefillCapture, CudaGraphManager), attributes)
    decode: Any = type("DecodeEagleCudaGraphManager", (*mixins, DecodeCapture, CudaGraphManager), attributes)
    return GraphManagers(prefill, decode)
