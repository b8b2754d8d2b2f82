"""The maximum length in the attention metadata of hybrid targets on vLLM 0.22 (#43991)."""

from __future__ import annotations

from typing import Any

from vllm_eagle_mrv2.patches.wrap import Function


def bounded_by_batch(original: Function) -> Function:
    """Wrap ``MambaHybridModelState.prepare_attn``: the attention metadata gets the batch's own maximum length.

    vLLM 0.22 passes ``max_model_len`` for every batch here; its DefaultModelState passes the batch's maximum.
    """

    def prepare_attn(
        self: Any, input_batch: Any, cudagraph_mode: Any, *args: Any, for_capture: bool = False, **kwargs: Any
    ) -> Any:
        if for_capture:
            return original(self, input_batch, cudagraph_mode, *args, for_capture=True, **kwargs)
        full = cudagraph_mode.name == "FULL"
        rows = input_batch.num_reqs_after_padding if full else input_batch.num_reqs
        limit = self.max_model_len
        self.max_model_len = int(input_batch.seq_lens_cpu_upper_bound[:rows].max())
        try:
            return original(self, input_batch, cudagraph_mode, *args, **kwargs)
        finally:
            self.max_model_len = limit

    return prepare_attn
