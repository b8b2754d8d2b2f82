"""The adapter of vLLM 0.28."""

from __future__ import annotations

from vllm_eagle_mrv2.releases import v0_28
from vllm_eagle_mrv2.releases.autoregressive import AutoRegressiveAdapter


class Adapter(AutoRegressiveAdapter):
    """vLLM 0.28."""

    release = v0_28.RELEASE
    sample_offset = 0
    samples_apart = False
    dp_sync_argument = None
