"""The adapter of vLLM 0.29 to 0.31."""

from __future__ import annotations

from vllm_eagle_mrv2.releases import v0_29
from vllm_eagle_mrv2.releases.autoregressive import AutoRegressiveAdapter


class Adapter(AutoRegressiveAdapter):
    """vLLM 0.29 to 0.31."""

    release = v0_29.RELEASE
    dp_sync_argument = "dp_sync"
