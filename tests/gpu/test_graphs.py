"""Captured graphs of the draft: that they run, draft what stock drafts, and go wrong without each behaviour."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
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

SIZES = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
TOKENS = 48


@contextmanager
def counted_replays(speculator: Any) -> Iterator[Counter[str]]:
    """Replays of FULL graphs, by ``prefill`` and ``decode`` and by padded size."""
    counts: Counter[str] = Counter()
    for kind in ("prefill", "decode"):
        manager = getattr(speculator, f"{kind}_cudagraph_manager")

        def replay(descriptor: Any, kind: str = kind, original: Any = manager.run_fullgraph) -> Any:
            counts[kind] += 1
            counts[f"{kind} of {descriptor.num_reqs}"] += 1
            return original(descriptor)

        manager.run_fullgraph = replay
    try:
        yield counts
    finally:
        del speculator.prefill_cudagraph_manager.run_fullgraph
        del speculator.decode_cudagraph_manager.run_fullgraph


@contextmanager
def counted_builds(llm: Any) -> Iterator[Counter[str]]:
    """Calls of ``build`` of the target's and of the draft's attention metadata builders."""
    counts: Counter[str] = Counter()
    owners = {"target": runner_of(llm).attn_groups, "draft": speculator_of(llm).attn_groups}
    builders = []
    for owner, groups in owners.items():
        for group in itertools.chain.from_iterable(groups):
            builder = group.get_metadata_builder(0)

            def build(*args: Any, owner: str = owner, original: Any = builder.build, **kwargs: Any) -> Any:
                counts[owner] += 1
                return original(*args, **kwargs)

            builder.build = build
            builders.append(builder)
    try:
        yield counts
    finally:
        for builder in builders:
            del builder.build


@pytest.mark.parametrize(("family", "k"), [("eagle", 3), ("eagle3", 3), ("eagle", 1), ("eagle", 7)])
def test_replayed_graphs_draft_what_stock_drafts(family: str, k: int) -> None:
    prompts = held_out_prompts(8)
    with engine(family, family=family, k=k, compilation_config=SIZES) as llm:
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
        assert replays["decode"] >= (k - 1) * replays["prefill"]
        # Three requests run in the graph of four: padded rows.
        assert replays["prefill of 4"] > 0
        assert k == 1 or replays["decode of 4"] > 0
        acceptance = Acceptance(llm)
        greedy(llm, prompts, TOKENS)
        assert acceptance.length >= stock - 0.02


def test_graphs_are_captured_at_the_small_sizes() -> None:
    with engine("eagle_mrv2", compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}) as llm:
        speculator = speculator_of(llm)
        prefill = {desc.num_reqs for desc in speculator.prefill_cudagraph_manager.graphs}
        decode = {desc.num_reqs for desc in speculator.decode_cudagraph_manager.graphs}
        assert {1, 2, 4, 8} <= prefill
        assert {1, 2, 4, 8} <= decode
        assert speculator.prefill_cudagraph_manager.pool == runner_of(llm).cudagraph_manager.pool
        assert speculator.decode_cudagraph_manager.pool == runner_of(llm).cudagraph_manager.pool


def draft_logits_steps(disable: list[str]) -> list[bool]:
    """By step: whether replays wrote the draft logits of every live request, beside padded rows."""
    prompts = held_out_prompts(3)
    with engine(
        "eagle_mrv2",
        speculative={"draft_sample_method": "probabilistic"},
        options={"disable": disable},
        compilation_config=SIZES,
    ) as llm:
        speculator = speculator_of(llm)
        assert speculator.draft_logits.dtype == torch.float32
        greedy(llm, prompts, 8)
        unwritten = 123.0
        speculator.draft_logits.fill_(unwritten)
        with counted_replays(speculator) as replays:
            greedy(llm, prompts, TOKENS, temperature=0.8, seed=7)
        assert replays["decode of 4"] > 0
        written = (speculator.draft_logits != unwritten).any(dim=-1)  # [max_num_reqs, K]
        rows = written[:, 0]
        assert int(rows.sum()) == len(prompts), "a padded row wrote into the row of another request"
        return [bool(column[rows].all()) for column in written.T]


def test_draft_logits_are_written_at_every_step() -> None:
    assert draft_logits_steps([]) == [True, True, True]
    assert draft_logits_steps(["draft_logits_in_replay"]) == [True, False, False]


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
    # Of K - 1 = 6 draft decodes the first alone is right.
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


@pytest.mark.parametrize(("disable", "extra"), [([], 0), (["target_metadata_reuse"], 1)])
def test_draft_prefill_reads_the_targets_metadata(disable: list[str], extra: int) -> None:
    with engine("eagle_mrv2", options={"disable": disable}, compilation_config=SIZES) as llm:
        prompts = held_out_prompts(1)
        greedy(llm, prompts, 8)
        with counted_builds(llm) as builds:
            greedy(llm, prompts, TOKENS)
        iterations = builds["target"]
        assert iterations > 5
        # K - 1 draft decodes, and a build for the draft prefill only without the reuse.  The last iteration of a
        # request may not draft.
        assert builds["draft"] == pytest.approx(iterations * (2 + extra), abs=2 + extra)


def test_max_seq_len_of_the_draft_is_the_batchs() -> None:
    seen: dict[str, set[int]] = {}
    for name, disable in (("on", []), ("off", ["actual_max_seq_len"])):
        with engine("eagle_mrv2", options={"disable": disable}, compilation_config=SIZES) as llm:
            seen[name] = recorded_max_seq_lens(speculator_of(llm))
            greedy(llm, held_out_prompts(2), 16)
    assert max(seen["on"]) < 200
    assert seen["off"] == {256}
