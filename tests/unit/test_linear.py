"""Which of a draft's products become ours, with vLLM's own layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
pytest.importorskip("vllm")

from vllm_eagle_mrv2.draft_model import compile_ahead, linear
from vllm_eagle_mrv2.draft_model.head import DraftHead
from vllm_eagle_mrv2.draft_model.logits_processor import DraftLogits
from vllm_eagle_mrv2.kernels import few_rows_product as few_rows
from vllm_eagle_mrv2.kernels.greedy import best_tokens
from vllm_eagle_mrv2.kernels.sample_with_logits import sample_with_target_noise

from .test_head import HIDDEN, VOCAB, Model, trim, whole_head

PADDED = 320  # rows of a head of VOCAB

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the layers are on the CPU, for the interpreter"),
    pytest.mark.usefixtures("one_rank_as_on_a_gpu"),
]


class Draft(Model):
    """A draft of one layer, with the target's embedding and head."""

    def __init__(self, target: Target, lm_head: Any = None) -> None:
        from vllm.model_executor.layers.linear import ReplicatedLinear

        super().__init__(lm_head or target.lm_head, None)
        self.embed_tokens = target.embed_tokens
        self.fc = ReplicatedLinear(2 * HIDDEN, HIDDEN, bias=True, params_dtype=torch.float32, return_bias=False)
        fill(self.fc)

    def forward(self, tokens: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.fc(torch.cat((self.embed_tokens(tokens), hidden_states), dim=-1))
        return states.relu()


class Target(Model):
    """A target with an embedding and a head."""

    def __init__(self) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        super().__init__(whole_head(torch.randn(VOCAB, HIDDEN)), None)
        self.embed_tokens = VocabParallelEmbedding(VOCAB, HIDDEN, params_dtype=torch.float32)
        fill(self.embed_tokens)


def fill(layer: nn.Module) -> None:
    generator = torch.Generator().manual_seed(4)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.arange(rows), torch.randn(rows, HIDDEN, generator=generator)


def test_single_rows_alone_and_the_same_result(ours: list[torch.Tensor]) -> None:
    target = Target()
    draft = Draft(target)
    expected = {rows: draft.compute_logits(draft(*inputs(rows))) for rows in (1, 3)}
    assert linear.install(draft, target, DraftLogits.of(draft, target, local=True)).layers == 1
    draft.compute_logits(inputs(2)[1])  # the profile run
    for rows, calls in ((3, 0), (1, 2)):
        ours.clear()
        torch.testing.assert_close(draft.compute_logits(draft(*inputs(rows))), expected[rows])
        assert [tuple(weight.shape) for weight in ours] == [(HIDDEN, 2 * HIDDEN), (PADDED, HIDDEN)][:calls]
    # The target multiplies as before, with the head that the draft has from it too.
    ours.clear()
    target.compute_logits(inputs(1)[1])
    assert not ours


@pytest.mark.parametrize("by_keys", [False, True], ids=["logits", "keys"])
def test_kernels_are_compiled_when_the_draft_is_loaded(by_keys: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, int, int]] = []

    def noting(kind: str) -> Callable[..., torch.Tensor]:
        def product(rows: torch.Tensor, weight: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            compiled.append((kind, len(rows) if rows.dim() > 1 else 1, len(weight)))
            return torch.empty(len(weight))

        return product

    monkeypatch.setattr(few_rows, "takes", lambda rows, weight: 1 < rows <= 32 and len(weight) >= PADDED)
    monkeypatch.setattr(linear, "row_product", noting("row"))
    monkeypatch.setattr(few_rows, "few_rows_product", noting("logits"))
    monkeypatch.setattr(few_rows, "few_rows_keys", noting("keys"))
    monkeypatch.setattr(compile_ahead, "submit", lambda device, call: call())
    target = Target()
    draft = Draft(target)
    few = few_rows.few_rows_keys if by_keys else None
    linear.install(draft, target, DraftLogits.of(draft, target, local=True), few)
    kind = "keys" if by_keys else "logits"
    of_head = [("row", 1, PADDED), (kind, 16, PADDED), (kind, 32, PADDED)]
    assert compiled == [("row", 1, HIDDEN), *of_head]
    # Whichever head the processor is given in the profile run, of many rows.
    compiled.clear()
    draft.compute_logits(inputs(65)[1])
    assert compiled == of_head


def test_keys_of_an_argmax_are_compiled_for_heads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide layer has products of few rows too, and nobody takes an argmax of them."""
    keys: list[int] = []
    monkeypatch.setattr(few_rows, "takes", lambda rows, weight: 1 < rows <= 32)
    monkeypatch.setattr(linear, "row_product", lambda row, weight, **how: torch.empty(len(weight)))
    monkeypatch.setattr(few_rows, "few_rows_product", lambda rows, weight: torch.empty(len(rows), len(weight)))
    monkeypatch.setattr(few_rows, "few_rows_keys", lambda rows, weight: keys.append(len(weight)))
    monkeypatch.setattr(compile_ahead, "submit", lambda device, call: call())
    target = Target()
    draft = Draft(target)
    draft.fc.bias = None
    linear.install(draft, target, DraftLogits.of(draft, target, local=True), few_rows.few_rows_keys)
    draft.compute_logits(inputs(65)[1])  # the profile run
    assert keys
    assert set(keys) == {PADDED}


@pytest.mark.parametrize(("rows", "scale", "few"), [(3, 1.0, True), (1, 1.0, False), (3, 0.5, False)])
def test_greedy_rows_leave_no_logits(rows: int, scale: float, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM 0.20 samples; drafts are the same as of all logits."""
    monkeypatch.setattr(few_rows, "takes", lambda rows, weight: 1 < rows <= 32)
    target = Target()
    draft = Draft(target)
    draft.logits_processor.scale = scale
    logits = DraftLogits.of(draft, target, local=True)
    linear.install(draft, target, logits)
    head, hidden = DraftHead(draft, logits), inputs(rows)[1]
    of_rows = (torch.tensor([0, 3, -1])[:rows], torch.tensor([0.0, 0.0, 0.0, 0.7]))
    head.logits_by_temperature(inputs(65)[1], torch.zeros(65, dtype=torch.int64), of_rows[1])  # the profile run
    whole = draft.compute_logits(hidden)
    given, best = head.logits_by_temperature(hidden, *of_rows)
    assert (best is not None) is few
    others = (*of_rows, torch.arange(4), torch.arange(rows), torch.tensor(1))
    drafted = best_tokens(sample_with_target_noise(given, None, *others, best))
    assert drafted.tolist() == best_tokens(sample_with_target_noise(whole, None, *others)).tolist()
    assert draft.compute_logits(hidden).equal(whole)  # whoever asks for all of them


def test_without_a_processor_of_its_own_the_head_is_left_alone(ours: list[torch.Tensor]) -> None:
    target = Target()
    draft = Draft(target)
    linear.install(draft, target)
    ours.clear()
    draft.compute_logits(inputs(1)[1])
    assert not ours


def test_a_compiled_model_goes_through_the_op(ours: list[torch.Tensor]) -> None:
    target = Target()
    draft = Draft(target)
    expected = [draft(*inputs(rows)) for rows in (4, 1, 2)]
    linear.install(draft, target)
    ours.clear()
    compiled = torch.compile(draft, fullgraph=True, dynamic=True)
    for rows, states in zip((4, 1, 2), expected, strict=True):
        torch.testing.assert_close(compiled(*inputs(rows)), states)
    assert len(ours) == 1


def test_an_embedding_as_the_head(ours: list[torch.Tensor]) -> None:
    target = Target()
    draft = Draft(target, target.embed_tokens)
    linear.install(draft, target, DraftLogits.of(draft, target, local=True))
    states = inputs(1)[1]
    draft.compute_logits(states)
    ours.clear()
    expected = states @ target.embed_tokens.weight[:VOCAB].T
    torch.testing.assert_close(draft.compute_logits(states), expected)
    assert len(ours) == 1
    assert torch.equal(draft.embed_tokens(torch.tensor([3])), target.embed_tokens.weight[3:4])


def test_weights_that_are_replaced(ours: list[torch.Tensor]) -> None:
    target = Target()
    draft = Draft(target, whole_head(torch.randn(VOCAB, HIDDEN)))
    linear.install(draft, target, DraftLogits.of(draft, target, local=True))
    states = inputs(1)[1]
    draft.compute_logits(states)
    ours.clear()
    weight = torch.randn(VOCAB, HIDDEN)
    draft.lm_head.weight.data[:VOCAB] = weight
    torch.testing.assert_close(draft.compute_logits(states), states @ weight.T)
    draft.lm_head.weight = nn.Parameter(2 * draft.lm_head.weight.data, requires_grad=False)
    torch.testing.assert_close(draft.compute_logits(states), 2 * states @ weight.T)
    assert len(ours) == 2


def test_the_rows_that_a_trimmed_head_keeps(ours: list[torch.Tensor]) -> None:
    target = Target()
    draft = Draft(target)
    kept = (3, 8, 120, 299)
    states = inputs(1)[1]
    best = kept[int(draft.compute_logits(states)[0, list(kept)].argmax())]
    linear.install(draft, target, DraftLogits.of(draft, target, local=True))
    _, head = trim(draft, target, *kept)
    head.keys(states)  # the profile run, which finds out
    ours.clear()
    assert best_tokens(head.keys(states)).tolist() == [best]
    assert [len(weight) for weight in ours] == [64], "four rows, padded"


@pytest.mark.parametrize("plain", [True, False])
def test_the_argmax_of_few_rows_is_part_of_the_product(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "takes", lambda rows, weight: 1 < rows <= 4)
    seen: list[tuple[int, ...]] = []
    keys = few_rows.few_rows_keys

    def counted(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append((len(rows), len(weight)))
        return keys(rows, weight)

    monkeypatch.setattr(few_rows, "few_rows_keys", counted)
    target = Target()
    draft = Draft(target)
    if not plain:
        draft.logits_processor.soft_cap = 0.5
    expected = {rows: draft.compute_logits(inputs(rows)[1]) for rows in (1, 3, 5)}
    logits = DraftLogits.of(draft, target, local=True)
    linear.install(draft, target, logits)
    head = DraftHead(draft, logits)
    head.keys(inputs(7)[1])  # the profile run
    seen.clear()
    for rows, whole in expected.items():
        assert best_tokens(head.keys(inputs(rows)[1])).tolist() == whole.argmax(-1).tolist()
    # Without the padding of the head, whose rows name no token.
    assert seen == [(3, VOCAB)] * plain
    # Whoever else asks gets logits.
    torch.testing.assert_close(draft.compute_logits(inputs(3)[1]), expected[3])


class GatedDraft(nn.Module):
    """A draft with an MLP of vLLM's, and the target's."""

    def __init__(self, of_target: nn.Module | None = None) -> None:
        from vllm.model_executor.models.llama import LlamaMLP

        super().__init__()
        self.mlp = LlamaMLP(HIDDEN, 24, "silu").float()
        self.of_target = of_target
        fill(self.mlp)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.mlp(hidden_states)
        return states


@pytest.mark.parametrize("compiled", [False, True])
def test_an_activation_is_part_of_the_product_before_it(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    product, seen = linear.gated_row_product, []

    def counted(row: torch.Tensor, weight: torch.Tensor, **how: Any) -> torch.Tensor:
        seen.append(tuple(weight.shape))
        return product(row, weight, **how)

    target = GatedDraft()
    draft = GatedDraft(target.mlp)
    expected = {rows: draft(inputs(rows)[1]) for rows in (1, 3)}
    assert linear.install(draft, target).layers == 2
    monkeypatch.setattr(linear, "gated_row_product", counted)
    forward = torch.compile(draft, fullgraph=True, dynamic=True) if compiled else draft
    for rows in (3, 1):
        torch.testing.assert_close(forward(inputs(rows)[1]), expected[rows])
    assert seen == [(48, HIDDEN)]
    target(inputs(1)[1])
    assert len(seen) == 1


@pytest.mark.parametrize("other", ["quantized", "biased", "another activation", "another module"])
def test_an_activation_that_stays(other: str, ours: list[torch.Tensor]) -> None:
    from vllm.model_executor.layers.activation import GeluAndMul
    from vllm.model_executor.models.llama import LlamaMLP

    draft = GatedDraft()
    if other == "quantized":
        draft.mlp.gate_up_proj.quant_method = type("Fp8", (type(draft.mlp.gate_up_proj.quant_method),), {})()
    elif other == "biased":
        draft.mlp = LlamaMLP(HIDDEN, 24, "silu", bias=True).float()
        fill(draft.mlp)
    elif other == "another activation":
        draft.mlp.act_fn = GeluAndMul()
    else:
        draft.mlp.__class__ = type("MLP", (LlamaMLP,), {})
    states = inputs(1)[1]
    expected = draft(states)
    linear.install(draft, GatedDraft())
    torch.testing.assert_close(draft(states), expected)
    assert len(ours) == (1 if other == "quantized" else 2)


@pytest.mark.parametrize("other", ["quantized", "another backend", "batch invariant", "transposed", "no GPU"])
def test_what_is_left_alone(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    target = Target()
    draft = Draft(target)
    if other == "quantized":
        draft.fc.quant_method = type("Fp8", (UnquantizedLinearMethod,), {})()
    elif other == "another backend":
        monkeypatch.setattr(utils, "dispatch_unquantized_gemm", lambda *_: None)
        draft.fc.quant_method._gemm_impl = None
    elif other == "batch invariant":
        monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True, raising=False)
    elif other == "transposed":
        draft.fc.weight.data = draft.fc.weight.data.T.contiguous().T
    else:
        monkeypatch.undo()
    assert linear.install(draft, target).layers == 0


def test_methods_stay_of_their_class() -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    target = Target()
    draft = Draft(target)
    stock = draft.fc.quant_method
    linear.install(draft, target)
    assert type(draft.fc.quant_method) is UnquantizedLinearMethod
    assert draft.fc.quant_method is not stock
    assert "apply" not in vars(stock)
