"""FP8 drafts in real engines: the same output, about the same drafts, and weights that can be replaced."""

from __future__ import annotations

from typing import Any

import pytest
from support import Acceptance, engine, greedy, held_out_prompts

pytestmark = [pytest.mark.engine]
FP8 = {"draft_quantization": "fp8"}


@pytest.fixture(autouse=True)
def weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU vLLM packs the weights of linear layers unless it lacks oneDNN."""
    from vllm import _custom_ops

    monkeypatch.setattr(_custom_ops, "_supports_onednn", False)


def drafted(method: str, options: dict[str, Any] | None = None, **given: Any) -> tuple[list[list[int]], float]:
    with engine(method, options=options, **given) as llm:
        acceptance = Acceptance(llm)
        return greedy(llm, held_out_prompts(8)), acceptance.length


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_the_same_output_and_nearly_the_same_drafts(family: str) -> None:
    with engine(None) as llm:
        target = greedy(llm, held_out_prompts(8))
    tokens, length = drafted("eagle_mrv2", family=family)
    rounded_tokens, rounded_length = drafted("eagle_mrv2", FP8, family=family)
    assert rounded_tokens == tokens == target
    assert rounded_length == pytest.approx(length, abs=0.05)
