"""Adapter and graph managers of vLLM 0.22."""

from __future__ import annotations

from typing import Any

from vllm_eagle_mrv2.drafting.capture import CollectsAttentionState
from vllm_eagle_mrv2.releases import draft_loading, monolith, v0_22
from vllm_eagle_mrv2.releases.monolith import MonolithAdapter


class PrefillEagleCudaGraphManager(CollectsAttentionState, monolith.PrefillEagleCudaGraphManager):
    """Graphs of the draft prefill, in the target's memory pool."""


class DecodeEagleCudaGraphManager(CollectsAttentionState, monolith.DecodeEagleCudaGraphManager):
    """Graphs of the draft decodes, in the target's memory pool."""


class Adapter(MonolithAdapter):
    """vLLM 0.22."""

    release = v0_22.RELEASE
    prefill_manager_class = PrefillEagleCudaGraphManager
    decode_manager_class = DecodeEagleCudaGraphManager

    def check_caches(self, kv_cache_config: Any) -> None:
        """Refuse a draft backend with another order of the KV cache, which vLLM is about to lay out."""
        draft_loading.check_cache_layouts(self.stock, kv_cache_config)
