"""An engine of two tensor-parallel ranks, each in a process of its own."""

from __future__ import annotations

from typing import Any

from support import Acceptance, engine, greedy

RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
VOCAB = 2048  # of the demo pair


def _watch(worker: Any) -> None:
    from vllm.distributed import get_tp_group

    speculator, group = worker.model_runner.speculator, get_tp_group()
    sample, all_gather = speculator.drafter.loop.sample, group.all_gather
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

    speculator.drafter.loop.sample, group.all_gather = sampled, gathered


def _exchanged(worker: Any) -> list[Any]:
    return list(worker.model_runner.speculator.exchanged)  # a set does not come through from another process


def drafts_on_two_ranks(
    family: str, options: dict[str, Any], prompts: list[str], max_tokens: int
) -> tuple[list[list[int]], list[float], list[set[Any]]]:
    """Greedy tokens, acceptance by position, and what each rank gave the others for its drafts: (width, dtype).

    The engine runs eagerly, as a replayed graph calls nothing that could be watched.
    """
    with engine("eagle_mrv2", family=family, options=options, enforce_eager=True, **RANKS) as llm:
        greedy(llm, prompts[:1], 2)  # how the draft makes its logits is found out with whole ones
        llm.collective_rpc(_watch)
        acceptance = Acceptance(llm)
        tokens = greedy(llm, prompts, max_tokens)
        exchanged = [set(map(tuple, of_rank)) for of_rank in llm.collective_rpc(_exchanged)]
        return tokens, acceptance.by_position, exchanged
