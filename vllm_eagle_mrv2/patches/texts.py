"""Keeps the requests' tokens in the device's memory, where drafts are looked up in them (``lookup_drafts``)."""

from __future__ import annotations

from typing import Any

import torch

from vllm_eagle_mrv2.config.method import settings_of
from vllm_eagle_mrv2.patches.wrap import Function


def texts_on_device(original: Function) -> Function:
    """Wrap ``GPUModelRunner.__init__``: the texts move to the device's memory, and the drafter is told where they are.

    Made here, they stay while the engine sleeps, unlike what is allocated when the model is loaded.
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        settings = settings_of(self.speculator)
        if settings is not None and settings.options.lookup_drafts:
            states = self.req_states
            keep_on_device(states.all_token_ids)
            self.speculator.drafter.look_up_in(states.all_token_ids.gpu, states.total_len.gpu)

    return init


def keep_on_device(tensor: Any) -> None:
    """Move one of the runner's ``StagedWriteTensor`` from the host's memory to the device's; its content is lost."""
    if hasattr(tensor, "_uva_buf"):
        tensor.gpu = torch.zeros(tensor.gpu.shape, dtype=tensor.dtype, device=tensor.device)
        del tensor._uva_buf
