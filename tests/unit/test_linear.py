"""Which of a draft's products become ours, with vLLM's own layers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
pytest.importorskip("vllm")

from vllm_eagle_mrv2.config.vocab_ranking import KeptTokens
from vllm_eagle_mrv2.draft_model import compile_ahead, fp8, linear
from vllm_eagle_mrv2.draft_model.head import DraftHead
from vllm_eagle_mrv2.draft_model.logits_processor import DraftLogits
from vllm_eagle_mrv2.draft_model.rows_read import RowsRead
from vllm_eagle_mrv2.draft_model.trimmed_head import TrimmedHead
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.kernels import few_rows_product as few_rows
from vllm_eagle_mrv2.kernels.fp8 import dequantized, quantized
from vllm_eagle_mrv2.kernels.greedy import best_tokens
from vllm_eagle_mrv2.kernels.row_product import gated_row_product
from vllm_eagle_mrv2.kernels.sample_with_logits import sample_with_target_noise

from .test_head import HIDDEN, VOCAB, Model, trim, whole_head

PADDED = 320  # rows of a head of VOCAB

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the layers are on the CPU, for the interpreter"),
    pytest.mark.usefixtures("one_rank_as_on_a_gpu"),
    pytest.mark.slow,
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
    monkeypatch.setattr(few_rows, "few_rows_product", lambda rows, weight, scale: torch.empty(len(rows), len(weight)))
    monkeypatch.setattr(few_rows, "few_rows_keys", lambda rows, weight, scale: keys.append(len(weight)))
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

    def counted(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        seen.append((len(rows), len(weight)))
        return keys(rows, weight, scale)

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
    product, seen = gated_row_product, []

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


class DraftLayer(GatedDraft):
    """With attention before the MLP, of which only the products are here; values are weighted equally."""

    def __init__(self, attentions: int = 1) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([Attention() for _ in range(attentions)])

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for attention in self.attentions.children():
            hidden_states = attention(hidden_states)
        return super().forward(hidden_states)


class Impl(nn.Module):
    impl = None


class Attention(nn.Module):
    def __init__(self) -> None:
        from vllm.model_executor.layers.linear import ReplicatedLinear

        super().__init__()
        self.attn, self.q_size = Impl(), HIDDEN
        how: Any = {"params_dtype": torch.float32, "return_bias": False}
        self.qkv_proj = ReplicatedLinear(HIDDEN, 3 * HIDDEN, bias=True, **how)
        self.o_proj = ReplicatedLinear(HIDDEN, HIDDEN, bias=False, **how)
        fill(self.qkv_proj)
        fill(self.o_proj)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.qkv_proj(hidden_states).split(HIDDEN, dim=-1)
        states: torch.Tensor = self.o_proj(queries + (keys + values).sum(0))
        return states


@pytest.mark.parametrize("other", [None, "little to gain", "all rows are read", "quantized", "two attention layers"])
def test_other_rows_are_but_keys_and_values(other: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and what follows attention are those of the rows that are read, if all of it can be."""
    monkeypatch.setattr(linear, "_ATTENTION", f"{Attention.__module__}.{Attention.__qualname__}")
    monkeypatch.setattr(linear, "_WORTH_SPLITTING", 2 * HIDDEN * HIDDEN + (other == "little to gain"))
    draft = DraftLayer(2 if other == "two attention layers" else 1)
    states = inputs(4)[1]
    expected = draft(states)
    read = RowsRead(torch.tensor([3, 1]))
    if other == "quantized":
        method = draft.mlp.down_proj.quant_method
        method.__class__ = type("Fp8", (type(method),), {})
    installed = linear.install(draft, DraftLayer(), read=None if other == "all rows are read" else read)
    picks = other in (None, "little to gain")
    assert installed.of_read_rows == (HIDDEN * (2 * HIDDEN + 3 * 24) if picks else 0)
    product, seen = linear._product, []

    def counted(x: torch.Tensor, weight: torch.Tensor, *further: Any) -> torch.Tensor:
        seen.append((len(x), len(weight)))
        return product(x, weight, *further)

    monkeypatch.setattr(linear, "_product", counted)
    with read.only(2):
        found = draft(states)
    torch.testing.assert_close(found[[1, 3]], expected[[1, 3]], rtol=1e-4, atol=1e-4)
    whole, apart = [(4, 3 * HIDDEN)], [(4, 2 * HIDDEN), (2, HIDDEN)]
    if picks:
        assert seen == [*(whole if other else apart), (2, HIDDEN), (2, 48), (2, HIDDEN)]
    else:
        assert {rows for rows, _ in seen} == {4}
    seen.clear()
    with read.only(0):
        assert draft(states).shape == expected.shape
    if picks:
        assert seen == apart[:1]
    else:
        assert {rows for rows, _ in seen} == {4}


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


