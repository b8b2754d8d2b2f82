"""What the start-up line calls active, and which slower paths it warns of."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_eagle_mrv2.config.behaviours import SWITCHES, Behaviour
from vllm_eagle_mrv2.config.method import Settings
from vllm_eagle_mrv2.config.options import Options

pytest.importorskip("vllm.config.compilation")

from vllm.config.compilation import CUDAGraphMode

from vllm_eagle_mrv2.kernels.measured import about
from vllm_eagle_mrv2.telemetry.counters import FOLDER_VARIABLE
from vllm_eagle_mrv2.telemetry.start_line import Facts, _mebibytes

from .stock import drafter_on, stock_speculator

NONE, PIECEWISE, BOTH, DECODE_ONLY = (
    CUDAGraphMode.NONE,
    CUDAGraphMode.PIECEWISE,
    CUDAGraphMode.FULL_AND_PIECEWISE,
    CUDAGraphMode.FULL_DECODE_ONLY,
)
FAST = Facts(
    vllm="0.26.0",
    adapter="v0_26",
    settings=Settings("eagle", Options()),
    num_draft_tokens=3,
    draft_logits=None,
    draft_vocab=None,
    draft_weights=None,
    texts=None,
    ours=frozenset(Behaviour),
    asked_mode=BOTH,
    target_mode=BOTH,
    prefill_mode=BOTH,
    decode_mode=DECODE_ONLY,
    largest_graph=256,
    largest_asked=256,
    graphs_pay_up_to=2048,
    max_num_seqs=64,
    decode_graphs=True,
    fused=True,
    one_graph=True,
    slots_ahead=True,
    backends="FLASH_ATTN",
    needs_no_builder=True,
    builders_refresh=True,
    host_builds=False,
    kv_cache_groups=1,
    context_parallel=1,
    data_parallel=1,
    draft_argmax=True,
    local_argmax=False,
    filters=False,
    products=True,
    products_cached=True,
    unmeasured=None,
    quantized=(),
    head_unrounded=False,
    attention=True,
    skips_unused=False,
    asks_dynamic=False,
    dynamic=False,
    lengths=(),
    why_constant=None,
)
"""A greedy draft on one GPU, where nothing is left to wish for."""

EAGER = {"prefill_mode": NONE, "decode_mode": NONE, "decode_graphs": False, "fused": False, "one_graph": False}
ON_A_CPU = {**EAGER, "asked_mode": NONE, "target_mode": NONE, "products": False, "attention": False}
BY_BUILDERS = {"fused": False, "one_graph": False, "needs_no_builder": False, "builders_refresh": False}


def facts(disable: set[Behaviour] | None = None, **changed: Any) -> Facts:
    options = Options(disable=frozenset(disable or ()))
    settings = Settings("eagle", options, enforce_eager=changed.pop("enforce_eager", False))
    return dataclasses.replace(FAST, settings=settings, ours=FAST.ours - options.disable, **changed)


ALWAYS = {Behaviour.DECODE_METADATA_REBUILD, Behaviour.TARGET_METADATA_REUSE}
IN_GRAPHS = {
    Behaviour.FULL_DECODE_ONLY,
    Behaviour.SHARED_GRAPH_POOL,
    Behaviour.SINGLE_TOKEN_CAPTURE_SIZES,
    Behaviour.FUSED_DRAFT_DECODE,
    Behaviour.ONE_DRAFT_GRAPH,
}
KERNELS = {Behaviour.TWO_STAGE_ARGMAX, Behaviour.ROW_PRODUCTS, Behaviour.SINGLE_TOKEN_ATTENTION}
BUILT = {Behaviour.ACTUAL_MAX_SEQ_LEN, Behaviour.LENGTHS_WITHOUT_SYNC}


@pytest.mark.parametrize(
    ("changed", "active"),
    [
        ({}, ALWAYS | IN_GRAPHS | KERNELS),
        (ON_A_CPU, ALWAYS | {Behaviour.TWO_STAGE_ARGMAX}),
        ({**EAGER, "enforce_eager": True}, ALWAYS | KERNELS | {Behaviour.DRAFT_ENFORCE_EAGER}),
        ({"needs_no_builder": False}, ALWAYS | IN_GRAPHS | KERNELS | BUILT),
        ({"local_argmax": True}, ALWAYS | IN_GRAPHS | KERNELS | {Behaviour.LOCAL_ARGMAX}),
        (
            {"draft_logits": "float32, 4.0 MiB", "draft_argmax": False, "filters": True},
            (ALWAYS | IN_GRAPHS | KERNELS | {Behaviour.DRAFT_LOGITS_IN_REPLAY, Behaviour.PADDING_WITHOUT_LOGITS})
            - {Behaviour.TWO_STAGE_ARGMAX}
            | {Behaviour.INDEPENDENT_DRAFT_NOISE, Behaviour.DRAFT_TOP_K_TOP_P},
        ),
        ({"target_mode": PIECEWISE}, ALWAYS | IN_GRAPHS | KERNELS | {Behaviour.DRAFT_GRAPHS_BY_SUPPORT}),
        ({"asks_dynamic": True, "dynamic": True}, ALWAYS | IN_GRAPHS | KERNELS | {Behaviour.DYNAMIC_DRAFT_LENGTH}),
        ({"disable": IN_GRAPHS & SWITCHES}, ALWAYS | KERNELS | IN_GRAPHS - SWITCHES),
        (
            {"num_draft_tokens": 1, "decode_graphs": False, "fused": False},
            {Behaviour.TARGET_METADATA_REUSE, Behaviour.SHARED_GRAPH_POOL, Behaviour.ONE_DRAFT_GRAPH}
            | KERNELS - {Behaviour.SINGLE_TOKEN_ATTENTION},
        ),
    ],
)
def test_what_is_active(changed: dict[str, Any], active: set[Behaviour]) -> None:
    assert facts(**changed).active == sorted(active)


def test_the_line() -> None:
    slow = facts(**ON_A_CPU, disable={Behaviour.TWO_STAGE_ARGMAX})
    start = "drafts on vLLM 0.26.0: adapter v0_26, family eagle, K=3"
    modes = (
        "draft prefill graphs {}, draft decode graphs {}{}, draft logits none, greedy, active beyond this release: {}"
    )
    few = "decode_metadata_rebuild, target_metadata_reuse, disabled: two_stage_argmax"
    assert slow.line().endswith(f"{start}, {modes.format('NONE', 'NONE', '', few)}")
    up_to = ", graphs up to 256 tokens"
    several = ", ".join(sorted(ALWAYS | IN_GRAPHS | KERNELS))
    assert facts().line().endswith(f"{start}, {modes.format(BOTH.name, DECODE_ONLY.name, up_to, several)}")
    # A mode for whose graphs there is no size is none.
    no_size = dataclasses.replace(facts(decode_graphs=False), ours=frozenset())
    assert no_size.line().endswith(modes.format(BOTH.name, "NONE", up_to, "nothing"))


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({}, None),
        (ON_A_CPU, None),
        ({"num_draft_tokens": 1, "decode_graphs": False, "fused": False}, None),
        ({**EAGER, "enforce_eager": True}, "as enforce_eager of the speculative configuration says"),
        ({**EAGER, "enforce_eager": True, "num_draft_tokens": 1}, "as enforce_eager of the speculative configuration"),
        ({**EAGER, "asked_mode": PIECEWISE}, "as cudagraph_mode=PIECEWISE has none for decodes"),
        ({**EAGER, "target_mode": PIECEWISE, "backends": "X"}, "as the attention backend X supports none"),
        ({**EAGER, "data_parallel": 2, "backends": "X"}, "under data parallelism they have the target's"),
        ({**EAGER, "decode_mode": DECODE_ONLY}, "none of cudagraph_capture_sizes fits"),
        ({**BY_BUILDERS, "backends": "FLASHINFER"}, "as the attention backend FLASHINFER has the host build"),
        ({**BY_BUILDERS, "context_parallel": 2}, "under decode context parallelism"),
        ({"max_num_seqs": 65}, "of more than 64 requests outside of CUDA graphs, as the largest of cudagraph_capture"),
        ({"max_num_seqs": 65, "target_mode": NONE}, None),
        ({"max_num_seqs": 65, "graphs_pay_up_to": 256}, None),
        ({"max_num_seqs": 1024, "largest_graph": 2048, "largest_asked": 2048}, None),
        ({"max_num_seqs": 1024, "largest_graph": 2044, "largest_asked": 2048}, None),
        ({"largest_graph": 0}, None),
        ({"why_constant": "they wait; do that"}, "does not choose the number of draft tokens, as they wait; do that"),
        ({"fused": False, "disable": {Behaviour.FUSED_DRAFT_DECODE}}, None),  # as asked
        ({**EAGER, "target_mode": PIECEWISE, "disable": {Behaviour.DRAFT_GRAPHS_BY_SUPPORT}}, None),
        ({"host_builds": True, "backends": "X"}, "before each replay of the draft decodes, as the attention backend X"),
        ({"slots_ahead": False, "kv_cache_groups": 2}, "as the KV cache has 2 groups"),
        ({"slots_ahead": False, "context_parallel": 2}, "ranks share the KV cache out"),
        ({"asks_dynamic": True, "data_parallel": 2}, "drafts 3 tokens whatever the batch size, as data-parallel ranks"),
        ({"quantized": ("Fp8LinearMethod",) * 4}, "leaves 4 layers of the draft to vLLM's kernels"),
        ({"quantized": ("Fp8LinearMethod",), "disable": {Behaviour.ROW_PRODUCTS}}, None),
        ({"unmeasured": about("NVIDIA A100", (8, 0))}, "leaves the draft's products to PyTorch on NVIDIA A100, as"),
        ({"unmeasured": about("NVIDIA A100", (8, 0)), "disable": {Behaviour.ROW_PRODUCTS}}, None),
        ({"unmeasured": about("NVIDIA H200", (9, 0))}, None),
        ({"products": False, "products_cached": False}, "by this additional_config"),
    ],
    ids=str,
)
def test_each_slower_path_is_warned_of_once(changed: dict[str, Any], cause: str | None) -> None:
    warnings = list(facts(**changed).warnings())
    assert len(warnings) == (cause is not None)
    for warning in warnings:
        assert cause is not None
        assert cause in warning
        assert warning.startswith("eagle_mrv2 ")
        assert warning.endswith(".")
        assert "; " in warning, "the remedy"
        assert "\n" not in warning


# Who says it, and who counts


@pytest.mark.parametrize(
    ("parallel", "counts", "speaks"),
    [
        ({}, True, True),
        ({"rank": 1, "tensor_parallel_size": 2}, False, False),
        # The speculator is on the last stage.
        ({"rank": 2, "tensor_parallel_size": 2}, True, True),
        ({"rank": 3, "tensor_parallel_size": 2}, False, False),
        ({"rank": 2, "tensor_parallel_size": 2, "prefill_context_parallel_size": 2}, False, False),
        ({"rank": 4, "tensor_parallel_size": 2, "prefill_context_parallel_size": 2}, True, True),
        ({"data_parallel_rank_local": 0}, True, True),
        ({"data_parallel_rank_local": 1}, True, False),
    ],
    ids=str,
)
def test_one_rank_speaks_for_the_engine(
    parallel: dict[str, Any], counts: bool, speaks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    looked_at: list[Any] = []

    def of(drafter: Any) -> Facts:
        looked_at.append(drafter)
        return FAST

    monkeypatch.setattr(Facts, "of", of)
    drafter = drafter_on(stock_speculator(parallel={"data_parallel_index": 3, **parallel}))
    assert drafter.loop.counter.shared is counts
    assert [path.name for path in tmp_path.iterdir()] == ["3"] * counts
    drafter.announce()
    drafter.announce()  # vLLM initializes the KV cache anew
    assert looked_at == [drafter] * speaks


# What a draft leaves to vLLM's own products


def test_quantized_layers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_linear: Any = pytest.importorskip("vllm.model_executor.layers.linear")
    from vllm_eagle_mrv2.draft_model import linear

    class InSomeBits(vllm_linear.LinearMethodBase):
        create_weights = apply = None

    def layer(method: Any) -> torch.nn.Module:
        module = torch.nn.Linear(2, 2)
        module.quant_method = method
        return module

    monkeypatch.setattr(linear, "_runs_kernels", lambda weight: True)
    theirs = layer(InSomeBits())
    draft = torch.nn.ModuleList([layer(InSomeBits()), layer(vllm_linear.UnquantizedLinearMethod()), theirs])
    found = linear.install(draft, torch.nn.ModuleList([theirs]))
    assert found.quantized == ("InSomeBits",)


def test_texts_of_lookup_drafts() -> None:
    assert "texts" not in facts().line()
    assert "draft logits none, greedy, texts 128.0 MiB, active" in facts(texts="128.0 MiB").line()
    assert _mebibytes(torch.empty(256, 131_072, dtype=torch.int32, device="meta")) == "128.0 MiB"


def test_rounded_weights() -> None:
    rounded: dict[str, Any] = {"draft_weights": "fp8, 208.0 MiB less"}
    assert "draft logits none, greedy, draft weights fp8, 208.0 MiB less, active" in facts(**rounded).line()
    assert list(facts(**rounded).warnings()) == []
    for changed, part in (
        ({"head_unrounded": True}, "draft_quantization rounds its layers alone"),
        ({"products": False}, "leave draft_quantization out"),
        ({"unmeasured": "on L4"}, "on a GPU on which it was not measured"),
    ):
        (warning,) = facts(**rounded, **changed).warnings()
        assert part in warning
