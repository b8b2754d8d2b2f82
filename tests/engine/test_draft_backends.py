"""The backends that the speculative configuration names reach the draft's layers, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from support import engine, greedy, held_out_prompts, runner_of, speculator_of


def test_draft_is_built_by_its_own_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which configuration layers are made: a CPU has one attention backend, whatever is asked for."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.models.llama import LlamaAttention

    made: list[tuple[str, str | None]] = []

    def init(self: Any, *args: Any, original: Any = LlamaAttention.__init__, **kwargs: Any) -> None:
        config = get_current_vllm_config()
        attention = config.attention_config.backend
        made.append((config.kernel_config.moe_backend, attention and attention.name))
        original(self, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "__init__", init)
    with engine("eagle_mrv2", speculative={"moe_backend": "triton", "attention_backend": "TRITON_ATTN"}) as llm:
        assert made == [("auto", None)] * 4 + [("triton", "TRITON_ATTN")]
        assert speculator_of(llm).vllm_config is runner_of(llm).vllm_config
        assert len(greedy(llm, held_out_prompts(1), max_tokens=8)[0]) == 8
