"""vLLM's speculators on the releases that have one class for EAGLE heads and one for MTP layers."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

from vllm_eagle_mrv2.config.families import Family


def speculator_class(family: Family) -> Any:
    """Return the class for a family."""
    return MTPSpeculator if family == "mtp" else EagleSpeculator
