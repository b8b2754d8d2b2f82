"""Speculator and graph managers on vLLM 0.20."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_eagle_mrv2.cudagraph import Pass
from vllm_eagle_mrv2.hosts import monolith, v0_20
from vllm_eagle_mrv2.hosts.common import StockHost
from vllm_eagle_mrv2.hosts.monolith import CompletedEagleSpeculator, MonolithHost
from vllm_eagle_mrv2.method import Family
from vllm_eagle_mrv2.sampling import sample_with_logits


class _OneFactoryCall:
    """This release asks once for the warm-up and the capture; inputs are made anew between the two all the same."""

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


class _Stock(CompletedEagleSpeculator):
    use_fp64_gumbel = True  # always, here

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
        """Draft tokens [n] int64, drawn with the target's own random numbers.

        Strict rejection accepts a draft that is the token which the target samples, so it is best to guess with the
        noise that the target will use, and no bias to: the output is the target's sample either way.
        """
        return sample_with_logits(
            self.model.compute_logits(hidden_states),
            idx_mapping,
            temperature,
            seeds,
            positions,
            draft_step,
            None,
            salted=False,
            after_temperature=True,
            fp64=True,
        )


class EagleMRV2Speculator(MonolithHost, _Stock):
    """EAGLE, EAGLE-3 and multi-token prediction heads."""

    host = v0_20.HOST
    greedy_is_argmax = False  # see `_Stock.sample_draft`
    prefill_manager_class = PrefillEagleCudaGraphManager
    decode_manager_class = DecodeEagleCudaGraphManager

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
        # As later releases and this one's own target do it.
        return None if descriptor.cg_mode == CUDAGraphMode.PIECEWISE else attn_metadata, slot_mappings


def speculator_class(family: Family) -> type[StockHost]:
    """The speculator of a family."""
    return EagleMRV2Speculator
