"""Draft decodes by `DecodeMetadata` alone, on a CPU whose layers stand in for those that attend by our kernel.

They attend by the CPU's own, to which they say what `DecodeMetadata` says, write what vLLM was kept from writing, and
turn by RoPE what the model has left as it was.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from support import Acceptance, engine, greedy, has_cuda, held_out_prompts, recorded_drafts, speculator_of

from vllm_eagle_mrv2.draft_model import attention
from vllm_eagle_mrv2.draft_model.attention import DecodeMetadata
from vllm_eagle_mrv2.drafting.capture import AskedGraphs

from .fake_graphs import SIZES, Draw

pytestmark = pytest.mark.skipif(has_cuda(), reason="tests/gpu has the kernel itself")

K = 4
TOKENS = 16
PROMPTS = held_out_prompts(5)
OFF = {"disable": ["single_token_attention"]}


@pytest.fixture(autouse=True)
def layers_that_need_no_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder as Builder

    made: list[Any] = []
    make = Builder.__init__

    def making(self: Any, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        made.append(self)

    monkeypatch.setattr(Builder, "__init__", making)

    def attend(impl: Any, kernels: Any, rope: Any, read: Any) -> None:
        stock, write = impl.forward, impl.do_kv_cache_update
        update = attention._CacheUpdate(impl, rope)
        assert rope is not None

        def forward(
            layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, output: Any, **further: Any
        ) -> Any:
            slots, keys_are_turned = update.taken()
            assert (slots is not None) is isinstance(metadata, DecodeMetadata)
            if metadata is not None:
                rope.turn(query, *([] if keys_are_turned else [key]))
            if slots is not None:
                write(layer, key, value, cache, slots)
                live = int((metadata.seq_lens > 0).sum())
                seq_lens, starts = metadata.seq_lens[:live], torch.arange(live + 1, dtype=torch.int32)
                schedule = ops.cpu_attn_get_scheduler_metadata(
                    num_reqs=live,
                    num_heads=impl.num_heads,
                    num_kv_heads=impl.num_kv_heads,
                    head_dim=impl.head_size,
                    seq_lens=seq_lens,
                    dtype=query.dtype,
                    query_start_loc=starts,
                    causal=True,
                    sliding_window_size=-1,
                    isa=made[-1].isa,
                    enable_kv_split=False,
                    dynamic_causal=None,
                    kv_cache_dtype=impl.kv_cache_dtype,
                )
                table = metadata.block_table[:live]
                longest = int(seq_lens.max())
                metadata = CPUAttentionMetadata(live, 1, starts, longest, seq_lens, table, torch.empty(0), schedule)
            return stock(layer, query, key, value, cache, metadata, output, **further)

        impl.forward = forward

    monkeypatch.setattr(attention, "_is_plain", lambda impl: isinstance(impl, CPUAttentionBackendImpl))
    monkeypatch.setattr(attention, "_attend_by_ours", attend)


def counted_builds(llm: Any) -> Counter[int]:
    """Calls of the draft's builders from now on, by the most tokens of a request; counted as they come."""
    counts: Counter[int] = Counter()
    for group in chain.from_iterable(speculator_of(llm).attn_groups):
        builder = group.get_metadata_builder(0)

        def build(*args: Any, original: Any = builder.build, **named: Any) -> Any:
            common = named["common_attn_metadata"] if named else args[1]  # from 0.32 on
            counts[common.max_query_len] += 1
            return original(*args, **named)

        builder.build = build
    return counts


def recorded(speculator: Any) -> list[bool]:
    """For each draft decode from now on, whether its metadata is that of the tokens at hand; filled as they come."""
    right: list[bool] = []
    buffers, tables = speculator.drafter.loop.buffers, speculator.block_tables
    run = speculator.drafter.adapter.run_draft_model

    def running(inputs: Any) -> Any:
        metadata = next(iter((inputs.attn_metadata or {}).values()), None)  # by layer; none in the profile run
        if isinstance(metadata, DecodeMetadata):
            live = int((buffers.idx_mapping[: metadata.num_actual_tokens] >= 0).sum())
            positions, size = buffers.positions[:live], tables.block_sizes[0]
            blocks = metadata.block_table[torch.arange(live), positions // size]
            slots = blocks * size + positions % size
            right.append(
                metadata.seq_lens[:live].tolist() == (positions + 1).tolist()
                and slots.tolist() == tables.slot_mappings[0, :live].tolist()
            )
        return run(inputs)

    speculator.drafter.adapter.run_draft_model = running
    return right


class ByBuilders(NamedTuple):
    """Where the host builds the metadata of every step, and the model turns by RoPE."""

    tokens: list[list[int]]  # without speculation
    acceptance: list[float]  # by position
    drafts: list[list[int]]


@pytest.fixture(scope="module")
def by_builders() -> ByBuilders:
    with engine(None) as llm:
        tokens = greedy(llm, PROMPTS, TOKENS)
    with engine("eagle_mrv2", k=K, options=OFF) as llm:
        builds, acceptance, drafts = counted_builds(llm), Acceptance(llm), recorded_drafts(speculator_of(llm))
        greedy(llm, PROMPTS, TOKENS)
        assert builds[1] > 10
        return ByBuilders(tokens, acceptance.by_position, drafts)


def test_nothing_is_built_for_draft_decodes(by_builders: ByBuilders) -> None:
    with engine("eagle_mrv2", k=K) as llm:
        speculator = speculator_of(llm)
        builds, acceptance, right = counted_builds(llm), Acceptance(llm), recorded(speculator)
        drafts = recorded_drafts(speculator)
        assert greedy(llm, PROMPTS, TOKENS) == by_builders.tokens
        assert acceptance.by_position == pytest.approx(by_builders.acceptance, abs=0.03)
        assert len(drafts) > 10
        assert drafts == by_builders.drafts
        assert builds[1] == 0
        assert len(right) > 10
        assert all(right)


def test_one_graph_of_all_draft_decodes(by_builders: ByBuilders, draft_decode_graphs: Draw) -> None:
    from vllm.config.compilation import CUDAGraphMode

    with engine("eagle_mrv2", k=K) as llm:
        builds, speculator = counted_builds(llm), speculator_of(llm)
        # As if asked for; on a CPU vLLM asks for none.
        speculator.drafter.adapter.asked = AskedGraphs(CUDAGraphMode.FULL_DECODE_ONLY, SIZES, SIZES[-1])
        replayed = draft_decode_graphs(llm)
        assert speculator.drafter.adapter.refreshes_in_graph
        acceptance, right = Acceptance(llm), recorded(speculator)
        assert greedy(llm, PROMPTS, TOKENS) == by_builders.tokens
        assert acceptance.by_position == pytest.approx(by_builders.acceptance, abs=0.03)
        assert builds[1] == 0
        # Five requests in a graph of eight: three rows of padding.
        assert {descriptor.num_reqs for descriptor in replayed} >= {8}
        assert len(right) > 10
        assert all(right)


def test_kernels_that_need_no_plan_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    monkeypatch.setattr(CPUAttentionMetadataBuilder, "use_trtllm_decode_attention", True, raising=False)
    with engine("eagle_mrv2", k=K) as llm:
        builds = counted_builds(llm)
        greedy(llm, PROMPTS[:2], 8)
        assert builds[1] > 3