# FP8


def in_memory_of(layer: Any) -> tuple[int, int]:
    return layer.weight.data_ptr(), layer.weight_scale.data_ptr()


def test_rounded_weights(ours: list[torch.Tensor]) -> None:
    """The draft's own layer in place, the target's head in a copy, which is made again in its memory."""
    target = Target()
    draft = Draft(target)
    exact = {rows: draft.compute_logits(draft(*inputs(rows))) for rows in (1, 3)}
    whole = target.lm_head.weight.clone()
    installed = linear.install(draft, target, DraftLogits.of(draft, target, local=True), rounds=True)
    draft.compute_logits(inputs(65)[1])  # the profile run
    assert [layer.weight.dtype for layer in installed.rounded] == [torch.float8_e4m3fn]
    for rows, logits in exact.items():
        found = draft.compute_logits(draft(*inputs(rows)))
        assert 0.001 < float((found - logits).norm() / logits.norm()) < 0.1
    assert target.lm_head.weight.equal(whole)
    view = installed.view_of_head
    assert view is not None
    assert view.copied
    memory, states = in_memory_of(view.view), inputs(3)[1]
    before = draft.compute_logits(states)
    target.lm_head.weight.data.mul_(2)
    assert draft.compute_logits(states).equal(before)
    view.renew()
    torch.testing.assert_close(draft.compute_logits(states), 2 * before)
    assert in_memory_of(view.view) == memory


def test_a_head_of_its_own_is_rounded_in_place() -> None:
    target = Target()
    draft = Draft(target, whole_head(torch.randn(VOCAB, HIDDEN)))
    exact = draft.compute_logits(inputs(3)[1])
    installed = linear.install(draft, target, DraftLogits.of(draft, target, local=True), rounds=True)
    assert installed.rounded == (draft.fc, draft.lm_head)
    found = draft.compute_logits(inputs(3)[1])
    assert 0.001 < float((found - exact).norm() / exact.norm()) < 0.1
    assert installed.view_of_head is not None
    assert not installed.view_of_head.copied
    assert fp8.bytes_saved(draft.fc) == draft.fc.weight.numel() * 3 - 4 * HIDDEN


def test_a_head_that_vllm_has_rounded_stays_with_it() -> None:
    """By its own option, from 0.33 on; its scales have the name of ours."""

    class Rounded:
        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return nn.functional.linear(x, dequantized(layer.weight, layer.weight_scale, x.dtype))

    target = Target()
    head = target.lm_head
    values, scales = quantized(head.weight.data)
    head.weight, head.weight_scale = (nn.Parameter(one, requires_grad=False) for one in (values, scales))
    head.quant_method = Rounded()
    draft = Draft(target)
    states = inputs(3)[1]
    exact = draft.compute_logits(states)
    linear.install(draft, target, DraftLogits.of(draft, target, local=True))
    assert draft.compute_logits(states).equal(exact)


@pytest.mark.parametrize("own", [True, False])
def test_a_head_of_another_dtype_is_not_rounded(own: bool) -> None:
    """vLLM would multiply with its values, without their scales."""
    target = Target()
    draft = Draft(target, whole_head(torch.randn(VOCAB, HIDDEN)) if own else None)
    draft.logits_processor.head_dtype = torch.float64
    linear.install(draft, target, DraftLogits.of(draft, target, local=True), rounds=True)
    with pytest.raises(EagleMRV2Error, match="head_dtype"):
        draft.compute_logits(inputs(3)[1])


def test_kept_rows_of_a_head_of_its_own_are_rounded_once() -> None:
    target = Target()
    draft = Draft(target, whole_head(torch.randn(VOCAB, HIDDEN)))
    kept = (3, 7, 11)
    exact = draft.compute_logits(inputs(3)[1])[:, list(kept)]
    logits = DraftLogits.of(draft, target, local=True)
    assert logits is not None
    assert linear.install(draft, target, logits, rounds=True, trims=True).rounded == (draft.fc,)
    trimmed = TrimmedHead(logits, KeptTokens(kept, "ranking.json", None), torch.device("cpu"), rounds=True)
    for _ in range(2):
        found = draft.compute_logits(inputs(3)[1])[:, list(kept)]
        assert 0.001 < float((found - exact).norm() / exact.norm()) < 0.1
        assert fp8.is_rounded(trimmed.kept)
        memory = in_memory_of(trimmed.kept)
        trimmed.renew()
        assert in_memory_of(trimmed.kept) == memory


def test_a_draft_of_several_heads_is_not_rounded() -> None:
    """Each would be copied at every turn."""
    target = Target()
    draft = Draft(target)
    linear.install(draft, target, DraftLogits.of(draft, target, local=True), rounds=True)
    draft.compute_logits(inputs(3)[1])
    draft.lm_head = whole_head(torch.randn(VOCAB, HIDDEN))
    with pytest.raises(EagleMRV2Error, match="several heads"):
        draft.compute_logits(inputs(3)[1])


