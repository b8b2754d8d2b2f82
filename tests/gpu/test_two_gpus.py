"""Two ranks on two GPUs, tensor-parallel or data-parallel: their graphs draft what stock drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from release_under_test import supplied
from support import Acceptance, engine, greedy, held_out_prompts
from two_ranks import IN_STEP, RANKS, VOCAB, Share, drafts_on_two_ranks, greedy_on_replicas

from .test_graphs import SIZES, STOCK_SIZES, TOKENS

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

PROMPTS = held_out_prompts(8)
# With FlashInfer at hand vLLM fuses the ranks' exchange into its kernels, which it compiles first, for minutes.
NO_FUSION = {"pass_config": {"fuse_allreduce_rms": False}}


@pytest.fixture(autouse=True)
def _engines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine in a process of its own, and its ranks too.

    In this one, vLLM collects the message queues of the engine before, and pyzmq waits without end for what they have
    not sent. A forked rank could not use CUDA, as this process has asked how many GPUs there are.
    """
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for the functions that ranks are given
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def _count_replays(worker: Any) -> None:
    manager = worker.model_runner.speculator.prefill_cudagraph_manager
    replay, manager.replays = manager.run_fullgraph, 0

    def counted(descriptor: Any) -> Any:
        manager.replays += 1
        return replay(descriptor)

    manager.run_fullgraph = counted


def _replays(worker: Any) -> int:
    count: int = worker.model_runner.speculator.prefill_cudagraph_manager.replays
    return count


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_two_ranks_draft_what_stock_drafts(family: str, record_property: Callable[[str, object], None]) -> None:
    with engine(family, family=family, compilation_config=STOCK_SIZES | NO_FUSION, **RANKS) as llm:
        expected = [greedy(llm, PROMPTS[:n], TOKENS) for n in (1, 3, 8)]
        acceptance = Acceptance(llm)
        greedy(llm, PROMPTS, TOKENS)
        record_property("stock", stock := acceptance.length)
    for name, disable in (("local", []), ("gathered", ["local_argmax"])):
        options = {"disable": disable}
        with engine("eagle_mrv2", family=family, options=options, compilation_config=SIZES | NO_FUSION, **RANKS) as llm:
            llm.collective_rpc(_count_replays)
            assert [greedy(llm, PROMPTS[:n], TOKENS) for n in (1, 3, 8)] == expected
            acceptance = Acceptance(llm)
            greedy(llm, PROMPTS, TOKENS)
            assert min(llm.collective_rpc(_replays)) > 10
            record_property(name, acceptance.length)
            assert acceptance.length >= stock - 0.02


def _graph_times(worker: Any) -> list[tuple[int, int]]:
    times = worker.model_runner.speculator.drafter.graphs.times()
    assert all(0 < one.seconds < 0.1 for one in times)
    return [(one.requests, one.length) for one in times]


def test_two_ranks_time_their_graphs() -> None:
    """Before the first request, and once more: each rank waits for the other in every pass."""
    arguments: dict[str, Any] = {"k": 5, "compilation_config": SIZES | NO_FUSION} | RANKS
    with engine("eagle_mrv2", **arguments) as llm:
        expected = [greedy(llm, PROMPTS[:n], TOKENS) for n in (1, 3, 8)]
    with engine("eagle_mrv2", options={"draft_length": "auto"}, **arguments) as llm:
        first, second = llm.collective_rpc(_graph_times)
        assert first == second
        assert {length for _, length in first} == {0, 1, 2, 3, 5}
        assert [greedy(llm, PROMPTS[:n], TOKENS) for n in (1, 3, 8)] == expected


@pytest.mark.skipif(not supplied("local_argmax"), reason="this release samples every draft")
def test_ranks_exchange_their_best_tokens() -> None:
    for disable, width in (([], 2), (["local_argmax"], VOCAB // 2)):
        _, acceptance, exchanged = drafts_on_two_ranks("eagle", {"disable": disable}, PROMPTS[:3], 16)
        assert acceptance[0] > 0.2
        assert [{size for size, _ in of_rank} for of_rank in exchanged] == [{width}] * 2


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_data_parallel_ranks_of_uneven_batches(family: str, record_property: Callable[[str, object], None]) -> None:
    """Each dispatches graphs of its own size, and the one that ends first drafts for no requests."""
    shares = Share(PROMPTS[:7], TOKENS), Share(PROMPTS[7:], TOKENS // 3)
    expected, stock = greedy_on_replicas(family, shares, family=family, compilation_config=STOCK_SIZES, **IN_STEP)
    tokens, accepted = greedy_on_replicas("eagle_mrv2", shares, family=family, compilation_config=SIZES, **IN_STEP)
    record_property("stock", stock)
    record_property("eagle_mrv2", accepted)
    assert tokens == expected
    assert accepted >= stock - 0.02
