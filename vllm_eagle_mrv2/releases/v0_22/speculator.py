"""Speculator and graph managers on vLLM 0.22."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from vllm_eagle_mrv2.config.method import Family
from vllm_eagle_mrv2.drafting.capture import Pass
from vllm_eagle_mrv2.patches.engine_args import wrap
from vllm_eagle_mrv2.releases import draft_loading, monolith, v0_22
from vllm_eagle_mrv2.releases.common import StockAdapter
from vllm_eagle_mrv2.releases.monolith import CompletedEagleSpeculator, MonolithAdapter


def bound_hybrid_lengths() -> None:
    """Have ``MambaHybridModelState.prepare_attn`` take the batch's own maximum length (#43991), once.

    One more seam, made only in processes that build our speculator.  The stock method passes ``max_model_len`` for
    every batch; DefaultModelState of this release has it right.
    """

    def bounded(original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_attn(
            self: Any, input_batch: Any, cudagraph_mode: Any, *args: Any, for_capture: bool = False, **kwargs: Any
        ) -> Any:
            if for_capture:
                return original(self, input_batch, cudagraph_mode, *args, for_capture=True, **kwargs)
            full = cudagraph_mode == CUDAGraphMode.FULL
            rows = input_batch.num_reqs_after_padding if full else input_batch.num_reqs
            limit = self.max_model_len
            self.max_model_len = int(input_batch.seq_lens_cpu_upper_bound[:rows].max())
            try:
                return original(self, input_batch, cudagraph_mode, *args, **kwargs)
            finally:
                self.max_model_len = limit

        return prepare_attn

    wrap(MambaHybridModelState, "prepare_attn", bounded)


bound_hybrid_lengths()


class _WithAttentionState:
    """The capture loop of this release also collects the attention state of each pass; ours hands none on."""

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
        """Make the draft's metadata builders; vLLM has not laid out the KV cache yet."""
        draft_loading.check_cache_layouts(self, kv_cache_config)
        super().set_attn(model_state, kv_cache_config, block_tables)

    def capture(self, attn_states: Any = None) -> None:
        """Capture the draft's graphs; the target's states are those of another pass, so they are not used."""
        super().capture()


def speculator_class(family: Family) -> type[StockAdapter]:
    """The speculator of a family."""
    return EagleMRV2Speculator
