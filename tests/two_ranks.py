"""Engines of two ranks, tensor-parallel or data-parallel, each in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from support import Acceptance, engine, engine_arguments, greedy, same_runner

from vllm_eagle_mrv2.cli.common.draft_counters import counted_since, read_counters

RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
VOCAB = 2048  # of the demo pair
IN_STEP: dict[str, Any] = {"hf_overrides": {"num_local_experts": 2}}
"""Has vLLM keep data-parallel ranks in step, by dummy runs of those without requests: it does so for models with
experts only, and goes by their configuration."""

_ENDS_WITHIN_S = 120


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


class Share(NamedTuple):
    """What one data-parallel rank generates."""

    prompts: list[str]
    max_tokens: int


def greedy_on_replicas(method: str, shares: Sequence[Share], **arguments: Any) -> tuple[list[list[list[int]]], float]:
    """Greedy tokens by rank and prompt, and the accepted length over all ranks.

    Each rank gets its share at once, so that its batches are always the same.

    Raises:
        TimeoutError: the ranks do not end.
    """
    with same_runner(method):
        given = engine_arguments(method, data_parallel_size=len(shares), **arguments)
        return asyncio.run(_generate(given, shares))


async def _generate(arguments: dict[str, Any], shares: Sequence[Share]) -> tuple[list[list[list[int]]], float]:
    from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine: Any = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**arguments))
    before = read_counters()  # of this engine: it has put those of an earlier one aside

    async def one(rank: int, number: int) -> list[int]:
        share = shares[rank]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=share.max_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name = f"{rank}-{number}"
        outputs = engine.generate(share.prompts[number], params, name, data_parallel_rank=rank)
        (last,) = [output async for output in outputs]
        return list(last.outputs[0].token_ids)

    async def all_at_once() -> list[list[list[int]]]:
        await engine.sleep(level=0)
        asked = [
            asyncio.gather(*(one(rank, number) for number in range(len(share.prompts))))
            for rank, share in enumerate(shares)
        ]
        await asyncio.sleep(2.0)  # until all of them have arrived
        await engine.wake_up(tags=["scheduling"])
        return list(await asyncio.gather(*asked))

    try:
        tokens = await asyncio.wait_for(all_at_once(), _ENDS_WITHIN_S)
    finally:
        engine.shutdown()
    counted = counted_since(before)
    return tokens, 1 + counted["num_accepted_tokens"] / counted["num_drafts"]
