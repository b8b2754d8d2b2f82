"""The adapter of vLLM 0.20."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.draft_model import compile_ahead
from vllm_eagle_mrv2.draft_model.logits_processor import FewRows
from vllm_eagle_mrv2.drafting.capture import AskedGraphs, CapturedAttentionState, Pass
from vllm_eagle_mrv2.drafting.protocols import Descriptor
from vllm_eagle_mrv2.kernels.few_rows_product import few_rows_by_temperature
from vllm_eagle_mrv2.kernels.sample_with_logits import sample_with_target_noise
from vllm_eagle_mrv2.releases import v0_20
from vllm_eagle_mrv2.releases.graph_managers import graph_managers
from vllm_eagle_mrv2.releases.monolith import MonolithAdapter


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


class Adapter(MonolithAdapter):
    """vLLM 0.20."""

    release = v0_20.RELEASE
    greedy_is_argmax = False  # every draft is sampled
    managers = graph_managers(_OneFactoryCall, use_breakable_cg=False)

    def __init__(self, stock: Any, options: Options, asked: AskedGraphs) -> None:
        super().__init__(stock, options, asked)
        stock.use_fp64_gumbel = True  # always, on this release

    def sample_unstored(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Draft with the target's random numbers, in a form of `how_drafted`."""
        head, best, num_reqs, buffers = self.head, None, len(hidden_states), self.buffers
        idx_mapping = buffers.idx_mapping[:num_reqs]
        if head is None:
            logits = self.stock.model.compute_logits(hidden_states)
        else:
            logits, best = head.logits_by_temperature(hidden_states, idx_mapping, buffers.temperature)
        return sample_with_target_noise(
            logits,
            None if head is None else head.offsets,
            idx_mapping,
            buffers.temperature,
            buffers.seeds,
            buffers.sample_positions[:num_reqs],
            self.stock.current_draft_step,
            best,
        )

    @property
    def few_rows(self) -> FewRows:
        buffers = self.buffers
        of_batch = {"idx_mapping": buffers.idx_mapping, "temperature": buffers.temperature}
        return functools.partial(few_rows_by_temperature, **of_batch)

    def drafts_ahead(self, head: torch.Tensor, offsets: torch.Tensor | None) -> Callable[[], list[torch.Tensor]]:
        return functools.partial(compile_ahead.sampling, self.buffers, head, offsets)

    def capture_options(self, piecewise: bool, manager: Any) -> dict[str, bool]:
        return {}

    def prepare_capture(
        self, manager: Any, descriptor: Descriptor, num_reqs: int, input_buffers: Any, attn_groups: Any
    ) -> CapturedAttentionState:
        built = super().prepare_capture(manager, descriptor, num_reqs, input_buffers, attn_groups)
        # PIECEWISE graphs get no metadata, as in later releases and in this release's target.
        return built._replace(attn_metadata=None) if descriptor.cg_mode == CUDAGraphMode.PIECEWISE else built
