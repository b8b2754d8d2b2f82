"""Captured graphs of the draft: that they run, draft what stock drafts, and go wrong without each behaviour."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
from packaging.version import Version
from release_under_test import PROBABILISTIC, release, supplied
from support import (
    Acceptance,
    engine,
    greedy,
    held_out_prompts,
    recorded_max_seq_lens,
    recorded_slots,
    runner_of,
    speculator_of,
)

from vllm_eagle_mrv2 import patches
from vllm_eagle_mrv2.draft_model import linear
from vllm_eagle_mrv2.draft_model.compile_ahead import THREAD
from vllm_eagle_mrv2.drafting import loop
from vllm_eagle_mrv2.drafting.drafter import drafter_of
from vllm_eagle_mrv2.kernels import decode_inputs, prefill_inputs, row_product, single_token_attention, step_update

SIZES = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
# From 0.22 to 0.25 stock captures full graphs of the draft prefill on metadata of the target's capture (#48261): with
# the demo pair that is an illegal memory access in FlashAttention's combine kernel, and the end of the process.
STOCK_SIZES = SIZES | ({"cudagraph_mode": "PIECEWISE"} if Version("0.22") <= release < Version("0.26") else {})
TOKENS = 48


@contextmanager
def counted_replays(speculator: Any) -> Iterator[Counter[str]]:
    """Replays of FULL graphs, by ``prefill`` and ``decode`` and by padded size; one graph of both counts as both."""
    counts: Counter[str] = Counter()
    drafter = drafter_of(speculator)
    whole = frozenset() if drafter is None else drafter.loop.phase_graphs.descriptors
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("prefill", "decode"):
            manager = getattr(speculator, f"{kind}_cudagraph_manager")

            def replay(descriptor: Any, kind: str = kind, original: Any = manager.run_fullgraph) -> Any:
                for held in ("prefill", "decode", "both") if descriptor in whole else (kind,):
                    counts[held] += 1
                    counts[f"{held} of {descriptor.num_reqs}"] += 1
                return original(descriptor)

            patch.setattr(manager, "run_fullgraph", replay)
        yield counts


def counted_calls(owner: Any, name: str) -> Counter[str]:
    """Calls of a method from now on, by its name."""
    counts, original = Counter[str](), getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return original(*args, **kwargs)

    setattr(owner, name, counted)
    return counts


@contextmanager
def counted_builds(llm: Any) -> Iterator[Counter[str]]:
    """Calls of ``build`` of the metadata builders: ``target``, ``draft prefill`` and ``draft decode``."""
    counts: Counter[str] = Counter()
    owners = {"target": runner_of(llm).attn_groups, "draft": speculator_of(llm).attn_groups}
    builders = []
    for owner, groups in owners.items():
        for group in itertools.chain.from_iterable(groups):
            builder = group.get_metadata_builder(0)

            def build(
                common_prefix_len: int,
                common: Any,
                *,
                owner: str = owner,
                original: Any = builder.build,
                **further: Any,
            ) -> Any:
                phase = "" if owner == "target" else " prefill" if common.max_query_len > 1 else " decode"
                counts[owner + phase] += 1
                return original(common_prefix_len, common, **further)

            # vLLM passes its arguments by name.
            builder.build = lambda common_prefix_len, common_attn_metadata, build=build, **further: build(
                common_prefix_len, common_attn_metadata, **further
            )
            builders.append(builder)
    try:
        yield counts
    finally:
        for builder in builders:
            del builder.build


@pytest.mark.parametrize(("family", "k"), [("eagle", 3), ("eagle3", 3), ("eagle", 1), ("eagle", 7)])
def test_replayed_graphs_draft_what_stock_drafts(
    family: str, k: int, record_property: Callable[[str, object], None]
) -> None:
    prompts = held_out_prompts(8)
    with engine(family, family=family, k=k, compilation_config=STOCK_SIZES) as llm:
        expected = [greedy(llm, prompts[:n], TOKENS) for n in (1, 3, 8)]
        acceptance = Acceptance(llm)
        greedy(llm, prompts, TOKENS)
        stock = acceptance.length
    with engine("eagle_mrv2", family=family, k=k, compilation_config=SIZES) as llm:
        speculator = speculator_of(llm)
        assert type(speculator).__name__ == "EagleMRV2Speculator"
        with counted_replays(speculator) as replays:
            actual = [greedy(llm, prompts[:n], TOKENS) for n in (1, 3, 8)]
        assert actual == expected
        assert replays["prefill"] > 10
        assert (
            replays["decode"]
            >= (k > 1 if speculator.drafter.adapter.refreshes_in_graph else k - 1) * replays["prefill"]
        )
        # Three requests run in the graph of four: padded rows.
        assert replays["prefill of 4"] > 0
        assert k == 1 or replays["decode of 4"] > 0
        acceptance = Acceptance(llm)
        greedy(llm, prompts, TOKENS)
        for name, value in (("family", family), ("k", k), ("stock", stock), ("eagle_mrv2", acceptance.length)):
            record_property(name, value)
        assert acceptance.length >= stock - 0.05


def test_graphs_are_captured_at_the_small_sizes() -> None:
    sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
    with engine("eagle_mrv2", compilation_config=sizes) as llm:
        speculator = speculator_of(llm)
        prefill = {desc.num_reqs for desc in speculator.prefill_cudagraph_manager.graphs}
        decode = {desc.num_reqs for desc in speculator.decode_cudagraph_manager.graphs}
        assert {1, 2, 4, 8} <= prefill
        assert {1, 2, 4, 8} <= decode
        asked = set(runner_of(llm).vllm_config.compilation_config.cudagraph_capture_sizes)
        assert not supplied("single_token_capture_sizes") or asked == {4, 8, 16, 32}, "the target's sizes are its own"


def test_graphs_share_the_targets_pool() -> None:
    with engine("eagle_mrv2", compilation_config=SIZES) as llm:
        speculator = speculator_of(llm)
        pools = {speculator.prefill_cudagraph_manager.pool, speculator.decode_cudagraph_manager.pool}
        assert pools == {runner_of(llm).cudagraph_manager.pool}


def test_a_draft_can_be_eager() -> None:
    prompts = held_out_prompts(3)
    with engine("eagle_mrv2", speculative={"enforce_eager": True}, compilation_config=SIZES) as llm:
        speculator = speculator_of(llm)
        assert not speculator.prefill_cudagraph_manager.graphs
        assert not speculator.decode_cudagraph_manager.graphs
        assert runner_of(llm).cudagraph_manager.graphs
        acceptance = Acceptance(llm)
        greedy(llm, prompts, TOKENS)
        assert acceptance.length > 1.5


def rows_with_draft_logits(disable: list[str]) -> tuple[int, list[bool]]:
    """How many rows replays for three requests wrote, and by step whether all of the three."""
    prompts = held_out_prompts(3)
    with engine(
        "eagle_mrv2",
        speculative=PROBABILISTIC,
        options={"disable": disable},
        compilation_config=SIZES,
    ) as llm:
        speculator = speculator_of(llm)
        assert speculator.draft_logits.dtype == torch.float32
        greedy(llm, prompts, 8)
        # As if a fourth request had run before; greedy rows store nothing.
        speculator.temperature.fill_(0.8)
        speculator.idx_mapping[3] = min(set(range(4)) - set(speculator.idx_mapping[:3].tolist()))
        unwritten = 123.0
        speculator.draft_logits.fill_(unwritten)
        with counted_replays(speculator) as replays:
            greedy(llm, prompts, TOKENS, temperature=0.8, seed=7)
        assert replays["decode of 4"] > 0
        logits = speculator.draft_logits
        # [max_num_reqs, K]; from 0.25 on the rows of new requests begin as placeholders, infinite but for token 0.
        written = (logits != unwritten).any(dim=-1) & logits.isfinite().all(dim=-1)
        rows = written[:, 0]
        return int(rows.sum()), [bool(column[rows].all()) for column in written.T]


def test_draft_logits_are_written_at_every_step() -> None:
    assert rows_with_draft_logits([]) == (3, [True, True, True])
    assert rows_with_draft_logits(["draft_logits_in_replay"]) == (3, [True, False, False])


def test_each_draft_step_has_metadata_of_its_own() -> None:
    prompts = held_out_prompts(8)
    late, right_slots = {}, {}
    for name, disable in (("fresh", []), ("stale", ["decode_metadata_rebuild"])):
        with engine("eagle_mrv2", k=7, options={"disable": disable}, compilation_config=SIZES) as llm:
            acceptance = Acceptance(llm)
            greedy(llm, prompts, TOKENS)
            late[name] = sum(acceptance.by_position[3:])
            with recorded_slots(speculator_of(llm)) as right:
                greedy(llm, prompts[:3], 16)
            right_slots[name] = right
    assert right_slots["fresh"]
    assert all(right_slots["fresh"])
    # Of K - 1 = 6 draft decodes the first alone is right; where one graph holds all, the last is looked at.
    assert right_slots["stale"].count(True) <= len(right_slots["stale"]) // 4
    assert late["stale"] < 0.95 * late["fresh"]


@pytest.mark.parametrize("disable", [[], ["full_decode_only"]])
def test_draft_decode_has_no_piecewise_graphs(disable: list[str]) -> None:
    with engine("eagle_mrv2", options={"disable": disable}, compilation_config=SIZES) as llm:
        speculator = speculator_of(llm)
        greedy(llm, held_out_prompts(5), 8)
        greedy(llm, held_out_prompts(2), 8)
        piecewise = speculator.decode_cudagraph_manager.cudagraph_mode.has_piecewise_cudagraphs()
        stale = bool(speculator.last_token_indices[2:].any())
        assert (piecewise, stale) == ((True, True) if disable else (False, False))


def builds_of(method: str, disable: list[str], record_property: Callable[[str, object], None]) -> tuple[float, float]:
    """Builds of the draft's metadata for each of the target's: for draft prefills, and for draft decodes."""
    options = {"disable": disable} if disable else None
    sizes = SIZES if method == "eagle_mrv2" else STOCK_SIZES
    with engine(method, options=options, compilation_config=sizes) as llm:
        prompts = held_out_prompts(1)
        greedy(llm, prompts, 8)
        with counted_builds(llm) as builds:
            greedy(llm, prompts, TOKENS)
    assert builds["target"] > 5
    prefill, decode = (builds[f"draft {phase}"] / builds["target"] for phase in ("prefill", "decode"))
    record_property("draft_prefill_builds", round(prefill, 3))
    record_property("draft_decode_builds", round(decode, 3))
    return prefill, decode


@pytest.mark.parametrize(("disable", "extra"), [([], 0), (["target_metadata_reuse"], 1)])
def test_draft_prefill_reads_the_targets_metadata(
    disable: list[str], extra: int, record_property: Callable[[str, object], None]
) -> None:
    prefill, decode = builds_of("eagle_mrv2", disable, record_property)
    # The last iteration of a request may not draft, so the shares are a little below.
    assert prefill == pytest.approx(extra, abs=0.2)
    assert decode == 0, "the graph of the draft decodes refreshes its metadata itself"


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_one_graph_holds_the_draft_phase(family: str) -> None:
    prompts = held_out_prompts(5)
    tokens, lengths = {}, {}
    for name, disable in (("one", []), ("two", ["one_draft_graph"])):
        options = {"disable": disable}
        with engine("eagle_mrv2", family=family, options=options, compilation_config=SIZES) as llm:
            speculator = speculator_of(llm)
            # By the adapter: a replay calls nothing.
            combined, dispatched, launched = (
                counted_calls(owner, name)
                for owner, name in (
                    (speculator.drafter.adapter, "combine"),
                    (speculator.drafter.adapter, "dispatch_prefill"),
                    (speculator.drafter.loop, "_run_prefill"),
                )
            )
            with counted_replays(speculator) as replays, recorded_slots(speculator) as right:
                tokens[name] = [greedy(llm, prompts[:n], TOKENS) for n in (1, 3, 5)]
            acceptance = Acceptance(llm)
            greedy(llm, prompts, TOKENS)
            lengths[name] = acceptance.length
            assert right
            assert all(right)
            assert replays["both"] == (0 if disable else replays["prefill"])
            assert replays["prefill"] > 10
            # Prompts go through no graph.
            assert (combined["combine"] >= replays["prefill"]) is bool(disable)
            assert (launched["_run_prefill"] >= replays["prefill"]) is bool(disable)
            # Once for each size.
            assert (dispatched["dispatch_prefill"] >= replays["prefill"]) is bool(disable)
            # Three requests in the graph of four, five in that of eight.
            assert {f"decode of {n}" for n in (1, 4, 8)} <= replays.keys()
    assert tokens["one"] == tokens["two"]
    assert lengths["one"] == pytest.approx(lengths["two"], abs=0.01)


def test_kernels_are_compiled_while_the_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {
        name: kernel
        for module in (row_product, single_token_attention, prefill_inputs, decode_inputs, step_update)
        for name, kernel in vars(module).items()
        if name.endswith("_kernel")
    }
    ahead: set[str] = set()

    def noted(*args: Any, fn: Any, **kwargs: Any) -> None:
        if threading.current_thread().name.startswith(THREAD):
            ahead.add(fn.name.rpartition(".")[2])

    for kernel in kernels.values():
        kernel.device_caches.clear()  # of the engines before
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", noted)
    with engine("eagle_mrv2", compilation_config=SIZES) as llm:
        greedy(llm, held_out_prompts(2), 8)
    assert ahead >= kernels.keys()


@pytest.mark.parametrize("disable", [[], ["row_products"]])
def test_a_request_alone_has_products_of_rows(disable: list[str]) -> None:
    prompts = held_out_prompts(2)
    products = {}
    with engine("eagle_mrv2", options={"disable": disable}, compilation_config=SIZES) as llm:
        greedy(llm, prompts, 8)
        for count in (1, 2):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                greedy(llm, prompts[:count], 8)
                torch.cuda.synchronize()
            products[count] = sum("row_product" in event.name for event in profile.events())
    # Of two requests, once the first has ended, there is one left.
    assert (products[1] > 20) is not bool(disable)
    assert products[2] <= products[1] / 2


@pytest.mark.parametrize("options", [{}, {"draft_quantization": "fp8"}], ids=str)
def test_a_prefill_computes_the_rows_that_are_read(options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Eagerly and in graphs; the other rows are not even numbers here."""
    tokens, lengths, picked = [], [], 0

    def spread(product: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        nonlocal picked
        picked += 1
        return product.new_full((num_rows, product.shape[1]), torch.nan).index_copy_(0, rows, product)

    monkeypatch.setattr(linear, "_spread", spread)
    for picks in (False, True):
        for module, worth in ((loop, "_WORTH_PICKING"), (loop, "_WORTH_LAUNCHING"), (linear, "_WORTH_SPLITTING")):
            monkeypatch.setattr(module, worth, 0 if picks else 2**62)
        with engine("eagle_mrv2", options=options, compilation_config=SIZES) as llm:
            acceptance = Acceptance(llm)
            tokens.append(greedy(llm, held_out_prompts(7), TOKENS))
            lengths.append(acceptance.length)
        assert (picked > 0) is picks
    assert tokens[0] == tokens[1]
    assert lengths[0] == pytest.approx(lengths[1], abs=0.05)


def test_a_draft_vocabulary_is_not_scattered() -> None:
    """On 0.20 too, which has no engine on a CPU: its drafts are sampled, and out of the head's own columns."""
    tokens, scatters = [], []
    for disable in ([], ["two_stage_argmax"]):
        with (
            engine("eagle_mrv2", family="eagle3", options={"disable": disable}, compilation_config=SIZES) as llm,
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile,
        ):
            tokens.append(greedy(llm, held_out_prompts(2), 16))
            torch.cuda.synchronize()
        # Of the draft's steps, and of whatever else vLLM does so.
        scatters.append(sum("index_put" in event.name for event in profile.events()))
    assert tokens[0] == tokens[1]
    assert scatters[1] - scatters[0] > 10


def test_draft_decodes_attend_with_one_kernel() -> None:
    prompts = held_out_prompts(3)
    tokens, lengths, kernels = {}, {}, {}
    for name, disable in (("ours", []), ("FlashAttention's", ["single_token_attention"])):
        with engine("eagle_mrv2", options={"disable": disable}, compilation_config=SIZES) as llm:
            acceptance = Acceptance(llm)
            tokens[name] = greedy(llm, prompts, TOKENS)
            lengths[name] = acceptance.length
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                greedy(llm, prompts, 16)
                torch.cuda.synchronize()
            names = [event.name for event in profile.events()]
            ours, flash, writes, turns, maps, phases = (
                sum(part in each for each in names)
                for part in (
                    "single_token_attention",
                    "flash",
                    "reshape_and_cache_flash",
                    "rotary_embedding",
                    "compute_slot_mappings",
                    "prefill_inputs",
                )
            )
            # A draft phase more or less, by the acceptance, makes no difference to these.
            kernels[name] = tuple(each / phases for each in (ours, flash - writes, writes, turns, maps))
    assert tokens["ours"] == tokens["FlashAttention's"]
    assert lengths["ours"] == pytest.approx(lengths["FlashAttention's"], abs=0.1)
    # The target and the draft prefill stay with FlashAttention.
    assert kernels["ours"][0] > 1
    assert kernels["FlashAttention's"][0] == 0
    assert 0 < kernels["ours"][1] <= kernels["FlashAttention's"][1] - 0.9 * kernels["ours"][0]
    # They write the cache too, and turn by RoPE, which of a draft prefill is done to the queries and to the keys.
    assert 0 < kernels["ours"][2] <= kernels["FlashAttention's"][2] - 0.9 * kernels["ours"][0]
    assert 0 < kernels["ours"][3] <= kernels["FlashAttention's"][3] + 2
    # The target's slots are mapped once an iteration, and the draft's only where a prefill is no graph.
    assert kernels["ours"][4] < 1.6


# What asks nothing of the builders hides what they do.
BUILT = ["fused_draft_decode", "single_token_attention"]


@pytest.mark.skipif(not supplied("fused_draft_decode"), reason="vLLM's own on this release")
def test_without_fused_decodes_every_step_is_built(record_property: Callable[[str, object], None]) -> None:
    prompts = held_out_prompts(3)
    tokens = {}
    for name, disable in (("fused", []), ("steps", BUILT)):
        with engine("eagle_mrv2", options={"disable": disable}, compilation_config=SIZES) as llm:
            with counted_builds(llm) as builds, counted_replays(speculator_of(llm)) as replays:
                tokens[name] = greedy(llm, prompts, TOKENS)
            share = builds["draft decode"] / builds["target"]
            record_property(name, round(share, 3))
            assert share == pytest.approx(2 if disable else 0, abs=0.4)
            assert replays["decode"] / replays["prefill"] == pytest.approx(2 if disable else 1, abs=0.1)
    assert tokens["fused"] == tokens["steps"]


def test_what_stock_builds(record_property: Callable[[str, object], None]) -> None:
    """What the behaviours are measured against.

    0.20 builds for draft prefills, and once for all draft decodes; 0.22 to 0.27 at every step; later ones not at all.
    """
    prefill, decode = builds_of("eagle", [], record_property)
    old = release < Version("0.22")
    assert prefill == pytest.approx(1 if old else 0, abs=0.2)
    steps = (1 if old else 2) if supplied("fused_draft_decode") else 0
    assert decode == pytest.approx(steps, abs=0.4)


@pytest.mark.skipif(not supplied("fused_draft_decode"), reason="stock's builders build nothing at run time")
def test_what_stock_takes_for_the_maximum_length(record_property: Callable[[str, object], None]) -> None:
    with engine("eagle", compilation_config=STOCK_SIZES) as llm:
        seen = recorded_max_seq_lens(speculator_of(llm))
        greedy(llm, held_out_prompts(2), 16)
    record_property("max_seq_len", max(seen))
    assert (max(seen) == 256) is (release < Version("0.23"))


@pytest.mark.skipif(not supplied("fused_draft_decode"), reason="the draft's builders build nothing at run time")
def test_max_seq_len_of_the_draft_is_the_batchs(record_property: Callable[[str, object], None]) -> None:
    seen: dict[str, set[int]] = {}
    for name, disable in (("on", []), ("off", ["actual_max_seq_len"])):
        # A graph that holds all draft decodes is captured for the longest sequence: without it.
        off = [*disable, *BUILT]
        with engine("eagle_mrv2", options={"disable": off}, compilation_config=SIZES) as llm:
            seen[name] = recorded_max_seq_lens(speculator_of(llm))
            greedy(llm, held_out_prompts(2), 16)
    record_property("max_seq_len", max(seen["on"]))
    assert max(seen["on"]) < 200
    assert seen["off"] == {256}


def test_lengths_come_from_the_cpu() -> None:
    """Without a bound on the CPU some builders fetch the lengths from the device at every step."""
    if not supplied("lengths_without_sync"):
        pytest.skip("vLLM's own on this release")
    with engine("eagle_mrv2", options={"disable": BUILT}, compilation_config=SIZES) as llm:
        bounds: list[bool] = []
        for group in itertools.chain.from_iterable(speculator_of(llm).attn_groups):
            builder = group.get_metadata_builder(0)

            def build(common_prefix_len: int, common_attn_metadata: Any, original: Any = builder.build) -> Any:
                bounds.append(common_attn_metadata.seq_lens_cpu_upper_bound is not None)
                return original(common_prefix_len, common_attn_metadata)

            builder.build = build
        greedy(llm, held_out_prompts(2), 8)
    assert bounds
    assert all(bounds)


@pytest.mark.skipif(not Version("0.22") <= release < Version("0.23"), reason="supplied on vLLM 0.22 alone")
def test_hybrid_models_take_the_batchs_maximum_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.22 refuses hybrid models on this runner, so its class is called directly."""
    from types import SimpleNamespace

    import numpy as np
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.model_states import mamba_hybrid

    patches.apply(patches.Scope.WORKER, release)
    state = object.__new__(mamba_hybrid.MambaHybridModelState)
    state.max_model_len = 4096
    state.num_accepted_tokens_gpu = torch.ones(4, dtype=torch.int32)
    lengths = torch.tensor([17, 33, 0, 0], dtype=torch.int32)
    batch = SimpleNamespace(
        num_reqs=2,
        num_reqs_after_padding=4,
        num_tokens=2,
        num_tokens_after_padding=4,
        query_start_loc=None,
        query_start_loc_np=np.arange(3, dtype=np.int32),
        num_scheduled_tokens=np.ones(2, dtype=np.int32),
        is_prefilling_np=np.zeros(2, dtype=bool),
        num_draft_tokens_per_req=None,
        idx_mapping=torch.arange(2),
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        dcp_local_seq_lens=None,
    )
    seen = []
    monkeypatch.setattr(mamba_hybrid, "build_attn_metadata", lambda **given: seen.append(given["max_seq_len"]))
    for mode in (CUDAGraphMode.FULL, CUDAGraphMode.NONE):
        state.prepare_attn(batch, mode, (), None, [], None)
    state.prepare_attn(batch, CUDAGraphMode.FULL, (), None, [], None, for_capture=True)
    stock = mamba_hybrid.MambaHybridModelState.prepare_attn._eagle_mrv2_original
    stock(state, batch, CUDAGraphMode.FULL, (), None, [], None)
    assert seen == [33, 33, 4096, 4096]
    assert state.max_model_len == 4096
    patches.apply(patches.Scope.WORKER, release)
    assert mamba_hybrid.MambaHybridModelState.prepare_attn._eagle_mrv2_original is stock, "one wrap, not two"