def test_an_embedding_that_is_the_head_too_stays() -> None:
    """Its rows are looked up."""
    target = Target()
    draft = Draft(target, whole_head(torch.randn(VOCAB, HIDDEN)))
    draft.embed_tokens = copy.copy(draft.lm_head)
    assert linear.install(draft, target, rounds=True).rounded == (draft.fc,)


def test_weights_that_vllm_loads_again_are_rounded_into_the_same_memory() -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    target = Target()
    draft = Draft(target)
    linear.install(draft, target, rounds=True)
    assert isinstance(draft.fc.quant_method, UnquantizedLinearMethod)  # as vLLM checks
    fresh = torch.randn(HIDDEN, 2 * HIDDEN)
    with pytest.raises(EagleMRV2Error, match="into which none can be loaded directly"):
        draft.fc.weight.weight_loader(draft.fc.weight, fresh)
    draft.fc.weight = nn.Parameter(fresh, requires_grad=False)
    draft.fc.quant_method.process_weights_after_loading(draft.fc)
    values, scales = quantized(fresh)
    assert draft.fc.weight.float().equal(values.float())
    assert draft.fc.weight_scale.equal(scales)


@pytest.mark.parametrize("name", ["gate", "fused_qkv_a_proj", "wk_weights_proj", "linear_gate"])
def test_a_router_and_what_other_code_reads_stay(name: str) -> None:
    from vllm.model_executor.layers.linear import ReplicatedLinear

    target = Target()
    draft = Draft(target)
    setattr(draft, name, ReplicatedLinear(HIDDEN, 8, bias=False, params_dtype=torch.float32, return_bias=False))
    assert linear.install(draft, target, rounds=True).rounded == (draft.fc,)


def test_what_cannot_be_rounded_is_said() -> None:
    target = Target()
    packed, foreign, bare = Draft(target), Draft(target), Draft(target)
    packed.fc.weight = nn.Parameter(torch.empty(0, 0), requires_grad=False)
    foreign.fc.quant_method = type("Fp8LinearMethod", (), {})()
    del bare.fc
    for draft, cause in (
        (packed, "vLLM has packed them for this CPU (fc)"),
        (foreign, "fc has its own (Fp8LinearMethod)"),
        (bare, "Draft has none"),
    ):
        with pytest.raises(EagleMRV2Error, match=re.escape(cause)):
            linear.install(draft, target, rounds=True)
    logits = DraftLogits.of(bare, target, local=True)
    assert logits is not None
    target.lm_head.quant_method = foreign.fc.quant_method
    with pytest.raises(EagleMRV2Error, match="the target's is quantized"):
        linear.HeadView(logits, None, rounds=True)._product(target.lm_head, inputs(2)[1])


@pytest.mark.parametrize("rows", [2, 33])
@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize("shape", [(64, 64), (60, 64), (64, 4096)])
def test_who_multiplies_several_rows(
    rows: int, supported: bool, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our kernel a few rows, where it is as fast or vLLM has no product; else vLLM, or PyTorch with whole weights."""
    from vllm import _custom_ops

    weight, x = torch.randn(shape).to(torch.bfloat16), torch.randn(rows, shape[1]).to(torch.bfloat16)
    values, scale = quantized(weight)
    who: list[str] = []
    product, dense = few_rows.few_rows_product, dequantized

    def by_vllm(a: Any, b: torch.Tensor, scale_a: Any, scale_b: torch.Tensor, dtype: torch.dtype, bias: Any) -> Any:
        who.append("vLLM")
        return (a @ (b.float() * scale_b.T)).to(dtype)

    def ours(*given: Any) -> Any:
        who.append("ours")
        return product(*given)

    def widened(*given: Any) -> Any:
        who.append("PyTorch")
        return dense(*given)

    monkeypatch.setattr(linear, "_has_fp8_product", lambda device: supported)
    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", lambda x, use_per_token_if_dynamic: (x.float(), None))
    monkeypatch.setattr(_custom_ops, "cutlass_scaled_mm", by_vllm)
    monkeypatch.setattr(few_rows, "few_rows_product", ours)
    monkeypatch.setattr(linear, "dequantized", widened)
    found, exact = (
        linear._several_rows(x, values, None, scale).float(),
        x.float() @ dense(values, scale, torch.float32).T,
    )
    assert float((found - exact).norm() / exact.norm()) < 0.01
    fits = supported and shape[0] % 16 == 0
    few = rows <= 32 and (shape[1] <= 2048 or not fits)
    assert who == ["ours" if few else "vLLM" if fits else "PyTorch"]
