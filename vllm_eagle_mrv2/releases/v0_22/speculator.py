"""Speculator and graph managers on vLLM 0.22."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_eagle_mrv2.config.method import Family
from vllm_eagle_mrv2.drafting.capture import Pass
from vllm_eagle_mrv2.releases import draft_loading, monolith, v0_22
from vllm_eagle_mrv2.releases.common import StockAdapter
from vllm_eagle_mrv2.releases.monolith import CompletedEagleSpeculator, MonolithAdapter


class _WithAttentionState:
    """Supports a capture loop that also collects the attention state of each pass; returns None for it."""

    def pass_factory(self, make_pass: Callable[[Any], Pass]) -> Callable[[Any], tuple[Pass, None]]:
        return lambda descriptor: (make_pass(descriptor), None)


class PrefillEagleCudaGraphManager(_WithAttentionState, monolith.PrefillEagleCudaGraphManager):
    """Graphs of the draft prefill, in the target's memory pool."""


class DecodeEagleCudaGraphManager(_WithAttentionState, monolith.DecodeEagleCudaGraphManager):
    """Graphs of one draft decode step, in the target's memory pool."""


class EagleMRV2Speculator(MonolithAdapter, CompletedEagleSpeculator):
    """EAGLE, EAGLE-3 and multi-token prediction heads."""

    release = v0_22.RELEASE
    prefill_manager_class = PrefillEagleCudaGraphManager
    decode_manager_class = DecodeEagleCudaGraphManager

    def set_attn(self, model_state: Any, kv_cache_config: Any, block_tables: Any) -> None:
        """Create the draft's metadata builders; vLLM has not laid out the KV cache yet."""
        draft_loading.check_cache_layouts(self, kv_cache_config)
        super().set_attn(model_state, kv_cache_config, block_tables)

    def capture(self, attn_states: Any = None) -> None:
        """Capture the draft's graphs; the target's attention states belong to another pass and are not used."""
        super().capture()


def speculator_class(family: Family) -> type[StockAdapter]:
    """Return the speculator class of a family."""
    return EagleMRV2Speculator
