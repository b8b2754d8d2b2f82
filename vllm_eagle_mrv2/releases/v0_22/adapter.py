"""The adapter of vLLM 0.22."""

from __future__ import annotations

from typing import Any

from vllm_eagle_mrv2.drafting.capture import CollectsAttentionState
from vllm_eagle_mrv2.releases import draft_loading, v0_22
from vllm_eagle_mrv2.releases.graph_managers import graph_managers
from vllm_eagle_mrv2.releases.monolith import MonolithAdapter


class Adapter(MonolithAdapter):
    """vLLM 0.22."""

    release = v0_22.RELEASE
    managers = graph_managers(CollectsAttentionState, use_breakable_cg=False)

    def check_caches(self, kv_cache_config: Any) -> None:
        """Refuse a draft backend with another order of the KV cache, which vLLM is about to lay out."""
        draft_loading.check_cache_layouts(self.stock, kv_cache_config)
