"""Former vLLM defects, brought back for measurements when one of five behaviours is disabled.

Each defect is a class mixed in before `DraftLoop`, which itself has no switches for them.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_eagle_mrv2.batch.buffers import DraftBatch, SlotTable
from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.drafting.loop import DraftLoop, ForwardInputs, GraphRun


class _LogitsOfTheFirstStepAlone(DraftLoop):
    """Draft decodes store no logits, and draft greedily (before #37639)."""

    def decode(self, *args: Any, **kwargs: Any) -> None:
        kept, self.sample = self.sample, self.adapter.sample_unstored
        try:
            super().decode(*args, **kwargs)
        finally:
            self.sample = kept


class _MetadataOfTheFirstStep(DraftLoop):
    """Every draft decode runs with the metadata of the first one (before #38311, #41162)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.build_metadata, self._first = self._first_metadata, (None, None)

    def _first_metadata(self, batch: DraftBatch, run: GraphRun, step: int) -> tuple[Any, Any]:
        if step == 1:
            self._first = self.adapter.build_decode_metadata(batch, run, step)
        return self._first

    def _refresh_metadata(self, inputs: ForwardInputs, step: int, *, slots_known: bool) -> ForwardInputs:
        return inputs if step > 1 else super()._refresh_metadata(inputs, step, slots_known=slots_known)

    def _slots_ahead(self, inputs: ForwardInputs) -> SlotTable | None:
        return None


class _StaleTokenIndices(DraftLoop):
    """``last_token_indices`` beyond the live requests keep the previous batch's values (before #39773)."""

    @torch.inference_mode()
    def _fill_inputs(self, num_reqs: int) -> None:
        indices, live = self.buffers.last_token_indices, self.buffers.live_reqs
        before = indices.clone()
        super()._fill_inputs(num_reqs)
        rows = torch.arange(len(indices), device=indices.device)
        indices.copy_(torch.where(rows < live, indices, before))


class _PrefillMetadataBuiltAgain(DraftLoop):
    """The draft's own builders build the metadata of a draft prefill a second time (before #40410)."""

    def _prefill_metadata(self, batch: DraftBatch, run: GraphRun) -> tuple[Any, Any]:
        if batch.skip_attn:
            return super()._prefill_metadata(batch, run)
        return self.adapter.rebuild_prefill_metadata(batch, run)


class _LongestLengths(DraftLoop):
    """Attention metadata is built for ``max_model_len``, whatever the batch (before #43991)."""

    def _max_seq_len(self, batch: DraftBatch) -> int:
        return self.config.max_model_len


_DEFECTS: dict[Behaviour, type[DraftLoop]] = {
    Behaviour.DRAFT_LOGITS_IN_REPLAY: _LogitsOfTheFirstStepAlone,
    Behaviour.DECODE_METADATA_REBUILD: _MetadataOfTheFirstStep,
    Behaviour.FULL_DECODE_ONLY: _StaleTokenIndices,
    Behaviour.TARGET_METADATA_REUSE: _PrefillMetadataBuiltAgain,
    Behaviour.ACTUAL_MAX_SEQ_LEN: _LongestLengths,
}


def loop_class(options: Options) -> type[DraftLoop]:
    """Return the draft loop class, with the defects of the disabled behaviours mixed in."""
    defects = [defect for behaviour, defect in _DEFECTS.items() if not options.enabled(behaviour)]
    return type("DraftLoop", (*defects, DraftLoop), {}) if defects else DraftLoop
