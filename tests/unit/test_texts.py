"""Where the requests' tokens are kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_eagle_mrv2.config.method import Settings, mark
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.patches import texts

from .stock import K, drafter_on, stock_speculator


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_texts_are_kept_on_the_device_where_drafts_are_looked_up(on_host: bool) -> None:
    ours, lengths = stock_speculator(), torch.tensor([3, 4], dtype=torch.int32)
    ours.drafter = drafter_on(ours)
    tokens = torch.arange(8, dtype=torch.int32).view(2, 4)
    staged = SimpleNamespace(gpu=tokens, dtype=torch.int32, device=torch.device("cpu"))
    if on_host:
        staged._uva_buf = "pinned memory"

    def made(runner: Any) -> None:
        runner.speculator = ours
        runner.req_states = SimpleNamespace(all_token_ids=staged, total_len=SimpleNamespace(gpu=lengths))

    init = texts.texts_on_device(made)
    for settings in (None, Settings("eagle", Options())):
        if settings is not None:
            mark(ours, settings)
        init(SimpleNamespace())
        assert ours.drafter.loop.lookup is None
        assert staged.gpu is tokens
    mark(ours, Settings("eagle", Options(lookup_drafts=True)))
    init(SimpleNamespace())
    lookup: Any = ours.drafter.loop.lookup
    assert (lookup.tokens is staged.gpu, lookup.lengths is lengths) == (True, True)
    assert lookup.found.tolist() == 2 * [K * [-1]]
    assert (staged.gpu is tokens) is not on_host
    assert (staged.gpu.shape, staged.gpu.dtype) == ((2, 4), torch.int32)
    assert not hasattr(staged, "_uva_buf")
