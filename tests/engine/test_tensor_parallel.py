"""Two tensor-parallel ranks, in processes of their own: the same text and drafts, and what is exchanged for them."""

from __future__ import annotations

from typing import Any

import pytest
from releases import supplied
from support import Acceptance, engine, greedy, held_out_prompts

PROMPTS = held_out_prompts(3)
TOKENS = 16
VOCAB = 2048


@pytest.fixture(autouse=True)
def _two_ranks_on_few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each rank asks for a NUMA node to bind its threads to.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def drafts_on_two_ranks(family: str, options: dict[str, Any]) -> tuple[list[list[int]], list[float], list[set[Any]]]:
    """Greedy tokens, acceptance by position, and what each rank gave the others for its drafts: (width, dtype)."""

    def watch(worker: Any) -> None:
        from vllm.distributed import get_tp_group

        speculator, group = worker.model_runner.speculator, get_tp_group()
        sample, all_gather = speculator.sample, group.all_gather
        speculator.exchanged, sampling = set(), [False]

        def sampled(*args: Any, **kwargs: Any) -> Any:
            sampling[0] = True
            try:
                return sample(*args, **kwargs)
            finally:
                sampling[0] = False

        def gathered(values: Any, *args: Any, **kwargs: Any) -> Any:
            if sampling[0]:
                speculator.exchanged.add((values.shape[-1], str(values.dtype)))
            return all_gather(values, *args, **kwargs)

        speculator.sample, group.all_gather = sampled, gathered

    with engine(
        "eagle_mrv2", family=family, options=options, tensor_parallel_size=2, distributed_executor_backend="mp"
    ) as llm:
        greedy(llm, PROMPTS[:1], 2)  # how the draft makes its logits is found out with whole ones
        llm.collective_rpc(watch)
        acceptance = Acceptance(llm)
        tokens = greedy(llm, PROMPTS, TOKENS)
        exchanged = llm.collective_rpc(lambda worker: worker.model_runner.speculator.exchanged)
        return tokens, acceptance.by_position, exchanged


@pytest.mark.skipif(not supplied("local_argmax"), reason="this release samples every draft")
def test_ranks_exchange_their_best_tokens() -> None:
    with engine(None) as llm:
        expected = greedy(llm, PROMPTS, TOKENS)
    tokens, acceptance, exchanged = drafts_on_two_ranks("eagle", {})
    assert tokens == expected
    assert acceptance[0] > 0.2
    assert exchanged == [{(2, "torch.float32")}] * 2, "a key of 64 bits for a block of the shard"
    off = drafts_on_two_ranks("eagle", {"disable": ["local_argmax"]})
    assert off == (tokens, acceptance, [{(VOCAB // 2, "torch.float32")}] * 2)
    tokens, acceptance, exchanged = drafts_on_two_ranks("eagle3", {})
    assert tokens == expected
    assert acceptance[0] > 0.2
    assert exchanged == [{(2, "torch.float32")}] * 2
