"""Speculator and graph managers on vLLM 0.20."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_eagle_mrv2.config.method import Family
from vllm_eagle_mrv2.draft_model import compile_ahead
from vllm_eagle_mrv2.drafting.capture import Pass
from vllm_eagle_mrv2.kernels.few_rows_product import few_rows_by_temperature
from vllm_eagle_mrv2.kernels.sample_with_logits import sample_with_target_noise
from vllm_eagle_mrv2.releases import monolith, v0_20
from vllm_eagle_mrv2.releases.common import StockAdapter
from vllm_eagle_mrv2.releases.monolith import CompletedEagleSpeculator, MonolithAdapter


class _OneFactoryCall:
    """Supports a capture loop that calls the factory once for warm-up and capture; rebuilds inputs in between."""

    def pass_factory(self, make_pass: Callable[[Any], Pass]) -> Callable[[Any], Pass]:
        def factory(descriptor: Any) -> Pass:
            prepared = [make_pass(descriptor)]

            def run(mode: Any) -> None:
                prepared.pop()(mode)
                if not torch.cuda.is_current_stream_capturing():
                    prepared.append(make_pass(descriptor))

            return run

        return factory


class PrefillEagleCudaGraphManager(_OneFactoryCall, monolith.PrefillEagleCudaGraphManager):
    """Graphs of the draft prefill, in the target's memory pool."""


class DecodeEagleCudaGraphManager(_OneFactoryCall, monolith.DecodeEagleCudaGraphManager):
    """Graphs of one draft decode step, in the target's memory pool."""


class EagleMRV2Speculator(MonolithAdapter, CompletedEagleSpeculator):
    """EAGLE, EAGLE-3 and multi-token prediction heads."""

    release = v0_20.RELEASE
    use_fp64_gumbel = True  # always, on this release
    greedy_is_argmax = False  # every draft is sampled
    prefill_manager_class = PrefillEagleCudaGraphManager
    decode_manager_class = DecodeEagleCudaGraphManager

    def sample_draft(
        self,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        draft_step: torch.Tensor,
        draft_logits: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return drafts for n rows in a form of `how_drafted`, with the target's random numbers; stores no logits."""
        head, best = self._head, None
        if head is None:
            logits = self.model.compute_logits(hidden_states)
        else:
            logits, best = head.logits_by_temperature(hidden_states, idx_mapping, temperature)
        offsets = None if head is None else head.offsets
        return sample_with_target_noise(logits, offsets, idx_mapping, temperature, seeds, positions, draft_step, best)

    def _draft_few_rows(self, hidden_states: torch.Tensor, weight: torch.Tensor) -> object:
        buffers = self.loop.buffers
        return few_rows_by_temperature(hidden_states, weight, buffers.idx_mapping, buffers.temperature)

    def _drafts_ahead(self, head: torch.Tensor, offsets: torch.Tensor | None) -> Callable[[], list[torch.Tensor]]:
        return functools.partial(compile_ahead.sampling, self.loop.buffers, head, offsets)

    def capture_model(self) -> None:
        """Capture the draft's graphs."""
        self.capture()

    def capture_options(self, piecewise: bool, manager: Any) -> dict[str, bool]:
        return {}

    def prepare_capture(
        self, manager: Any, descriptor: Any, num_reqs: int, num_tokens: int, input_buffers: Any, attn_groups: Any
    ) -> tuple[Any, Any]:
        attn_metadata, slot_mappings = super().prepare_capture(
            manager, descriptor, num_reqs, num_tokens, input_buffers, attn_groups
        )
        # PIECEWISE graphs get no metadata, as in later releases and in this release's target.
        return None if descriptor.cg_mode == CUDAGraphMode.PIECEWISE else attn_metadata, slot_mappings


def speculator_class(family: Family) -> type[StockAdapter]:
    """Return the speculator class of a family."""
    return EagleMRV2Speculator
