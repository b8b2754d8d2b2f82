"""Which of a draft's norms become ours, with vLLM's own layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
pytest.importorskip("vllm")

from test_head import HIDDEN

from vllm_eagle_mrv2 import draft_norms, row_products
from vllm_eagle_mrv2.kernels import launching

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the layers are on the CPU, for the interpreter"),
    pytest.mark.usefixtures("one_rank_as_on_a_gpu"),
]


@pytest.fixture
def normed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that our kernel was given."""
    kernel, seen = draft_norms.add_rms_norm, []

    def counted(x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(len(x))
        return kernel(x, *others)

    monkeypatch.setattr(draft_norms, "add_rms_norm", counted)
    return seen


class NormedDraft(nn.Module):
    """A norm, one that adds a residual, and an MLP; and the target's."""

    def __init__(self, of_target: nn.Module | None = None) -> None:
        from vllm.model_executor.layers.layernorm import RMSNorm
        from vllm.model_executor.models.llama import LlamaMLP

        super().__init__()
        self.first, self.norm = RMSNorm(HIDDEN), RMSNorm(HIDDEN)
        self.mlp = LlamaMLP(HIDDEN, 24, "silu").float()
        self.of_target = of_target
        generator = torch.Generator().manual_seed(4)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states, total = self.norm(self.first(hidden_states), residual)
        return self.mlp(states), total


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    hidden_states, residual = torch.randn(2, rows, HIDDEN, generator=torch.Generator().manual_seed(rows))
    return hidden_states, residual


@torch.inference_mode()
@pytest.mark.parametrize("compiled", [False, True])
def test_a_norm_that_adds_a_residual_is_ours(compiled: bool, normed: list[int]) -> None:
    target = NormedDraft()
    draft = NormedDraft(target)
    names = set(draft.state_dict())
    expected = {rows: draft(*inputs(rows)) for rows in (1, 3)}
    row_products.install(draft, target, norms=True)
    forward = torch.compile(draft, fullgraph=True, dynamic=True) if compiled else draft
    normed.clear()
    for rows in (3, 1):
        torch.testing.assert_close(forward(*inputs(rows)), expected[rows])
    assert normed == [3, 1]
    target(*inputs(1))
    assert normed == [3, 1]
    # Weights are found, and seen, where they were.
    assert set(draft.state_dict()) == names
    draft.norm.weight.data.zero_()
    assert not forward(*inputs(1))[0].any()


@pytest.mark.parametrize(
    "other",
    [
        "not asked for",
        "a quantized layer",
        "several ranks",
        "another model",
        "a part of a row's variance",
        "no weights",
        "another norm",
        "another residual",
    ],
)
def test_a_norm_that_stays(other: str, normed: list[int]) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.models.llama import LlamaMLP

    draft, given = NormedDraft(), inputs(1)
    if other == "a quantized layer":
        draft.mlp.down_proj.quant_method = type("Fp8", (type(draft.mlp.down_proj.quant_method),), {})()
    elif other == "several ranks":
        draft.mlp.down_proj.tp_size = 2
    elif other == "another model":
        draft.mlp.__class__ = type("MLP", (LlamaMLP,), {})
    elif other == "a part of a row's variance":
        draft.norm.variance_size_override = HIDDEN // 2
    elif other == "no weights":
        draft.norm = RMSNorm(HIDDEN, has_weight=False)
    elif other == "another norm":
        draft.norm.__class__ = type("Norm", (RMSNorm,), {})
    elif other == "another residual":
        given = (given[0], given[1].double())
    row_products.install(draft, NormedDraft(), norms=other != "not asked for")
    normed.clear()
    draft.norm(*given)
    assert not normed


@pytest.mark.parametrize(("allowed", "has_it"), [(True, True), (True, False), (False, True)])
def test_who_launches_before_the_kernel_ahead_has_ended(
    allowed: bool, has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_has_pdl", lambda: has_it)
    try:
        launching.allow_pdl(allowed)
        used = allowed and has_it
        assert launching.uses_pdl() is used
        # A launcher that does not know it is not told.
        assert launching.pdl() == {"PDL": used, **({"launch_pdl": True} if used else {})}
    finally:
        launching.allow_pdl(True)
